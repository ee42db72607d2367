"""Statistics of scores against counting, NumPy, scipy and simulations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entropix_jax.engine.results import Row
from entropix_jax.lab.measures import distinct, measure_row, repetition, self_bleu
from entropix_jax.lab.plots import error_bars
from entropix_jax.lab.statistics import (
    Bootstrap,
    Interval,
    joint_intervals,
    over_curve,
    percentile_interval,
)
from tests.support.runs import unrun

Floats = NDArray[np.float64]
STRATA = [0] * 7 + [1] * 3 + [4] * 5  # tasks of different sizes, with a gap in the ids


def rng_of(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The bootstrap


def bounds(values: Sequence[float] | Floats) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values), [0.025, 0.975])
    return float(low), float(high)


def test_one_item_has_no_interval() -> None:
    """Neither alone, nor as one of several tasks, nor as the only item with a measure."""
    for strata, wholes in (([0], [1.0]), ([0, 1, 1], [1.0] * 3), ([0, 0, 0], [1.0, 0.0, 0.0])):
        value, each = Bootstrap(strata, resamples=50).ratio(np.array(wholes), np.array(wholes))
        (joint,) = joint_intervals([value], each[None])
        for one in (joint, percentile_interval(value, each)):
            assert (str(one), one.verdict_with(9.0)) == ("1.000", "not significant")
    assert np.isnan(error_bars([joint])).all()


@pytest.mark.parametrize("items", [2, 7, 100])
def test_equal_scores_have_an_interval_of_zero_width(items: int) -> None:
    """All answers are right, in tasks of different sizes."""
    bootstrap = Bootstrap([0] * items + [1] * 3, resamples=500)
    (found,) = bootstrap.estimates(np.ones((1, items + 3)))
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1), abs=1e-14)
    cost = [bootstrap.mean_of(np.full(items + 3, value)) for value in (1.0, 3.0, 1.7)]
    one = bootstrap.mean_of(np.ones(items + 3))
    over = over_curve([(cost[0], one), (cost[1], one)], cost[2], one)
    assert percentile_interval(*over).verdict == "not significant"


def weights() -> tuple[Floats, Floats]:
    """Returns the weights of the items in the study [I], and in each resample [10,000, I]."""
    strata, rng = np.asarray(STRATA), rng_of(0)
    even, drawn = np.zeros(len(strata)), np.zeros((10_000, len(strata)))
    for task in (0, 1, 4):
        inside = strata == task
        size = int(inside.sum())
        even[inside] = 1 / size / 3
        drawn[:, inside] = rng.multinomial(size, [1 / size] * size, 10_000) / size / 3
    return even, drawn


def test_the_mean_and_its_interval() -> None:
    """Compares with a plain bootstrap in float64."""
    scores, (even, drawn) = rng_of(2).random(len(STRATA)), weights()
    (found,) = Bootstrap(STRATA).estimates(scores[None])
    assert (found.low, found.high) == pytest.approx(bounds(drawn @ scores), abs=1e-6)
    assert found.value == pytest.approx(even @ scores, abs=1e-12)
    wholes = rng_of(3).integers(0, 3, len(STRATA)).astype(float)
    value, each = Bootstrap(STRATA).ratio(scores, wholes)
    assert value == pytest.approx((even @ scores) / (even @ wholes), abs=1e-12)
    np.testing.assert_allclose(each, (drawn @ scores) / (drawn @ wholes), atol=1e-9)


@pytest.mark.parametrize("paired", [False, True])
def test_intervals_cover_the_truth(paired: bool) -> None:
    """Intervals of scores and of paired differences cover it in 92 to 98 % of 400 simulations."""
    strata, seeds, covered = [0] * 60 + [1] * 40, 3, 0
    for study in range(400):
        rng = rng_of(1000 + study)
        # The difficulties of two tasks' items follow two distributions of known mean.
        hard = np.concatenate([rng.beta(2, 1, 60), rng.beta(1, 2, 40)])
        scores = rng.binomial(seeds, hard) / seeds
        truth = (2 / 3 + 1 / 3) / 2
        if paired:
            scores = rng.binomial(seeds, hard**2) / seeds - scores
            truth = (2 / 4 + 1 / 6) / 2 - truth
        (found,) = Bootstrap(strata, resamples=500).estimates(scores[None])
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_joint_intervals_by_hand() -> None:
    rng = rng_of(11)
    values, each = np.array([0.5, -1.0, 0.0, 0.25]), rng.normal(size=(4, 400))
    each *= np.array([0.1, 2.0, 0.0, 1.0])[:, None]
    each += values[:, None]
    each[3, :7] = np.nan  # resamples without the measure
    largest = []
    for draw in range(400):
        known = [j for j in (0, 1, 3) if not np.isnan(each[j, draw])]
        spreads = {j: np.std([x for x in each[j] if x == x]) for j in known}
        largest.append(max(abs(each[j, draw] - values[j]) / spreads[j] for j in known))
    critical = np.quantile(largest, 0.95)
    found = joint_intervals([*values, math.nan], np.vstack([each, np.full(400, np.nan)]))
    for one, value, row in zip(found[:2], values, each, strict=False):
        width = critical * row.std()
        assert (one.low, one.high) == pytest.approx((value - width, value + width))
    assert (found[2].low, found[2].high) == (0.0, 0.0)  # equal on every item
    assert found[3].high - found[3].value == pytest.approx(critical * np.nanstd(each[3]))
    assert np.isnan([found[4].value, found[4].low, found[4].high]).all()
    (alone,) = joint_intervals([math.nan], np.full((1, 9), np.nan))
    assert math.isnan(alone.low)


def test_joint_intervals_cover_all_differences() -> None:
    """Joint intervals cover all differences in 92 to 98 % of simulated studies of eight settings,
    half of which differ from the baseline. Uncorrected intervals do so less often."""
    items, settings, studies = 80, 8, 300
    truth = np.repeat([0.0, 0.15], settings // 2)
    joint = single = 0
    bootstrap = Bootstrap([0] * items, resamples=400)
    for study in range(studies):
        rng = rng_of(5000 + study)
        noise = rng.normal(size=(settings + 1, items))
        differences = truth[:, None] + noise[1:] - noise[0]  # with a shared baseline
        values, each = zip(*(bootstrap.ratio(d, np.ones(items)) for d in differences), strict=True)
        found = joint_intervals(values, np.stack(each))
        joint += all(one.low <= t <= one.high for one, t in zip(found, truth, strict=True))
        found = bootstrap.estimates(differences)
        single += all(one.low <= t <= one.high for one, t in zip(found, truth, strict=True))
    assert 0.92 <= joint / studies <= 0.98
    assert single / studies < 0.85


def test_verdicts_and_error_bars() -> None:
    for low, high, verdict in (
        (0.1, 0.2, "higher"),
        (-0.2, -0.1, "lower"),
        (-0.1, 0.2, "not significant"),
        (0.0, 0.2, "not significant"),
        (1e-17, 1e-16, "not significant"),  # rounding
    ):
        assert Interval((low + high) / 2, low, high).verdict == verdict
    # With a margin.
    for low, high, verdict in (
        (-0.03, 0.02, "equivalent"),
        (-0.04, 0.02, "not significant"),
        (-0.02, 0.04, "not significant"),
        (0.01, 0.02, "higher"),
        (-0.02, -0.01, "lower"),
    ):
        assert Interval((low + high) / 2, low, high).verdict_with(0.03) == verdict
    assert Interval(0.0, 0.0, 0.0).verdict_with(None) == "not significant"
    # Percentile intervals need not contain the value; bars are not negative.
    scores = [Interval(0.5, 0.6, 0.7), Interval(0.5, 0.3, 0.4), Interval(0.5, 0.25, 0.75)]
    assert error_bars(scores) == [[0.0, 0.2, 0.25], pytest.approx([0.2, 0.0, 0.25])]


# A curve


def test_over_a_curve_by_hand() -> None:
    """Each resample has its own curve, sorted and interpolated at its own costs."""
    rng, number = rng_of(4), len(STRATA)
    costs = 3 * rng.random((4, number)) + np.array([2.0, 0.8, 1.5, 1.6])[:, None]
    curve, scores = rng.random((4, number)), rng.random(number)
    even, drawn = weights()
    bootstrap = Bootstrap(STRATA)
    swapped = (np.argsort(drawn @ costs.T, axis=1) != np.argsort(costs @ even)).any(axis=1)
    assert 0.05 < swapped.mean() < 0.95
    for middle in (0.0, 1.9, 2.3, 3.5):
        cost = rng.random(number) + middle

        def above(weight: Floats, cost: Floats = cost) -> float:
            points = sorted(
                (float(weight @ x), float(weight @ y)) for x, y in zip(costs, curve, strict=True)
            )
            at, own = float(weight @ cost), float(weight @ scores)
            if at <= points[0][0]:
                return own - points[0][1]
            for (x0, y0), (x1, y1) in itertools.pairwise(points):
                if at <= x1:
                    return own - (y0 + (y1 - y0) * (at - x0) / (x1 - x0))
            return own - points[-1][1]

        points = [
            (bootstrap.mean_of(x), bootstrap.mean_of(y)) for x, y in zip(costs, curve, strict=True)
        ]
        value, each = over_curve(points, bootstrap.mean_of(cost), bootstrap.mean_of(scores))
        assert value == pytest.approx(above(even), abs=1e-12)
        np.testing.assert_allclose(each[:999], [*map(above, drawn[:999])], atol=1e-9)


def test_a_resample_without_a_cost_has_no_difference() -> None:
    nan, zeros = math.nan, np.zeros(2)
    curve = [((0.0, zeros), (1.0, zeros + 1)), ((2.0, np.array([2.0, nan])), (3.0, zeros + 3))]
    value, each = over_curve(curve, (1.0, np.array([1.0, 1.0])), (5.0, zeros + 5))
    assert (value, [*each]) == (3.0, [3.0, 4.0])  # a curve of one point gives its score
    assert np.isnan(over_curve(curve, (1.0, np.array([nan, 1.0])), (5.0, zeros + 5))[1][0])


# Texts


def test_distinct() -> None:
    # 12 21 12 21; 121 212 121
    expected = [2 / 5, 2 / 4, 2 / 3, 1.0, 1.0, None]
    assert [distinct([1, 2, 1, 2, 1], n) for n in range(1, 7)] == expected
    assert repetition([1, 2, 1, 2, 1]) == pytest.approx(1 - (2 / 4) * (2 / 3) * (2 / 2))
    assert repetition([7] * 5) == pytest.approx(1 - (1 / 4) * (1 / 3) * (1 / 2))
    assert repetition([1, 2, 3]) is None


def test_self_bleu() -> None:
    """Compares with sacrebleu, with smoothing and repeated words."""
    from sacrebleu.metrics import BLEU

    one = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert self_bleu(["a b c d e", "a b c d f"]) == pytest.approx(one)
    bleu = BLEU(effective_order=True)
    for texts in (
        ["a b c d e", "a b c d f", "x b c d e g"],
        ["a a a b, c.", "a a d", "b c a a a, e f g", "a"],
    ):
        each = [
            bleu.sentence_score(text, [*texts[:i], *texts[i + 1 :]]).score
            for i, text in enumerate(texts)
        ]
        assert self_bleu(texts) == pytest.approx(np.mean(each) / 100)
        assert self_bleu([*texts, ""]) == self_bleu(texts)
    assert self_bleu(["same old words"] * 3) == pytest.approx(1)
    assert self_bleu(["p q r s t", "u v w x y"]) < 0.1  # type: ignore[operator]
    assert self_bleu(["a b", " "]) is None


def row_of(*tokens: dict[str, float]) -> Row:
    records: list[Any] = [SimpleNamespace(**one) for one in tokens]
    return Row(unrun(), tokens=records)


def test_measures_of_a_row() -> None:
    averaged = ["entropy", "varentropy", "attn_entropy_norm", "agreement", "attn_varentropy"]
    averaged += ["interaction_strength"]
    columns = {name: rng_of(i).random(3) for i, name in enumerate([*averaged, "max_prob"])}
    columns |= {"token_id": np.array([5, 6, 5]), "logprob": np.array([-0.5, -1.5, -1.0])}
    tokens = [{name: float(own[i]) for name, own in columns.items()} for i in range(3)]
    found = measure_row(row_of(*tokens))
    assert found.pop("repetition") is None
    assert found == pytest.approx(
        {
            **{f"mean_{name}": columns[name].mean() for name in averaged},
            **{f"max_{name}": columns[name].max() for name in averaged[:3]},
            "mean_p1": columns["max_prob"].mean(),
            "min_p1": columns["max_prob"].min(),
            "perplexity": math.e,
            "distinct_1": 2 / 3,
            "distinct_2": 1.0,
        }
    )
    assert measure_row(row_of()) == {}
    # The perplexity stays finite for any log-probability, so that a table can hold it.
    for logprob in (-1e5, -math.inf):
        found = measure_row(row_of({**tokens[0], "logprob": logprob}))
        assert 1e300 < found["perplexity"] < math.inf
