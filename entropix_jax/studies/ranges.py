"""Values of a sampler's settings that are drawn: from lists, and from ranges of numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.sampler.sampler import Sampler, check_key, check_values, scalars

_MOST_TRIES = 1000  # for one draw that is to be another than those before


def _is_range(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"from", "to", "scale"}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values; a range is a value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not _is_range(value):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def changed_by(sampler: Sampler, values: Mapping[str, Any]) -> Sampler:
    """The sampler with other values.

    Raises:
        UserError: a key or a value that no sampler has, or values that do not go together: two
            thresholds even where the model's own are still to come, above which these stand.
    """
    changed = sampler.with_values(values)
    for ends in (("h1", "h2"), ("u1", "u2")):
        low, high = (changed.changes.get(f"thresholds.{name}") for name in ends)
        if low is not None and high is not None and low > high:
            raise UserError(
                f"{sampler.name}: thresholds.{ends[0]} = {low} is above "
                f"thresholds.{ends[1]} = {high}"
            )
    return changed


def draws_of(
    ranges: Mapping[str, Any], rng: Random, sampler: Sampler, number: int, where: str
) -> Iterator[tuple[dict[str, Any], Sampler]]:
    """So many draws, each another one, and the sampler with each. What does not go together, two
    thresholds say, is drawn anew.

    Raises:
        UserError: a key or a value that no sampler has, or no more draws to be had.
    """
    axes = {key: _axis(key, values, sampler, where) for key, values in ranges.items()}
    before: set[str] = set()
    problem = ""
    tries = 0
    while len(before) < number:
        if tries == _MOST_TRIES:
            raise UserError(f"{where}: {len(before)} draws and no more, of {number}: {problem}")
        tries += 1
        drawn = {key: _draw(axis, rng) for key, axis in axes.items()}
        name = name_of(drawn)
        if name in before:
            problem = "what is drawn was drawn before"
            continue
        try:
            changed = changed_by(sampler, drawn)
        except UserError as error:
            problem = str(error)
            continue
        before.add(name)
        tries = 0
        yield drawn, changed


@dataclass(frozen=True)
class _Range:
    """Numbers from `low` to `high`, drawn evenly or, where `log`, evenly in their logarithms."""

    low: float
    high: float
    log: bool
    whole: bool


def _axis(key: str, values: Any, sampler: Sampler, where: str) -> list[Any] | _Range:
    """What a key's values are drawn from: whole numbers where it takes no other.

    Raises:
        UserError: it is neither a list nor a range, or holds what cannot be a value of the key.
    """
    check_key(key, where)
    axis = values if isinstance(values, list) and values else _range(values)
    if axis is None:
        raise UserError(
            f"{where}: {key}: must be a list of values, or"
            ' { from = LOW, to = HIGH, scale = "linear" or "log" }'
        )
    if isinstance(axis, list):
        ends = axis
    else:
        if key in scalars() and scalars()[key]["type"] is int:
            axis = _Range(math.ceil(axis.low), math.floor(axis.high), axis.log, True)
            if axis.low > axis.high:
                raise UserError(f"{where}: {key}: no whole number lies in the range")
        ends = [axis.low, axis.high]
    for value in ends:
        check_values({key: value}, where, sampler.mechanisms)
    return axis


def _range(values: Any) -> _Range | None:
    """The range that a table describes; None where it is none."""
    if not _is_range(values):
        return None
    low, high, scale = values.get("from"), values.get("to"), values.get("scale", "linear")
    if not is_list([low, high], int | float) or scale not in ("linear", "log"):
        return None
    if not -sys.float_info.max <= low < high <= sys.float_info.max:  # nor is NaN
        return None
    return None if scale == "log" and low <= 0 else _Range(low, high, scale == "log", False)


def _draw(axis: list[Any] | _Range, rng: Random) -> Any:
    """A value: one of a list, or a number of a range, of four digits."""
    if isinstance(axis, list):
        return rng.choice(axis)
    if axis.log:
        number = math.exp(rng.uniform(math.log(axis.low), math.log(axis.high)))
    else:
        number = rng.uniform(axis.low, axis.high)
    rounded = round(number) if axis.whole else float(f"{number:.4g}")
    return min(max(rounded, axis.low), axis.high)


def is_list(value: Any, kind: Any) -> bool:
    """Whether a value is a list of that kind; a truth value is no number."""
    return isinstance(value, list) and all(
        isinstance(v, kind) and not isinstance(v, bool) for v in value
    )


def name_of(values: Mapping[str, Any]) -> str:
    """What a setting is called by its values."""
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
