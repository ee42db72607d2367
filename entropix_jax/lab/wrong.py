"""Fits P(wrong) to scored answers: a logistic regression, then an isotonic one.

Legend: n answers, T tokens of an answer, N tokens of all answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from entropix_jax.errors import UserError
from entropix_jax.sampler.wrong import GAP, KNOTS, WrongTable, running_means

Floats = NDArray[np.float64]

FOLDS = 5
_BINS = 15  # of the calibration error
_PENALTY = 1.0  # of a squared weight of a standardised mean. An answer has a total weight of 1
_STEPS = 50  # of Newton's method
_EPSILON = 1e-3  # penalty of the intercept, and the least deviation of a mean


def fit_wrong(measures: Sequence[Floats], wrong: NDArray[np.bool_]) -> WrongTable:
    """Fits P(wrong) at every token of answers. An answer has the weight of one token.

    Args:
        measures: `sampler.wrong.MEASURES` at the tokens of each answer, [T, 4].
        wrong: [n], whether each answer is wrong.

    Raises:
        UserError: all answers are wrong, or all are right.
    """
    means, target, mass = _tokens(measures, wrong)
    if len(np.unique(target)) < 2:
        outcome = "wrong" if target.any() else "right"
        raise UserError(f"all {len(measures)} answers are {outcome}: P(wrong) needs both outcomes")
    weights = _logistic(means, target, mass)
    knots = _isotonic(means @ weights[:-1] + weights[-1], target, mass)
    if len(knots) == 1:  # a constant: the measures do not tell answers apart
        knots = knots + np.array([[0.0, 0.0], [1.0, 0.0]])
    return WrongTable(weights, knots)


def cross_validate(measures: Sequence[Floats], wrong: NDArray[np.bool_]) -> float:
    """Returns the calibration error of P(wrong) at tokens, each predicted by the table that is
    fitted to the answers of the other folds. See `calibration_error`.

    Raises:
        UserError: fewer than `FOLDS` answers are wrong, or right.
    """
    wrong = np.asarray(wrong, bool)
    if min(wrong.sum(), (~wrong).sum()) < FOLDS:
        raise UserError(
            f"{wrong.sum()} of {len(wrong)} answers are wrong: at least {FOLDS} wrong and {FOLDS}"
            " right answers are needed"
        )
    folds = np.empty(len(wrong), int)
    for outcome in (wrong, ~wrong):
        folds[outcome] = np.arange(outcome.sum()) % FOLDS
    tables = [
        fit_wrong(
            [own for own, other in zip(measures, folds, strict=True) if other != fold],
            wrong[folds != fold],
        )
        for fold in range(FOLDS)
    ]
    predicted = [tables[fold].probabilities(own) for own, fold in zip(measures, folds, strict=True)]
    _, target, mass = _tokens(measures, wrong)
    return calibration_error(np.concatenate(predicted), target, mass)


def calibration_error(predicted: Floats, target: Floats, mass: Floats) -> float:
    """Returns the expected calibration error: the mean over 15 bins of equal mass of the absolute
    difference between mean prediction and mean target. All arrays are [N]. Equal predictions share
    their targets, and a prediction on an edge counts in part in both bins."""
    levels, place = np.unique(predicted, return_inverse=True)
    masses = np.bincount(place, mass)
    ends = np.append(0.0, masses.cumsum())
    gaps = np.append(0.0, (masses * levels - np.bincount(place, mass * target)).cumsum())
    edges = np.linspace(0, ends[-1], _BINS + 1)
    return float(np.abs(np.diff(np.interp(edges, ends, gaps))).sum() / ends[-1])


def _tokens(measures: Sequence[Floats], wrong: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """The running means [N, 4], outcomes [N] and weights [N] of all tokens."""
    sizes = [len(own) for own in measures]
    means = np.concatenate([running_means(np.asarray(own, np.float64)) for own in measures])
    mass = np.repeat(1 / np.maximum(sizes, 1), sizes)
    return means, np.repeat(np.asarray(wrong, np.float64), sizes), mass


def _logistic(means: Floats, target: Floats, mass: Floats) -> Floats:
    """The weights [5] of a logistic regression with an L2 penalty, for means as they are."""
    centre = np.average(means, axis=0, weights=mass)
    scale = np.maximum(np.sqrt(np.average((means - centre) ** 2, axis=0, weights=mass)), _EPSILON)
    features = np.column_stack([(means - centre) / scale, np.ones(len(means))])
    penalty = np.append(np.full(means.shape[1], _PENALTY), _EPSILON)
    weights = np.zeros(len(penalty))
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-features @ weights))
        slope = features.T @ (mass * (target - p)) - penalty * weights
        curvature = (features * (mass * p * (1 - p))[:, None]).T @ features + np.diag(penalty)
        weights = weights + np.linalg.solve(curvature, slope)
    own = weights[:-1] / scale
    return np.append(own, weights[-1] - own @ centre)


def _isotonic(scores: Floats, target: Floats, mass: Floats) -> Floats:
    """The knots [K, 2]: an isotonic regression on the mean outcomes of K bins of equal mass."""
    order = np.argsort(scores, kind="stable")
    ends = mass[order].cumsum()
    place = np.empty(len(order), int)
    place[order] = np.minimum((ends / ends[-1] * KNOTS).astype(int), KNOTS - 1)
    # Two bins whose mean scores are close become one.
    while True:
        _, place = np.unique(place, return_inverse=True)
        masses = np.bincount(place, mass)
        levels = np.bincount(place, mass * scores) / masses
        close = np.flatnonzero(np.diff(levels) < 2 * GAP)
        if not len(close):
            break
        place[place == close[0] + 1] = close[0]
    rates = np.bincount(place, mass * target) / masses
    fitted = isotonic_regression(rates, weights=masses).x
    return np.column_stack([levels, np.clip(fitted, 0, 1)])
