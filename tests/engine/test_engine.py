"""Rows on slots: results do not depend on the other rows, and free slots are refilled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import shapes
from entropix_jax.engine.loop import Engine, shared_lanes
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Event, Row
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.support.model_folders import poisoned
from tests.support.runs import Spec, ids_of, is_same, prefills, requests, run_rows, set_pace
from tests.support.samplers import LITERAL

CAPACITY = 512
SLOTS = 4  # the same in all tests, so that few programs are compiled


def request_of(
    model: LanguageModel,
    prompt: Sequence[int],
    row_id: str,
    budget: int,
    sampler: Sampler | str = "greedy",
    **options: Any,
) -> Request:
    spec = Spec(prompt, row_id, budget)
    return requests(model, [spec], sampler, ignore_eos=True, **options)[0]


def run(
    model: LanguageModel, wanted: Sequence[Request], slots: int = SLOTS
) -> tuple[Engine, list[Row], list[Event]]:
    engine = Engine(model, slots=slots, capacity=CAPACITY)
    rows = [*map(engine.new_row, wanted)]
    return engine, rows, list(engine.run(wanted))


def records(row: Row) -> list[dict[str, Any]]:
    return [{**token.to_json(), "row": 0} for token in row.tokens]


def texts(model: LanguageModel) -> list[list[int]]:
    world = (
        "Once upon a time",
        "Question: Mia has 12 apples and buys 7. How many apples does Mia have?",
        "There Adam met Rita. Rita was happy and sang. Then Adam went to the market. " * 6,
        "The capital of",
        "On Sunday",
    )
    return [model.tokenizer.encode(text, add_bos=True) for text in world]


def mixed(model: LanguageModel, number: int, presets: Sequence[str]) -> list[Request]:
    """Returns requests with different prompts, budgets, samplers and seeds. No row forks."""
    prompts, budgets = texts(model), np.random.default_rng(5).integers(1, 60, number).tolist()
    loaded = [load_sampler(name) for name in presets]
    samplers = [
        one.with_values({k: "explore" for k, v in one.values.items() if v == "branch"})
        for one in loaded
    ]
    return [
        request_of(
            model, prompts[i % len(prompts)], f"row {i}", n, samplers[i % len(samplers)], seed=i % 2
        )
        for i, n in enumerate(budgets)
    ]


@pytest.mark.usefixtures("optimized")
def test_results_depend_on_neither_other_rows_nor_slots(tiny: LanguageModel) -> None:
    """Results are equal bit for bit, within one window, if no row forks. A resumed run thus gives
    the same results. Earlier runs of the engine have no effect either, even an aborted one."""
    wanted = mixed(tiny, 10, (LITERAL, "entropix", "mirostat"))
    engine, forward, _ = run(tiny, wanted)
    assert all(0 < (row.started or 0) <= (row.first_token or 0) for row in forward)
    _, backward, _ = run(tiny, wanted[::-1])
    left: Any = engine.run(wanted[1:])
    next(left)
    engine.stop()
    left.close()
    once_more = run_rows(engine, wanted)
    for one, *others in zip(forward, backward[::-1], once_more, strict=True):
        for other in others:
            assert records(one) == records(other), one.number


def test_a_free_slot_is_taken_at_once(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy rows commit one token per step, so the number of steps is known."""
    set_pace(monkeypatch, 32)
    budgets = [3, 17, 5, 9, 2, 30, 8, 6, 11, 4]
    prompt = texts(tiny)[0]
    engine, _, _ = run(tiny, [request_of(tiny, prompt, str(i), n) for i, n in enumerate(budgets)])
    finished = [0] * SLOTS
    for budget in budgets:  # each to the slot that is free first
        first = min(finished)
        finished[finished.index(first)] = first + budget
    assert engine.steps == max(finished)
    assert engine.useful == sum(budgets)


def test_a_shared_prompt_is_prefilled_once(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt has more rows than there are slots, so some start while another is far ahead."""
    prompt = texts(tiny)[1]
    calls = prefills(monkeypatch)
    wanted = [request_of(tiny, prompt, f"row {i}", 5 if i else 60, "top-p") for i in range(8)]
    _, together, _ = run(tiny, wanted)
    assert len(calls) == 1
    # A longer prompt with the same beginning gets its own prefill.
    _, (*_, longer), _ = run(tiny, [*wanted, request_of(tiny, [*prompt, 5], "longer", 9, "top-p")])
    assert len(calls) == 3
    for row in [*together, longer]:
        (other,) = run(tiny, [row.request], 1)[1]
        assert ids_of(row) == ids_of(other), row.number
        for name in ("entropy", "attn_entropy", "interaction_strength"):
            values = [getattr(token, name) for token in other.tokens]
            assert [getattr(t, name) for t in row.tokens] == pytest.approx(values, abs=1e-5)
    assert len({tuple(ids_of(row)[:5]) for row in together}) > 1


def test_requests_are_fetched_when_there_is_room(tiny: LanguageModel) -> None:
    """The engine reads its input at most one request ahead, and creates the rows."""
    wanted = mixed(tiny, 9, ["greedy"])
    fetched: list[Request] = []
    ended = 0

    def source() -> Iterator[Request]:
        for request in wanted:
            fetched.append(request)
            yield request

    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY)
    for event in engine.run(source()):
        ended += event.row.finish_reason is not None
        assert len(fetched) <= ended + SLOTS + 1, event
    assert len(fetched) == ended == 9


def test_a_row_past_its_stop_string_does_not_block_others(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device runs it to its budget, which fills the window, before the host sees the text."""
    monkeypatch.setattr(shapes, "DECODE_WINDOW", 64)
    set_pace(monkeypatch, 32)
    long, short = texts(tiny)[0], texts(tiny)[4][:2]
    budget = 65 - len(long)

    def rows(stop: Sequence[str] = ()) -> list[Row]:
        wanted = ((long, "long", budget), (short, "short", 80))
        return run(tiny, [request_of(tiny, *one, stop=stop) for one in wanted])[1]

    whole = rows()
    text = whole[0].text
    end = len(text) - len("".join(token.text for token in whole[0].tokens[-4:]))
    (stop, *_) = (
        text[start:end]
        for start in range(end - 3, 0, -1)
        if text.find(text[start:end]) == start and text[start:end] not in whole[1].text
    )
    stopped = rows([stop])
    assert [row.finish_reason for row in stopped] == ["stop", "length"]
    assert len(stopped[0].tokens) < budget
    # Floats may differ, since the decode window follows the longest running row.
    assert is_same(stopped[1], whole[1])


def test_a_row_that_fails_at_the_window_end_does_not_block_others(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "DECODE_WINDOW", 64)
    good, bad = texts(tiny)[0][:2]
    params = replace(poisoned(bad)(tiny.params), head=tiny.params.embedding)
    model = replace(tiny, params=params)
    wanted = [
        request_of(tiny, [good] * 63 + [bad], "fails", 9),
        request_of(tiny, [good], "other", 20),
    ]
    _, rows, _ = run(model, wanted)
    assert [row.finish_reason for row in rows] == ["error", "length"]


def test_each_row_has_its_own_end_tokens(tiny: LanguageModel) -> None:
    request = request_of(tiny, texts(tiny)[0], "0", 20)
    _, (whole,), _ = run(tiny, [request])
    all_ = ids_of(whole)
    ends: list[tuple[int, ...]] = [(), (all_[4],), (all_[9], all_[7])]
    _, rows, _ = run(tiny, [replace(request, eos_ids=own) for own in ends])
    for row, own in zip(rows, ends, strict=True):
        at = min((all_.index(i) + 1 for i in own), default=20)
        assert ids_of(row) == all_[:at]
        assert row.finish_reason == ("eos" if own else "length")


def test_samplers_of_one_run_must_share_mechanisms(tiny: LanguageModel) -> None:
    other = load_sampler("greedy").with_arm("own", lambda *_: pytest.fail("never chosen"))
    with pytest.raises(UserError, match="must have the same mechanisms"):
        run(tiny, [request_of(tiny, [5], "0", 3), request_of(tiny, [5], "1", 3, other)])


def test_chunks_follow_the_time_that_the_host_waits(tiny: LanguageModel) -> None:
    """Steps per chunk double below half of the target of 0.1 s, and halve above the target."""
    engine, steps = Engine(tiny, slots=SLOTS, capacity=CAPACITY), []
    for waited in (0.0, 0.049, 0.05, 0.1, 0.11, 0.11, 0.11, *[0.04] * 6):
        engine._pace(waited)
        steps.append(engine._chunk_steps)
    assert steps == [2, 4, 4, 4, 2, 1, 1, 2, 4, 8, 16, 32, 32]


def test_chunks_without_a_step_are_a_defect(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run raises after some of them, instead of never ending."""

    def read_nothing(self: Engine, chunk: object) -> Iterator[Event]:
        assert next(chunks) < 100
        yield from ()

    chunks = itertools.count()
    monkeypatch.setattr(Engine, "_read_back", read_nothing)
    with pytest.raises(RuntimeError, match="rows are running, but no step is made"):
        run(tiny, [request_of(tiny, [5], "0", 3)])


def test_lanes_of_some_slots() -> None:
    assert [shared_lanes(slots) for slots in (1, 59, 60)] == [9, 9, 10]
    assert [shared_lanes(60, needed) for needed in (0, 3, 12)] == [0, 10, 12]


@pytest.mark.parametrize(
    ("prompt", "budget", "capacity", "expected"),
    [
        ([5] * 10, 500, 100, 90),
        ([5] * 10, 10_000, None, 4086),
        ([5] * 100, 5, 100, "the prompt has 100 tokens, but a row has room for 100: shorten it to"),
        ([5] * 4096, 5, None, "the prompt has 4096 tokens, but the model has positions for 4096"),
        ([], 5, 100, "the prompt is empty"),
        ([5], 0, 100, "max_new_tokens must be at least 1, not 0"),
        ([1, 10**6], 1, None, "holds 1000000, which is not a token id"),
        ("Guests", 1, None, "holds 'G', which is not a token id"),
    ],
)
def test_prompts_and_budgets_are_checked(
    tiny: LanguageModel, prompt: list[int], budget: int, capacity: int | None, expected: int | str
) -> None:
    request = request_of(tiny, prompt, "0", budget)
    if isinstance(expected, int):
        assert check_request(tiny, request, capacity) == expected
    else:
        with pytest.raises(UserError, match=expected):
            check_request(tiny, request, capacity)


def test_a_sampler_must_be_calibrated(tiny: LanguageModel) -> None:
    loaded: Any = load_sampler("greedy")
    with pytest.raises(UserError, match="the sampler is not calibrated"):
        check_request(tiny, replace(request_of(tiny, [5], "0", 1), sampler=loaded))
