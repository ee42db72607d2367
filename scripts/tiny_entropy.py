"""Prints the entropy of `weights/tiny` beside the truth, by kind of position.

    python scripts/tiny_entropy.py [--model DIR] [--rows N] [--length N] [--seed N]

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
from rich.console import Console
from rich.table import Table
from tiny.corpus import Comparison, compare

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.lab.world.corpus import encode_row, terminal_ids, write_row
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.lab.world.grammar import Position
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import load_params
from entropix_jax.model.config import ModelConfig, load_model_config
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params

TINY = Path(__file__).resolve().parent.parent / "weights" / "tiny"


def teacher_forced(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Float32 logits [B, T, V] after every prefix of `tokens[B, T]`."""
    batch, length = tokens.shape
    cache = init_cache(config, batch, length, jnp.dtype(jnp.float32))
    count = jnp.full(batch, length, jnp.int32)
    hidden, _, _ = forward(params, config, tokens, count, cache, window=length)
    return unembed(params, hidden)


@partial(jax.jit, static_argnames="config")
def _log_probs(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(teacher_forced(params, config, tokens), axis=-1)


def measure(
    params: Params,
    config: ModelConfig,
    rows: Sequence[Sequence[Position]],
    ids: Mapping[str, int],
) -> Comparison:
    """Holds the model's predictions on rows of equal length against their truth."""
    parts = []
    for row in rows:
        tokens = jnp.asarray([encode_row(row, ids)[:-1]], jnp.int32)
        parts.append(compare(row, np.asarray(_log_probs(params, config, tokens)[0]), ids))
    return Comparison.join(parts)


def entropy_table(comparison: Comparison) -> Table:
    """One line a kind of position, and one for all of them."""
    table = Table(title="Entropy in bits, varentropy in bits²: the truth and the model")
    table.add_column("position")
    for heading in ("share", "true h", "model h", "true u", "model u", "KL", "surprise"):
        table.add_column(heading, justify="right")
    total = comparison.kinds.size

    def add(label: str, part: Comparison) -> None:
        columns = (
            part.true_entropy,
            part.model_entropy,
            part.true_varentropy,
            part.model_varentropy,
            part.divergence,
            part.surprise,
        )
        share = f"{100 * part.kinds.size / total:.1f} %"
        table.add_row(label, share, *(f"{column.mean():.3f}" for column in columns))

    for kind in sorted(set(comparison.kinds.tolist())):
        add(kind, comparison.of_kind(kind))
    table.add_section()
    add("all", comparison)
    return table


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY, help="a folder with the tiny model")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--seed", type=int, default=7, help="of the held-out text")
    args = parser.parse_args()
    config = load_model_config(args.model)
    params = load_params(args.model, config, "float32")
    ids = terminal_ids(json.loads((args.model / "tokenizer.json").read_text(encoding="utf-8")))
    rng = Random(f"held out {args.seed}")
    world = create(WORLD_SEED)
    rows = [write_row(world, rng, args.length) for _ in range(args.rows)]
    comparison = measure(params, config, rows, ids)
    Console(width=100).print(entropy_table(comparison))
    print(
        f"{comparison.kinds.size} tokens: true entropy rate {comparison.entropy_rate:.4f} bits a "
        f"token, the model's expected cross-entropy {comparison.excess:.4f} bits above it "
        f"({100 * comparison.excess / comparison.entropy_rate:.1f} %)"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
