"""Each arm's formulas: document 001's worked scenarios, and the float64 formulas of a replay."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.replay import formulas
from entropix_jax.sampler.context import Context, as_configured
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.mechanisms.plain import confidence
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Proposal
from entropix_jax.sampler.step import propose
from tests.support.samplers import (
    ARMS,
    LITERAL,
    RULES,
    VOCAB_SIZE,
    batch_of,
    context,
    metrics_at,
    metrics_of,
    params_of,
    scalars,
)

Values = Mapping[str, Any]


def proposal_at(
    arm: str | jax.Array, point: Metrics, params: SamplerSettings, **row: Any
) -> Proposal:
    """Returns the proposal of an arm, given by name or index, for one row."""
    index = jnp.int32(ARMS.index(arm)) if isinstance(arm, str) else arm
    return propose(index, context(point, params, **row))


def published(**metrics: float) -> Metrics:
    """Returns a point of document 001. Metrics that its arms must not read are 9."""
    return metrics_of(agreement=9.0, attn_entropy_norm=9.0, **metrics)


# Document 001, "Example Generations": metrics and proposals. For `explore` the factor is 1.44 and
# top-k is floor(27 * 1.2). For `resample`, 0.666 * 2.45 is below the lower bound.
LOW = published(entropy=0.05, varentropy=0.02)
UNDECIDED = published(entropy=3.5, varentropy=0.08)
FORKED = published(entropy=2.1, varentropy=5.5, interaction_strength=0.8, agreement_published=0.6)
HIGH = published(entropy=5.5, varentropy=5.2, attn_varentropy=0.9, attn_entropy=1.0)
BETWEEN = published(
    entropy=2.8,
    varentropy=1.5,
    attn_entropy=1.9,
    attn_varentropy=0.7,
    agreement_published=0.6,
    interaction_strength=0.75,
)
SCENARIOS: list[tuple[Metrics, str, str, dict[str, float]]] = [
    (LOW, "lelv", "argmax", {"temperature": 0, "num_candidates": 1}),
    (UNDECIDED, "helv", "inject", {}),
    (FORKED, "lehv", "explore", {"temperature": 0.666 * 1.44, "top_k": 32, "num_candidates": 1}),
    (HIGH, "hehv", "resample", {"temperature": 2.0, "top_p": 0.7, "top_k": 27, "min_p": 0.03}),
    (
        BETWEEN,
        "mid",
        "adaptive",
        {"temperature": 1.7915, "top_p": 0.963, "top_k": 30, "num_candidates": 12},
    ),
]


@pytest.mark.parametrize(("point", "regime", "action", "expected"), SCENARIOS)
def test_document_001(point: Metrics, regime: str, action: str, expected: dict[str, float]) -> None:
    params = params_of("document-001")
    found = classify(point, params)
    proposal = proposal_at(params.arms[found], point, params)
    assert (REGIMES[int(found)], ACTIONS[int(proposal.action)]) == (regime, action)
    for name, value in expected.items():
        assert float(getattr(proposal, name)) == pytest.approx(value, rel=3e-5), name
    if action == "adaptive":
        own = confidence(context(point, params))
        assert float(own) == pytest.approx(0.36, rel=1e-5)


# The oracle: the formulas of a replay, in float64


def random_point(rng: np.random.Generator) -> dict[str, float]:
    highest = {"entropy": 8.0, "varentropy": 8.0, "attn_entropy": 6.0, "attn_varentropy": 3.0}
    highest |= {"agreement_published": 0.2, "interaction_strength": 4.0}
    names = Metrics.__dataclass_fields__
    return {name: float(np.float32(rng.uniform(0, highest.get(name, 1.0)))) for name in names}


# Values that disable all clipping, so that each coefficient has an effect.
WIDE: Values = {
    "explore.temperature_max": 100.0,
    "inject.temperature_max": 100.0,
    "resample.temperature_min": 0.0,
    "resample.top_p_min": 1e-6,
    "adaptive.top_k_max": 10_000,
    "adaptive.min_p_min": 0.0,
}


def random_values(rng: np.random.Generator) -> dict[str, Any]:
    """Returns settings with random coefficients, and random values of the arms' other settings."""
    coefficients = [key for key, number in scalars().items() if number.low == -100.0]
    return {
        **{key: float(rng.uniform(0.05, 1.5)) for key in coefficients},
        **{key: float(rng.uniform(0.2, 1)) for key in ("base.top_p", "branch.top_p", "edt.base")},
        **{f"{arm}.temperature": float(rng.uniform(0.1, 2)) for arm in ("base", "branch")},
        "base.top_k": int(rng.choice([0, 1, 27, 300])),
        "base.min_p": float(rng.choice([0.0, 0.03, 0.4])),
        "adaptive.draws": int(rng.integers(1, 17)),
        "branch.width": int(rng.integers(1, 9)),
        "branch.min_p": float(rng.uniform(0, 1)),
        "adaptive.top_k_min": int(rng.choice([1, 20])),
        "edt.theta": float(rng.choice([0.0, 0.1, 2.0])),
        **{f"dynatemp.temperature_{end}": float(rng.uniform(0, 3)) for end in ("min", "max")},
        "dynatemp.exponent": float(rng.choice([0.0, 0.5, 1.0, 2.0])),
        "forking.threshold": float(rng.uniform(0, 8)),
        **{f"forking.temperature_{side}": float(rng.uniform(0, 3)) for side in ("low", "high")},
        "truncation.rule": str(rng.choice(RULES)),
        "metrics.attn_entropy": str(rng.choice(["normalised", "raw"])),
        "metrics.agreement": str(rng.choice(["corrected", "published"])),
        "metrics.units": str(rng.choice(["bits", "thresholds"])),
        "adaptive.most": float(rng.choice([0.5, 2.0, 1e6])),
        **(WIDE if rng.random() < 0.5 else {}),
    }


@jax.jit
@jax.vmap
def propose_each(
    arm: jax.Array, metrics: Metrics, params: SamplerSettings, row: Context
) -> tuple[Proposal, jax.Array]:
    """Returns each row's proposal and confidence."""
    ctx = replace(row, metrics=as_configured(metrics, params), settings=params)
    return propose(arm, ctx), confidence(ctx)


def test_arms_equal_the_oracle() -> None:
    """Each row of the batch has its own arm, settings and metrics. Permissions for the actions of
    other arms have no effect."""
    rng = np.random.default_rng(0)
    base = load_sampler(LITERAL)
    arms = [arm for arm in ARMS for _ in range(40)]
    samplers = [base.with_values(random_values(rng)) for _ in arms]
    points = [random_point(rng) for _ in arms]
    for row in range(0, len(arms), 40):
        points[row]["entropy"] = 0.0
    actions = ("inject", "lookup", "branch", "clarify", "backspace")
    may = [{action: bool(rng.random() < 0.5) for action in actions} for _ in arms]
    thresholds = rng.choice([0.0, 0.3, 2.5, 7.0], (len(arms), 4)).tolist()
    params = batch_of(*(params_of(LITERAL, s.values) for s in samplers))
    indices = jnp.asarray([ARMS.index(arm) for arm in arms], jnp.int32)
    rows = (
        context(None, None, thresholds=own, **each)
        for own, each in zip(thresholds, may, strict=True)
    )
    views = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    proposal, reported = propose_each(indices, metrics_at(points), params, views)
    for row, arm in enumerate(arms):
        v = samplers[row].values
        point = formulas.as_configured(v, points[row], thresholds[row], VOCAB_SIZE)
        expected = formulas.ARMS[arm](v, point, may[row])
        assert ACTIONS[int(proposal.action[row])] == expected.action
        assert int(proposal.top_k[row]) in expected.top_k
        assert int(proposal.num_candidates[row]) == expected.candidates
        for name in ("temperature", "top_p", "min_p"):
            got, wanted = float(getattr(proposal, name)[row]), getattr(expected, name)
            assert got == pytest.approx(wanted, rel=2e-5, abs=2e-5), (row, name)
        wanted = formulas.confidence(v, point)
        assert float(reported[row]) == pytest.approx(wanted, rel=2e-5, abs=2e-5), row


def test_extreme_metrics_stay_within_the_types() -> None:
    """Top-k does not overflow the integer, and the temperature does not become negative."""
    params = params_of(LITERAL, {"adaptive.top_k_max": 2**31 - 1, "base.top_k": 2**31 - 1})
    proposal = proposal_at("adaptive", metrics_of(interaction_strength=1e30), params)
    assert int(proposal.top_k) == 2**30  # larger than any vocabulary, and exact in float32
    cold = params_of(LITERAL, {"adaptive.temperature_agreement": 100.0})
    assert float(proposal_at("adaptive", metrics_of(agreement=1.0), cold).temperature) == 0
