"""Random draws of a sampler's values for tuning, from lists and from ranges of numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.shapes import fits
from entropix_jax.sampler.files import check_key
from entropix_jax.sampler.keys import check_values, keys
from entropix_jax.sampler.sampler import Sampler

_MAX_TRIES = 1000  # for one draw that differs from all before


def _is_range(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"from", "to", "scale"}


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested tables to dotted keys; a range counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not _is_range(value):
            flat.update(flatten_table(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def draw_samplers(
    ranges: Mapping[str, Any], rng: Random, sampler: Sampler, number: int, where: str
) -> Iterator[tuple[dict[str, Any], Sampler]]:
    """Draws `number` distinct sets of values; yields each with its sampler. Inconsistent draws,
    such as h1 > h2, are repeated.

    Raises:
        UserError: an unknown key, an invalid value, or ranges with too few distinct draws.
    """
    axes = {key: _axis(key, values, sampler, where) for key, values in ranges.items()}
    seen: set[str] = set()
    problem, tries = "", 0
    while len(seen) < number:
        if tries == _MAX_TRIES:
            raise UserError(f"{where}: only {len(seen)} of {number} draws: {problem}")
        tries += 1
        drawn = {key: draw(rng) for key, draw in axes.items()}
        name = name_setting(drawn)
        if name in seen:
            problem = "further draws repeat earlier ones"
            continue
        try:
            changed = sampler.with_values(drawn)
        except UserError as error:
            problem = str(error)
            continue
        seen.add(name)
        tries = 0
        yield drawn, changed


def _axis(key: str, values: Any, sampler: Sampler, where: str) -> Callable[[Random], Any]:
    """Returns a function that draws a key's values: from a list, or from a range, integers for an
    integer key and numbers of four significant digits for others.

    Raises:
        UserError: neither a list nor a range, or an invalid value of the key.
    """
    check_key(key, where, keys(sampler.mechanisms))

    def check(ends: list[Any]) -> None:
        for value in ends:
            check_values({key: value}, where, sampler.mechanisms)

    if isinstance(values, list) and values:
        check(values)
        return lambda rng: rng.choice(values)
    found = _ends(values)
    if found is None:
        raise UserError(
            f"{where}: {key}: must be a list of values, or"
            ' { from = LOW, to = HIGH, scale = "linear" or "log" }'
        )
    low, high = found
    whole = keys(sampler.mechanisms)[key].kind is int
    if whole:
        low, high = math.ceil(low), math.floor(high)
        if low > high:
            raise UserError(f"{where}: {key}: no integer lies in the range")
    check([low, high])
    log = values.get("scale") == "log"

    def draw(rng: Random) -> float:
        ends = (math.log(low), math.log(high)) if log else (low, high)
        number = math.exp(rng.uniform(*ends)) if log else rng.uniform(*ends)
        rounded = round(number) if whole else float(f"{number:.4g}")
        return min(max(rounded, low), high)

    return draw


def _ends(values: Any) -> tuple[float, float] | None:
    """The ends of a range; None for an invalid one."""
    if not _is_range(values):
        return None
    low, high, scale = values.get("from"), values.get("to"), values.get("scale", "linear")
    if not fits([low, high], [float]) or scale not in ("linear", "log"):
        return None
    if not -sys.float_info.max <= low < high <= sys.float_info.max:  # also false for NaN
        return None
    return None if scale == "log" and low <= 0 else (low, high)


def name_setting(values: Mapping[str, Any]) -> str:
    """Names a setting by its values."""
    shown = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items()}
    return " ".join(f"{key}={value}" for key, value in shown.items())
