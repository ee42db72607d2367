"""How well the measures of an answer tell wrong answers from right ones.

Legend: n answers of I items, G groups of answers with equal values from the most certain on,
R resamples of items. Index 0 of an axis of 1 + R is the sample itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from entropix_jax.lab.measures import UNCERTAINTY
from entropix_jax.lab.statistics import Floats, joint_intervals, percentile_interval

_RESAMPLES = 1000
_REFITS = 300  # of the resamples, for the calibration error
_BINS = 15
QUALITIES = ("auroc", "aurc", "e_aurc", "ece")


def evaluate(answers: pd.DataFrame) -> pd.DataFrame:
    """Evaluates each measure of `UNCERTAINTY` on answers of one task and one setting.

    An answer is wrong if its score is below 1. Intervals resample items; those of `auroc` are joint
    over the measures.

    Args:
        answers: columns item, score and measures. A measure with missing values is left out.

    Returns:
        measure, and estimates of `QUALITIES`, see `separate` and `calibration_error`. Empty if no
        answer is wrong, none is right, or there is one item.
    """
    wrong = (answers["score"] < 1).to_numpy()
    names = [name for name in UNCERTAINTY if answers[name].notna().all()]
    items = pd.factorize(answers["item"])[0]
    number = items.max(initial=-1) + 1
    if wrong.all() or not wrong.any() or not names or number < 2:
        return pd.DataFrame(columns=["measure", *QUALITIES])
    drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), _RESAMPLES)
    counts = np.vstack([np.ones(number, int), drawn])[:, items]
    found = []
    for name in names:
        values = UNCERTAINTY[name] * answers[name].to_numpy(float)
        error = calibration_error(values, wrong, counts[: 1 + _REFITS], items % 2)
        # A resample repeats items, which raises the error: its mean excess is subtracted.
        if not np.isnan(error[0]):
            error[1:] = np.maximum(error[1:] - (np.nanmean(error[1:]) - error[0]), 0)
        found.append([*separate(values, wrong, counts), error])
    aurocs = [own[0] for own in found]
    joint = joint_intervals([each[0] for each in aurocs], np.stack([each[1:] for each in aurocs]))
    rows = [
        (name, one, *(percentile_interval(float(each[0]), each[1:]) for each in own[1:]))
        for name, one, own in zip(names, joint, found, strict=True)
    ]
    return pd.DataFrame(rows, columns=["measure", *QUALITIES])


def separate(
    values: Floats, wrong: NDArray[np.bool_], counts: NDArray[np.integer]
) -> tuple[Floats, Floats, Floats]:
    """Measures how well uncertainty orders answers, in each resample.

    Args:
        values: [n], the higher the more uncertain.
        counts: [1 + R, n], how often a resample has each answer.

    Returns:
        Three arrays [1 + R]: AUROC, the probability that a wrong answer is more uncertain than a
        right one. AURC (Geifman et al. 2019), the share of wrong answers among the k most certain
        ones, averaged over k = 1 to n. E-AURC, its excess over the AURC of the best order. Answers
        with equal values come in random order: values are expectations over it. NaN without wrong
        or without right answers.
    """
    _, (sizes, errors) = _grouped(values, counts, counts * wrong)
    right = sizes - errors
    ends, total_wrong = sizes.cumsum(axis=1), errors.sum(axis=1)
    total_right, number = right.sum(axis=1), ends[:, -1]
    known = (total_wrong > 0) & (total_right > 0)
    below = right.cumsum(axis=1) - right / 2
    pairs = np.where(known, total_wrong * total_right, np.nan)
    auroc = (errors * below).sum(axis=1) / pairs

    # Within a group the expected number of errors grows linearly, by `rate` for each answer.
    harmonic = np.append(0.0, np.cumsum(1 / np.arange(1, number.max() + 1)))
    rate = np.divide(errors, sizes, out=np.zeros(sizes.shape), where=sizes > 0)
    starts = ends - sizes
    offset = errors.cumsum(axis=1) - errors - starts * rate
    aurc = (errors + offset * (harmonic[ends] - harmonic[starts])).sum(axis=1) / number
    span = harmonic[number] - harmonic[total_right]
    best = (total_wrong - total_right * span) / number
    return auroc, np.where(known, aurc, np.nan), np.where(known, aurc - best, np.nan)


def calibration_error(
    values: Floats,
    wrong: NDArray[np.bool_],
    counts: NDArray[np.integer],
    folds: NDArray[np.integer],
) -> Floats:
    """Returns the expected calibration error of P(wrong), in each resample [1 + R].

    P(wrong) is an isotonic regression on the answers of the other fold, interpolated linearly and
    refitted in each resample. The answers of both folds are put into 15 bins of equal mass by
    P(wrong): the error is the mean of abs(mean P(wrong) - share of wrong answers). An answer on an
    edge counts in part on both sides, and answers with equal P(wrong) share their outcomes. NaN if
    a fold is empty.

    Args:
        values, wrong, counts: see `separate`.
        folds: [n], 0 or 1, the same for all answers of an item.
    """
    first, second = counts * (folds == 0), counts * (folds == 1)
    levels, (*sizes, errors, others) = _grouped(
        values, first, second, first * wrong, second * wrong
    )
    found = np.full(len(counts), np.nan)
    for index, (own, other) in enumerate(zip(*sizes, strict=True)):
        if not own.any() or not other.any():
            continue
        fits = []
        for mass, bad in ((other, others[index]), (own, errors[index])):
            there = mass > 0
            fit = isotonic_regression(bad[there] / mass[there], weights=mass[there]).x
            fits.append(np.interp(levels, levels[there], fit))
        mass = np.append(own, other).astype(float)
        predicted, place = np.unique(np.concatenate(fits), return_inverse=True)
        masses = np.bincount(place, mass)
        bad = np.bincount(place, np.append(errors[index], others[index]))
        ends = np.append(0.0, masses.cumsum())
        edges = np.linspace(0, ends[-1], _BINS + 1)
        gaps = np.append(0.0, (masses * predicted - bad).cumsum())
        found[index] = np.abs(np.diff(np.interp(edges, ends, gaps))).sum() / ends[-1]
    return found


def _grouped(
    values: Floats, *counts: NDArray[np.integer]
) -> tuple[Floats, list[NDArray[np.integer]]]:
    """The distinct values [G], ascending, and sums of counts [..., n] over equal values."""
    order = np.argsort(values, kind="stable")
    levels, starts = np.unique(values[order], return_index=True)
    return levels, [np.add.reduceat(each[:, order], starts, axis=1) for each in counts]
