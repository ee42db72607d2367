"""The regime table at and around every bound, and the loop guard against a plain Python oracle."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import QUANTITIES, REGIMES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings, SamplerSettings
from tests.support.regime_oracles import (
    SLOTS,
    around,
    box_by_hand,
    classify_each,
    is_loop,
    looping_each,
)
from tests.support.samplers import batch_of, metrics_of, params_of


def regimes_of(params: SamplerSettings, points: Sequence[dict[str, float]]) -> list[str]:
    """The regimes of many points under one sampler."""
    metrics = jax.tree.map(lambda *x: jnp.stack(x), *(metrics_of(**point) for point in points))
    rows = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * len(points)), params)
    return [REGIMES[i] for i in classify_each(metrics, rows)]


def test_conditions_on_attention() -> None:
    """Document 002: heads that look at few keys and agree are a reason to trust the argmax."""
    params = params_of(
        "entropix",
        {
            "regimes.lelv": ["entropy < 1", "attn_entropy_norm < 0.4", "agreement > 0.8"],
            "regimes.hehv": ["agreement < 0.3", "varentropy > u2", "varentropy < 9"],
        },
    )
    trusted = {"entropy": 0.5, "attn_entropy_norm": 0.3, "agreement": 0.9, "varentropy": 2.0}
    divided = {"entropy": 4.0, "agreement": 0.2, "varentropy": 8.0}
    assert regimes_of(
        params,
        [
            trusted,
            trusted | {"attn_entropy_norm": 0.5},
            trusted | {"agreement": 0.7},
            # The corrected one counts, also where the arms see the published one.
            trusted | {"agreement": 0.7, "agreement_published": 0.9},
            divided,
            divided | {"agreement": 0.4},
            divided | {"varentropy": 9.5},
        ],
    ) == ["lelv", "mid", "mid", "mid", "hehv", "mid", "mid"]


def bounds_of(values: Mapping[str, Any], quantity: str) -> list[float]:
    conditions = [c.split() for box in REGIMES[:-1] for c in values[f"regimes.{box}"]]
    bounds = {values.get(f"thresholds.{b}", b) for q, _, b in conditions if q == quantity}
    return sorted(map(float, bounds))


PRINTED = {
    "lelv": ["entropy < 0.1", "varentropy < 0.1"],
    "helv": ["entropy > 3", "varentropy < 0.1"],
    "lehv": ["entropy < 5", "varentropy > 5"],
    "hehv": ["entropy > 5", "varentropy > 5"],
}
CALIBRATED = {
    "lelv": ["entropy < h1", "varentropy < u1"],
    "helv": ["entropy > h2", "varentropy < u1"],
    "lehv": ["entropy < h2", "varentropy > u2"],
    "hehv": ["entropy > h2", "varentropy > u2"],
}


@pytest.mark.parametrize(
    ("preset", "boxes", "arms"),
    [
        ("document-000", PRINTED, ["argmax", "inject", "explore", "resample", "adaptive"]),
        ("document-001", PRINTED, ["argmax", "inject", "explore", "resample", "adaptive"]),
        (
            "document-004",
            {**CALIBRATED, "helv": ["entropy > h1", "varentropy < u2"]},
            ["argmax", "inject", "branch", "backspace", "sample"],
        ),
        ("entropix", CALIBRATED, ["argmax", "inject", "branch", "backspace", "adaptive"]),
    ],
)
def test_the_bounds_and_arms_of_the_presets(
    preset: str, boxes: dict[str, list[str]], arms: list[str]
) -> None:
    values = load_sampler(preset).values
    numbers = {
        box: [(*c.split()[:2], _number(c.split()[2])) for c in conditions]
        for box, conditions in boxes.items()
    }
    found = {
        box: [(*c.split()[:2], _number(c.split()[2])) for c in values[f"regimes.{box}"]]
        for box in boxes
    }
    assert found == numbers
    assert [values[f"arms.{regime}"] for regime in REGIMES] == arms
    if boxes is not PRINTED:
        bounds = [values[f"thresholds.{name}"] for name in ("h1", "h2", "u1", "u2")]
        assert bounds == [0.3, 2.5, 1.2, 2.5]
        assert values["thresholds.calibrated"] is True


def _number(bound: str) -> float | str:
    return bound if bound.isidentifier() else float(bound)


WITH_ATTENTION = {
    "regimes.lelv": ["entropy < h1", "attn_entropy_norm < 0.4", "agreement > 0.8"],
    "regimes.helv": ["entropy > h2", "varentropy < u1", "attn_entropy_norm > 0.4"],
    "regimes.lehv": ["varentropy > u2", "agreement < 0.3", "agreement > 0.1"],
    "regimes.hehv": ["entropy > 1", "entropy < 4", "varentropy > u1"],
}


def test_every_bound_of_every_row() -> None:
    """All four quantities on, just below and just above every bound, in every combination, each
    row of one batch by its own bounds."""
    samplers = [
        load_sampler("entropix"),
        load_sampler("document-001"),
        load_sampler("document-004").with_values({"thresholds.h1": 1.0, "thresholds.u2": 3.5}),
        load_sampler("entropix").with_values(WITH_ATTENTION),
        load_sampler("entropix").with_values({**WITH_ATTENTION, "thresholds.h2": 3.75}),
    ]
    whose, points, expected = [], [], []
    for i, sampler in enumerate(samplers):
        values = [
            [*itertools.chain(*map(around, bounds_of(sampler.values, q)))] or [0.5]
            for q in QUANTITIES
        ]
        for numbers in itertools.product(*values):
            point = dict(zip(QUANTITIES, numbers, strict=True))
            whose.append(i)
            points.append(point)
            expected.append(box_by_hand(sampler.values, point))
    order = np.random.default_rng(0).permutation(len(points))
    params = batch_of(*(params_of(sampler.name, sampler.values) for sampler in samplers))
    rows = jax.tree.map(lambda x: x[np.array(whose)[order]], params)
    columns = {q: np.array([p[q] for p in points], np.float32)[order] for q in QUANTITIES}
    metrics = metrics_of()
    metrics = replace(metrics, **dict.fromkeys(vars(metrics), jnp.zeros(len(points))))
    metrics = replace(metrics, **{q: jnp.asarray(x) for q, x in columns.items()})
    found = [REGIMES[i] for i in classify_each(metrics, rows).tolist()]
    assert found == [expected[i] for i in order]
    for i in range(len(samplers)):
        assert {e for w, e in zip(whose, expected, strict=True) if w == i} == {*REGIMES}


# The loop guard


def looping(rows: Sequence[tuple[Sequence[int], int]], max_period: int, repeats: int) -> list[bool]:
    """Whether each of (tokens, how many of them were generated) loops. Junk follows the tokens."""
    history = np.full((len(rows), SLOTS), 7, np.int32)
    for row, (tokens, _) in enumerate(rows):
        history[row, : len(tokens)] = tokens
    params = LoopSettings(max_period=jnp.int32(max_period), repeats=jnp.int32(repeats))
    length = jnp.asarray([len(tokens) for tokens, _ in rows], jnp.int32)
    generated = jnp.asarray([number for _, number in rows], jnp.int32)
    return [bool(x) for x in looping_each(jnp.asarray(history), length, generated, params)]


@pytest.mark.parametrize(("max_period", "repeats"), [(1, 2), (4, 3), (16, 4), (32, 2), (3, 85)])
def test_loops_against_the_oracle(max_period: int, repeats: int) -> None:
    rng = np.random.default_rng(max_period)
    rows: list[tuple[list[int], int]] = []
    for _ in range(400):
        prompt = rng.integers(0, 3, rng.integers(1, 20)).tolist()
        noise = rng.integers(0, 3, rng.integers(0, 12)).tolist()
        period = int(rng.integers(1, min(MAX_PERIOD, max_period + 2) + 1))
        stretch = rng.integers(0, 3, period).tolist()
        copies = min(repeats + int(rng.integers(-1, 2)), 250 // period)
        part = stretch[: rng.integers(0, period)]
        text = noise + stretch * copies + part
        if rng.random() < 0.2 and text:
            text[int(rng.integers(0, len(text)))] ^= 1
        rows.append((prompt + text, len(text)))
    expected = [is_loop(tokens, number, max_period, repeats) for tokens, number in rows]
    assert looping(rows, max_period, repeats) == expected
    assert 20 < sum(expected) < 380


def test_the_longest_loop() -> None:
    """The longest period, as often as the window holds it."""
    repeats = LOOP_WINDOW // MAX_PERIOD
    tokens = [*range(MAX_PERIOD)] * repeats
    rows = [(tokens, len(tokens)), ([99, *tokens[1:]], len(tokens))]
    assert looping(rows, MAX_PERIOD, repeats) == [True, False]
