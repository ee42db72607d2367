"""Batched prefill: bit for bit as one prompt at a time, and in few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import prompts as module
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.programs import Programs, PromptPart
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import DecodeState, Recording
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, ids_of, is_same, prefills, requests, set_pace
from tests.support.samplers import LITERAL, SHARED

CAPACITY = 1024
# Two shards, so that the index of a slot differs from the index of its row in the state.
LAYOUT = Layout(slots=20, lanes=3, shards=2)
# Tokens prefilled per prompt: three in parts of 64, two in parts of 128, thirteen in parts of 32, a
# short one, and a long one.
LENGTHS = (64, 63, 33, 128, 100, *range(17, 30), 9, 300)


class Arrivals:
    """Slots with rows of random prompts without cached tokens."""

    def __init__(self, model: LanguageModel, lengths: Sequence[int]) -> None:
        self.lengths = [*lengths]
        wanted = prompts_of(model, lengths)
        self.rows = {
            slot: RunningRow(Row(one, number=slot), model, CAPACITY)
            for slot, one in enumerate(wanted)
        }
        programs = Programs(model, Recording())
        self.reader = PromptReader(model, capacity=CAPACITY, keep=False, programs=programs)
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
        """Prefills the rows of some slots, by default of all."""
        arrived = [*self.rows] if slots is None else [*slots]
        rows = {slot: self.rows[slot] for slot in arrived}
        self.state = self.reader.cache(self.state, LAYOUT, rows, arrived, stops)
        return self.state

    def cached(self) -> list[np.ndarray]:
        """Returns keys and values of each row in the last layer, which depends on all layers."""
        found = []
        for slot, length in enumerate(self.lengths):
            place = LAYOUT.indices[slot]
            assert self.state.cache.length[place] == length == self.rows[slot].cached
            for array in (self.state.cache.keys[-1], self.state.cache.values[-1]):
                found.append(np.asarray(array[place, :, :length]))
        return found

    def equals(self, other: Arrivals) -> bool:
        """Compares the caches bit for bit."""
        return all(map(np.array_equal, self.cached(), other.cached()))


def prompts_of(model: LanguageModel, lengths: Sequence[int]) -> list[Request]:
    """Returns requests with these numbers of tokens to prefill before the first step."""
    random = np.random.default_rng(0)
    specs = [
        Spec(random.integers(0, model.config.vocab_size, length + 1).tolist(), str(slot), 4)
        for slot, length in enumerate(lengths)
    ]
    return requests(model, specs, "greedy", ignore_eos=True)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    return prefills(monkeypatch)


def test_batched_prefill_equals_single_prefill(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    together, alone = Arrivals(tiny, LENGTHS), Arrivals(tiny, LENGTHS)
    together.read()
    # Three rows take a call for four, with padding. One or two rows are prefilled one by one.
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
def test_batched_prefill_in_every_precision(
    weights: str, activations: str, shapes: list[tuple[int, int]]
) -> None:
    model = load("tiny", weights, precision=activations)
    together, alone = Arrivals(model, (20, 32, 25, 17)), Arrivals(model, (20, 32, 25, 17))
    together.read()
    assert shapes == [(4, 32)]
    for slot in alone.rows:
        alone.read([slot])
    assert together.equals(alone)


def test_continued_and_new_prompts_share_a_prefill(
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


def test_short_and_long_prompts_are_prefilled_alone(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    """Short prompts would depend on their batch in the last bits. Long ones would need memory."""
    Arrivals(tiny, (9, 10, 11)).read()
    assert shapes == [(1, 16)] * 3
    Arrivals(tiny, (600, 601, 602)).read()
    assert shapes[3:] == [(1, 512)] * 3 + [(1, 128)] * 3


def test_prefill_shapes_off_the_cpu_do_not_depend_on_waiting_rows(
    tiny: LanguageModel, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "on_cpu", lambda: False)
    Arrivals(tiny, (20,)).read()
    Arrivals(tiny, (20, 25, 30, 31, 32)).read()
    assert shapes == [(4, 32)] * 3


# `Engine(keep=True)`: a row prefills only uncached tokens, and equals a row without a cache

# A sampler that branches and retracts often on `tiny`.
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


def request_of(
    model: LanguageModel, prompt: Sequence[int], budget: int = 12, **options: Any
) -> Request:
    options = {"sampler": "min-p", "ignore_eos": True, "others": SHARED, **options}
    return requests(model, [Spec(prompt, "0", budget)], **options)[0]


def run(engine: Engine, *wanted: Request, events: int | None = None) -> list[Row]:
    """Runs requests, and stops after a number of events."""
    rows = [*map(engine.new_row, wanted)]
    for number, _ in enumerate(engine.run(wanted), start=1):
        if number == events:
            engine.stop()
    list(engine.interrupt())
    return rows


def equals_fresh_row(model: LanguageModel, row: Row, events: int | None = None) -> bool:
    """Compares a row with a fresh one, tokens exactly and floats up to rounding."""
    fresh = run(Engine(model, slots=1, capacity=CAPACITY), row.request, events=events)[0]
    return is_same(row, fresh)


def encoded(model: LanguageModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_bos=True)


def test_only_uncached_tokens_are_prefilled(tiny: LanguageModel) -> None:
    engine = engine_of(tiny)
    first = encoded(tiny, "Once upon a time")
    (row,) = run(engine, request_of(tiny, first))
    assert engine._reader.read == len(first) - 1
    # A continuation of the row: all its tokens but the last are cached.
    longer = [*first, *ids_of(row), *encoded(tiny, "Question: Mia has 12 apples.")]
    before = engine._reader.read
    (row,) = run(engine, request_of(tiny, longer, seed=3))
    assert engine._reader.read - before == len(longer) - 1 - (len(first) + 12 - 1)
    assert equals_fresh_row(tiny, row)
    # The same prompt with another seed and sampler needs no prefill.
    before = engine._reader.read
    (row,) = run(engine, request_of(tiny, longer, seed=4, sampler=LITERAL))
    assert engine._reader.read == before
    assert equals_fresh_row(tiny, row)
    # A prompt that diverges from it, and a shorter one.
    parted = [*longer[:-3], *encoded(tiny, " and buys")]
    (row,) = run(engine, request_of(tiny, parted))
    assert engine._reader.read - before == len(parted) - 1 - (len(longer) - 3)
    assert equals_fresh_row(tiny, row)
    before = engine._reader.read
    (row,) = run(engine, request_of(tiny, parted[:9]))
    assert engine._reader.read == before
    assert equals_fresh_row(tiny, row)


def test_the_cache_is_valid_wherever_a_run_was_stopped(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may be ahead of the last event, and may have retracted or forked since."""
    set_pace(monkeypatch, 8)
    engine = engine_of(tiny)
    prompt = encoded(tiny, "There Adam met Rita. Rita")
    wanted = request_of(tiny, prompt, budget=48, sampler=RESTLESS, seed=2)
    retracted = branched = 0
    for events in range(1, 40, 3):
        (row,) = run(engine, wanted, events=events)
        retracted += row.retracted
        branched += sum(token.action == "branch" for token in row.tokens)
        follows = request_of(
            tiny, [*prompt, *ids_of(row), *encoded(tiny, "On Sunday")], sampler="greedy"
        )
        (row,) = run(engine, follows)
        assert equals_fresh_row(tiny, row), events
    assert retracted
    assert branched


def test_a_prefill_that_was_stopped_is_continued(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny, slots=2)
    short = encoded(tiny, "Once upon a time")
    long = encoded(tiny, "Rita was happy and sang. Then Adam went to the market. " * 3)
    read_part = PromptReader._read_part

    def stop_in_the_long_one(
        self: PromptReader, state: Any, layout: Layout, rows: Any, size: int, key: PromptPart
    ) -> Any:
        if 1 in rows:
            engine.stop()
            size, key = 16, PromptPart(16, CAPACITY)  # its first part
        return read_part(self, state, layout, rows, size, key)

    with monkeypatch.context() as patch:
        patch.setattr(PromptReader, "_read_part", stop_in_the_long_one)
        _, stopped = run(engine, request_of(tiny, short), request_of(tiny, long))
    assert (stopped.finish_reason, engine._reader.read) == ("interrupt", len(short) - 1 + 16)
    # The first slot does not take the prompt from the second, which has only its first part.
    (row,) = run(engine, request_of(tiny, long))
    assert equals_fresh_row(tiny, row)
    # The second slot continues from its cached part.
    before = engine._reader.read
    _, row = run(engine, request_of(tiny, short), request_of(tiny, [*long, *short]))
    assert engine._reader.read - before == len(short) - 2 + len(long) + len(short) - 1 - 16
    assert equals_fresh_row(tiny, row)


def test_rows_of_a_stopped_run_do_not_run_in_the_next(tiny: LanguageModel) -> None:
    """Rows that the caller has not ended are not continued either."""
    engine = engine_of(tiny, slots=2)
    prompts = [encoded(tiny, text) for text in ("Once upon a time", "Mia has")]
    wanted = [request_of(tiny, prompt, 400, sampler=RESTLESS) for prompt in prompts]
    left = [*map(engine.new_row, wanted)]
    for number, _ in enumerate(engine.run(wanted), start=1):
        if number == 20:
            engine.stop()
    told = [len(row.tokens) for row in left]
    (row,) = run(engine, request_of(tiny, prompts[1], 20, sampler=RESTLESS, seed=5))
    assert equals_fresh_row(tiny, row)
    assert [len(row.tokens) for row in left] == told


def test_an_aborted_run_leaves_no_cache(tiny: LanguageModel) -> None:
    engine = engine_of(tiny)
    wanted = request_of(tiny, encoded(tiny, "Once upon a time"))
    left: Any = engine.run([wanted])
    next(left)
    left.close()
    before = engine._reader.read
    (row,) = run(engine, wanted)
    assert engine._reader.read - before == len(wanted.prompt) - 1
    assert equals_fresh_row(tiny, row)
