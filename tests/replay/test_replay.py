"""Recorded runs follow from their settings, and altered ones do not: the line is found."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.replay import read_trace, replay
from entropix_jax.replay.row import Row
from entropix_jax.replay.state import tolerance
from entropix_jax.sampler.mechanisms import ACTIONS
from tests.support.replays import CASES, CachedReader, alter, record, write
from tests.support.traces import read_trace as read_lines

ALTERATIONS = int(os.environ.get("ENTROPIX_ALTERATIONS") or 60)
ALTERED = ("everything", "far-back", "first-tokens", "entropix", "document-001", "phrases")


@pytest.fixture(scope="module")
def reader(tiny: LanguageModel) -> CachedReader:
    return CachedReader(tiny)


@pytest.fixture(scope="module")
def traces(tiny: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace of each row of the table."""
    return record(tiny, tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("name", CASES)
def test_every_token_follows(name: str, traces: dict[str, Path], reader: CachedReader) -> None:
    found = replay(read_trace(traces[name]), reader)
    assert str(found.doubt or "") == ""
    assert found.tokens == len(read_lines(traces[name])) - 2
    assert found.rounded <= 1


def test_rounding_decides_between_likely_tokens() -> None:
    """Each log-probability of bfloat16 may be off by a tenth, and by a tenth of its value."""
    row: Any = object.__new__(Row)
    row.tolerance = tolerance(2.0**-7)
    log_probs = np.log([0.26, 0.07, 0.3, 0.37])
    place: Any = SimpleNamespace(log_probs=log_probs)
    greedy: Any = SimpleNamespace(temperature=0.0)
    assert row.draws(place, log_probs + 20, greedy, np.zeros(1)) == [[3, 0, 2]]


def count_events(lines: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Counts actions, pairs of actions, rewinds, forks and ends in the lines of a trace."""
    found, there, attempts = Counter[str](), dict[int, str](), Counter[int]()
    for line, following in itertools.pairwise([*lines[1:-1], {}]):
        position, action = line["position"], line["action"]
        found.update([action, f"{action}, {following.get('action')}", line["regime"]])
        found["loop"] += bool(line.get("loop"))
        found["loop ends"] += bool(line.get("loop")) and not following.get("loop")
        found[f"{position + 1 - following.get('position', position + 1)} back"] += 1
        found[f"after {there.get(position)}"] += action in ("backspace", "phrases")
        there[position] = action
        if line["type"] == "retracted":
            attempts[position] += 1
            found[f"attempt {attempts[position]}"] += 1
        else:
            attempts.pop(position, None)
        if branches := line.get("branches"):
            found[f"width {len(branches)}"] += 1
            found["ambiguous"] += bool(line.get("ambiguous"))
            found["not the first"] += not branches[0]["chosen"]
            found["long"] += max(len(branch["tokens"]) for branch in branches) > 4
    found[f"end {lines[-1]['rows'][0]['finish_reason']}"] += 1
    return found


def test_the_traces_show_all_events(traces: dict[str, Path]) -> None:
    """Each event occurs at least as often as stated, so that the replays show it."""
    found = sum((count_events(read_lines(path)) for path in traces.values()), Counter[str]())
    rarer = "explore think_end budget_forcing phrases"
    expected = {
        40: [*({*ACTIONS} - {*rarer.split(), "clarify"}), *REGIMES],
        20: [*rarer.split(), "long", "end length"],
        10: ["loop", "ambiguous", "not the first", "end eos", "backspace, backspace"]
        + [f"attempt {n}" for n in range(1, 9)]
        + [f"after {action}" for action in ("argmax", "sample", "adaptive", "backspace")],
        5: ["end confidence", "end stop"],
        2: ["clarify", "branch, inject", "inject, branch"]
        + [f"width {n}" for n in range(1, 11)]
        + [f"{n} back" for n in range(1, 8)],
        1: ["end question", "loop ends", "after explore", "after resample"],
    }
    missing = {
        name: found[name] for n, names in expected.items() for name in names if found[name] < n
    }
    assert not missing
    # Thoughts and branches are not retracted.
    assert found["inject, backspace"] == found["branch, backspace"] == 0


def find(path: Path, reader: CachedReader) -> int:
    """The number of the line in doubt, or of the line for which the trace is refused; 0 if every
    token follows."""
    try:
        doubt = replay(read_trace(path), reader).doubt
    except UserError as error:
        return int(str(error).split("line ")[1].split(":")[0])
    return 0 if doubt is None else doubt.line.number


def test_altered_traces_are_found(
    traces: dict[str, Path], reader: CachedReader, tmp_path: Path
) -> None:
    """Each alteration is found in its line. ENTROPIX_ALTERATIONS is their number."""
    rng, kinds = random.Random(0), Counter[str]()
    lines = {name: read_lines(traces[name]) for name in ALTERED}
    for number in range(ALTERATIONS):
        name = ALTERED[number % len(ALTERED)]
        changed, at, kind = alter(lines[name], rng, len(reader.texts))
        kinds[kind] += 1
        path = write(tmp_path / "altered.jsonl", changed)
        found = find(path, reader)
        assert found in ((at, at + 1) if kind == "gone" else (at,)), (name, kind, at)
    assert len(kinds) > 10
