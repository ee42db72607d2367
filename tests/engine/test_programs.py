"""Programs that compile in the background, while only the rows that need them wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from entropix_jax.engine import loop as module
from entropix_jax.engine import prompts
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.programs import Programs, decode_for_backend
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.model_folders import MAX_POSITIONS
from tests.support.runs import as_requests, ids_of

WINDOW = 32


def row(model: LanguageModel, prompt: str, sampler: str, tokens: int, number: int = 0) -> Row:
    calibrated = calibrate_sampler(load_sampler(sampler), model)
    ids = model.tokenizer.encode(prompt, add_bos=True)
    return Row(Request(ids, calibrated, tokens, row_id=prompt), number=number)


def engine(model: LanguageModel, **options: Any) -> Engine:
    options = {"slots": 2, "widest": True, **options}
    return Engine(model, capacity=MAX_POSITIONS, **options)


def running(*rows: Row) -> bool:
    return any(row.finish_reason is None for row in rows)


def check_as_without_background(model: LanguageModel, rows: Sequence[Row]) -> None:
    """Checks that the rows equal those of an engine that compiles in the foreground."""
    there = [Row(one.request, number=one.number) for one in rows]
    run = engine(model, slots=3)
    list(run.run(as_requests(run, there)))
    assert [row.finish_reason for row in rows] == ["length"] * len(rows)
    assert [*map(ids_of, rows)] == [*map(ids_of, there)]


def test_other_rows_do_not_wait(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row outgrows its window, another needs a sampler without a program, and the third one has
    its program."""
    monkeypatch.setattr(module, "DECODE_WINDOW", WINDOW)
    gate = threading.Event()
    compile_ = Programs._compile

    def held_back(self: Programs) -> None:
        gate.wait(120)
        compile_(self)

    asked = [("Once", "greedy", 90), ("Guests:", "mirostat", 8), ("Anna", "greedy", 8)]
    here = [row(model, *one, number=i) for i, one in enumerate(asked)]
    first = engine(model, slots=3, background=True)

    def source() -> Iterator[Row | None]:
        yield here[0]
        while len(here[0].tokens) < 4:
            yield None
        # From here on, nothing compiles until the third row has ended.
        monkeypatch.setattr(Programs, "_compile", held_back)
        yield here[1]
        yield here[2]
        while running(*here):
            if not running(here[2]):
                gate.set()
            yield None

    order = [event.row.number for event in first.run(as_requests(first, source()))]
    # The third row ended before the second began, although that one was there first.
    assert order.index(1) > max(i for i, number in enumerate(order) if number == 2)
    check_as_without_background(model, here)


def test_long_prompts_are_read_between_chunks(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other row continues between the parts of the prompt."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    long = row(model, "Anna went to the market. " * 20, "greedy", 8, number=1)
    long = Row(replace(long.request, prompt=long.request.prompt[:70]), number=1)
    here, run = [row(model, "Once", "greedy", 60), long], engine(model, background=True)

    def source() -> Iterator[Row | None]:
        yield here[0]
        while len(here[0].tokens) < 4:
            yield None
        yield here[1]
        while running(*here):
            yield None

    read = {run.read for event in run.run(as_requests(run, source())) if event.row.number == 0}
    # The first row got tokens after some parts of the prompt, but not all, were read.
    assert len(read) >= 4
    check_as_without_background(model, here)


def test_prefill_time_does_not_change_the_pace(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a chunk that ends during a prefill is not used for pacing. Chunks would become
    longer and longer otherwise, and a stream would pause for each."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    read_part = PromptReader._read_part

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return read_part(*arguments)

    monkeypatch.setattr(PromptReader, "_read_part", read_slowly)
    paced: list[int] = []  # prompt tokens read before each call

    def pace(engine: Engine, waited: float) -> None:
        paced.append(engine.read)
        engine._chunk_steps = 1

    monkeypatch.setattr(Engine, "_pace", pace)
    first, second = row(model, "Once", "greedy", 60), row(model, "Anna " * 70, "greedy", 8, 1)
    run = engine(model, background=True, look=0.02)
    start = 0

    def source() -> Iterator[Row | None]:
        nonlocal start
        yield first
        while len(first.tokens) < 4:
            yield None
        start = run.read
        yield second
        while running(second):
            yield None

    assert [*run.run(as_requests(run, source()))]
    assert len({*paced}) >= 2  # before and after
    assert not [read for read in paced if start < read < run.read]


def test_waiting_rows_can_be_ended(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait for a program are cancelled, or interrupted with the run."""
    monkeypatch.setattr(Programs, "_compile", lambda self: None)
    here = [row(model, "Once", "greedy", 5), row(model, "Guests:", "greedy", 5, number=1)]
    run = engine(model, background=True)
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            (event,) = run.end(here[0])
            assert event.row.finish_reason == "cancelled"
        elif asked == 3:
            run.stop()

    assert list(run.run(as_requests(run, [*here, None, None]), between)) == []
    assert [event.row for event in run.interrupt()] == [here[1]]
    assert [one.finish_reason for one in here] == ["cancelled", "interrupt"]


@pytest.mark.parametrize("broken", ["sampler", "window"])
def test_a_compiler_error_ends_only_the_row_that_needs_the_program(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """One row needs a sampler whose program fails, or outgrows its window."""
    monkeypatch.setattr(module, "DECODE_WINDOW", WINDOW)

    class Broken:
        def lower(self, *arguments: Any, **static: Any) -> Any:
            program = static["program"]
            wide, used = program.window > WINDOW, program.parts.used
            if wide if broken == "window" else "mirostat" in used:
                raise RuntimeError("no such luck")
            return decode_for_backend().lower(*arguments, **static)

    monkeypatch.setattr(module, "decode_for_backend", Broken)
    sampler, tokens = ("greedy", 90) if broken == "window" else ("mirostat", 8)
    lost, other = row(model, "Once", sampler, tokens), row(model, "Anna", "greedy", 20, number=1)
    late = row(model, "Once", "greedy", 5, number=2)

    def source() -> Iterator[Row | None]:
        yield lost
        yield other
        while running(lost, other):
            yield None
        yield late

    run = engine(model, background=True)
    list(run.run(as_requests(run, source())))
    assert [one.finish_reason for one in (lost, other, late)] == ["error", "length", "length"]
    assert str(lost.error).startswith("compiling steps of ")
    assert bool(lost.tokens) == (broken == "window")
