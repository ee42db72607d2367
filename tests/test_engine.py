"""Rows through slots: each is itself whatever runs beside it, and no slot stands empty for long."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from verification.comparison import compare

from entropix_jax import engine as module
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.config import GenerationConfig
from entropix_jax.decode import decode, prefill
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.generation import Generation
from entropix_jax.loading import LanguageModel, load
from entropix_jax.preparation import sampler_params
from entropix_jax.results import Event, Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.slots import admit
from tests.folders import poisoned

CAPACITY = 512
SLOTS = 4  # one number for all, so that few programs are compiled


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return load("tiny")


def job(
    model: LanguageModel,
    number: int,
    request: Request,
    sampler: Sampler,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] = (),
) -> RunningRow:
    sampler = calibrate_sampler(sampler, model)
    return RunningRow(
        number,
        Row(request),
        model,
        sampler,
        sampler_params(model, sampler),
        budget=budget_of(model, request, CAPACITY),
        seed=seed,
        eos_ids=eos_ids,
        stop=stop,
    )


def engine_of(model: LanguageModel, row: RunningRow, slots: int = SLOTS) -> Engine:
    """An engine for rows like this one."""
    return Engine(
        model,
        row.params,
        slots=slots,
        capacity=CAPACITY,
        recording=Recording(),
    )


def run(model: LanguageModel, jobs: Sequence[RunningRow], slots: int) -> tuple[Engine, list[Event]]:
    """Runs rows; an engine that is asked for chunks without end is stuck."""
    engine = engine_of(model, jobs[0], slots)
    dispatch, chunks = engine._dispatch, itertools.count()

    def counted() -> Any:
        assert next(chunks) < 1000, "stuck"
        return dispatch()

    engine._dispatch = counted  # type: ignore[method-assign]
    return engine, list(engine.run(jobs))


def again(row: RunningRow, slots: int, model: LanguageModel) -> Row:
    """The row once more, from the beginning, in one of so many slots."""
    same = job(model, row.number, row.row.request, row.sampler, seed=row.seed)
    run(model, [same], slots)
    return same.row


def records(row: RunningRow) -> list[dict[str, Any]]:
    return [{**token.to_json(), "row": 0} for token in row.row.tokens]


def texts(model: LanguageModel) -> list[list[int]]:
    world = (
        "Once upon a time",
        "Question: Mia has 12 apples and buys 7. How many apples does Mia have?",
        "There Adam met Rita. Rita was happy and sang. Then Adam went to the market. " * 6,
        "The capital of",
        "On Sunday",
    )
    return [model.tokenizer.encode(text, add_bos=True) for text in world]


PRESETS = ("entropix", "greedy", "document-001", "top-p", "mirostat")


def jobs_of(model: LanguageModel, number: int) -> list[RunningRow]:
    """Rows of all sorts: lengths, budgets, samplers, seeds."""
    rng = np.random.default_rng(5)
    prompts = texts(model)
    return [
        job(
            model,
            i,
            Request(prompts[i % len(prompts)], f"row {i}", int(rng.integers(1, 60))),
            load_sampler(PRESETS[i % len(PRESETS)] if i % 3 else "entropix"),
            seed=i % 2,
        )
        for i in range(number)
    ]


def test_rows_are_the_rows_alone(tiny: LanguageModel) -> None:
    """More rows than slots, each with its own sampler, seed and budget."""
    together = jobs_of(tiny, 14)
    engine, events = run(tiny, together, slots=SLOTS)
    assert [row.row.finish_reason for row in together] == ["length"] * 14
    actions = {token.action for row in together for token in row.row.tokens}
    assert {"argmax", "inject", "branch", "adaptive", "sample"} <= actions
    for row in together:
        alone = again(row, 1, tiny)
        assert [t.token_id for t in row.row.tokens] == [t.token_id for t in alone.tokens]
        runs = partial(again, row, 1), partial(again, row, SLOTS)
        assert compare(tiny, alone, row.row, *runs).parting is None
    # Every event of a row is told under its number, in order.
    for row in together:
        told = [e.token.position for e in events if e.row == row.number and e.token is not None]
        assert told == sorted(told)
        assert told[0] == len(row.row.request.prompt)
    assert engine.useful >= sum(
        token.action != "branch" for r in together for token in r.row.tokens
    )


def test_the_rows_beside_it_and_its_slot_do_not_show(tiny: LanguageModel) -> None:
    """To the last digit, in one window: a run that is taken up again gives the results that it
    would have."""
    forward, backward = jobs_of(tiny, 10), jobs_of(tiny, 10)
    run(tiny, forward, slots=SLOTS)
    run(tiny, backward[::-1], slots=SLOTS)
    for one, other in zip(forward, backward, strict=True):
        assert records(one) == records(other), one.number


def test_a_free_slot_is_taken_at_once(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows commit a token a step, so that the count of steps is known."""
    monkeypatch.setattr(Engine, "_pace", lambda self, waited: setattr(self, "_chunk_steps", 32))
    budgets = [3, 17, 5, 9, 2, 30, 8, 6, 11, 4]
    greedy = load_sampler("greedy")
    prompt = texts(tiny)[0]
    jobs = [job(tiny, i, Request(prompt, str(i), n), greedy) for i, n in enumerate(budgets)]
    engine, _ = run(tiny, jobs, slots=SLOTS)
    finished = [0] * SLOTS
    for budget in budgets:  # each to the slot that is free first
        first = min(finished)
        finished[finished.index(first)] = first + budget
    assert engine.steps == max(finished)
    assert engine.useful == sum(budgets)


def test_a_prompt_that_another_row_has_is_not_run_again(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one prompt, more of them than slots, one of which is far on when others come."""
    prompts = texts(tiny)
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(module, "prefill", counted)

    def jobs(text: int) -> list[RunningRow]:
        sampler = load_sampler("top-p")
        return [
            job(tiny, i, Request(prompts[text], f"row {i}", 60 if i == 0 else 5), sampler)
            for i in range(8)
        ]

    together = jobs(1)
    run(tiny, together, slots=SLOTS)
    assert len(calls) == 1
    # Beside them, a row whose prompt only begins alike: it has its own.
    longer = job(tiny, 8, Request([*prompts[1], 5], "longer", 9), load_sampler("top-p"))
    run(tiny, [*jobs(1), longer], slots=SLOTS)
    assert len(calls) == 3
    for row in [*together, longer]:
        alone = job(tiny, row.number, row.row.request, row.sampler)
        run(tiny, [alone], slots=1)
        ours, theirs = row.row.tokens, alone.row.tokens
        assert [t.token_id for t in ours] == [t.token_id for t in theirs], row.number
        for name in ("entropy", "attn_entropy", "interaction_strength"):
            wanted = [getattr(token, name) for token in theirs]
            assert [getattr(token, name) for token in ours] == pytest.approx(wanted, abs=1e-5)
    assert len({tuple(t.token_id for t in row.row.tokens[:5]) for row in together}) > 1


def test_rows_are_fetched_when_there_is_room(tiny: LanguageModel) -> None:
    """An input of any length is held one row ahead, no more."""
    jobs = jobs_of(tiny, 9)
    fetched = 0

    def source() -> Iterator[RunningRow]:
        nonlocal fetched
        for row in jobs:
            fetched += 1
            yield row

    engine = engine_of(tiny, jobs[0])
    for event in engine.run(source()):
        ended = sum(not row.running for row in jobs)
        assert fetched <= ended + SLOTS + 1, event
    assert fetched == 9


def test_a_stop_string_frees_its_slot(tiny: LanguageModel) -> None:
    greedy = load_sampler("greedy")
    prompts = texts(tiny)
    whole = [job(tiny, i, Request(prompts[i % 5], str(i), 40), greedy) for i in range(9)]
    run(tiny, whole, slots=SLOTS)
    stop = whole[0].row.text[10:14]
    stopped = [
        job(tiny, i, Request(prompts[i % 5], str(i), 40), greedy, stop=[stop]) for i in range(9)
    ]
    run(tiny, stopped, slots=SLOTS)
    assert {row.row.finish_reason for row in stopped} == {"stop", "length"}
    for cut, full in zip(stopped, whole, strict=True):
        assert cut.row.text == full.row.text.partition(stop)[0]


def test_a_row_that_went_on_past_its_stop_string_holds_nobody(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has run it to its budget, which fills the window, before the host saw the text."""
    monkeypatch.setattr(module, "DECODE_WINDOW", 64)
    monkeypatch.setattr(Engine, "_pace", lambda self, waited: setattr(self, "_chunk_steps", 32))
    greedy = load_sampler("greedy")
    long, short = texts(tiny)[0], texts(tiny)[4][:2]
    budget = 65 - len(long)

    def jobs(stop: Sequence[str]) -> list[RunningRow]:
        requests = Request(long, "long", budget), Request(short, "short", 80)
        return [job(tiny, i, one, greedy, stop=stop) for i, one in enumerate(requests)]

    whole = jobs([])
    run(tiny, whole, slots=SLOTS)
    text = whole[0].row.text
    end = len(text) - len("".join(token.text for token in whole[0].row.tokens[-4:]))
    (stop, *_) = (
        text[start:end]
        for start in range(end - 3, 0, -1)
        if text.find(text[start:end]) == start and text[start:end] not in whole[1].row.text
    )
    stopped = jobs([stop])
    run(tiny, stopped, slots=SLOTS)
    assert [row.row.finish_reason for row in stopped] == ["stop", "length"]
    assert len(stopped[0].row.tokens) < budget
    # Floats may differ: how far a step reads the cache follows the longest row beside it.
    runs = partial(again, stopped[1], 1), partial(again, stopped[1], SLOTS)
    assert compare(tiny, whole[1].row, stopped[1].row, *runs).parting is None


def test_a_row_that_fails_at_the_end_of_the_window_holds_nobody(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DECODE_WINDOW", 64)
    good, bad = texts(tiny)[0][:2]
    params = replace(poisoned(bad)(tiny.params), head=tiny.params.embedding)
    model = replace(tiny, params=params)
    greedy = load_sampler("greedy")
    jobs = [
        job(model, 0, Request([good] * 63 + [bad], "fails", 9), greedy),
        job(model, 1, Request([good], "other", 20), greedy),
    ]
    run(model, jobs, slots=SLOTS)
    assert [row.row.finish_reason for row in jobs] == ["error", "length"]


def test_a_run_that_does_not_move_is_an_error(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never an endless loop."""
    monkeypatch.setattr(Engine, "_window", lambda self: 64)
    prompt = texts(tiny)[2]
    assert len(prompt) > 65
    with pytest.raises(RuntimeError, match="no step is made"):
        run(tiny, [job(tiny, 0, Request(prompt, "0", 9), load_sampler("greedy"))], slots=SLOTS)


def test_end_tokens_are_each_rows_own(tiny: LanguageModel) -> None:
    greedy = load_sampler("greedy")
    prompt = texts(tiny)[0]
    (whole,) = [job(tiny, 0, Request(prompt, "0", 20), greedy)]
    run(tiny, [whole], slots=SLOTS)
    ids = [token.token_id for token in whole.row.tokens]
    ends: list[tuple[int, ...]] = [(), (ids[4],), (ids[9], ids[7])]
    jobs = [
        job(tiny, i, Request(prompt, "0", 20), greedy, eos_ids=own) for i, own in enumerate(ends)
    ]
    run(tiny, jobs, slots=SLOTS)
    for row, own in zip(jobs, ends, strict=True):
        at = min((ids.index(i) + 1 for i in own), default=20)
        assert [token.token_id for token in row.row.tokens] == ids[:at]
        assert row.row.finish_reason == ("eos" if own else "length")


def test_one_program_for_all_rows(tiny: LanguageModel) -> None:
    """Rows come and go, samplers change: nothing is compiled but for another window."""
    jobs = jobs_of(tiny, 14)
    run(tiny, jobs, slots=SLOTS)
    programs: Any = (decode, prefill, admit)
    sizes = [program._cache_size() for program in programs]
    again = [
        job(
            tiny,
            i,
            Request(row.row.request.prompt, f"other {i}", 9),
            row.sampler.with_values({"base.temperature": 0.5 + 0.1 * i, "branch.width": 1 + i % 8}),
        )
        for i, row in enumerate(jobs)
    ]
    run(tiny, again, slots=SLOTS)
    assert [program._cache_size() for program in programs] == sizes


def test_a_run_without_rows(tiny: LanguageModel) -> None:
    sampler = load_sampler("greedy")
    engine = Engine(
        tiny,
        sampler_params(tiny, sampler),
        slots=SLOTS,
        capacity=CAPACITY,
        recording=Recording(),
    )
    assert list(engine.run([])) == []
    assert (engine.steps, engine.useful) == (0, 0)


def test_rows_that_are_not_there_yet(tiny: LanguageModel) -> None:
    """Those that are go on, and the others come as if nothing had been."""
    jobs = jobs_of(tiny, 6)
    engine = engine_of(tiny, jobs[0])
    told: list[Event] = []

    def source() -> Iterator[RunningRow | None]:
        for number, row in enumerate(jobs):
            yield row
            end = len(told) + 5 * (number % 3)
            while len(told) < end and any(row.running for row in jobs[: number + 1]):
                yield None
            yield None

    for event in engine.run(source()):
        told.append(event)
    assert [row.row.finish_reason for row in jobs] == ["length"] * 6
    starts = [row.started or 0.0 for row in jobs]
    assert starts == sorted(starts)
    assert starts[0] > 0
    # Once more, with the same engine.
    for one, other in zip(again := jobs_of(tiny, 6), jobs, strict=True):
        assert one.row.request == other.row.request
    list(engine.run(again))
    ids = [[[t.token_id for t in row.row.tokens] for row in rows] for rows in (jobs, again)]
    assert ids[0] == ids[1]


def test_a_run_that_is_asked_to_stop(tiny: LanguageModel) -> None:
    jobs = jobs_of(tiny, 9)
    engine = engine_of(tiny, jobs[0])
    events = []
    for event in engine.run(jobs):
        events.append(event)
        if len(events) == 25:
            engine.stop()
    extra = list(itertools.dropwhile(lambda event: event.retracted, events[24:]))
    assert len(extra) <= 1, "the event that asks is the last"
    assert any(row.running for row in jobs)


@pytest.mark.parametrize(
    ("length", "budget", "capacity", "expected"),
    [
        (10, 5, 100, 5),
        (10, 500, 100, 90),
        (10, 10_000, None, 4086),
        (99, 5, 100, 1),
        (100, 5, 100, "the prompt has 100 tokens, a row has room for 100: at most 99 leave room"),
        (4096, 5, None, "the prompt has 4096 tokens, the model 4096 positions"),
        (4802, 5, 2048, "a row has room for 2048: at most 2047 leave room"),
        (0, 5, 100, "the prompt is empty"),
        (10, 0, 100, "max_new_tokens must be at least 1, not 0"),
    ],
)
def test_budgets(
    tiny: LanguageModel, length: int, budget: int, capacity: int | None, expected: int | str
) -> None:
    request = Request([5] * length, "0", budget)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            budget_of(tiny, request, capacity)
    else:
        assert budget_of(tiny, request, capacity) == expected


def test_too_many_end_tokens(tiny: LanguageModel) -> None:
    crowded = replace(tiny, generation=GenerationConfig(eos_ids=tuple(range(9))))
    with pytest.raises(UserError, match="9 end tokens, at most 8"):
        Generation(crowded, [Request([5], "0", 3)])
