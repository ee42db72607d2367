"""A row from itself: the same tokens, and floats within TOLERANCE of each other.

At a few positions the model magnifies float32's rounding beyond that. By how much is measured, not
assumed: by how far floats scatter there, here and there, in models that are the same, but sum in
another order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from entropix_jax.loading import LanguageModel
from entropix_jax.params import ParamSpec, param_specs
from entropix_jax.results import Row

TOLERANCE = 1e-5
MOST = 10 * TOLERANCE  # whatever rounding does
ORDERS = 24
DEVIATIONS = 4  # standard ones, of a difference of two floats
Place = tuple[str | int, ...]  # the keys and indices that lead to a value


@dataclass(frozen=True)
class Difference:
    """Of a row here from the same row there."""

    largest: float  # of two floats, over the larger of 1 and their size
    rounded: int  # floats that differ by more than TOLERANCE, by rounding alone
    parting: str | None  # what else differs


def compare(
    model: LanguageModel,
    one: Row,
    other: Row,
    here: Callable[[LanguageModel], Row],
    there: Callable[[LanguageModel], Row],
) -> Difference:
    """A row from itself; `here` and `there` run it again with another model."""
    if one.to_json() != other.to_json():
        return Difference(0.0, 0, f"{one.to_json()}, {other.to_json()}")
    largest, rounded = 0.0, 0
    orders: list[list[list[Any]]] | None = None
    mine = records(one)
    for path, a, b in differences(mine, records(other)):
        if not (isinstance(a, float) and isinstance(b, float)):
            return Difference(largest, rounded, f"{path}: {a!r}, {b!r}")
        apart = abs(a - b) / max(1.0, abs(a))
        if not apart <= TOLERANCE:
            if orders is None:
                models = [reordered(model, seed) for seed in range(ORDERS)]
                orders = [[records(run(like)) for like in models] for run in (here, there)]
            scatter = math.hypot(*(_deviation(path, a, mine, found) for found in orders))
            if not abs(a - b) <= min(DEVIATIONS * scatter, MOST * max(1.0, abs(a))):
                return Difference(largest, rounded, f"{path}: {a!r}, {b!r}")
            rounded += 1
        largest = max(largest, apart)
    return Difference(largest, rounded, None)


def records(row: Row) -> list[Any]:
    """A row's tokens, then those that it took back, without the confidence: a sum of the metrics,
    whose terms cancel while their differences add up."""
    tokens = (token.to_json() for token in (*row.tokens, *row.taken_back))
    return [{k: v for k, v in one.items() if k not in ("row", "confidence")} for one in tokens]


def differences(one: Any, other: Any, path: Place = ()) -> Iterator[tuple[Place, Any, Any]]:
    """Where two values differ: the keys and indices that lead there, and what is there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], (*path, key))
    elif (
        isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other)
    ):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, (*path, i))
    elif one != other:
        yield path, one, other


def _deviation(path: Place, value: float, mine: list[Any], orders: Sequence[list[Any]]) -> float:
    """The standard deviation of the float at a place, `value` in mine, over orders of summation;
    0 where less than half of them are the row: the same in all but floats."""
    floats = []
    for one in orders:
        apart = {place: (x, y) for place, x, y in differences(mine, one)}
        if all(isinstance(x, float) and isinstance(y, float) for x, y in apart.values()):
            floats.append(apart.get(path, (value, value))[1])
    return float(np.std(floats, ddof=1)) if len(floats) >= ORDERS / 2 else 0.0


def reordered(model: LanguageModel, seed: int) -> LanguageModel:
    """A model of float weights with its channels, and the units of its MLPs, in a random order."""
    rng = np.random.default_rng(seed)
    orders = {
        "width": rng.permutation(model.config.width),
        "mlp": rng.permutation(model.config.mlp_width),
    }

    def ordered(spec: ParamSpec, x: jax.Array) -> jax.Array:
        for axis, name in enumerate(spec.axes):
            if name in orders:
                x = x.take(orders[name], axis)
        return x

    return replace(model, params=jax.tree.map(ordered, param_specs(model.config), model.params))
