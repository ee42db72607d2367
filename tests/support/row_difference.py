"""Compares a row with itself in another batch: the same tokens, floats equal but for rounding.

In a batch of another size sums run in another order, and at a few positions the model magnifies
that beyond TOLERANCE. By how much is measured, not assumed: by the scatter of the same float over
equivalent models whose channels and MLP units are permuted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.params import ParamSpec, param_specs

TOLERANCE = 1e-5
MOST = 10 * TOLERANCE  # whatever the scatter
ORDERS = 24  # equivalent models
DEVIATIONS = 4  # standard deviations of a difference of two floats
Path = tuple[str | int, ...]  # the keys and indices that lead to a value
Run = Callable[[LanguageModel], Row]


def difference(
    model: LanguageModel, one: Row, other: Row, run_one: Run, run_other: Run
) -> str | None:
    """Returns the first difference that is not rounding, or None.

    Args:
        run_one: runs the row again as `one` was run, with another model; `run_other` likewise.
    """
    if one.to_json() != other.to_json():
        return f"{one.to_json()}, {other.to_json()}"
    mine = _records(one)
    orders: list[list[list[Any]]] = []
    for path, a, b in _differences(mine, _records(other)):
        if not (isinstance(a, float) and isinstance(b, float)):
            return f"{path}: {a!r}, {b!r}"
        scale = max(1.0, abs(a))
        if abs(a - b) <= TOLERANCE * scale:
            continue
        if not orders:
            models = [reordered(model, seed) for seed in range(ORDERS)]
            orders = [[_records(run(like)) for like in models] for run in (run_one, run_other)]
        scatter = math.hypot(*(_deviation(path, a, mine, found) for found in orders))
        if not abs(a - b) <= min(DEVIATIONS * scatter, MOST * scale):
            return f"{path}: {a!r}, {b!r}"
    return None


def reordered(model: LanguageModel, seed: int) -> LanguageModel:
    """Permutes the channels of a model of float weights, and the units of its MLPs."""
    rng = np.random.default_rng(seed)
    sizes = {"width": model.config.width, "mlp": model.config.mlp_width}
    orders = {name: rng.permutation(size) for name, size in sizes.items()}

    def ordered(spec: ParamSpec, x: jax.Array) -> jax.Array:
        for axis, name in enumerate(spec.axes):
            if name in orders:
                x = x.take(orders[name], axis)
        return x

    return replace(model, params=jax.tree.map(ordered, param_specs(model.config), model.params))


def _records(row: Row) -> list[Any]:
    """The row's committed and retracted tokens, without the confidence: a sum of metrics whose
    terms cancel while their errors add up."""
    tokens = (token.to_json() for token in (*row.tokens, *row.retracted_tokens))
    return [{k: v for k, v in one.items() if k not in ("row", "confidence")} for one in tokens]


def _differences(one: Any, other: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    one, other = (dict(enumerate(x)) if isinstance(x, list | tuple) else x for x in (one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from _differences(one[key], other[key], (*path, key))
    elif one != other:
        yield path, one, other


def _deviation(path: Path, value: float, mine: list[Any], orders: Sequence[list[Any]]) -> float:
    """The standard deviation of the float at `path` over the equivalent models that ran the same
    row, or 0 where less than half of them did."""
    floats = []
    for one in orders:
        apart = {place: (x, y) for place, x, y in _differences(mine, one)}
        if all(isinstance(x, float) and isinstance(y, float) for x, y in apart.values()):
            floats.append(apart.get(path, (value, value))[1])
    return float(np.std(floats, ddof=1)) if len(floats) >= ORDERS / 2 else 0.0
