"""Samplers with any boxes, for property tests."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import strategies as st

from entropix_jax.errors import UserError
from entropix_jax.names import BOXES, QUANTITIES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.support.samplers import CALIBRATION, LITERAL

QUADRANTS = load_sampler(LITERAL)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    """Draws float32 numbers without denormals, which are 0 on some machines."""
    return st.floats(low, high, width=32, allow_subnormal=False)


def around(bound: float) -> list[float]:
    """Returns a float32 bound and its two neighbours."""
    middle, inf = np.float32(bound), np.float32(np.inf)
    return [float(x) for x in (np.nextafter(middle, -inf), middle, np.nextafter(middle, inf))]


percentiles = st.integers(0, 1600).map(lambda sixteenths: f"{sixteenths / 16:g}%")
bounds = st.sampled_from(("h1", "h2", "u1", "u2", "0", "1", "2.5")) | numbers(-1e6, 1e6).map(repr)
conditions = st.builds(
    "{} {} {}".format, st.sampled_from(QUANTITIES), st.sampled_from("<>"), bounds | percentiles
)


def percent_of(value: object) -> float:
    """Returns the number of a percentile."""
    return float(str(value).removesuffix("%"))


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    """Draws samplers with boxes of any conditions that are not empty with `CALIBRATION`."""
    changes: dict[str, Any] = {}
    for low, high in (("h1", "h2"), ("u1", "u2")):
        if draw(st.booleans()):
            values: list[Any] = sorted(draw(st.tuples(numbers(0, 16), numbers(0, 16))))
        else:
            values = sorted(draw(st.tuples(percentiles, percentiles)), key=percent_of)
        changes |= {f"thresholds.{low}": values[0], f"thresholds.{high}": values[1]}
    sampler = QUADRANTS.with_values({**changes, **{f"regimes.{box}": [] for box in BOXES}})
    for box in BOXES:
        for condition in draw(st.lists(conditions, max_size=4)):
            # Conditions that would make a box empty are rejected.
            with contextlib.suppress(UserError):
                wider = [*sampler.values[f"regimes.{box}"], condition]
                changed = sampler.with_values({f"regimes.{box}": wider})
                changed.resolve(CALIBRATION)
                sampler = changed
    return sampler
