"""Programs that compile in the background: who waits for them, and that nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine import engine as module
from entropix_jax.engine import prompts
from entropix_jax.engine.decode import decode_here
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.engine.programs import CompileError, Programs
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.slots import emptied, park
from entropix_jax.engine.state import BRANCH_ENDED, FINISHED_EOS, FINISHED_STOP, FORKS, PARKED
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.model_folders import MAX_POSITIONS

WINDOW = 32


def row(model: LanguageModel, prompt: str, sampler: str, tokens: int, number: int = 0) -> Row:
    calibrated = calibrate_sampler(load_sampler(sampler), model)
    ids = model.tokenizer.encode(prompt, add_bos=True)
    return Row(Request(ids, calibrated, tokens, row_id=prompt), number=number)


def engine(model: LanguageModel, **options: Any) -> Engine:
    options = {"slots": 2, "widest": True, **options}
    return Engine(model, capacity=MAX_POSITIONS, **options)


def test_other_rows_go_on(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row outgrows its window, another needs a sampler without a program, a third one has all
    that it needs. The rows are those of an engine that compiles when it needs to."""
    monkeypatch.setattr(module, "DECODE_WINDOW", WINDOW)
    gate = threading.Event()
    compile_ = Programs._compile

    def held_back(self: Programs) -> None:
        gate.wait(120)
        compile_(self)

    asked = [("Once", "greedy", 90), ("Guests:", "mirostat", 8), ("Anna", "greedy", 8)]

    def rows() -> list[Row]:
        return [row(model, *one, number=i) for i, one in enumerate(asked)]

    here = rows()
    first = engine(model, slots=3, background=True)
    order = []

    def source() -> Iterator[Row | None]:
        yield here[0]
        while len(here[0].tokens) < 4:
            yield None
        # From here on nothing compiles until the third row has ended.
        monkeypatch.setattr(Programs, "_compile", held_back)
        yield here[1]
        yield here[2]
        while any(one.finish_reason is None for one in here):
            if here[2].finish_reason is not None:
                gate.set()
            yield None

    for event in first.run(source()):
        order.append(event.row.number)
    assert [one.finish_reason for one in here] == ["length"] * 3
    # The third row ended before the second began, although that one was there first.
    assert order.index(1) > max(i for i, number in enumerate(order) if number == 2)
    there = rows()
    for _ in engine(model, slots=3).run(there):
        pass
    for one, other in zip(here, there, strict=True):
        assert [t.token_id for t in one.tokens] == [t.token_id for t in other.tokens]


def test_long_prompts_are_read_between_chunks(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part, while another row goes on."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    asked = [("Once", "greedy", 60), ("Anna went to the market. " * 20, "greedy", 8)]

    def rows() -> list[Row]:
        made = [row(model, *one, number=i) for i, one in enumerate(asked)]
        text = made[1].request.prompt[:70]
        made[1] = Row(replace(made[1].request, prompt=text), number=1)
        return made

    here, run = rows(), engine(model, background=True)
    order: list[tuple[int, int]] = []

    def source() -> Iterator[Row | None]:
        yield here[0]
        while len(here[0].tokens) < 4:
            yield None
        yield here[1]
        while any(one.finish_reason is None for one in here):
            yield None

    for event in run.run(source()):
        order.append((event.row.number, run.read))
    # The first row got tokens after some parts of the prompt, but not all, were read.
    assert len({read for number, read in order if number == 0}) >= 4
    there = rows()
    for _ in engine(model).run(there):
        pass
    for one, other in zip(here, there, strict=True):
        assert [t.token_id for t in one.tokens] == [t.token_id for t in other.tokens]


def test_what_is_read_is_no_part_of_the_pace(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that was ready while a part of a prompt was read says nothing of how long chunks
    take: else they become longer and longer, and a stream halts for each."""
    monkeypatch.setattr(prompts, "chunk_size", lambda *arguments: 16)
    read_part = PromptReader._read_part

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.05)
        return read_part(*arguments)

    monkeypatch.setattr(PromptReader, "_read_part", read_slowly)
    paced: list[int] = []  # what was read before each time

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
        while second.finish_reason is None:
            yield None

    assert [*run.run(source())]
    assert len({*paced}) >= 2  # before and after
    assert not [read for read in paced if start < read < run.read]


def test_held_rows_end(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, or with the run."""
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

    assert list(run.run(iter([*here, None, None]), between)) == []
    assert [event.row for event in run.interrupt()] == [here[1]]
    assert [one.finish_reason for one in here] == ["cancelled", "interrupt"]


def test_an_error_of_the_compiler_is_raised(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def lower(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no such luck")

    programs = Programs()

    def request(**when: bool) -> None:
        programs.request("key", "a program", Broken(), (np.zeros(2),), {}, **when)

    for _ in range(2):  # it is tried again
        request()
        while programs.compiling is not None:
            programs.wait(0.05)
        request(ahead=True)
        with pytest.raises(CompileError, match="compiling a program failed") as raised:
            request()
        assert str(raised.value.__cause__) == "no such luck"
        assert "key" not in programs


@pytest.mark.parametrize("broken", ["sampler", "window"])
def test_an_error_of_the_compiler_ends_the_row_that_needs_the_program(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """One row needs a sampler whose program fails, or outgrows its window."""
    monkeypatch.setattr(module, "DECODE_WINDOW", WINDOW)

    class Broken:
        def lower(self, *arguments: Any, **static: Any) -> Any:
            wide, used = static["window"] > WINDOW, arguments[1].settings.used
            if wide if broken == "window" else "mirostat" in used:
                raise RuntimeError("no such luck")
            return decode_here().lower(*arguments, **static)

    monkeypatch.setattr(module, "decode_here", Broken)
    sampler, tokens = ("greedy", 90) if broken == "window" else ("mirostat", 8)
    lost, other = row(model, "Once", sampler, tokens), row(model, "Anna", "greedy", 20, number=1)
    late = row(model, "Once", "greedy", 5, number=2)

    def source() -> Iterator[Row | None]:
        yield lost
        yield other
        while lost.finish_reason is None or other.finish_reason is None:
            yield None
        yield late

    for _ in engine(model, background=True).run(source()):
        pass
    assert [one.finish_reason for one in (lost, other, late)] == ["error", "length", "length"]
    assert str(lost.error).startswith("compiling steps of ")
    assert bool(lost.tokens) == (broken == "window")


def test_parked_rows_keep_their_state(model: LanguageModel) -> None:
    run = engine(model)
    for _ in run.run([row(model, "Once", "greedy", 2)]):
        state = emptied(run._state)
    codes = [0, FINISHED_STOP, FORKS, BRANCH_ENDED, FINISHED_EOS]
    places = state.finish.shape[0]
    finish = jnp.asarray([codes[i % len(codes)] for i in range(places)], jnp.int32)
    lengths = [40 if i < len(codes) else 7 for i in range(places)]
    length = jnp.asarray(lengths, jnp.int32)
    state = replace(state, finish=finish, cache=replace(state.cache, length=length))
    before = finish.tolist()
    expected = [
        code + PARKED if long >= WINDOW and code != FINISHED_STOP else code
        for code, long in zip(before, lengths, strict=True)
    ]
    nothing = np.zeros(places, bool)
    state = park(state, np.int32(WINDOW), nothing)
    assert state.finish.tolist() == expected
    state = park(state, np.int32(2 * WINDOW), ~nothing)  # all are being read
    assert state.finish.tolist() == [c if c == FINISHED_STOP else c + PARKED for c in before]
    assert park(state, np.int32(2 * WINDOW), nothing).finish.tolist() == before
