"""Prompts that are read together: each to the last digit as alone, and in few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import prompts as module
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import RunningRow
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, ids_of, is_same, requests, set_pace
from tests.support.samplers import LITERAL

CAPACITY = 1024
# Of two shards, so that a slot's number is not its row's in the state.
LAYOUT = Layout(slots=20, lanes=3, shards=2)
# Tokens that are read of each prompt: three in parts of 64, two in parts of 128, thirteen in parts
# of 32, a short one, and a long one.
LENGTHS = (64, 63, 33, 128, 100, *range(17, 30), 9, 300)


class Arrivals:
    """Slots with rows of random prompts, of which nothing is cached yet."""

    def __init__(self, model: LanguageModel, lengths: Sequence[int]) -> None:
        self.lengths = [*lengths]
        wanted = prompts_of(model, lengths)
        self.rows = {
            slot: RunningRow(Row(one, number=slot), model, CAPACITY)
            for slot, one in enumerate(wanted)
        }
        self.reader = PromptReader(model, capacity=CAPACITY, keep=False, check=False)
        self.state = empty_slots(
            model.config,
            LAYOUT,
            wanted[0].sampler.settings,
            mechanisms=wanted[0].sampler.mechanisms,
            capacity=CAPACITY,
            dtype=model.precision.activations,
        )

    def read(
        self, slots: Sequence[int] | None = None, stops: Callable[[], bool] = lambda: False
    ) -> DecodeState:
        """Reads the rows of some slots, by default of all."""
        arrived = [*self.rows] if slots is None else [*slots]
        rows = {slot: self.rows[slot] for slot in arrived}
        self.state = self.reader.cache(self.state, LAYOUT, rows, arrived, stops)
        return self.state

    def cached(self) -> list[np.ndarray]:
        """Keys and values of each row, of the last layer, which all others feed."""
        found = []
        for slot, length in enumerate(self.lengths):
            place = LAYOUT.numbers[slot]
            assert self.state.cache.length[place] == length == self.rows[slot].cached
            for array in (self.state.cache.keys[-1], self.state.cache.values[-1]):
                found.append(np.asarray(array[place, :, :length]))
        return found

    def equals(self, other: Arrivals) -> bool:
        """Whether the same is cached, to the last digit."""
        return all(map(np.array_equal, self.cached(), other.cached()))


def prompts_of(model: LanguageModel, lengths: Sequence[int]) -> list[Request]:
    """Requests of which so many tokens are read before the first step."""
    random = np.random.default_rng(0)
    specs = [
        Spec(random.integers(0, model.config.vocab_size, length + 1).tolist(), str(slot), 4)
        for slot, length in enumerate(lengths)
    ]
    return requests(model, specs, "greedy", ignore_eos=True)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Those of the tokens of each call so far."""
    found: list[tuple[int, int]] = []

    def noted(params: Any, state: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        found.append(tokens.shape)
        return prefill(params, state, tokens, *args, **options)

    monkeypatch.setattr(module, "prefill", noted)
    return found


def test_rows_read_together_are_the_rows_read_alone(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    together, alone = Arrivals(tiny, LENGTHS), Arrivals(tiny, LENGTHS)
    together.read()
    # Three are a call of four, with padding; one and two are read alone.
    expected = {(4, 64): 1, (1, 128): 2, (4, 32): 3, (1, 32): 1, (1, 16): 1, (1, 512): 1}
    assert Counter(shapes) == expected
    assert together.reader.read == sum(LENGTHS)
    for slot in alone.rows:
        alone.read([slot])
    assert together.equals(alone)


@pytest.mark.parametrize(
    ("weights", "activations"),
    [(weights, one) for one in ("float32", "bfloat16") for weights in ("bfloat16", "int8")],
)
def test_in_every_precision(weights: str, activations: str, shapes: list[tuple[int, int]]) -> None:
    model = load("tiny", weights, precision=activations)
    together, alone = Arrivals(model, (20, 32, 25, 17)), Arrivals(model, (20, 32, 25, 17))
    together.read()
    assert shapes == [(4, 32)]
    for slot in alone.rows:
        alone.read([slot])
    assert together.equals(alone)


def test_rows_that_are_read_on_join_those_that_begin(
    tiny: LanguageModel, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "chunk_size", lambda *arguments: 32)
    together, alone = Arrivals(tiny, (64, 30, 20)), Arrivals(tiny, (64, 30, 20))
    together.read([0], stops=lambda: together.reader.read > 0)
    assert together.rows[0].cached == 32
    together.read()
    assert shapes == [(1, 32), (4, 32)]
    for slot in alone.rows:
        alone.read([slot])
    assert together.equals(alone)


def test_few_tokens_and_long_rows_are_read_alone(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    """Of few the last digits would depend on who came with them; long ones would take memory."""
    Arrivals(tiny, (9, 10, 11)).read()
    assert shapes == [(1, 16)] * 3
    Arrivals(tiny, (600, 601, 602)).read()
    assert shapes[3:] == [(1, 512)] * 3 + [(1, 128)] * 3


def test_off_the_cpu_the_calls_do_not_depend_on_who_else_waits(
    tiny: LanguageModel, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "on_cpu", lambda: False)
    Arrivals(tiny, (20,)).read()
    Arrivals(tiny, (20, 25, 30, 31, 32)).read()
    assert shapes == [(4, 32)] * 3


# `Engine(keep=True)`: a row reads what its slot has not cached, and is the row that reads all

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
    return is_same(row, fresh)


def encoded(model: LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_bos=True)


def test_a_row_reads_only_what_is_new(tiny: LanguageModel) -> None:
    engine = engine_of(tiny)
    first = encoded(tiny, "Once upon a time")
    (row,) = run(engine, of(tiny, first))
    assert engine.read == len(first) - 1
    # It goes on: all but the last token of what is there is cached.
    longer = [*first, *ids_of(row), *encoded(tiny, "Question: Mia has 12 apples.")]
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
        follows = of(tiny, [*prompt, *ids_of(row), *encoded(tiny, "On Sunday")], sampler="greedy")
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
