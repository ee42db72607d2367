"""The boxes of a sampler's regimes as conditions on entropy and varentropy, and their occupancy.

Comparisons are in float32, as in the sampler.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.names import BOXES, QUANTITIES, REGIMES, THRESHOLDS, read_condition
from entropix_jax.sampler.sampler import Sampler

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class Condition(NamedTuple):
    """One side of a box."""

    axis: int  # 0 entropy, 1 varentropy
    sign: str  # "<" or ">"
    bound: str | float  # one of THRESHOLDS, or a constant


Boxes = tuple[tuple[Condition, ...], ...]  # in the order of BOXES; the first that matches counts


def read_boxes(sampler: Sampler) -> Boxes:
    """Reads the boxes of a sampler.

    Raises:
        UserError: a condition on another quantity, h1 or h2 not on entropy, u1 or u2 not on
            varentropy, or a threshold that no box uses.
    """
    boxes = []
    for box in BOXES:
        conditions = []
        for text in sampler.values[f"regimes.{box}"]:
            quantity, sign, bound = read_condition(text)
            axis = QUANTITIES.index(quantity)
            if axis > 1 or (isinstance(bound, str) and THRESHOLDS.index(bound) // 2 != axis):
                raise UserError(
                    f"{sampler.name}: regimes.{box}: '{text}' cannot be calibrated: "
                    "only entropy may be bounded, by h1 and h2, and varentropy, by u1 and u2"
                )
            conditions.append(Condition(axis, sign, bound))
        boxes.append(tuple(conditions))
    used = {condition.bound for box in boxes for condition in box}
    if unused := [name for name in THRESHOLDS if name not in used]:
        raise UserError(
            f"{sampler.name}: cannot be calibrated: no box of its regimes uses {unused[0]}"
        )
    return tuple(boxes)


def classify_points(
    points: np.ndarray, thresholds: Mapping[str, float], boxes: Boxes
) -> np.ndarray:
    """The regime of each point as an index into REGIMES, int64 [n]. Boxes are open sets."""
    points = np.asarray(points, np.float32)
    regimes = np.full(len(points), len(BOXES))
    for i in reversed(range(len(BOXES))):
        inside = np.ones(len(points), bool)
        for axis, sign, bound in boxes[i]:
            number = np.float32(thresholds[bound] if isinstance(bound, str) else bound)
            inside &= points[:, axis] < number if sign == "<" else points[:, axis] > number
        regimes[inside] = i
    return regimes


def occupancy(
    points: np.ndarray, thresholds: Mapping[str, float], boxes: Boxes
) -> dict[str, float]:
    """The share of the points in each of REGIMES."""
    counts = np.bincount(classify_points(points, thresholds, boxes), minlength=len(REGIMES))
    return dict(zip(REGIMES, (counts / len(points)).tolist(), strict=True))


def quantiles(points: np.ndarray) -> np.ndarray:
    """QUANTILES of entropy (bits) and varentropy (bits^2): float64 [6, 2]."""
    return np.quantile(np.asarray(points, np.float64), QUANTILES, axis=0)
