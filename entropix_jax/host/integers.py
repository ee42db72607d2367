"""Integers of files, requests and arguments: one rule for all of them."""

import math
import operator
from typing import Any

from entropix_jax.errors import UserError, check_range


def as_integer(value: Any) -> int | None:
    """Returns an integer of any type, NumPy's included, as an `int`, and 4 for 4.0, as JavaScript
    and tables write it. None for any other value, booleans included."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, least: float = -math.inf, most: int | None = None) -> int:
    """Returns the integer of an argument. UserError if it is not an integer or out of range."""
    if (number := as_integer(value)) is None:
        raise UserError(f"{name} must be an integer, not {value!r}")
    check_range(name, number, least, most)
    return number
