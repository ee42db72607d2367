"""The same rows again: alone and in batches of other sizes, streamed and not, in two processes.

A row that parts from itself is a failure: none has been seen whose decision was too close to call.
"""

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import entropix_jax
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.loading import LanguageModel, load
from entropix_jax.preparation import sampler_params
from entropix_jax.programs import use_compilation_cache
from entropix_jax.results import Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler, preset_names
from verification.comparison import TOLERANCE, compare
from verification.findings import Line

CAPACITY, NEW = 512, 60
PROMPTS = (
    "Guests:",
    "Once upon a time",
    "Anna has 30 apples. Anna finds 4 apples.",
    "There Adam met Rita. Rita was happy and sang. Then Adam went to the market. " * 4,
    "12 + 7 =",
    "Dear diary",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--rows", type=int, default=180, help="rows, over presets and prompts")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 3, 8, 32])
    parser.add_argument("--processes", type=int, default=6, help="commands that are run twice")


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Runs all rows in each number of slots, and some commands twice."""
    use_compilation_cache()
    model = load("tiny")
    numbers = range(args.rows)
    alone = rows_of(model, numbers, slots=1)
    lines = []
    for slots in args.slots:
        found, tokens, largest, rounded = [], 0, 0.0, 0
        for number, one, other in zip(
            numbers, alone, rows_of(model, numbers, slots=slots), strict=True
        ):
            tokens += len(one.tokens) + len(one.taken_back)
            again = functools.partial(row_again, number)
            difference = compare(
                model, one, other, functools.partial(again, 1), functools.partial(again, slots)
            )
            largest = max(largest, difference.largest)
            rounded += difference.rounded
            if difference.parting is not None:
                found.append({"row": number, "slots": slots, "difference": difference.parting})
        lines.append(
            Line(
                f"tokens of rows alone and in {slots} slots",
                tokens,
                "tokens",
                len(found),
                f"same tokens, floats within {TOLERANCE:g} or of float32's rounding",
                f"largest difference {largest:.1e}, {rounded} beyond {TOLERANCE:g} by rounding",
                found,
            )
        )
    streams = list(streamed(model))
    lines.append(Line("runs streamed and not", len(streams), "runs", streams.count(False)))
    twice = [same_bytes(*command) for command in itertools.islice(commands(), args.processes)]
    lines.append(
        Line("traces of two processes", len(twice), "pairs", twice.count(False), "same bytes")
    )
    return lines


def rows_of(model: LanguageModel, numbers: Sequence[int], slots: int) -> list[Row]:
    """Rows of every preset in turn, run in so many slots."""
    budgets = np.random.default_rng(0).integers(1, NEW, max(numbers) + 1).tolist()
    running = []
    for i in numbers:
        presets = preset_names()
        sampler = calibrate_sampler(load_sampler(presets[i % len(presets)]), model)
        prompt = model.tokenizer.encode(PROMPTS[i % len(PROMPTS)], add_bos=True)
        request = Request(prompt, f"row {i}", budgets[i])
        running.append(
            RunningRow(
                i,
                Row(request),
                model,
                sampler,
                sampler_params(model, sampler),
                budget=budget_of(model, request, CAPACITY),
                seed=i,
            )
        )
    engine = Engine(
        model,
        running[0].params,
        slots=slots,
        capacity=CAPACITY,
        recording=Recording(top=3, layers=True),
    )
    for _ in engine.run(running):
        pass
    return [one.row for one in running]


def row_again(number: int, slots: int, model: LanguageModel) -> Row:
    """One of those rows, in one of so many slots."""
    (row,) = rows_of(model, [number], slots)
    return row


def streamed(model: LanguageModel) -> Iterator[bool]:
    """Whether a run that is iterated over gives the records of one that is not."""
    for preset in preset_names():
        options: Any = {"max_new_tokens": NEW, "samples": 2, "seed": 1}
        whole = entropix_jax.generate(model, PROMPTS[0], preset, **options)
        stream = entropix_jax.stream(model, PROMPTS[0], preset, **options)
        told: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        text = ["", ""]
        for event in stream:
            text[event.row] += "".join(piece.text for piece in event.pieces)
            if event.token is not None:
                told[event.row].append(event.token.to_json(retracted=event.retracted))
        yield all(
            row.text == text[i]
            and [t.to_json() for t in row.tokens] == [t for t in told[i] if t["type"] == "token"]
            for i, row in enumerate(whole)
        )


def commands() -> Iterator[tuple[str, ...]]:
    """Command lines of `main`, one for each preset and prompt in turn."""
    for seed, preset in enumerate(preset_names()):
        prompt = PROMPTS[seed % len(PROMPTS)]
        yield "--prompt", prompt, "--sampler", preset, "--seed", str(seed), "--samples", "3"


def same_bytes(*arguments: str) -> bool:
    """Whether two processes write the same trace, the timings of its footer aside."""
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for path in (Path(scratch) / "one.jsonl", Path(scratch) / "two.jsonl"):
            command = [sys.executable, "-m", "entropix_jax.main", *arguments]
            more = ["--trace", str(path), "--max-new-tokens", str(NEW)]
            subprocess.run([*command, *more], check=True, capture_output=True)
            *lines, footer = path.read_bytes().splitlines()
            counts = {k: v for k, v in json.loads(footer).items() if k != "timings"}
            found.append((lines, counts))
    return found[0] == found[1]
