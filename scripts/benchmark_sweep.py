"""Measures a sweep: 64 settings side by side beside the same rows one after another.

    python scripts/benchmark_sweep.py [--model DIR] [--tokens N] [--repeats N]

Both run in one warm process, the same rows with the same random numbers, in turns. Each setting is
its own sampler; the program that runs them all is compiled once, which is checked.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.commandline import EXIT_OK, run_command
from entropix_jax.decode import decode
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.loading import LanguageModel, load
from entropix_jax.preparation import sampler_params
from entropix_jax.results import Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

SIDE = 8  # settings are a square of so many values of two keys
PROMPT = "Once upon a time"


def settings() -> list[Sampler]:
    """A grid over a threshold and a coefficient of the default sampler."""
    base = load_sampler("entropix")
    return [
        base.with_values({"thresholds.h1": float(h1), "adaptive.temperature_logits": float(weight)})
        for h1, weight in itertools.product(np.linspace(0.05, 0.6, SIDE), np.linspace(0, 0.6, SIDE))
    ]


@dataclass
class Sweep:
    """Rows that differ in their samplers alone."""

    model: LanguageModel
    samplers: Sequence[Sampler]
    tokens: int

    def rows(self) -> list[RunningRow]:
        """New rows, nothing generated yet."""
        model = self.model
        request = Request(model.tokenizer.encode(PROMPT, add_bos=True), "row", self.tokens)
        return [
            RunningRow(
                number,
                Row(request),
                model,
                sampler,
                sampler_params(model, sampler),
                budget=budget_of(model, request),
                seed=0,
            )
            for number, sampler in enumerate(self.samplers)
        ]

    def run(self, rows: Sequence[RunningRow], slots: int) -> float:
        """Seconds of a run."""
        prompt = len(rows[0].row.request.prompt)
        started = time.perf_counter()
        engine = Engine(
            self.model,
            rows[0].params,
            slots=slots,
            capacity=-(-(prompt + self.tokens) // 64) * 64,
            recording=Recording(),
        )
        for _ in engine.run(rows):
            pass
        return time.perf_counter() - started

    def side_by_side(self) -> tuple[float, list[RunningRow]]:
        """All rows in one batch."""
        rows = self.rows()
        return self.run(rows, len(rows)), rows

    def one_by_one(self) -> tuple[float, list[RunningRow]]:
        """Each row alone."""
        rows = self.rows()
        return sum(self.run([row], 1) for row in rows), rows


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a model (default: tiny)")
    parser.add_argument("--tokens", type=int, default=100, help="that each row generates")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = load(args.model, "float32")
    sweep = Sweep(model, [calibrate_sampler(one, model) for one in settings()], args.tokens)
    sweep.one_by_one()
    before = decode._cache_size()  # type: ignore[attr-defined]
    _, together = sweep.side_by_side()
    programs = decode._cache_size() - before  # type: ignore[attr-defined]
    figures: dict[str, list[float]] = {"side by side": [], "one by one": []}
    for _ in range(args.repeats):
        seconds, together = sweep.side_by_side()
        figures["side by side"].append(seconds)
        seconds, alone = sweep.one_by_one()
        figures["one by one"].append(seconds)
    tokens = sum(len(row.row.tokens) for row in together)
    table = Table("", "seconds", "tok/s", title=f"{len(together)} settings, {tokens} tokens")
    for name, times in figures.items():
        median = statistics.median(times)
        table.add_row(name, f"{median:.2f}", f"{tokens / median:.0f}")
    Console().print(table)
    pairs = zip(figures["one by one"], figures["side by side"], strict=True)
    equal = sum(
        [t.token_id for t in a.row.tokens] == [t.token_id for t in b.row.tokens]
        for a, b in zip(together, alone, strict=True)
    )
    print(f"times as fast: {statistics.median(a / b for a, b in pairs):.1f}")
    print(f"programs compiled for the sweep: {programs}")
    print(f"rows with the same tokens both ways: {equal} of {len(together)}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
