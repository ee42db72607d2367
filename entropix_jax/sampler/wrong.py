"""P(wrong): the probability that an answer is wrong, estimated at each of its tokens.

A table maps running means of four measures to a probability. This module has the table on the host,
in float64, without JAX. `mechanisms.wrong` is the traced version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entropix_jax.host.shapes import fits
from entropix_jax.names import LARGEST

MEASURES = ("entropy", "varentropy", "max_prob", "agreement")  # of the model's own distribution
RATE = 2 / 9  # of the exponential means: that of N = 8 tokens, 2 / (N + 1)
KNOTS = 32  # K, at most
GAP, MOST = 0.05, 1e4  # the least distance between two scores, and the largest score
EXPECTED = (
    f"[weights, knot, knot, ...]: five weights, and 2 to {KNOTS} knots [score, probability] in"
    f" ascending order, scores up to {MOST:g} and at least {GAP} apart"
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

    def look_up(self, means: Floats) -> Floats:
        """Returns P(wrong) for means [..., 4]."""
        return np.asarray(np.interp(means @ self.weights[:4] + self.weights[4], *self.knots.T))

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
    are_knots = all(len(row) == 2 and abs(row[0]) <= MOST and 0 <= row[1] <= 1 for row in rows[1:])
    if not are_knots or max(map(abs, rows[0])) > LARGEST:
        return False
    apart, rise = np.diff(rows[1:], axis=0).T.min(axis=1)
    return bool(apart > 0.99 * GAP and rise >= 0)


def is_entry(value: Any) -> bool:
    """Returns whether a value is the table of a calibration file."""
    has_both = fits(value, {"weights": [float], "knots": [[float]]})
    return has_both and is_table([value["weights"], *value["knots"]])


def find_table(rows: Any, model: Mapping[str, Any] | None) -> WrongTable | None:
    """Returns the table of a value of `wrong.table`: rows, or "model" for that of the model's
    calibration file, None if it has none."""
    if rows == "model":
        if model is None:
            return None
        rows = [model["weights"], *model["knots"]]
    return WrongTable(np.array(rows[0], np.float64), np.array(rows[1:], np.float64))
