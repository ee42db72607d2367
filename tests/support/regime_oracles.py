"""Regimes and loops in plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from entropix_jax.names import REGIMES
from entropix_jax.sampler.regimes import classify, is_looping

classify_each = jax.jit(jax.vmap(classify))


def around(bound: float) -> list[float]:
    """A float32 bound and its two neighbours."""
    middle = np.float32(bound)
    return [
        float(np.nextafter(middle, np.float32(-np.inf))),
        float(middle),
        float(np.nextafter(middle, np.float32(np.inf))),
    ]


def box_by_hand(values: Mapping[str, Any], point: Mapping[str, float]) -> str:
    """The first box all of whose written conditions hold, in float32."""
    for box in REGIMES[:-1]:
        holds = True
        for condition in values[f"regimes.{box}"]:
            quantity, sign, bound = condition.split()
            number = np.float32(values.get(f"thresholds.{bound}", bound))
            x = np.float32(point[quantity])
            holds &= bool(x < number if sign == "<" else x > number)
        if holds:
            return box
    return "mid"


SLOTS = 300


looping_each = jax.jit(jax.vmap(is_looping, in_axes=(0, 0, 0, None)))


def is_loop(tokens: Sequence[int], generated: int, max_period: int, repeats: int) -> bool:
    """The oracle: the generated tokens end in `repeats` copies of a stretch."""
    if repeats < 2:
        return False
    tail = list(tokens)[len(tokens) - generated :]
    for period in range(1, max_period + 1):
        stretch = tail[-period:]
        if len(tail) >= period * repeats and tail[-period * repeats :] == stretch * repeats:
            return True
    return False
