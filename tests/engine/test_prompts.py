"""Prompts that are read together: each to the last digit as alone, and in few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import prompts as module
from entropix_jax.engine.decode import prefill
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import RunningRow
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel, load
from tests.support.runs import Spec, requests

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
    [("bfloat16", None), ("int8", None), ("bfloat16", "bfloat16"), ("int8", "bfloat16")],
)
def test_in_every_precision(
    weights: str, activations: str | None, shapes: list[tuple[int, int]]
) -> None:
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


def test_the_engine_reads_what_arrives_together(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    rows = [Row(one) for one in prompts_of(tiny, (20, 25, 30, 5))]
    list(Engine(tiny, slots=4, capacity=CAPACITY).run(rows))
    assert Counter(shapes) == {(4, 32): 1, (1, 16): 1}
    assert all(len(row.tokens) == 4 for row in rows)


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


def test_of_several_with_one_prompt_one_is_read(tiny: LanguageModel) -> None:
    arrivals = Arrivals(tiny, (40, 50, 50, 40, 40))
    first, other = (arrivals.rows[slot].request for slot in (0, 1))
    wanted = [first, other, other, first, first]
    arrivals.rows = {i: RunningRow(Row(x, number=i), tiny, CAPACITY) for i, x in enumerate(wanted)}
    arrivals.read()
    assert arrivals.reader.read == 40 + 50
    keys = arrivals.cached()[::2]
    np.testing.assert_array_equal(keys[0], keys[4])
    np.testing.assert_array_equal(keys[1], keys[2])


def test_reading_stops_between_calls(tiny: LanguageModel) -> None:
    """Who is not read then has nothing cached, and neither has who waited for the same prompt."""
    arrivals = Arrivals(tiny, (40, 300, 40, 300))
    wanted = [arrivals.rows[slot].request for slot in (0, 1)] * 2
    arrivals.rows = {i: RunningRow(Row(x, number=i), tiny, CAPACITY) for i, x in enumerate(wanted)}
    arrivals.read(stops=lambda: arrivals.reader.read > 0)
    assert [row.cached for row in arrivals.rows.values()] == [40, 0, 0, 0]
    arrivals.read([1, 2, 3])
    assert [row.cached for row in arrivals.rows.values()] == [40, 300, 40, 300]
    assert arrivals.reader.read == 340 + 40
