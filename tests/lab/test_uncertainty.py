"""The evaluation of uncertainty against its definitions, computed directly in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from entropix_jax.lab.measures import UNCERTAINTY
from entropix_jax.lab.statistics import joint_intervals
from entropix_jax.lab.uncertainty import QUALITIES, calibration_error, evaluate, separate
from tests.support.reference import auroc

Floats = NDArray[np.float64]


def sample(
    seed: int, number: int, levels: int = 0
) -> tuple[np.random.Generator, Floats, NDArray[np.bool_]]:
    """Returns uncertainties of answers, with ties if there are few levels, and wrong answers."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, number).astype(float) if levels else rng.random(number)
    wrong = rng.random(number) < 0.2 + 0.5 * values / values.max()
    wrong[:2] = False, True
    return rng, values, wrong


def risk_coverage(wrong: NDArray[np.bool_]) -> float:
    """Returns the area under the risk-coverage curve of answers in this order."""
    return float(np.mean([np.mean(wrong[:k]) for k in range(1, len(wrong) + 1)]))


@pytest.mark.parametrize("levels", [0, 3])
def test_risk_and_coverage_equal_their_definition(levels: int) -> None:
    """Averages over all orders of answers with equal values."""
    _, values, wrong = sample(1, 7, levels)
    orders = [
        [*order]
        for order in itertools.permutations(range(7))
        if (np.diff(values[[*order]]) >= 0).all()
    ]
    assert (len(orders) > 1) == bool(levels)
    found = [each[0] for each in separate(values, wrong, np.ones((1, 7), int))]
    expected = np.mean([risk_coverage(wrong[order]) for order in orders])
    assert found[0] == pytest.approx(auroc(values, wrong))
    assert found[1] == pytest.approx(expected)
    assert found[2] == pytest.approx(expected - risk_coverage(np.sort(wrong)))


@pytest.mark.parametrize("levels", [0, 4])
def test_counts_equal_repeated_answers(levels: int) -> None:
    rng, values, wrong = sample(2, 40, levels)
    folds = np.arange(40) % 2
    counts = np.vstack([np.ones(40, int), rng.integers(0, 3, (5, 40))])
    found = [*separate(values, wrong, counts), calibration_error(values, wrong, counts, folds)]
    for index, own in enumerate(counts):
        once = np.ones((1, own.sum()), int)
        one, two, three = np.repeat(values, own), np.repeat(wrong, own), np.repeat(folds, own)
        alone = [*separate(one, two, once), calibration_error(one, two, once, three)]
        assert [each[index] for each in found] == pytest.approx([each[0] for each in alone])


def test_perfect_order_and_missing_classes() -> None:
    wrong = np.array([False, False, True, True, True])
    found = separate(np.arange(5.0), wrong, np.array([[1] * 5, [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]))
    assert (found[0][0], found[2][0]) == (1.0, pytest.approx(0.0))
    assert all(np.isnan(each[1:]).all() for each in found)


def pool(values: list[float]) -> list[float]:
    """Returns the isotonic regression of values with equal weights, by pool-adjacent-violators."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [float(np.mean(block)) for block in blocks for _ in block]


def fit(values: Floats, wrong: NDArray[np.bool_], at: Floats) -> Floats:
    """Fits isotonic regression. Answers with equal values are one point with their mean outcome."""
    order = np.argsort(values, kind="stable")
    means = [float(wrong[values == value].mean()) for value in values[order]]
    fitted = dict(zip(values[order], pool(means), strict=True))
    return np.interp(at, [*fitted], [*fitted.values()])


@pytest.mark.parametrize("levels", [0, 5])
def test_the_calibration_error_equals_its_definition(levels: int) -> None:
    _, values, wrong = sample(3, 61, levels)
    folds = np.arange(61) // 3 % 2
    predicted = np.empty(61)
    for fold in (0, 1):
        others = folds != fold
        predicted[~others] = fit(values[others], wrong[others], values[~others])
    outcome = np.array([wrong[np.isclose(predicted, p)].mean() for p in predicted])
    # 15 copies of each answer, in 15 bins of 61.
    order = np.repeat(np.argsort(predicted, kind="stable"), 15)
    bins = [np.mean(predicted[own] - outcome[own]) for own in np.split(order, 15)]
    found = calibration_error(values, wrong, np.ones((1, 61), int), folds)
    assert found == pytest.approx([np.mean(np.abs(bins))])


def test_a_fold_without_answers_has_no_calibration_error() -> None:
    _, values, wrong = sample(4, 6)
    counts = np.array([[1] * 6, [1, 0, 1, 0, 1, 0]])
    assert np.isnan(calibration_error(values, wrong, counts, np.arange(6) % 2)).tolist() == [
        False,
        True,
    ]


def answers(number: int = 60) -> pd.DataFrame:
    rng, values, wrong = sample(5, number)
    noise = (
        rng.normal(size=(len(UNCERTAINTY), number)) * np.linspace(0, 1, len(UNCERTAINTY))[:, None]
    )
    columns = {
        name: sign * (values + own)
        for (name, sign), own in zip(UNCERTAINTY.items(), noise, strict=True)
    }
    items = np.repeat([f"item {n}" for n in range(number // 3)], 3)
    return pd.DataFrame({**columns, "item": items, "score": 1.0 - wrong})


def test_measures_of_answers() -> None:
    """All measures share the resamples of items. Directions are fixed in advance."""
    given = answers()
    found = evaluate(given)
    assert [*found["measure"]] == [*UNCERTAINTY]
    wrong = (given["score"] < 1).to_numpy()
    for (name, sign), row in zip(UNCERTAINTY.items(), found.to_dict("records"), strict=True):
        values = sign * given[name].to_numpy()
        assert row["auroc"].value == pytest.approx(auroc(values, wrong))
        order = np.argsort(values)
        assert row["aurc"].value == pytest.approx(risk_coverage(wrong[order]))
        for quality in QUALITIES:
            assert row[quality].low <= row[quality].value <= row[quality].high, (name, quality)
    assert found["auroc"][0].value > found["auroc"].iloc[-1].value
    # Joint intervals of AUROC, by hand.
    rng, each = np.random.default_rng(0), []
    for own in rng.multinomial(20, np.full(20, 1 / 20), 1000):
        rows = np.repeat(np.arange(60), np.repeat(own, 3))
        each.append(
            [
                auroc(sign * given[n].to_numpy()[rows], wrong[rows])
                for n, sign in UNCERTAINTY.items()
            ]
        )
    joint = joint_intervals([one.value for one in found["auroc"]], np.array(each).T)
    for one, expected in zip(found["auroc"], joint, strict=True):
        assert (one.low, one.high) == pytest.approx((expected.low, expected.high))


def test_answers_without_a_measure_or_a_class() -> None:
    given = answers()
    given.loc[3, "mean_p1"] = math.nan
    assert {*UNCERTAINTY} - {*evaluate(given)["measure"]} == {"mean_p1"}
    alone = evaluate(given[:3].assign(score=[0.0, 1.0, 1.0]))  # one item is in only one fold
    assert all(math.isnan(one.value) for one in alone["ece"])
    assert not any(math.isnan(one.value) for one in alone["auroc"])
    for score in (0.0, 1.0):
        assert not len(evaluate(given.assign(score=score)))
