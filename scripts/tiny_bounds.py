"""Measures the thresholds of `weights/tiny` on its own text and writes its `calibration.json`.

    python scripts/tiny_bounds.py [--model DIR] [--tokens N] [--seed N]

The model writes text by plain sampling at temperature 1. The four thresholds are then chosen
so that each box of the `entropix` preset holds a wanted share of its tokens; the rest is MID. Other
text of the same model is held against them.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.files import replacing
from entropix_jax.generation import Generation
from entropix_jax.loading import LanguageModel, load
from entropix_jax.results import Request
from entropix_jax.sampler.params import BOXES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import CALIBRATION_FILE, THRESHOLDS

TINY = Path(__file__).resolve().parent.parent / "weights" / "tiny"
WANTED = {"lelv": 0.63, "helv": 0.09, "lehv": 0.04, "hehv": 0.05}
GRID = np.geomspace(0.02, 10.0, 100)  # bits, and bits^2
PULL = 1e-5  # a factor of e off the published value weighs as much as 0.3 % of the tokens
ROWS = 32


def own_text(model: LanguageModel, tokens: int, seed: int) -> np.ndarray:
    """Entropy (bits) and varentropy (bits^2) of each of the model's own tokens: [tokens, 2]."""
    sampler = load_sampler("temperature").with_values({"base.temperature": 1.0})
    start = model.tokenizer.encode("", add_bos=True)
    requests = [Request(start, str(row), tokens // ROWS) for row in range(ROWS)]
    rows = Generation(model, requests, sampler, seed=seed, ignore_eos=True).run()
    return np.array([(token.entropy, token.varentropy) for row in rows for token in row.tokens])


def occupancy(points: np.ndarray, h1: float, h2: float, u1: float, u2: float) -> np.ndarray:
    """The share of points in each box of the `entropix` preset, in the order of BOXES."""
    entropy, varentropy = points.T
    calm, wild = varentropy < u1, varentropy > u2
    boxes = (
        (entropy < h1) & calm,
        (entropy > h2) & calm,
        (entropy < h2) & wild,
        (entropy > h2) & wild,
    )
    return np.array([box.mean() for box in boxes])


def solve(points: np.ndarray) -> dict[str, float]:
    """The thresholds whose occupancy is nearest to WANTED, by the sum of squared differences.

    Where the text leaves a choice, as it does across a gap, they stay near the published ones.
    """
    wanted = np.array([WANTED[box] for box in BOXES])
    published = [load_sampler("entropix").values[f"thresholds.{name}"] for name in THRESHOLDS]

    def loss(values: tuple[float, ...], boxes: slice) -> float:
        misses = (occupancy(points, *values) - wanted)[boxes]
        return float(np.sum(misses**2) + PULL * np.sum(np.log(np.divide(values, published)) ** 2))

    # Two boxes hang on (h2, u2) alone, one more on u1, the last on h1: one after the other.
    _, h2, _, u2 = min(
        ((h2, h2, u2, u2) for h2, u2 in product(GRID, GRID)),
        key=lambda values: loss((published[0], values[1], published[2], values[3]), np.s_[2:]),
    )
    u1 = min(GRID[u2 >= GRID], key=lambda u: loss((published[0], h2, u, u2), np.s_[1:2]))
    h1 = min(GRID[h2 >= GRID], key=lambda h: loss((h, h2, u1, u2), np.s_[:1]))
    return {k: float(f"{v:.3g}") for k, v in zip(THRESHOLDS, (h1, h2, u1, u2), strict=True)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load(str(args.model))
    points, others = (own_text(model, args.tokens, args.seed + i) for i in (0, 1))
    thresholds = solve(points)
    table = Table("", "wanted", "measured", "other text", title=f"thresholds {thresholds}")
    values = tuple(thresholds[name] for name in THRESHOLDS)
    shares = (occupancy(points, *values), occupancy(others, *values))
    for box, own, other in zip(BOXES, *shares, strict=True):
        table.add_row(box, f"{WANTED[box]:.1%}", f"{own:.1%}", f"{other:.1%}")
    Console(width=100).print(table)
    source = f"scripts/tiny_bounds.py --tokens {args.tokens} --seed {args.seed}"
    with replacing(args.model / CALIBRATION_FILE) as path:
        content = {"thresholds": thresholds, "source": source}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
