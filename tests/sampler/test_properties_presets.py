"""Any values of a sampler, as a file and back and on a command line; and what is refused."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.errors import UserError
from entropix_jax.names import BOXES, REGIMES, THRESHOLDS
from entropix_jax.sampler.mechanisms.inject import MAX_THOUGHTS
from entropix_jax.sampler.presets import load_sampler, parse_setting, preset_names
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import (
    LOOP_WINDOW,
    MAX_BANS,
    RULES,
    SamplerSettings,
)
from entropix_jax.sampler.thresholds import preset_text
from tests.support.properties import examples
from tests.support.sampler_strategies import numbers, samplers
from tests.support.samplers import ARMS, EPSILON, NUM_LAYERS

# Text that TOML can hold: anything but lone surrogates.
texts = st.text(st.characters(codec="utf-8"), max_size=12)


def scalar(field: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """A value within the range of a scalar parameter; its ends are frequent."""
    low, high, kind = field["low"], field["high"], field["type"]
    if kind is bool:
        return st.booleans()
    ends = st.sampled_from((low, high))
    if kind is int:
        return ends | st.integers(low, min(high, low + 300))
    return ends | st.floats(low, high) | st.integers(math.ceil(low), math.floor(high))


SCALARS = {key: scalar(field) for key, field in scalars().items()}
OTHERS: dict[str, st.SearchStrategy[Any]] = {
    **{f"arms.{regime}": st.sampled_from(sorted(ARMS)) for regime in REGIMES},
    "truncation.rule": st.sampled_from(RULES),
    "metrics.attn_entropy": st.sampled_from(("normalised", "raw")),
    "metrics.agreement": st.sampled_from(("corrected", "published")),
    "metrics.layers": st.sampled_from(("all", "last"))
    | st.lists(numbers(0, 1e6), min_size=1, max_size=4).filter(lambda all_: max(all_) > 1e-6),
    "metrics.noise_floor": st.booleans(),
    "thresholds.calibrated": st.booleans(),
    "inject.thought": texts | st.lists(texts, max_size=MAX_THOUGHTS),
    "draw.bans": st.lists(st.integers(0, 2**31 - 1), max_size=MAX_BANS),
}


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid values of some keys or of all of them."""
    some = draw(st.sets(st.sampled_from(sorted({**SCALARS, **OTHERS})), max_size=8))
    if draw(st.integers(0, 9)) == 0:
        some = {*SCALARS, *OTHERS}
    values = {key: draw({**SCALARS, **OTHERS}[key]) for key in sorted(some)}
    if draw(st.booleans()):
        boxes = draw(samplers()).values
        values |= {f"regimes.{box}": boxes[f"regimes.{box}"] for box in BOXES}
        values |= {f"thresholds.{name}": boxes[f"thresholds.{name}"] for name in THRESHOLDS}
    period, repeats = values.get("loop.max_period", 32), values.get("loop.repeats", 4)
    if period * repeats > LOOP_WINDOW:
        values |= {"loop.max_period": 32, "loop.repeats": 8}
    return values


def toml_of(value: Any) -> str:
    """A value as TOML, which writes all of these as JSON does, but for DEL and infinity."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def file_of(values: Mapping[str, Any], base: str | None, dotted: bool) -> str:
    """A sampler's file: keys with dots, or a table for each section."""
    lines = [] if base is None else [f"extends = {toml_of(base)}"]
    if dotted:
        return "\n".join([*lines, *(f"{key} = {toml_of(value)}" for key, value in values.items())])
    for section in sorted({key.split(".")[0] for key in values}):
        lines.append(f"[{section}]")
        lines += [
            f"{key.split('.')[1]} = {toml_of(value)}"
            for key, value in values.items()
            if key.startswith(f"{section}.")
        ]
    return "\n".join(lines)


def loaded(text: str) -> Sampler:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return load_sampler(str(path))


def params_of(sampler: Sampler) -> SamplerSettings:
    layers = sampler.values["metrics.layers"]
    number = len(layers) if isinstance(layers, list) else NUM_LAYERS
    return sampler.settings(
        num_layers=number, epsilon=EPSILON, encode=lambda text: [*text.encode()]
    )


bases = st.sampled_from(preset_names())


@examples(80)
@given(settings(), bases, st.booleans(), st.booleans())
def test_values_survive_a_file(
    values: dict[str, Any], base: str, dotted: bool, whole: bool
) -> None:
    """Dumped and loaded they are the same, by themselves or beside those of a preset."""
    set_in_python = load_sampler(base).with_values(values)
    in_full = set_in_python.values, None, dotted  # a file that extends nothing
    sampler = loaded(file_of(*in_full) if whole else file_of(values, base, dotted))
    expected = dict(set_in_python.values)
    if not whole and "thresholds.h1" in values and "thresholds.calibrated" not in values:
        expected["thresholds.calibrated"] = False  # who sets thresholds means them
    assert dict(sampler.values) == expected
    assert {key: type(value) for key, value in sampler.values.items()} == {
        key: type(value) for key, value in expected.items()
    }
    leaves = (jax.tree.leaves(params_of(each)) for each in (sampler, set_in_python))
    for one, other in zip(*leaves, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@examples(80)
@given(settings())
def test_values_survive_a_command_line(values: dict[str, Any]) -> None:
    given_values = dict(parse_setting(f"sampler.{key}={toml_of(v)}") for key, v in values.items())
    assert given_values == values


@examples(60)
@given(bases, st.tuples(*[numbers(0, 1e6)] * 4), texts)
def test_what_calibrate_writes_is_read(
    base: str, found: tuple[float, float, float, float], description: str
) -> None:
    h1, h2 = sorted(found[:2])
    u1, u2 = sorted(found[2:])
    thresholds = {"h1": h1, "h2": h2, "u1": u1, "u2": u2}
    changes: dict[str, Any] = {f"thresholds.{name}": value for name, value in thresholds.items()}
    text = preset_text(base, thresholds, description)
    try:
        expected = load_sampler(base).with_values({**changes, "thresholds.calibrated": False})
    except UserError:  # nothing lies between such bounds
        with pytest.raises(UserError, match="is above"):
            loaded(text)
        return
    sampler = loaded(text)
    assert sampler.description == description
    assert dict(sampler.values) == dict(expected.values)
