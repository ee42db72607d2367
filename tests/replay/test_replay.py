"""Recorded runs follow from their settings, and altered ones do not: the line is found."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Rows
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.replay import read_trace, replay
from entropix_jax.replay.threefry import STREAMS, row_key, uniforms
from entropix_jax.sampler import draw
from entropix_jax.sampler.presets import load_sampler
from tests.support.replays import BUDGET, NAMES, SEED, CachedReader, alter, record, write
from tests.support.traces import read_trace as read_lines

ALTERATIONS = int(os.environ.get("ENTROPIX_ALTERATIONS") or 60)
ALTERED = ("everything", "far-back", "first-tokens", "entropix", "document-001", "phrases")


@pytest.fixture(scope="module")
def reader(tiny: LanguageModel) -> CachedReader:
    return CachedReader(tiny)


@pytest.fixture(scope="module")
def traces(tiny: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trace of each preset and special sampler, of one batch."""
    return record(tiny, tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize("name", NAMES)
def test_every_token_follows(name: str, traces: dict[str, Path], reader: CachedReader) -> None:
    found = replay(read_trace(traces[name]), reader)
    assert str(found.doubt or "") == ""
    assert found.tokens == len(read_lines(traces[name])) - 2
    assert found.rounded <= 1


def test_the_traces_show_all_actions(traces: dict[str, Path]) -> None:
    ends = [
        row["finish_reason"] for path in traces.values() for row in read_lines(path)[-1]["rows"]
    ]
    assert {*ends} == {"length", "eos", "stop", "confidence"}
    lines = [line for path in traces.values() for line in read_lines(path)[1:-1]]
    counts = Counter(line["action"] for line in lines)
    actions = "argmax inject explore branch resample backspace adaptive sample think_end "
    assert set((actions + "budget_forcing phrases").split()) <= {*counts}
    assert sum(line["type"] == "retracted" for line in lines) > 10
    assert {line["regime"] for line in lines} == {"lelv", "helv", "lehv", "hehv", "mid"}
    assert any(line["loop"] for line in lines)


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


def test_moves_of_the_caller(tiny: LanguageModel, reader: CachedReader, tmp_path: Path) -> None:
    """Rows that are forked, rewound and forced, also after their end."""
    prompt = tiny.tokenizer.encode("Guests: the sky is", add_bos=True)
    sampler = calibrate_sampler(load_sampler("temperature").with_values({}), tiny)
    engine = Engine(tiny, slots=4, capacity=256, recording=Recording(state=True))
    request = Request(prompt, sampler, BUDGET, seed=SEED)
    row = engine.new_row(request)
    rows, moves = [row], {"fork", "rewind", "force", "again"}
    for event in engine.run([request]):
        count = len(event.row.tokens)
        if event.row is row and count >= 10 and "fork" in moves:
            moves.remove("fork")
            rows += engine.fork(row, 2, position=row.tokens[7].position)
        elif event.row is row and count >= 14 and "rewind" in moves:
            moves.remove("rewind")
            engine.rewind(row, row.tokens[4].position)
        elif event.row is rows[-1] and event.row is not row and count >= 12 and "force" in moves:
            moves.remove("force")
            engine.force(event.row, tiny.tokenizer.encode_within(" and then"))
            rows += engine.fork(event.row, 1)
        elif event.row is row and row.finish_reason and "again" in moves:
            moves.remove("again")
            engine.rewind(row, row.tokens[20].position)
    assert not moves
    path = tmp_path / "run.jsonl"
    Rows(rows, header(tiny, sampler, prompt, seed=SEED)).save_trace(path)
    found = replay(read_trace(path), reader)
    assert str(found.doubt or "") == ""
    lines = read_lines(path)
    lines[-1]["rows"][0]["request"]["moves"][0]["rewinds"] = 7
    doubt = replay(read_trace(write(path, lines)), reader).doubt
    assert doubt is not None
    assert doubt.stage == "draw"


def test_random_numbers_are_those_of_jax() -> None:
    for seed, row_id, position, attempt in ((0, "0", 5, 0), (99, "a name", 4095, 3)):
        for index, stream in enumerate(STREAMS):
            key, place = jnp.asarray(draw.row_key(seed, row_id)), jnp.int32(position)
            expected = draw.uniforms(key, place, jnp.int32(attempt), jnp.int32(index), 16)
            found = uniforms(row_key(seed, row_id), position, attempt, stream, 16)
            np.testing.assert_array_equal(found, np.asarray(jax.device_get(expected)))
