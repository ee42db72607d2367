"""Prints the entropy of `weights/tiny` next to the truth, by kind of position.

    python scripts/tiny_entropy.py [--model DIR] [--world NAME] [--rows N] [--length N] [--seed N]

The text is drawn anew from the generator, whose next-token distribution is exact at every position.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from tiny.corpus import compare, encode_row, terminal_ids, write_row

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.lab.world.grammar import Position
from entropix_jax.lab.world.lexicon import ASKING_TERMINALS, STRANGERS, TERMINALS
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import open_folder, read_params
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params

# The world and the terminals of a model, by the world's name.
WORLDS = {
    "tiny": (create(WORLD_SEED), TERMINALS),
    "asking": (create(WORLD_SEED, STRANGERS), ASKING_TERMINALS),
}
TINY = Path(__file__).resolve().parent.parent / "weights" / "tiny"


@partial(jax.jit, static_argnames="config")
def teacher_forced(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Float32 logits [B, T, V] after every prefix of `tokens[B, T]`."""
    batch, length = tokens.shape
    cache = init_cache(config, batch, length, jnp.dtype(jnp.float32))
    count = jnp.full(batch, length, jnp.int32)
    hidden, _, _ = forward(params, config, tokens, count, cache, window=length)
    return unembed(params, hidden)


def measure(
    params: Params,
    config: ModelConfig,
    rows: Sequence[Sequence[Position]],
    ids: Mapping[str, int],
) -> pd.DataFrame:
    """Compares the model's predictions on rows of equal length with the truth; see `compare`."""
    parts = []
    for row in rows:
        tokens = jnp.asarray([encode_row(row, ids)[:-1]], jnp.int32)
        log_probs = jax.nn.log_softmax(teacher_forced(params, config, tokens)[0], axis=-1)
        parts.append(compare(row, np.asarray(log_probs), ids))
    return pd.concat(parts, ignore_index=True)


def format_means(comparison: pd.DataFrame) -> str:
    """Formats a table of means by kind of position, and over all."""
    groups = comparison.groupby("kind")
    table = groups.mean()
    table.loc["all"] = comparison.mean(numeric_only=True)
    shares = groups.size() / len(comparison)
    table.insert(0, "share", shares.reindex(table.index, fill_value=1.0))
    return table.to_string(float_format="{:.3f}".format)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY, help="a folder with the tiny model")
    parser.add_argument("--world", choices=WORLDS, default="tiny")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--seed", type=int, default=7, help="of the held-out text")
    args = parser.parse_args()
    files = open_folder(args.model)
    params = read_params(files.tensors, files.config, "float32")
    world, terminals = WORLDS[args.world]
    tokenizer = json.loads((args.model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = terminal_ids(tokenizer, terminals)
    rng = Random(f"held out {args.seed}")
    rows = [write_row(world, rng, args.length) for _ in range(args.rows)]
    comparison = measure(params, files.config, rows, ids)
    print(format_means(comparison))
    rate, excess = comparison["true h"].mean(), comparison["KL"].mean()
    print(
        f"{len(comparison)} tokens: true entropy rate {rate:.4f} bits a token, the model's "
        f"expected cross-entropy {excess:.4f} bits above it ({100 * excess / rate:.1f} %)"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
