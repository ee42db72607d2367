"""What may be concluded from scores: intervals, differences, votes, and predictors of error.

Legend: I items, S seeds, k samples of a vote. An item's score is a mean over seeds, and items are
what a bootstrap draws: seeds of one item are not independent of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 10_000
_AUROC_RESAMPLES = 1000  # fewer: each sorts its rows anew
_BINS = 10
_COVERAGE = 0.95
_NOTHING = 1e-9  # what rounding alone may make of equal scores


@dataclass(frozen=True)
class Interval:
    """A figure and where it may lie: the 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def verdict(self) -> str:
        """Of a difference: which side of 0 it lies on."""
        if self.low > _NOTHING:
            return "higher"
        return "lower" if self.high < -_NOTHING else "no difference seen"


class Bootstrap:
    """Resamples of items, the same for all figures, so that differences are paired.

    Items are drawn within their tasks (strata), and tasks count alike however many items they
    have. Percentile intervals (Efron and Tibshirani 1993, ch. 13).
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
            self._weights[:, chosen] = draws * share

    def even(self, values: Floats) -> float:
        """The mean over tasks of the mean over items of `values[I]`."""
        return float(self._even @ values)

    def mean(self, scores: Floats) -> Interval:
        """The mean over tasks of the mean over items of `scores[I]`."""
        return self._interval(self.even(scores), self._weights @ scores)

    def curve(self, costs: Floats, scores: Floats, cost: Floats) -> tuple[Floats, Floats]:
        """What a curve gives at a cost, of all items and of each resample.

        Args:
            costs, scores: [n, I], n points of the curve: forward passes and scores of each item.
            cost: [I], forward passes at which it is read, between the points by a straight line,
                and past either end as at that end.
        """
        even = np.interp(self._even @ cost, costs @ self._even, scores @ self._even)
        at, xs, ys = (self._weights @ v.T for v in (cost, costs, scores))
        each = [np.interp(*found) for found in zip(at, xs, ys, strict=True)]
        return np.asarray(even), np.asarray(each)

    def over_curve(self, costs: Floats, curve: Floats, cost: Floats, scores: Floats) -> Interval:
        """How far `scores[I]`, bought at `cost[I]`, lie above a curve at the same cost."""
        even, each = self.curve(costs, curve, cost)
        return self._interval(float(self._even @ scores - even), self._weights @ scores - each)

    @staticmethod
    def _interval(value: float, found: Floats) -> Interval:
        tail = 100 * (1 - _COVERAGE) / 2
        low, high = np.percentile(found, [tail, 100 - tail])
        return Interval(value, float(low), float(high))


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer that most samples give (self-consistency, Wang et al. 2022); of those that are
    given as often the first. None where no sample gives one."""
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts, key=lambda answer: counts[answer]) if counts else None


def votes(answers: Sequence[str | None], k: int) -> list[str | None]:
    """The majority of each `k` samples that follow each other, around the end: as many votes as
    samples, in each of which each sample stands equally often."""
    number = len(answers)
    return [majority([answers[(i + j) % number] for j in range(k)]) for i in range(number)]


def auroc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """The area under the ROC curve: how often a positive case has a higher score than a negative
    one, ties counting half (Mann-Whitney). NaN without cases of both kinds, and where a score is
    NaN."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    ranks = np.repeat(first + (counts + 1) / 2, counts)  # from 1; tied ones share their mean
    total = float(ranks[positive[order]].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def auroc_interval(
    scores: Floats, positive: NDArray[np.bool_], items: NDArray[np.int64]
) -> Interval:
    """The AUROC of rows, with a bootstrap over the items that they belong to."""
    rng = np.random.default_rng(0)
    order = np.argsort(items, kind="stable")
    _, first = np.unique(items[order], return_index=True)
    rows = np.split(order, first[1:])
    found = []
    for _ in range(_AUROC_RESAMPLES):
        chosen = np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
        found.append(auroc(scores[chosen], positive[chosen]))
    if np.isnan(found).all():
        return Interval(auroc(scores, positive), float("nan"), float("nan"))
    tail = 100 * (1 - _COVERAGE) / 2
    low, high = np.nanpercentile(found, [tail, 100 - tail])
    return Interval(auroc(scores, positive), float(low), float(high))


@dataclass(frozen=True)
class Bin:
    """Rows of like scores, and how many of them were right."""

    low: float
    high: float
    mean: float
    number: int
    right: float


def reliability(scores: Floats, right: Floats) -> list[Bin]:
    """Rows in ten bins of equally many, by score: the share of right ones in each."""
    order = np.argsort(scores, kind="stable")
    parts = [part for part in np.array_split(order, _BINS) if len(part)]
    return [
        Bin(
            low=float(scores[part[0]]),
            high=float(scores[part[-1]]),
            mean=float(scores[part].mean()),
            number=len(part),
            right=float(right[part].mean()),
        )
        for part in parts
    ]
