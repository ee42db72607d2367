"""What narrower weights and activations change against float32, token by token.

    python scripts/precision.py [--model DIR] [--tokens N] [--text FILE]

Reads texts with each type of weights, and with bfloat16 activations, teacher-forced, and compares
at every position: the Kullback-Leibler divergence KL(float32 || narrow) in nats, the most likely
token, and the regime of the preset `entropix` (without the loop guard). Then generates texts with
each type at the same seed, and counts the tokens before the first difference. Without --text the
model writes the texts itself, by the preset `temperature`. The default model is `tiny`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.generation import Generation
from entropix_jax.engine.preparation import calibrate_sampler, for_rows
from entropix_jax.engine.results import Request
from entropix_jax.errors import UserError
from entropix_jax.model.cache import init_cache
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.metrics import apply_noise_floor, measure
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify

# Weights, and activations.
TYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "int8": ("int8", "float32"),
    "bfloat16, activations too": ("bfloat16", "bfloat16"),
    "int8, bfloat16 activations": ("int8", "bfloat16"),
}
ROW, PROMPT, NEW = 256, 16, 128  # tokens of a text, of a prompt, and that are generated


def texts_of(model: LanguageModel, args: argparse.Namespace) -> np.ndarray:
    """Tokens int32 [rows, ROW]."""
    if args.text:
        ids = model.tokenizer.encode(args.text.read_text(encoding="utf-8"), add_bos=True)
        rows = len(ids) // ROW
        if not rows:
            raise UserError(f"{args.text}: fewer than {ROW} tokens")
        return np.asarray(ids[: min(rows, max(args.tokens // ROW, 1)) * ROW]).reshape(-1, ROW)
    start = model.tokenizer.encode("The ", add_bos=True)
    sampler = calibrate_sampler(load_sampler("temperature"), model)
    requests = [
        Request(start, sampler, max_new_tokens=ROW - len(start), row_id=str(i))
        for i in range(max(args.tokens // ROW, 1))
    ]
    written = Generation(model, requests).run()
    return np.asarray([[*start, *(t.token_id for t in row.tokens)] for row in written])


def read(model: LanguageModel, texts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of one text after the other: log-probabilities float32 [ROW, V], and the regimes int32
    [ROW]."""
    config = model.config
    one = calibrate_sampler(load_sampler("entropix"), model).settings
    params = for_rows(one, ROW)

    @jax.jit
    def row(weights: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = init_cache(config, 1, ROW, model.precision.activations)
        count = jnp.full(1, ROW, jnp.int32)
        hidden, stats, _ = forward(
            weights, config, tokens[None], count, cache, window=ROW, every=True
        )
        log_probs = jax.nn.log_softmax(unembed(weights, hidden[0]), axis=-1)
        heard = apply_noise_floor(log_probs, params.noise_epsilon)
        metrics = measure(heard, stats, params.layer_weights)
        return log_probs, jax.vmap(classify)(metrics, params)

    for text in texts:
        log_probs, regimes = row(model.params, jnp.asarray(text, jnp.int32))
        yield np.asarray(log_probs), np.asarray(regimes)


def compare(exact: LanguageModel, model: LanguageModel, texts: np.ndarray) -> dict[str, np.ndarray]:
    """At every position: the divergence, whether the likeliest token is the same, both regimes."""
    rows = []
    for (true, regimes), (theirs, their_regimes) in zip(
        read(exact, texts), read(model, texts), strict=True
    ):
        kl = np.sum(np.exp(true) * (true - theirs), axis=-1, dtype=np.float64)
        rows.append((kl, true.argmax(-1) == theirs.argmax(-1), regimes, their_regimes))
    names = ("kl", "same", "regimes", "their_regimes")
    return dict(zip(names, map(np.concatenate, zip(*rows, strict=True)), strict=True))


def parting(model: LanguageModel, texts: np.ndarray, sampler: str) -> list[list[int]]:
    """What each text's first tokens are followed by, at one seed."""
    calibrated = calibrate_sampler(load_sampler(sampler), model)
    budget = min(NEW, model.config.max_positions - PROMPT)
    requests = [
        Request(text[:PROMPT].tolist(), calibrated, max_new_tokens=budget, row_id=str(i))
        for i, text in enumerate(texts)
    ]
    rows = Generation(model, requests).run()
    return [[token.token_id for token in row.tokens] for row in rows]


def same_until(one: list[int], other: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a model (default: tiny)")
    parser.add_argument("--tokens", type=int, default=8192, help="how much is read")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what is read")
    args = parser.parse_args()
    models = {
        name: load(args.model, weights, precision=activations)
        for name, (weights, activations) in TYPES.items()
    }
    exact = models["float32"]
    texts = texts_of(exact, args)
    written = {name: parting(exact, texts, name) for name in ("greedy", "entropix")}
    title = f"{exact.folder}: {texts.size} tokens, {len(texts)} texts"
    _, *narrow = TYPES
    table = Table("against float32", *narrow, title=title)
    columns = []
    for name in narrow:
        model = models[name]
        found = compare(exact, model, texts)
        kl, regimes = found["kl"], found["regimes"]
        changed = found["their_regimes"] != regimes
        column = {
            "KL a token, mean, nats": f"{kl.mean():.2e}",
            "99th percentile": f"{np.quantile(kl, 0.99):.2e}",
            "largest": f"{kl.max():.2e}",
            "same most likely token": f"{found['same'].mean():.3%}",
            "regime changes": f"{changed.mean():.3%}",
        }
        for index, regime in enumerate(REGIMES):
            where = regimes == index
            if where.any():
                column[f"  of {regime}"] = f"{changed[where].mean():.2%} of {where.sum()}"
        for sampler, those in written.items():
            same = [
                same_until(*pair)
                for pair in zip(those, parting(model, texts, sampler), strict=True)
            ]
            whole = sum(s == len(t) for s, t in zip(same, those, strict=True))
            column[f"{sampler}: tokens until they part, median"] = f"{np.median(same):.0f}"
            column[f"{sampler}: texts that never part"] = f"{whole} of {len(same)}"
        columns.append(column)
    for key in columns[0]:
        table.add_row(key, *(column[key] for column in columns))
    Console().print(table)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
