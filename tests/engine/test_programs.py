"""A list of programs: each chunk takes the smallest compiled one that covers its rows."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from entropix_jax.engine import loop, programs, prompts, shapes
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.decode import decode
from entropix_jax.engine.listed import ProgramList
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.programs import Programs, Steps, decode_for_backend
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.slots import answer, insert, share_prefix
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_WIDTH
from tests.support.model_folders import MAX_POSITIONS
from tests.support.runs import as_requests, ids_of

WINDOW = 32
SLOTS = 2  # the same in all tests, and the widest forks, so that lists share their programs
FORKS = "branch-on-doubt"  # `greedy`, but tokens in doubt branch
SETTINGS: dict[str, Any] = {"regimes.lelv": ["entropy > 0.5"], "arms.lelv": "branch"}
SETTINGS |= {"branch.max_share": 1e6, "branch.width": MAX_WIDTH, "branch.depth": 2}
SETTINGS |= {"branch.min_p": 0.0}


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "DECODE_WINDOW", WINDOW)


def row(model: LanguageModel, prompt: str, sampler: str, tokens: int, number: int = 0) -> Row:
    loaded = load_sampler("greedy" if sampler == FORKS else sampler)
    loaded = loaded.with_values(SETTINGS) if sampler == FORKS else loaded
    ids = model.tokenizer.encode(prompt, add_bos=True)
    calibrated = calibrate_sampler(loaded, model)
    return Row(Request(ids, calibrated, tokens, row_id=prompt, number=number), number=number)


def listed_engine(
    model: LanguageModel, *samplers: str, slots: int = SLOTS, **options: Any
) -> Engine:
    """Returns an engine with a set of mechanisms for each sampler and those before it."""
    own = [row(model, "Once", name, 1).request.sampler for name in samplers]
    used = (one.parts.used for one in own)
    sets: list[frozenset[str]] = [*itertools.accumulate(used, operator.or_)]
    listed = ProgramList(own[0], sets)
    return Engine(model, slots=slots, capacity=MAX_POSITIONS, listed=listed, **options)


def compiled(engine: Engine) -> Engine:
    engine.compile()
    while engine.programs.counts[1]:
        engine.programs.wait(engine.programs._current, 1)
    return engine


def run(engine: Engine, rows: Sequence[Row] | Iterator[Row | None]) -> None:
    list(engine.run(as_requests(engine, rows)))


def check_as_without_list(model: LanguageModel, rows: Sequence[Row]) -> None:
    """Checks that the rows equal those of an engine without a list."""
    there = [Row(one.request) for one in rows]
    run(Engine(model, slots=SLOTS, capacity=MAX_POSITIONS), there)
    assert [row.finish_reason for row in rows] == ["length"] * len(rows)
    assert [*map(ids_of, rows)] == [*map(ids_of, there)]


def used_programs(monkeypatch: pytest.MonkeyPatch) -> list[Steps]:
    """Returns the keys of the chunks from here on."""
    keys: list[Steps] = []
    run_steps = Programs.run_steps

    def noted(self: Programs, key: Steps, *arguments: Any) -> Any:
        keys.append(key)
        return run_steps(self, key, *arguments)

    monkeypatch.setattr(Programs, "run_steps", noted)
    return keys


def test_a_listed_engine_compiles_nothing_later(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All programs are compiled at the start. Rows of both sets, with forks, growing windows and
    copied prompts, use the smallest that covers them."""
    engine = listed_engine(model, FORKS, "mirostat")
    jitted: Any = (decode, prefill, insert, share_prefix, answer)
    made = [function._cache_size() for function in jitted]
    monkeypatch.setattr(loop, "widen", None)  # all lanes exist
    compiled(engine)
    keys = used_programs(monkeypatch)
    asked = [("Once", FORKS, 40), ("Anna", "mirostat", 9), ("Once", FORKS, 6)]
    rows = [row(model, *one, number=i) for i, one in enumerate(asked)]
    run(engine, rows)
    assert [function._cache_size() for function in jitted] == made
    first, second = engine.programs.sets
    assert first < second
    assert {key.used for key in keys} == {first, second}
    assert {key.lanes for key in keys} == {False, True}
    assert {key.window for key in keys} >= {WINDOW, 2 * WINDOW}
    assert engine._layout.lanes == MAX_WIDTH - 1
    assert any(len(token.branches or ()) > 1 for token in rows[0].tokens)
    check_as_without_list(model, rows)


def test_the_required_programs_run_all_rows(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest and the largest program of the first set are compiled first. The largest serves
    rows that do not fork, too. A row of the second set has no program yet."""
    engine = listed_engine(model, FORKS, "mirostat")
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "_compile", lambda self: None)
        engine.compile()
    queue, required = engine.programs._queue, engine.programs.required
    assert {*itertools.islice(queue, len(required))} == {*required}
    for key in required:
        engine.programs._compiled[key] = queue[key]()
    engine.programs.close()
    assert engine.programs.missing() is None
    first, second = engine.programs.sets
    assert (engine.programs.has(first), engine.programs.has(second)) == (True, False)
    keys = used_programs(monkeypatch)
    rows = [row(model, "Once", "greedy", 50), row(model, "Anna", FORKS, 9, number=1)]
    run(engine, rows)
    assert {*keys} == {Steps(first, WINDOW), Steps(first, MAX_POSITIONS, True)}
    check_as_without_list(model, rows)


def test_a_text_does_not_stop_for_a_queued_program() -> None:
    """The first call of a program of steps waits for the others that are queued."""
    made, seen = Programs(Mock(mesh=None), Recording()), list[tuple[str, bool]]()
    keys = [Steps(frozenset(), 64), Steps(frozenset(), 64, lanes=True)]

    def slow(x: jax.Array, name: str) -> jax.Array:
        time.sleep(0.2)
        wait = made.waits
        seen.append((name, wait is not None and name in wait[0]))
        return x

    jitted = jax.jit(slow, static_argnames="name")
    given = (jnp.float32(1),)
    for key in keys:
        made.add(key, jitted, given, {"name": str(key)})
    made.call(keys[0], jitted, given, name=str(keys[0]))
    assert seen == [(str(key), True) for key in keys]
    assert made.waits is None


def test_a_program_that_fails(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Larger programs serve its rows. A set cannot run without its largest one. Rows that have
    ended do not count for the next row's window."""

    class Broken:
        def lower(self, *arguments: Any, **static: Any) -> Any:
            program = static["program"]
            second = "mirostat" in program.parts.used
            if program.window == (MAX_POSITIONS if second else 2 * WINDOW):
                raise RuntimeError("no such luck\nmore")
            return decode_for_backend().lower(*arguments, **static)

    engine = listed_engine(model, "greedy", "mirostat")
    with monkeypatch.context() as patch:
        patch.setattr(programs, "decode_for_backend", Broken)
        compiled(engine)
    assert engine.programs.missing() is None
    assert len(caplog.messages) == 2
    assert all(line.endswith("failed, it is not used: no such luck") for line in caplog.messages)
    with pytest.raises(UserError, match=r"compiling steps of .* failed: no such luck$"):
        engine.programs.has(engine.programs.sets[1])
    rows = [row(model, *one) for one in (("Once", "greedy", 50), ("Anna", "greedy", 50))]
    rows.append(row(model, "Guests:", "greedy", 5))
    run(engine, rows)
    check_as_without_list(model, rows)


def test_nobody_waits_for_a_program_that_is_not_compiled(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiling thread survives a panic of a library, and ends with its process."""
    made = Programs(model, Recording())
    panics = SimpleNamespace(lower=Mock(side_effect=SystemExit("panic")))
    for key in ("one", "two"):
        made.add(key, panics, (), {})
        made.wait(key, 60)
    assert {*made._failed} == {"one", "two"}
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    made.add("three", panics, (), {})
    made.wait("three", 60)
    assert made.counts == (0, 0)


def long_row(model: LanguageModel) -> Row:
    """Returns a row whose prompt is read in parts."""
    long = row(model, "Anna went to the market. " * 20, "greedy", 8, number=1).request
    return Row(replace(long, prompt=long.prompt[:70]), number=1)


def test_long_prompts_are_read_between_chunks(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other row continues between the parts of the prompt. The time of a chunk that ends during
    a prefill is not used for pacing. Chunks would become longer and longer otherwise, and a stream
    would pause for each."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    read_part = PromptReader._read_part

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return read_part(*arguments)

    monkeypatch.setattr(PromptReader, "_read_part", read_slowly)
    paced: list[int] = []  # prompt tokens read before each call

    def pace(engine: Engine, waited: float) -> None:
        paced.append(engine._reader.read)
        engine._chunk_steps = 1

    monkeypatch.setattr(Engine, "_pace", pace)
    here = [row(model, "Once", "greedy", 60), long_row(model)]
    engine = compiled(listed_engine(model, "greedy", look=0.02))
    start = 0

    def source() -> Iterator[Row | None]:
        nonlocal start
        yield here[0]
        while len(here[0].tokens) < 4:
            yield None
        start = engine._reader.read
        yield here[1]
        while not all(one.finish_reason for one in here):
            yield None

    events = engine.run(as_requests(engine, source()))
    read = {engine._reader.read for event in events if event.row.number == 0}
    # The first row got tokens after some parts of the prompt, but not all, were read.
    assert len(read) >= 4
    assert len({*paced}) >= 2  # before and after
    assert not [count for count in paced if start < count < engine._reader.read]
    check_as_without_list(model, here)


def test_rows_that_are_read_in_parts_can_be_ended(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose prompt is being read is cancelled, and its slot is used again."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    long = long_row(model)
    here = [row(model, "Once", "greedy", 60), long, row(model, "Guests:", "greedy", 5, number=2)]
    engine = compiled(listed_engine(model, "greedy"))

    def source() -> Iterator[Row | None]:
        yield here[0]
        while not here[0].tokens:  # texts that arrive together are read at once
            yield None
        yield from here[1:]

    def between() -> None:
        if engine._reading and long.finish_reason is None:
            (event,) = engine.end(long)
            assert event.row.finish_reason == "cancelled"

    list(engine.run(as_requests(engine, source()), between))
    assert [one.finish_reason for one in here] == ["length", "cancelled", "length"]
    check_as_without_list(model, [here[0], here[2]])


def test_memory_for_the_lanes_of_a_list_is_checked_at_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    monkeypatch.setattr(loop, "check_cache", lambda *_, slots, **__: checked.append(slots))
    for slots in (4, 60):
        Engine(model, slots=slots, capacity=MAX_POSITIONS, recording=Recording())
        for sampler in ("greedy", FORKS):
            listed_engine(model, sampler, slots=slots)
    assert checked == [4, 4, 4 + 9, 60, 60, 60 + 10]
