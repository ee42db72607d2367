"""Any four boxes and any point, and any history: the regime and the loop guard against oracles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.names import BOXES, QUANTITIES, REGIMES
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings
from tests.support.properties import examples
from tests.support.regime_oracles import (
    SLOTS,
    around,
    box_by_hand,
    classify_each,
    is_loop,
    looping_each,
)
from tests.support.sampler_strategies import numbers, samplers
from tests.support.samplers import EPSILON, NUM_LAYERS, batch_of, encode, metrics_of

ROWS = 8
TINY = float(np.finfo(np.float32).tiny)


def regime_by_hand(sampler: Sampler, point: dict[str, float]) -> str:
    """Boxes are open, at infinity too: what is not a finite number is in none."""
    finite = all(np.isfinite(x) for x in point.values())
    return box_by_hand(sampler.values, point) if finite else "mid"


def bounds_in(sampler: Sampler) -> list[float]:
    written = [
        condition.split()[2] for box in BOXES for condition in sampler.values[f"regimes.{box}"]
    ]
    return [float(sampler.values.get(f"thresholds.{bound}", bound)) for bound in written]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Sampler], list[dict[str, float]]]:
    """Rows with a sampler and a point each; the points are often at a bound, or next to it."""
    chosen = [draw(samplers()) for _ in range(2)] * (ROWS // 2)
    points = []
    for sampler in chosen:
        beside = [x for bound in bounds_in(sampler) for x in around(bound)]
        beside = [x for x in beside if x == 0 or abs(x) >= TINY]
        values = numbers(-10, 20) | st.sampled_from((0.0, np.inf, -np.inf, np.nan))
        if beside:
            values = st.sampled_from(beside) | values
        points.append({quantity: draw(values) for quantity in QUANTITIES})
    return chosen, points


@examples(80)
@given(cases())
def test_the_first_box_that_holds_the_point(
    case: tuple[list[Sampler], list[dict[str, float]]],
) -> None:
    """Each row of a batch by its own bounds; what is not finite is in no box."""
    chosen, points = case
    options: Any = {"num_layers": NUM_LAYERS, "epsilon": EPSILON, "encode": encode}
    params = batch_of(*(sampler.settings(**options) for sampler in chosen))
    metrics = jax.tree.map(lambda *x: jnp.stack(x), *(metrics_of(**point) for point in points))
    found = [REGIMES[i] for i in classify_each(metrics, params)]
    expected = [regime_by_hand(*pair) for pair in zip(chosen, points, strict=True)]
    assert found == expected


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int]:
    """Tokens, and how many of the last of them were generated; they often end in copies."""
    few = st.integers(0, draw(st.sampled_from((1, 2, 300))))
    start = draw(st.lists(few, min_size=1, max_size=20))
    stretch = draw(st.lists(few, min_size=1, max_size=MAX_PERIOD + 2))
    copies = draw(st.integers(0, (SLOTS - 64) // len(stretch)))
    tokens = start + stretch * copies + stretch[: draw(st.integers(0, len(stretch)))]
    if draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] ^= 1
    return tokens, draw(st.integers(0, len(tokens)))


limits = st.integers(0, MAX_PERIOD).flatmap(
    lambda period: st.tuples(st.just(period), st.integers(0, LOOP_WINDOW // max(period, 1)))
)


@examples(80)
@given(st.lists(histories(), min_size=ROWS, max_size=ROWS), limits, st.integers(0, 3))
def test_the_loop_guard(
    rows: list[tuple[list[int], int]], limit: tuple[int, int], junk: int
) -> None:
    history = np.full((ROWS, SLOTS), junk, np.int32)
    for row, (tokens, _) in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    params = LoopSettings(max_period=jnp.int32(limit[0]), repeats=jnp.int32(limit[1]))
    length = jnp.asarray([len(tokens) for tokens, _ in rows], jnp.int32)
    generated = jnp.asarray([number for _, number in rows], jnp.int32)
    found = looping_each(jnp.asarray(history), length, generated, params)
    assert found.tolist() == [is_loop(*row, *limit) for row in rows]
