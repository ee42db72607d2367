"""The regime for any boxes and points, and the loop guard for any history, against oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from entropix_jax.names import BOXES, QUANTITIES, REGIMES, THRESHOLDS
from entropix_jax.replay.formulas import count_rounds
from entropix_jax.sampler import regimes
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify, update_drift
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings, SamplerSettings
from tests.support.properties import examples
from tests.support.sampler_strategies import around, numbers, percent_of, samplers
from tests.support.samplers import (
    CALIBRATION,
    HOST,
    LITERAL,
    LITERAL_THRESHOLDS,
    batch_of,
    metrics_at,
    params_of,
    settings_of,
)

ROWS, SLOTS = 8, 300
TINY = float(np.finfo(np.float32).tiny)

classify_each = jax.jit(jax.vmap(classify, in_axes=(0, 0, 0, None, 0)))
rounds_each = jax.jit(jax.vmap(regimes.count_rounds, in_axes=(0, 0, 0, None)))


def bound_of(sampler: Sampler, condition: str) -> np.float32:
    """Returns the value of a bound: a threshold, a percentile of `CALIBRATION`, or a number."""
    quantity, _, bound = condition.split()
    if bound in THRESHOLDS:
        quantity = "entropy" if bound in ("h1", "h2") else "varentropy"
        bound = sampler.written[f"thresholds.{bound}"]
    if "%" in str(bound):
        table = CALIBRATION.quantiles[quantity]
        bound = f"{np.interp(percent_of(bound), np.arange(101), table):.5g}"
    return np.float32(bound)


def regime_by_hand(sampler: Sampler, point: Mapping[str, float]) -> str:
    """Returns the first box whose conditions all hold, in float32. Boxes are open, also at
    infinity, so that a point with a non-finite metric is in no box. P(wrong) is NaN without a
    table."""

    def holds(condition: str) -> bool:
        quantity, sign, _ = condition.split()
        x, bound = np.float32(point[quantity]), bound_of(sampler, condition)
        return bool(x < bound if sign == "<" else x > bound)

    finite = all(np.isfinite(x) for quantity, x in point.items() if quantity != "p_wrong")
    inside = (box for box in BOXES if all(map(holds, sampler.written[f"regimes.{box}"])))
    return next(inside, "mid") if finite else "mid"


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Sampler], list[dict[str, float]]]:
    """Draws rows with a sampler and a point each. Points are often at a bound, or next to it."""
    chosen = [draw(samplers()) for _ in range(2)] * (ROWS // 2)
    points = []
    for sampler in chosen:
        conditions = [text for box in BOXES for text in sampler.written[f"regimes.{box}"]]
        beside = [x for text in conditions for x in around(float(bound_of(sampler, text)))]
        beside = [x for x in beside if x == 0 or abs(x) >= TINY]
        values = numbers(-10, 20) | st.sampled_from((*beside, 0.0, np.inf, -np.inf, np.nan))
        points.append({quantity: draw(values) for quantity in QUANTITIES})
    return chosen, points


@examples(100)
@given(cases())
def test_the_regime_is_the_first_box_with_the_point(
    case: tuple[list[Sampler], list[dict[str, float]]],
) -> None:
    """Each row of the batch has its own bounds."""
    chosen, points = case
    params = batch_of(*map(settings_of, chosen))
    spread, p_wrong = (
        jnp.asarray([point[quantity] for point in points], jnp.float32)
        for quantity in ("sequence_varentropy", "p_wrong")
    )
    found = [REGIMES[i] for i in classify_each(metrics_at(points), params, spread, None, p_wrong)]
    assert found == [regime_by_hand(*pair) for pair in zip(chosen, points, strict=True)]


# Thresholds that follow the row's own tokens


QUANTILES = (0.3, 0.7, 0.4, 0.6)  # of LITERAL's thresholds in CALIBRATION
STREAMS = 4
FORMS: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": lambda rng, n: rng.lognormal(0.5, 1.0, (n, 2, STREAMS)),
    "far above": lambda rng, n: 30 + 10 * rng.random((n, 2, STREAMS)),
    "often sure": lambda rng, n: rng.exponential(1.0, (n, 2, STREAMS)) ** 2,
}


@jax.jit
def follow_each(values: jax.Array, settings: SamplerSettings) -> jax.Array:
    """Returns the drift before each token of streams, float32 [n, STREAMS, 4], from values
    [n, 2, STREAMS] of entropy and varentropy."""

    def step(drift: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        blank = jnp.zeros(STREAMS, jnp.float32)
        fields = dict.fromkeys(Metrics.__dataclass_fields__, blank)
        metrics = Metrics(**{**fields, "entropy": now[0], "varentropy": now[1]})
        return jax.vmap(update_drift)(metrics, settings, drift), drift

    return lax.scan(step, jnp.zeros((STREAMS, 4), jnp.float32), values)[1]


def following(number: int, **changes: Any) -> SamplerSettings:
    """Returns settings of LITERAL with dynamic thresholds."""
    values = {"thresholds.dynamic": True, "thresholds.rate": 0.02}
    values |= {f"thresholds.{name}": value for name, value in changes.items()}
    return batch_of(*[params_of(LITERAL, values)] * number)


def thresholds_by_hand(values: np.ndarray, quantiles: Sequence[float], rate: float) -> np.ndarray:
    """Returns a stream's thresholds before each token, float64 [n, 4], from values [n, 2]."""
    drift, found = np.zeros(4), []
    for h, u in values.astype(np.float64):
        found.append(LITERAL_THRESHOLDS * np.exp(drift))
        below = np.array([h, h, u, u]) < found[-1]
        drift = np.clip(drift + rate * (np.array(quantiles) - below), -5, 5)
    return np.array(found)


@pytest.mark.parametrize("form", FORMS)
def test_thresholds_follow_the_rows_quantiles(form: str) -> None:
    """Thresholds equal float64, and each converges to the quantile of the row's own tokens."""
    values = FORMS[form](np.random.default_rng(3), 4000).astype(np.float32)
    drifts = np.asarray(follow_each(values, following(STREAMS)), np.float64)
    thresholds = LITERAL_THRESHOLDS * np.exp(drifts)
    for stream in range(STREAMS):
        own = values[:, :, stream]
        expected = thresholds_by_hand(own[:300], QUANTILES, 0.02)
        np.testing.assert_allclose(thresholds[:300, stream], expected, rtol=1e-3)
        for i, quantile in enumerate(QUANTILES):
            late = own[2000:, i // 2]
            final = np.exp(np.mean(np.log(thresholds[2000:, stream, i])))
            assert np.mean(late < final) == pytest.approx(quantile, abs=0.03)
            assert final == pytest.approx(np.quantile(late, quantile), rel=0.1)


def test_thresholds_that_stay_fixed() -> None:
    """Thresholds stay fixed if `dynamic` is false, the rate is 0, or the model has no tables."""
    values = FORMS["lognormal"](np.random.default_rng(4), 50).astype(np.float32)
    fixed = load_sampler(LITERAL).with_values({"thresholds.dynamic": True}).settings(**HOST)
    for settings in (
        following(STREAMS, dynamic=False),
        following(STREAMS, rate=0.0),
        batch_of(*[fixed] * STREAMS),
    ):
        assert not np.any(follow_each(values, settings))
    assert np.all(np.asarray(follow_each(values, following(STREAMS)))[1:])


def test_thresholds_change_at_most_by_a_factor_of_148() -> None:
    values = np.full((3000, 2, STREAMS), 1e9, np.float32)
    values[:, :, 1] = 0
    drifts = np.asarray(follow_each(values, following(STREAMS)))
    np.testing.assert_allclose(drifts[-1, :2], [[5.0] * 4, [-5.0] * 4], atol=0.02)


# The loop guard


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draws tokens, often with repeated ends, and how many of the last ones were generated."""
    few = st.integers(0, draw(st.sampled_from((1, 2, 300))))
    start = draw(st.lists(few, min_size=1, max_size=20))
    stretch = draw(st.lists(few, min_size=1, max_size=MAX_PERIOD + 2))
    copies = draw(st.integers(0, (SLOTS - 64) // len(stretch)))
    tokens = start + stretch * copies + stretch[: draw(st.integers(0, len(stretch)))]
    if draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] ^= 1
    return tokens, draw(st.integers(0, len(tokens)))


limits = st.integers(0, MAX_PERIOD).flatmap(
    lambda period: st.tuples(
        st.just(period),
        st.integers(0, LOOP_WINDOW // max(period, 1)),
        st.sampled_from((1.0, 0.9, 0.75, 0.5)),
    )
)


def rounds_of(
    rows: Sequence[tuple[list[int], int]], limit: tuple[int, int, float], junk: int = 7
) -> list[int]:
    """Returns the rounds of each (tokens, number of generated ones). Junk follows the tokens."""
    history = np.full((len(rows), SLOTS), junk, np.int32)
    for row, (tokens, _) in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    length = jnp.asarray([len(tokens) for tokens, _ in rows], jnp.int32)
    generated = jnp.asarray([number for _, number in rows], jnp.int32)
    settings = LoopSettings(*map(jnp.asarray, (*limit, 1.0, 100.0)))
    found: list[int] = rounds_each(jnp.asarray(history), length, generated, settings).tolist()
    return found


@examples(100)
@given(st.lists(histories(), min_size=ROWS, max_size=ROWS), limits, st.integers(0, 3))
def test_the_loop_guard(
    rows: list[tuple[list[int], int]], limit: tuple[int, int, float], junk: int
) -> None:
    keys = "loop.max_period", "loop.repeats", "loop.similarity"
    v = dict(zip(keys, limit, strict=True))
    expected = [count_rounds(v, *row) for row in rows]
    assert rounds_of(rows, limit, junk) == expected
