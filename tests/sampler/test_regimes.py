"""Any four boxes and any point, and any history: the regime and the loop guard against oracles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.names import BOXES, QUANTITIES, REGIMES
from entropix_jax.sampler.regimes import classify, count_rounds
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings
from tests.support.chains import BOUNDS, CONFIG, TYPES, chain
from tests.support.properties import examples
from tests.support.sampler_strategies import around, numbers, samplers
from tests.support.samplers import (
    Job,
    Line,
    batch_of,
    generate,
    metrics_at,
    params_of,
    settings_of,
    tokens_of,
)

ROWS, SLOTS = 8, 300
TINY = float(np.finfo(np.float32).tiny)

classify_each = jax.jit(jax.vmap(classify))
rounds_each = jax.jit(jax.vmap(count_rounds, in_axes=(0, 0, 0, None)))


def bound_of(sampler: Sampler, condition: str) -> np.float32:
    bound = condition.split()[2]
    return np.float32(sampler.values.get(f"thresholds.{bound}", bound))


def regime_by_hand(sampler: Sampler, point: Mapping[str, float]) -> str:
    """The first box all of whose written conditions hold, in float32. Boxes are open, at infinity
    too: what is not a finite number is in none."""

    def holds(condition: str) -> bool:
        quantity, sign, _ = condition.split()
        x, bound = np.float32(point[quantity]), bound_of(sampler, condition)
        return bool(x < bound if sign == "<" else x > bound)

    finite = all(np.isfinite(x) for x in point.values())
    inside = (box for box in BOXES if all(map(holds, sampler.values[f"regimes.{box}"])))
    return next(inside, "mid") if finite else "mid"


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Sampler], list[dict[str, float]]]:
    """Rows with a sampler and a point each; the points are often at a bound, or next to it."""
    chosen = [draw(samplers()) for _ in range(2)] * (ROWS // 2)
    points = []
    for sampler in chosen:
        conditions = [text for box in BOXES for text in sampler.values[f"regimes.{box}"]]
        beside = [x for text in conditions for x in around(float(bound_of(sampler, text)))]
        beside = [x for x in beside if x == 0 or abs(x) >= TINY]
        values = numbers(-10, 20) | st.sampled_from((*beside, 0.0, np.inf, -np.inf, np.nan))
        points.append({quantity: draw(values) for quantity in QUANTITIES})
    return chosen, points


@examples(100)
@given(cases())
def test_the_first_box_that_holds_the_point(
    case: tuple[list[Sampler], list[dict[str, float]]],
) -> None:
    """Each row of a batch by its own bounds."""
    chosen, points = case
    params = batch_of(*map(settings_of, chosen))
    spread = jnp.asarray([point["sequence_varentropy"] for point in points], jnp.float32)
    found = [REGIMES[i] for i in classify_each(metrics_at(points), params, spread)]
    assert found == [regime_by_hand(*pair) for pair in zip(chosen, points, strict=True)]


# The loop guard


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
    lambda period: st.tuples(
        st.just(period),
        st.integers(0, LOOP_WINDOW // max(period, 1)),
        st.sampled_from((1.0, 0.9, 0.75, 0.5)),
    )
)


def rounds_of(
    rows: Sequence[tuple[list[int], int]], limit: tuple[int, int, float], junk: int = 7
) -> list[int]:
    """How often each of (tokens, how many of them were generated) repeats itself. Junk follows."""
    history = np.full((len(rows), SLOTS), junk, np.int32)
    for row, (tokens, _) in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    length = jnp.asarray([len(tokens) for tokens, _ in rows], jnp.int32)
    generated = jnp.asarray([number for _, number in rows], jnp.int32)
    settings = LoopSettings(*map(jnp.asarray, (*limit, 1.0)))
    found: list[int] = rounds_each(jnp.asarray(history), length, generated, settings).tolist()
    return found


def rounds_by_hand(
    generated: Sequence[int], max_period: int, repeats: int, similarity: float = 1.0
) -> int:
    """From the longest tail of which so large a share equals the token a period before."""
    tokens, rounds, share = [*generated], 0, np.float32(similarity)
    for period in range(1, max_period + 1 if repeats >= 2 else 0):
        same = [tokens[i] == tokens[i - period] for i in range(len(tokens) - 1, period - 1, -1)]
        lengths = range(1, min(len(same), LOOP_WINDOW) + 1)
        enough = [n for n in lengths if np.float32(sum(same[:n])) >= share * np.float32(n)]
        if period <= len(tokens):
            rounds = max(rounds, 1 + max(enough, default=0) // period - repeats + 1)
    return rounds


@examples(100)
@given(st.lists(histories(), min_size=ROWS, max_size=ROWS), limits, st.integers(0, 3))
def test_the_loop_guard(
    rows: list[tuple[list[int], int]], limit: tuple[int, int, float], junk: int
) -> None:
    expected = [rounds_by_hand(tokens[len(tokens) - n :], *limit) for tokens, n in rows]
    assert rounds_of(rows, limit, junk) == expected


def test_the_longest_loop() -> None:
    """The longest period, as often as the window holds it."""
    repeats = LOOP_WINDOW // MAX_PERIOD
    tokens = [*range(MAX_PERIOD)] * repeats
    rows = [(tokens, len(tokens)), ([99, *tokens[1:]], len(tokens))]
    assert rounds_of(rows, (MAX_PERIOD, repeats, 1.0)) == [1, 0]


def test_rows_that_loop_leave_the_loop() -> None:
    """Under the guard's defaults; without it the likeliest token leads around to the end."""
    kinds = np.resize(["helv", "hehv", "lelv", "mid"], TYPES).tolist()
    likeliest = {f"arms.{regime}": "argmax" for regime in ("helv", "hehv", "mid")}

    def run(**changes: int) -> list[list[Line]]:
        values = {f"loop.{key}": value for key, value in changes.items()}
        sampler = params_of("quadrants", {**BOUNDS, **likeliest, **values})
        jobs = [Job([i], sampler, budget=60, row_id=str(i)) for i in range(8)]
        return generate((CONFIG, chain(kinds).params), jobs)

    for lines in run(max_period=0):
        assert rounds_by_hand(tokens_of(lines), 32, 4) > 3
    for lines in run():
        rounds, tokens = [line.exact[-2] for line in lines], tokens_of(lines)
        assert rounds == [rounds_by_hand(tokens[:i], 32, 4, 0.8) for i in range(60)]
        assert [line.action == "resample" for line in lines] == [n > 0 for n in rounds]
        looping = rounds.index(1)
        assert 0 in rounds[looping : looping + 8]
