"""P(wrong) is fitted to answers, against another solver and answers of known probability."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from entropix_jax.errors import UserError
from entropix_jax.lab.wrong import calibration_error, cross_validate, fit_wrong
from entropix_jax.sampler.wrong import GAP, KNOTS, find_table, is_table, running_means

Answers = tuple[list[np.ndarray], np.ndarray]


def answers(number: int = 400) -> Answers:
    """Returns measures and outcomes of answers. Wrong ones have a higher entropy."""
    rng = np.random.default_rng(0)
    wrong, measures = rng.random(number) < 0.4, []
    for is_wrong in wrong:
        size = int(rng.integers(1, 30))
        h = rng.exponential(0.3 + 0.6 * is_wrong, size)
        columns = h, h**2 * rng.random(size), np.exp2(-h), rng.normal(0.9, 0.02, size)
        measures.append(np.stack(columns, axis=1))
    return measures, wrong


def test_the_weights_minimise_the_penalised_loss() -> None:
    measures, wrong = answers()
    means = np.concatenate([*map(running_means, measures)])
    mass = np.repeat([1 / len(own) for own in measures], [*map(len, measures)])
    target = np.repeat(wrong, [*map(len, measures)])
    deviation = np.sqrt(np.cov(means.T, aweights=mass, ddof=0).diagonal())

    def loss(w: np.ndarray) -> float:
        z = means @ w[:4] + w[4]
        return float(mass @ (np.logaddexp(0, z) - target * z) + 0.5 * sum((w[:4] * deviation) ** 2))

    weights = fit_wrong(measures, wrong).weights
    best = minimize(loss, weights, tol=1e-12)
    assert loss(weights) == pytest.approx(best.fun, abs=1e-4)


def test_the_table_is_monotone_and_is_not_extrapolated() -> None:
    measures, wrong = answers()
    table = fit_wrong(measures, wrong)
    scores, probabilities = table.knots.T
    assert 2 <= len(scores) <= KNOTS
    assert min(np.diff(scores)) >= GAP
    assert min(np.diff(probabilities)) >= 0
    least, most = np.eye(4)[0] * -1e6, np.eye(4)[0] * 1e6
    assert [*table.look_up(np.stack([least, most]))] == [probabilities[0], probabilities[-1]]
    rows = table.to_rows()
    assert is_table(rows)
    near = find_table(rows, None)
    assert near is not None
    for own in measures:
        np.testing.assert_allclose(near.probabilities(own), table.probabilities(own), atol=1e-4)


def test_the_calibration_error() -> None:
    """It is small where P(wrong) is fitted, and the distance where it is off everywhere."""
    measures, wrong = answers()
    assert 0.01 < cross_validate(measures, wrong) < 0.06
    target, mass = np.array([1.0, 0.0, 0.0, 0.0]), np.ones(4)
    assert calibration_error(np.full(4, 0.25), target, mass) == pytest.approx(0.0)
    assert calibration_error(np.full(4, 0.65), target, mass) == pytest.approx(0.4)


def test_answers_that_cannot_be_fitted() -> None:
    measures, wrong = answers(40)
    with pytest.raises(UserError, match="all 40 answers are wrong"):
        fit_wrong(measures, wrong | True)
    constant = fit_wrong([np.ones((3, 4))] * 40, wrong)
    assert is_table(constant.to_rows())
    assert constant.look_up(np.zeros(4)) == pytest.approx(wrong.mean())
    few = np.arange(40) < 4
    with pytest.raises(UserError, match="4 of 40 answers are wrong: at least 5 wrong and 5 right"):
        cross_validate(measures, few)
