"""Solves for the four thresholds jointly, given the wanted share of tokens in each regime.

Candidates for thresholds are cuts: midpoints between neighbouring values of the data, which no
token equals. Within this module a threshold is the index of its cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.lab.boxes import Boxes, occupancy
from entropix_jax.names import BOXES, REGIMES, THRESHOLDS

TOLERANCE = 0.01  # of each regime's share

_TIE_BREAK = 0.01  # weight of the Euclidean deviation beside the largest one
_CUTS = 512  # cuts per axis of a grid
_OPEN_NODES = 1 << 14  # open nodes of the search; the least promising are dropped
_MARGIN = 4  # cuts on either side of the best one, for the next, finer grid
_EQUIVALENT = 0.1  # standard errors of a share


@dataclass(frozen=True)
class Solution:
    """Thresholds, and the occupancy that they give the points that they were solved on."""

    thresholds: dict[str, float]  # h1, h2 in bits; u1, u2 in bits^2
    occupancy: dict[str, float]  # the share of each of REGIMES
    missed: str | None = None  # a message, if the wanted occupancy is out of reach


def solve(
    points: np.ndarray,
    wanted: Mapping[str, float],
    boxes: Boxes,
    tolerance: float = TOLERANCE,
    *,
    nearest: bool = False,
) -> Solution:
    """Finds the thresholds whose occupancy is nearest to the wanted one.

    The distance is the largest deviation over the five regimes, ties broken by the sum of squares.
    It is minimised by branch and bound: a box's count is monotone in its sides, so ranges of
    thresholds can be excluded at once. The first grid has some 500 cuts per axis; finer ones follow
    around the optimum until they have every cut. With up to 500 distinct values per axis the result
    is optimal to within half a token; with more, an optimum between the first grid's cuts can be
    missed by about 0.1 percentage points. (With overlapping boxes, or wanted shares of 0, the
    search may also drop open nodes.)

    Thresholds within a tenth of a share's standard error of the optimum are equivalent on a sample.
    Among these each threshold takes the widest gap of the data, where it is most robust on other
    text, and in it the number with the fewest digits near the middle.

    Args:
        points: float [n, 2].
        wanted: the share of each of BOXES; MID gets the rest.
        boxes: see `read_boxes`.
        tolerance: the largest accepted deviation of a share.
        nearest: accept any deviation.

    Raises:
        UserError: no points, non-finite points, invalid shares, or, without `nearest`, shares out
            of reach; the message has the nearest ones.
    """
    points = np.asarray(points, np.float32)
    if not len(points):
        raise UserError("calibration: the text has no tokens")
    if not np.isfinite(points).all():
        raise UserError("calibration: an entropy or varentropy of the text is not a finite number")
    goal = _goal(wanted)

    # Search over all cuts, then move each threshold to the widest equivalent gap.
    constants = [[c.bound for box in boxes for c in box if c.axis == i] for i in (0, 1)]
    axes = [
        _Axis(values, np.array([x for x in own if isinstance(x, float)], np.float32))
        for values, own in zip(points.T, constants, strict=True)
    ]
    best = _find_nearest(points, boxes, goal, axes)
    cuts = _widen_gaps(points, boxes, goal, axes, best, tolerance)
    thresholds = {
        name: axes[i // 2].round(cut)
        for i, (name, cut) in enumerate(zip(THRESHOLDS, cuts, strict=True))
    }

    # Measure the result with the rounded thresholds.
    reached = occupancy(points, thresholds, boxes)
    missed = None
    if np.abs(np.array(list(reached.values())) - goal).max() > tolerance + 1e-9:
        missed = (
            f"the text does not allow {_percentages(wanted)} (to within {tolerance:.1%}); "
            f"the nearest that it allows is {_percentages(reached)}"
        )
    if missed is not None and not nearest:
        raise UserError(f"calibration: {missed}")
    return Solution(thresholds, reached, missed)


def _goal(wanted: Mapping[str, float]) -> np.ndarray:
    """The wanted shares of REGIMES, float64 [5]."""
    if set(wanted) != set(BOXES):
        raise UserError(f"calibration: the wanted shares must be of {', '.join(BOXES)}")
    shares = np.array([wanted[box] for box in BOXES], np.float64)
    if not (np.all(shares >= 0) and shares.sum() <= 1 + 1e-9):
        raise UserError(
            f"calibration: {_percentages(wanted)}: shares must be at least 0 and sum to at most 1"
        )
    return np.append(shares, max(0.0, 1 - shares.sum()))


def _percentages(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {shares[name]:.1%}" for name in REGIMES if name in shares)


class _Axis:
    """The cuts of one quantity, ascending, and the gaps of the data around them."""

    def __init__(self, values: np.ndarray, constants: np.ndarray) -> None:
        marks = np.unique(np.concatenate([values, constants, np.zeros(1, np.float32)]))
        middle = ((marks[:-1].astype(np.float64) + marks[1:]) / 2).astype(np.float32)
        free = (marks[:-1] < middle) & (middle < marks[1:]) & (middle > 0)
        # Cuts outside of gaps: 0, the boxes' constants, and two above all values, as a box may need
        # room between two thresholds.
        top = np.float32(f"{2 * marks[-1]:.1g}") or np.float32(1)
        self.fixed = np.unique(np.append(constants, [np.float32(0), top, 2 * top]))
        self.cuts = np.unique(np.append(self.fixed, middle[free]))
        self.gaps = np.zeros(len(self.cuts), np.float32)
        self.gaps[np.searchsorted(self.cuts, middle[free])] = (marks[1:] - marks[:-1])[free]
        self.below = np.searchsorted(np.sort(values), self.cuts)  # number of values
        self.first = int(np.searchsorted(self.cuts, 0))  # thresholds are not negative

    def thin(self, first: int, last: int) -> np.ndarray:
        """At most _CUTS of the cuts from first to last: half evenly spaced by tokens, half by
        index, so that a value of many tokens does not crowd out others."""
        if last - first < _CUTS:
            return np.arange(first, last + 1)
        tokens = np.linspace(self.below[first], self.below[last], _CUTS // 2)
        by_tokens = np.searchsorted(self.below[first : last + 1], tokens) + first
        by_number = np.linspace(first, last, _CUTS // 2).astype(int)
        return np.union1d(by_tokens, by_number)

    def round(self, cut: int) -> float:
        """The number with the fewest digits in the middle half of a cut's gap."""
        value, slack = self.cuts[cut], self.gaps[cut] / 4
        texts = (f"{value:.{digits}g}" for digits in range(1, 10))
        return next(float(text) for text in texts if abs(np.float32(text) - value) <= slack)


class _Grid:
    """A summed-area table of the points between cuts, from which boxes are counted.

    Sides of boxes are codes, so that a point on a cut is outside: as a lower side cut i has the
    code 2i + 2, as an upper one 2i + 1. `Sides` are lower and upper ones, int64 [m, 4 boxes, 2].
    """

    Sides = tuple[np.ndarray, np.ndarray]

    def __init__(self, points: np.ndarray, cuts: list[np.ndarray], boxes: Boxes) -> None:
        codes = [
            np.searchsorted(cut, values) + np.searchsorted(cut, values, "right")
            for cut, values in zip(cuts, points.T, strict=True)
        ]
        shape = tuple(2 * len(cut) + 1 for cut in cuts)
        cells = np.ravel_multi_index(codes, shape)
        table = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        self._below = np.pad(table.cumsum(0).cumsum(1), ((1, 0), (1, 0)))  # of codes (a, b)
        self._cuts, self._boxes = cuts, boxes
        self._size = len(points)

    def sides(self, lower: np.ndarray, upper: np.ndarray) -> Sides:
        """The sides of the boxes for thresholds at the cuts `lower` where they bound from below,
        and at `upper` where they bound from above: int64 [m, 4 thresholds] each."""
        low = np.zeros((len(lower), len(self._boxes), 2), np.int64)
        high = low + (np.array(self._below.shape) - 1)
        for i, box in enumerate(self._boxes):
            for axis, sign, bound in box:
                if isinstance(bound, str):
                    cut = (upper if sign == "<" else lower)[:, THRESHOLDS.index(bound)]
                else:
                    cut = np.asarray(np.searchsorted(self._cuts[axis], np.float32(bound)))
                if sign == "<":
                    high[:, i, axis] = np.minimum(high[:, i, axis], 2 * cut + 1)
                else:
                    low[:, i, axis] = np.maximum(low[:, i, axis], 2 * cut + 2)
        return low, high

    def shares(self, own: Sides, earlier: Sides) -> np.ndarray:
        """The share of points in each box with sides `own` and in no earlier box with sides
        `earlier`: float64 [m, 4]."""
        counts = [
            self._count(own[0][:, i], own[1][:, i], [side[:, :i] for side in earlier])
            for i in range(len(self._boxes))
        ]
        return np.stack(counts, axis=1) / self._size

    def deviations(self, cuts: np.ndarray, goal: np.ndarray) -> np.ndarray:
        """Deviations of the shares of REGIMES from the goal: float64 [m, 5]; infinite for empty
        boxes, which a sampler refuses."""
        sides = self.sides(cuts, cuts)
        shares = self.shares(sides, sides)
        shares = np.column_stack([shares, 1 - shares.sum(axis=1)])
        empty = np.any(sides[0] >= sides[1], axis=(1, 2))
        return np.where(empty[:, None], np.inf, shares - goal)

    def _count(self, low: np.ndarray, high: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
        """The number of points in a rectangle and in none of the others."""
        (left, bottom), (right, top) = low.T, np.maximum(low, high).T
        table = self._below
        corners = table[right, top], table[left, top], table[right, bottom], table[left, bottom]
        count: np.ndarray = corners[0] - corners[1] - corners[2] + corners[3]
        for i in range(others[0].shape[1]):
            common = np.maximum(low, others[0][:, i]), np.minimum(high, others[1][:, i])
            if np.any(np.all(common[0] < common[1], axis=1)):
                count = count - self._count(*common, [side[:, :i] for side in others])
        return count


def _loss(deviations: np.ndarray) -> np.ndarray:
    """The distance from the wanted occupancy: float64 [m] of deviations [m, 5]."""
    deviations = np.abs(deviations)
    tie_break = _TIE_BREAK * np.sqrt(np.sum(deviations**2, axis=1))
    losses: np.ndarray = deviations.max(axis=1) + tie_break
    return losses


def _find_nearest(
    points: np.ndarray, boxes: Boxes, goal: np.ndarray, axes: list[_Axis]
) -> list[int]:
    """The cuts of the four thresholds with the least loss, on finer and finer grids."""
    spans = [(axis.first, len(axis.cuts) - 1) for axis in axes for _ in range(2)]
    while True:
        chosen = []
        for axis, own in zip(axes, (spans[:2], spans[2:]), strict=True):
            fixed = np.searchsorted(axis.cuts, axis.fixed)
            chosen.append(np.unique(np.concatenate([fixed, *(axis.thin(*s) for s in own)])))
        grid = _Grid(points, [a.cuts[c] for a, c in zip(axes, chosen, strict=True)], boxes)
        picks = [chosen[i // 2] for i in range(4)]
        ranges = np.array([np.searchsorted(p, s) for p, s in zip(picks, spans, strict=True)])
        best = _search(grid, ranges, goal, 0.5 / len(points))
        if all(last - first == b - a for (first, last), (a, b) in zip(spans, ranges, strict=True)):
            return [int(p[i]) for p, i in zip(picks, best, strict=True)]
        near = np.clip(best[:, None] + [-_MARGIN, _MARGIN], ranges[:, :1], ranges[:, 1:])
        spans = [(int(p[a]), int(p[b])) for p, (a, b) in zip(picks, near, strict=True)]


def _search(grid: _Grid, ranges: np.ndarray, goal: np.ndarray, resolution: float) -> np.ndarray:
    """Branch and bound: of all cuts within `ranges`, int64 [4 thresholds, first and last], those
    with the least loss to within the resolution, int64 [4].

    A node is a range for each threshold. Its boxes hold at least the points of the smallest boxes
    in the ranges, and at most those of the largest.
    """
    low, high = ranges[None, :, 0], ranges[None, :, 1]
    best: np.ndarray = low[0]
    least, threshold = np.inf, 0
    while len(low):
        # Split every node at the middle of one threshold's range, and keep h1 <= h2 and u1 <= u2.
        middle = (low + high) // 2
        splits = low[:, threshold] < high[:, threshold]
        upper, lower = high.copy(), low[splits]
        upper[:, threshold] = middle[:, threshold]
        lower[:, threshold] = middle[splits, threshold] + 1
        low, high = np.concatenate([low, lower]), np.concatenate([upper, high[splits]])
        for smaller, larger in ((0, 1), (2, 3)):
            high[:, smaller] = np.minimum(high[:, smaller], high[:, larger])
            low[:, larger] = np.maximum(low[:, larger], low[:, smaller])
        possible = np.all(low <= high, axis=1)
        low, high = low[possible], high[possible]

        # Evaluate the middle of each node.
        middle = (low + high) // 2
        losses = _loss(grid.deviations(middle, goal))
        first = np.argmin(losses)
        if losses[first] < least:
            best, least = middle[first], losses[first]

        # Bound each node's loss from below, and drop those that cannot be better.
        small, large = grid.sides(high, low), grid.sides(low, high)
        fewest, most = grid.shares(small, large), grid.shares(large, small)
        mid = 1 - most.sum(axis=1), 1 - fewest.sum(axis=1)
        short = np.column_stack([fewest, mid[0]]) - goal, goal - np.column_stack([most, mid[1]])
        bounds = _loss(np.maximum(np.maximum(*short), 0))
        open_ = np.flatnonzero(np.any(low < high, axis=1) & (bounds < least - resolution))
        if len(open_) > _OPEN_NODES:
            open_ = open_[np.lexsort((losses[open_], bounds[open_]))[:_OPEN_NODES]]
        low, high = low[open_], high[open_]
        threshold = (threshold + 1) % len(THRESHOLDS)
    return best


def _widen_gaps(
    points: np.ndarray,
    boxes: Boxes,
    goal: np.ndarray,
    axes: list[_Axis],
    best: list[int],
    tolerance: float,
) -> list[int]:
    """Moves the thresholds, one after the other, to the widest gaps of equivalent loss."""
    chosen, limit = np.array(best), np.inf
    for i in range(len(THRESHOLDS)):
        # All cuts of the threshold's own axis, and only the ones in use of the other.
        own, other = i // 2, 1 - i // 2
        fixed = np.searchsorted(axes[other].cuts, axes[other].fixed)
        used = np.union1d(fixed, chosen[2 * other : 2 * other + 2])
        cuts = [axis.cuts for axis in axes]
        cuts[other] = cuts[other][used]
        indices = chosen.copy()
        indices[2 * other : 2 * other + 2] = np.searchsorted(used, indices[2 * other :][:2])

        # The loss at every cut that keeps h1 <= h2 and u1 <= u2.
        first = chosen[i - 1] if i % 2 else axes[own].first
        last = len(cuts[own]) - 1 if i % 2 else chosen[i + 1]
        trials = np.tile(indices, (last - first + 1, 1))
        trials[:, i] = np.arange(first, last + 1)
        deviations = _Grid(points, cuts, boxes).deviations(trials, goal)
        losses, largest = _loss(deviations), np.abs(deviations).max(axis=1)

        # The widest gap of those.
        now = chosen[i] - first
        limit = min(limit, losses[now] + _EQUIVALENT * 0.5 / np.sqrt(len(points)))
        equivalent = (losses <= limit) & (largest <= max(tolerance, largest[now]))
        gaps = np.where(equivalent, axes[own].gaps[first : last + 1], -1)
        if gaps.max() > gaps[now]:
            chosen[i] = first + np.argmax(gaps)
    return [int(cut) for cut in chosen]
