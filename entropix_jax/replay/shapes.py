"""Shapes of JSON: what a replay reads of the lines of a trace."""

import math
from typing import Any

from entropix_jax.report.reading import METRICS

# A type (float: any finite number), a list of one shape, a tuple of shapes, or an object's shapes
# by key. A key that ends in "?" may be absent or null. Keys that are not listed are ignored.
TOKEN: dict[str, Any] = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(METRICS, float),
    "loop": bool,
    **dict.fromkeys(("token_confidence?", "self_certainty?", "max_prob?"), float),
    "top?": [(int, str, float)],
    "branches?": [{"tokens": list, "text": str, "chosen": bool, "score?": float}],
    "layers?": [[float]],
    "chosen?": bool,
}
ROW: dict[str, Any] = {
    **dict.fromkeys(("row", "tokens", "forwards"), int),
    **dict.fromkeys(("text", "finish_reason?", "error?"), str),
}


def fits(value: Any, shape: Any) -> bool:
    """Returns whether a JSON value has a shape. True is not 1, and an overflowed number is not a
    number."""
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
