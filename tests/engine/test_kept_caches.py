"""`Engine(keep=True)`: a row reads what its slot has not cached, and is the row that reads all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine import slots
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import RunningRow
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import BRANCH_ENDED, FINISHED_STOP, FORKS, RUNNING
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, requests, set_pace
from tests.support.samplers import LITERAL

CAPACITY = 512
# On `tiny` it branches and goes back again and again.
RESTLESS = load_sampler(LITERAL).with_values(
    {
        "regimes.lelv": ["entropy < 0.2"],
        "regimes.helv": ["entropy < -1"],
        "regimes.lehv": ["entropy > 0.6", "entropy < 1.2"],
        "regimes.hehv": ["entropy > 1.2"],
        "base.temperature": 3.0,
        "branch.max_share": 1000.0,
        "backspace.reach": 4,
        "backspace.per_row": 1000,
        "backspace.max_prob": 0.9,
        "loop.max_period": 0,
    }
)


def engine_of(model: LanguageModel, slots: int = 1) -> Engine:
    return Engine(model, slots=slots, capacity=CAPACITY, keep=True)


def of(model: LanguageModel, prompt: Sequence[int], budget: int = 12, **options: Any) -> Request:
    options = {"sampler": "min-p", "ignore_eos": True, **options}
    return requests(model, [Spec(prompt, "0", budget)], **options)[0]


def run(engine: Engine, *wanted: Request, events: int | None = None) -> list[Row]:
    """Runs requests, one of them to the stop after so many events."""
    rows = [Row(request, number=number) for number, request in enumerate(wanted)]
    for number, _ in enumerate(engine.run(rows), start=1):
        if number == events:
            engine.stop()
    list(engine.interrupt())
    return rows


def is_the_row_that_reads_all(model: LanguageModel, row: Row, events: int | None = None) -> bool:
    """The same tokens, and the same numbers but for rounding."""
    fresh = run(Engine(model, slots=1, capacity=CAPACITY), row.request, events=events)[0]
    here, there = ([[t.entropy, t.logprob] for t in one.tokens] for one in (row, fresh))
    return ids(row) == ids(fresh) and np.allclose(here, there, rtol=1e-3, atol=1e-4)


def ids(row: Row) -> list[int]:
    return [token.token_id for token in row.tokens]


def encoded(model: LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_bos=True)


def test_a_row_reads_only_what_is_new(tiny: LanguageModel) -> None:
    engine = engine_of(tiny)
    first = encoded(tiny, "Once upon a time")
    (row,) = run(engine, of(tiny, first))
    assert engine.read == len(first) - 1
    # It goes on: all but the last token of what is there is cached.
    longer = [*first, *ids(row), *encoded(tiny, "Question: Mia has 12 apples.")]
    before = engine.read
    (row,) = run(engine, of(tiny, longer, seed=3))
    assert engine.read - before == len(longer) - 1 - (len(first) + 12 - 1)
    assert is_the_row_that_reads_all(tiny, row)
    # The same once more, with other numbers and another sampler: nothing is read.
    before = engine.read
    (row,) = run(engine, of(tiny, longer, seed=4, sampler=LITERAL))
    assert engine.read == before
    assert is_the_row_that_reads_all(tiny, row)
    # One that parts from it, or is shorter.
    parted = [*longer[:-3], *encoded(tiny, " and buys")]
    (row,) = run(engine, of(tiny, parted))
    assert engine.read - before == len(parted) - 1 - (len(longer) - 3)
    assert is_the_row_that_reads_all(tiny, row)
    before = engine.read
    (row,) = run(engine, of(tiny, parted[:9]))
    assert engine.read == before
    assert is_the_row_that_reads_all(tiny, row)


def test_without_it_each_run_reads_all(tiny: LanguageModel) -> None:
    engine = Engine(tiny, slots=1, capacity=CAPACITY)
    wanted = of(tiny, encoded(tiny, "Once upon a time"))
    for times in (1, 2):
        run(engine, wanted)
        assert engine.read == times * (len(wanted.prompt) - 1)


def test_wherever_the_run_before_was_stopped(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may be ahead of the last event, and have gone back or forked since."""
    set_pace(monkeypatch, 8)
    engine = engine_of(tiny)
    prompt = encoded(tiny, "There Adam met Rita. Rita")
    wanted = of(tiny, prompt, budget=48, sampler=RESTLESS, seed=2)
    retracted = branched = 0
    for events in range(1, 40, 3):
        (row,) = run(engine, wanted, events=events)
        retracted += row.retracted
        branched += sum(token.action == "branch" for token in row.tokens)
        follows = of(tiny, [*prompt, *ids(row), *encoded(tiny, "On Sunday")], sampler="greedy")
        (row,) = run(engine, follows)
        assert is_the_row_that_reads_all(tiny, row), events
    assert retracted
    assert branched


def test_a_prompt_whose_reading_was_stopped(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny, slots=2)
    short = encoded(tiny, "Once upon a time")
    long = encoded(tiny, "Rita was happy and sang. Then Adam went to the market. " * 3)
    read_part = PromptReader._read_part

    def stop_in_the_long_one(
        self: PromptReader, state: Any, layout: Layout, rows: Any, *shape: int
    ) -> Any:
        if 1 in rows:
            engine.stop()
            shape = (1, 16, CAPACITY)  # its first part
        return read_part(self, state, layout, rows, *shape)

    with monkeypatch.context() as patch:
        patch.setattr(PromptReader, "_read_part", stop_in_the_long_one)
        _, stopped = run(engine, of(tiny, short), of(tiny, long))
    assert (stopped.finish_reason, engine.read) == ("interrupt", len(short) - 1 + 16)
    # The first slot does not take it from the second, which has only begun it.
    (row,) = run(engine, of(tiny, long))
    assert is_the_row_that_reads_all(tiny, row)
    # The second goes on with what it has.
    before = engine.read
    _, row = run(engine, of(tiny, short), of(tiny, [*long, *short]))
    assert engine.read - before == len(short) - 2 + len(long) + len(short) - 1 - 16
    assert is_the_row_that_reads_all(tiny, row)


def test_rows_of_a_stopped_run_do_not_run_in_the_next(tiny: LanguageModel) -> None:
    """Whether or not the caller has ended them."""
    engine = engine_of(tiny, slots=2)
    prompts = [encoded(tiny, text) for text in ("Once upon a time", "Mia has")]
    left = [
        Row(of(tiny, prompt, 400, sampler=RESTLESS), number=i) for i, prompt in enumerate(prompts)
    ]
    for number, _ in enumerate(engine.run(left), start=1):
        if number == 20:
            engine.stop()
    told = [len(row.tokens) for row in left]
    (row,) = run(engine, of(tiny, prompts[1], 20, sampler=RESTLESS, seed=5))
    assert is_the_row_that_reads_all(tiny, row)
    assert [len(row.tokens) for row in left] == told


def test_emptied_slots_keep_what_is_cached(tiny: LanguageModel) -> None:
    settings = of(tiny, [1]).sampler.settings
    options: Any = {"capacity": 32, "dtype": tiny.precision.activations}
    state = empty_slots(tiny.config, Layout(2, 3, 1), settings, **options)
    branch = jnp.array([0, -1, 1, -1, 2], jnp.int32)
    finish = jnp.array([RUNNING, FORKS, RUNNING, FINISHED_STOP, BRANCH_ENDED], jnp.int32)
    length = jnp.array([3, 4, 5, 6, 7], jnp.int32)
    fork, cache = replace(state.fork, branch=branch), replace(state.cache, length=length)
    emptied = slots.emptied(replace(state, fork=fork, cache=cache, finish=finish))
    assert emptied.finish.tolist() == [FINISHED_STOP] * 5
    assert emptied.fork.branch.tolist() == [-1] * 5
    assert emptied.cache.length.tolist() == length.tolist()
    assert emptied.cache.keys[0] is state.cache.keys[0]


def test_nothing_is_kept_of_a_run_that_failed(tiny: LanguageModel) -> None:
    engine = engine_of(tiny)
    wanted = of(tiny, encoded(tiny, "Once upon a time"))
    left: Any = engine.run([wanted])
    next(left)
    left.close()
    before = engine.read
    (row,) = run(engine, wanted)
    assert engine.read - before == len(wanted.prompt) - 1
    assert is_the_row_that_reads_all(tiny, row)


def test_kept_caches_go_before_others_are_allocated(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny)
    run(engine, of(tiny, [1, 2, 3], 2))
    assert engine._kept is not None
    old, begin = weakref.ref(engine._kept[0].history), Engine._begin

    def check(self: Engine, first: RunningRow) -> None:
        assert old() is None
        begin(self, first)

    monkeypatch.setattr(Engine, "_begin", check)
    engine._mechanisms = ()  # as after a run of other ones
    assert len(ids(run(engine, of(tiny, [1, 2, 3], 2))[0])) == 2
