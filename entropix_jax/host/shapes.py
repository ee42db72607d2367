"""Shapes of JSON and TOML values."""

import math
from typing import Any


def fits(value: Any, shape: Any) -> bool:
    """Returns whether a value has a shape. True is not 1, and an overflowed number is not a number.

    A shape is a type (float: any finite number), a list of one shape, a tuple of shapes, or an
    object's shapes by key. A key that ends in "?" may be absent or null. Keys that are not listed
    are ignored.
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(
            (value.get(key[:-1]) is None or fits(value[key[:-1]], inner))
            if key.endswith("?")
            else fits(value.get(key), inner)
            for key, inner in shape.items()
        )
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        same = isinstance(value, list) and len(value) == len(shape)
        return same and all(map(fits, value, shape))
    if isinstance(value, bool) or shape is bool:
        return isinstance(value, bool) and shape is bool
    if shape is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, shape)
