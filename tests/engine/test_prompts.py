"""Prompts that are read together: each to the last digit as alone, and in few calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import prompts as module
from entropix_jax.engine.decode import prefill
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.results import Row
from entropix_jax.engine.running import RunningRow
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel
from tests.support.runs import Spec, requests

CAPACITY = 512
SLOTS = 20
# Tokens that are read of each prompt: parts of 64, 128 and 32, a short one, and a long one.
LENGTHS = (64, 63, 33, 128, 100, 65, *range(17, 30), 300)


def arrive(
    model: LanguageModel, lengths: tuple[int, ...]
) -> tuple[PromptReader, DecodeState, Layout, dict[int, RunningRow]]:
    """Slots with rows of random prompts, of which nothing is cached."""
    random = np.random.default_rng(0)
    layout = Layout(SLOTS, 0, 1)
    specs = [
        Spec(random.integers(0, model.config.vocab_size, length + 1).tolist(), str(slot), 4)
        for slot, length in enumerate(lengths)
    ]
    wanted = requests(model, specs, "greedy", ignore_eos=True)
    rows = {i: RunningRow(Row(one, number=i), model, CAPACITY) for i, one in enumerate(wanted)}
    dtype = model.precision.activations
    settings = wanted[0].sampler.settings
    state = empty_slots(model.config, layout, settings, capacity=CAPACITY, dtype=dtype)
    reader = PromptReader(model, capacity=CAPACITY, keep=False, check=False)
    return reader, state, layout, rows


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Those of the tokens of each call so far."""
    found: list[tuple[int, int]] = []

    def noted(params: Any, state: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        found.append(tokens.shape)
        return prefill(params, state, tokens, *args, **options)

    monkeypatch.setattr(module, "prefill", noted)
    return found


def never() -> bool:
    return False


def cached(state: DecodeState) -> list[np.ndarray]:
    """Keys and values, of the last layer that all others feed."""
    return [np.asarray(array) for array in (state.cache.keys[-1], state.cache.values[-1])]


def test_rows_read_together_are_the_rows_read_alone(
    tiny: LanguageModel, shapes: list[tuple[int, int]]
) -> None:
    reader, state, layout, rows = arrive(tiny, LENGTHS)
    together = reader.cache(state, layout, rows, [*rows], never)
    # Three are a call of four, with padding; one and two are read alone.
    assert Counter(shapes) == {(4, 64): 1, (4, 128): 1, (4, 32): 3, (1, 32): 1, (1, 512): 1}
    assert np.asarray(together.cache.length).tolist() == list(LENGTHS)
    assert reader.read == sum(LENGTHS)
    assert all(row.cached == length for row, length in zip(rows.values(), LENGTHS, strict=True))

    reader, state, layout, rows = arrive(tiny, LENGTHS)
    for slot, row in rows.items():
        state = reader.cache(state, layout, {slot: row}, [slot], never)
    for mine, other in zip(cached(together), cached(state), strict=True):
        for slot, length in enumerate(LENGTHS):
            np.testing.assert_array_equal(mine[slot, :, :length], other[slot, :, :length])


def test_few_tokens_are_read_alone(tiny: LanguageModel, shapes: list[tuple[int, int]]) -> None:
    """Their last digits would depend on who came with them."""
    reader, state, layout, rows = arrive(tiny, (9,) * 5)
    reader.cache(state, layout, rows, [*rows], never)
    assert shapes == [(1, 16)] * 5


def test_of_several_with_one_prompt_one_is_read(tiny: LanguageModel) -> None:
    reader, state, layout, rows = arrive(tiny, (40, 50))
    (first, other) = (row.request for row in rows.values())
    wanted = [first, other, other, first, first]
    rows = {i: RunningRow(Row(one, number=i), tiny, CAPACITY) for i, one in enumerate(wanted)}
    state = reader.cache(state, layout, rows, [*rows], never)
    assert reader.read == 40 + 50
    assert np.asarray(state.cache.length)[:5].tolist() == [40, 50, 50, 40, 40]
    for array in cached(state):
        np.testing.assert_array_equal(array[0, :, :40], array[4, :, :40])
        np.testing.assert_array_equal(array[1, :, :50], array[2, :, :50])


def test_reading_stops_between_calls(tiny: LanguageModel) -> None:
    """Who is not read then has nothing cached, and neither has who waited for the same prompt."""
    reader, state, layout, rows = arrive(tiny, (40, 300))
    wanted = [*(row.request for row in rows.values())] * 2
    rows = {i: RunningRow(Row(one, number=i), tiny, CAPACITY) for i, one in enumerate(wanted)}
    state = reader.cache(state, layout, rows, [*rows], lambda: reader.read > 0)
    assert [row.cached for row in rows.values()] == [40, 0, 0, 0]
    state = reader.cache(state, layout, rows, [1, 2, 3], never)
    assert [row.cached for row in rows.values()] == [40, 300, 40, 300]
    assert reader.read == 340
