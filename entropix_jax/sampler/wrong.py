"""P(wrong): the probability that an answer is wrong, estimated at each of its tokens.

A table maps running means of four measures to a probability. This module has the table on the host,
in float64, without JAX. `mechanisms.wrong` is the traced version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entropix_jax.host.shapes import fits
from entropix_jax.names import LARGEST

MEASURES = ("entropy", "varentropy", "max_prob", "agreement")  # of the model's own distribution
RATE = 2 / 9  # of the exponential means: that of N = 8 tokens, 2 / (N + 1)
KNOTS = 32  # K, at most
GAP = 0.05  # the least distance between two scores: bounds the slope
EXPECTED = (
    "[weights, knot, knot, ...]: five weights, and 2 to 32 knots [score, probability], scores at"
    f" least {GAP} apart and probabilities in [0, 1], both ascending"
)

Floats = NDArray[np.float64]


def update_means(means: Floats, values: Floats, index: int) -> Floats:
    """Returns the exponential means after one more token, from the token's measures and its index
    in the answer. The first tokens have equal weights."""
    return means + max(RATE, 1 / (index + 1)) * (values - means)


@dataclass(frozen=True, eq=False)
class WrongTable:
    """P(wrong) as a monotone function of a score, the log odds of a logistic regression.

    Attributes:
        weights: float64 [5], of the means of `MEASURES`, and the intercept.
        knots: float64 [K, 2], score and probability, both ascending. P(wrong) is linear between
            two knots and constant beyond the first and the last.
    """

    weights: Floats
    knots: Floats

    def score(self, means: Floats) -> Floats:
        """Returns the scores of means [..., 4]."""
        scores: Floats = means @ self.weights[:4] + self.weights[4]
        return scores

    def look_up(self, means: Floats) -> Floats:
        """Returns P(wrong) for means [..., 4]."""
        return np.asarray(np.interp(self.score(means), *self.knots.T))

    def probabilities(self, measures: Floats) -> Floats:
        """Returns P(wrong) at each token of an answer, [T], from its `MEASURES`, [T, 4]."""
        return self.look_up(running_means(measures))

    def to_rows(self) -> list[list[float]]:
        """Returns the value of the key `wrong.table`, with six significant digits."""
        return [[float(f"{x:.6g}") for x in row] for row in (self.weights, *self.knots)]


def running_means(measures: Floats) -> Floats:
    """Returns the exponential means at each token, [T, 4], of an answer's measures, [T, 4]."""
    means, found = np.zeros(len(MEASURES)), np.empty((len(measures), len(MEASURES)))
    for index, values in enumerate(measures):
        found[index] = means = update_means(means, values, index)
    return found


def is_table(rows: Any) -> bool:
    """Returns whether a value is a table as in `WrongTable.to_rows`."""
    if not fits(rows, [[float]]) or not 3 <= len(rows) <= 1 + KNOTS or len(rows[0]) != 5:
        return False
    if max(map(abs, rows[0])) > LARGEST or any(len(row) != 2 for row in rows[1:]):
        return False
    scores, probabilities = np.array(rows[1:]).T
    ascends = min(np.diff(scores)) >= GAP and min(np.diff(probabilities)) >= 0
    return bool(
        ascends and max(abs(scores)) <= LARGEST and 0 <= probabilities[0] <= probabilities[-1] <= 1
    )


def as_table(rows: Sequence[Sequence[float]]) -> WrongTable:
    """Returns the table of rows that `is_table` accepts."""
    return WrongTable(np.array(rows[0], np.float64), np.array(rows[1:], np.float64))
