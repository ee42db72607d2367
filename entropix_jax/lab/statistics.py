"""Statistics of scores: bootstrap intervals, also joint ones, and paired differences.

Legend: I items. An item's score is a mean over seeds. The bootstrap resamples
items, since seeds of one item are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Resampled = tuple[float, Floats]  # an estimate, and the same of each resample

RESAMPLES = 10_000
_COVERAGE = 0.95
_ROUNDING = 1e-9  # differences below are rounding errors
NOT_SIGNIFICANT = "not significant"
EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval; NaN stands for an unknown number."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.format(".3f")

    def format(self, form: str) -> str:
        """Returns the value with its interval, each only if it is known."""
        ends = f" [{self.low:{form}}, {self.high:{form}}]" if self.low == self.low else ""
        return "" if np.isnan(self.value) else f"{self.value:{form}}{ends}"

    @property
    def verdict(self) -> str:
        """For a difference: `higher` or `lower` if it is significant (its interval excludes 0)."""
        if self.low > _ROUNDING:
            return "higher"
        return "lower" if self.high < -_ROUNDING else NOT_SIGNIFICANT

    def verdict_with(self, margin: float | None) -> str:
        """The verdict; `equivalent` if the difference is not significant and its interval lies
        within +-`margin`."""
        inside = margin is not None and max(-self.low, self.high) <= margin
        return EQUIVALENT if inside and self.verdict == NOT_SIGNIFICANT else self.verdict


class Bootstrap:
    """One set of resamples of items for all estimates, so that differences are paired.

    Items are resampled within their tasks (strata). All tasks have the same weight. Percentile
    intervals (Efron and Tibshirani 1993, ch. 13); NaN if a task has a single item.
    """

    def __init__(self, strata: Sequence[int], *, resamples: int = RESAMPLES) -> None:
        """`strata[I]` is each item's task, as a number."""
        numbers = np.asarray(strata)
        tasks = np.unique(numbers)
        self._even = np.zeros(len(numbers))
        self._weights = np.zeros((resamples, len(numbers)))
        rng = np.random.default_rng(0)
        for task in tasks:
            chosen = np.flatnonzero(numbers == task)
            share = 1.0 / (len(chosen) * len(tasks))
            self._even[chosen] = share
            draws = rng.multinomial(len(chosen), np.full(len(chosen), 1 / len(chosen)), resamples)
            self._weights[:, chosen] = draws * share if len(chosen) > 1 else np.nan

    def mean(self, values: Floats) -> float:
        """The mean over tasks of the mean over items of `values[I]`."""
        return float(self._even @ values)

    def estimates(self, scores: Floats) -> list[Interval]:
        """The means over tasks of the means over items of `scores[n, I]`, with intervals."""
        each = (self._weights @ scores.T).T
        return [percentile_interval(*own) for own in zip(map(self.mean, scores), each, strict=True)]

    def mean_of(self, values: Floats) -> Resampled:
        """The mean of `values[I]`, and that of each resample [resamples]."""
        return self.mean(values), self._weights @ values

    def ratio(self, parts: Floats, wholes: Floats) -> Resampled:
        """The mean of `parts[I]` over the mean of `wholes[I]`, and the same of each resample
        [resamples]; NaN where the wholes are 0, and everywhere if one item has a whole."""
        over, under = self._weights @ parts, self._weights @ wholes
        known = (under != 0) & (np.count_nonzero(wholes) > 1)
        each = np.divide(over, under, out=np.full_like(over, np.nan), where=known)
        whole = self.mean(wholes)
        return self.mean(parts) / whole if whole else float("nan"), each


def over_curve(
    curve: Sequence[tuple[Resampled, Resampled]], cost: Resampled, score: Resampled
) -> Resampled:
    """Returns the difference between a score and a curve at the same cost, and that of each
    resample.

    The curve is piecewise linear and constant beyond its ends. Every resample has a curve of its
    own, whose points are sorted by its own costs.

    Args:
        curve: costs and scores of its points, at least two; a point without a cost is left out.
    """

    def joined(resampled: Resampled) -> Floats:
        return np.append(resampled[0], resampled[1])

    xs, ys = (np.stack([joined(point[axis]) for point in curve], axis=1) for axis in (0, 1))
    order = np.argsort(xs, axis=1, kind="stable")  # NaN last
    xs, ys = (np.take_along_axis(each, order, axis=1) for each in (xs, ys))
    at, height = joined(cost), ys[:, 0]
    for left in range(len(curve) - 1):
        (x0, y0), (x1, y1) = ((xs[:, n], ys[:, n]) for n in (left, left + 1))
        run = x1 - x0
        share = np.divide(at - x0, run, out=np.zeros_like(run), where=run > 0).clip(0, 1)
        height = np.where(at > x0, y0 + share * (y1 - y0), height)
    height = np.where(np.isnan(at), np.nan, height)
    found = joined(score) - height
    return float(found[0]), found[1:]


def percentile_interval(value: float, resampled: Floats) -> Interval:
    """Returns the interval of a value between percentiles of its resamples, ignoring NaN."""
    known = resampled[~np.isnan(resampled)]
    if not len(known):
        return Interval(value, float("nan"), float("nan"))
    tail = 100 * (1 - _COVERAGE) / 2
    low, high = np.percentile(known, [tail, 100 - tail])
    return Interval(value, float(low), float(high))


def joint_intervals(values: Sequence[float], resampled: Floats) -> list[Interval]:
    """Returns intervals of n estimates that contain all n true values in 95 % of studies.

    value +- c * s, where s is the standard deviation of the value's resamples, and c the 95th
    percentile over resamples of the largest |resample - value| / s of the n: the max-t bootstrap
    (Westfall and Young 1993, ch. 2; Romano and Wolf 2005, "Stepwise Multiple Testing as Formalized
    Data Snooping", with studentised statistics).

    Unlike Bonferroni's correction it uses the correlation of the estimates, which share items,
    random numbers and a baseline. It is the single-step form of the stepwise test, which rejects
    more hypotheses but has no two-sided intervals.

    Args:
        values: the n estimates; one that is NaN, or has only such resamples, has a NaN interval.
        resampled: [n, resamples], paired: column by column from the same items.
    """
    estimates = np.asarray(values, float)
    known = np.flatnonzero(~np.isnan(estimates) & ~np.isnan(resampled).all(axis=1))
    spread = np.full(len(estimates), np.nan)
    spread[known] = np.nanstd(resampled[known], axis=1)
    spread[spread <= _ROUNDING] = 0.0  # equal on every item: an interval without width
    varying = known[spread[known] > 0]
    critical = 0.0
    if len(varying):
        deviations = np.abs(resampled[varying] - estimates[varying, None])
        largest = np.fmax.reduce(deviations / spread[varying, None], axis=0)
        critical = float(np.nanquantile(largest, _COVERAGE))
    return [
        Interval(float(value), float(value - critical * s), float(value + critical * s))
        for value, s in zip(estimates, spread, strict=True)
    ]
