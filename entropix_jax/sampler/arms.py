"""What each regime does: an arm turns one row's metrics into a proposal, a handful of scalars.

Arms are branches of a `lax.switch`. Under `vmap` every branch runs for every row, so an arm
computes scalars only; whatever is expensive belongs to the step that carries a proposal out. All
numbers come from the traced parameters; the formulas are those of documents 000 and 001, which
the README lists among its sources.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.metrics import Metrics
from entropix_jax.sampler.params import SamplerParams

ACTIONS = (
    "argmax",
    "inject",
    "explore",
    "branch",
    "resample",
    "backspace",
    "adaptive",
    "sample",
)
ARGMAX, INJECT, EXPLORE, BRANCH, RESAMPLE, BACKSPACE, ADAPTIVE, SAMPLE = range(len(ACTIONS))


@struct.dataclass
class Proposal:
    """How a row's next token is to be drawn; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into ACTIONS
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off
    draws: jax.Array  # int32, candidates
    confidence: jax.Array  # float32, of the documents' formula, reported in any regime


@struct.dataclass
class RowView:
    """What an arm may know of its row besides the metrics."""

    may_inject: jax.Array  # bool: a thought is configured, fits the budget, and nothing cools down


Arm = Callable[[Metrics, SamplerParams, RowView], Proposal]


def propose(arm: jax.Array, metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """The proposal of the arm with index `arm` for one row.

    The arms see `attn_entropy_norm` and `agreement_published` under the plain names where the
    parameters say so.
    """
    metrics = replace(
        metrics,
        attn_entropy=jnp.where(
            params.attn_entropy_normalised, metrics.attn_entropy_norm, metrics.attn_entropy
        ),
        agreement=jnp.where(
            params.agreement_published, metrics.agreement_published, metrics.agreement
        ),
    )
    return lax.switch(arm, tuple(ARMS.values()), metrics, params, row)


def argmax(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """The most likely token."""
    return _draw(ARGMAX, metrics, params, temperature=0.0)


def inject(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """A configured thought, or, while one cools down or none fits, a warmer draw."""
    p = params.inject
    scale = p.temperature_scale + p.temperature_attn_entropy * metrics.attn_entropy
    return _draw(
        jnp.where(row.may_inject, INJECT, SAMPLE),
        metrics,
        params,
        temperature=jnp.minimum(p.temperature_max, params.base.temperature * scale),
    )


def explore(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One draw, warmer with the interaction strength and wider where the heads disagree."""
    p = params.explore
    scale = p.temperature_scale + p.temperature_interaction * metrics.interaction_strength
    widening = 1.0 + p.top_k_disagreement * (1.0 - metrics.agreement)
    top_k = jnp.floor(params.base.top_k.astype(jnp.float32) * widening)
    return _draw(
        EXPLORE,
        metrics,
        params,
        temperature=jnp.minimum(p.temperature_max, params.base.temperature * scale),
        top_k=_or_off(params, jnp.maximum(p.top_k_min, _to_int(top_k))),
    )


def resample(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One hot draw from a nucleus that narrows with the attention entropy."""
    p = params.resample
    scale = p.temperature_scale + p.temperature_attn_varentropy * metrics.attn_varentropy
    top_p = params.base.top_p - p.top_p_attn_entropy * metrics.attn_entropy
    return _draw(
        RESAMPLE,
        metrics,
        params,
        temperature=jnp.maximum(p.temperature_min, params.base.temperature * scale),
        top_p=jnp.maximum(p.top_p_min, top_p),
    )


def adaptive(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """Several draws under parameters that follow all metrics; the likeliest candidate is kept."""
    p, base = params.adaptive, params.base
    logits_uncertainty = metrics.entropy + metrics.varentropy
    attn_uncertainty = metrics.attn_entropy + metrics.attn_varentropy
    warming = (
        1.0
        + p.temperature_logits * logits_uncertainty
        + p.temperature_attn * attn_uncertainty
        - p.temperature_agreement * metrics.agreement
    )
    widening = (
        1.0
        + p.top_k_interaction * metrics.interaction_strength
        - p.top_k_agreement * metrics.agreement
    )
    top_k = _to_int(jnp.round(base.top_k.astype(jnp.float32) * widening))
    top_p = base.top_p * (1.0 + p.top_p_attn_varentropy * metrics.attn_varentropy)
    min_p = base.min_p * (1.0 - p.min_p_logits * logits_uncertainty)
    return _draw(
        ADAPTIVE,
        metrics,
        params,
        temperature=base.temperature * warming,
        top_k=_or_off(params, jnp.clip(top_k, 1, p.top_k_max)),
        top_p=jnp.clip(top_p, p.top_p_min, 1.0),
        min_p=jnp.clip(min_p, p.min_p_min, p.min_p_max),
        draws=p.draws,
    )


def sample(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One draw at the base values: what every sampler without entropy does."""
    return _draw(SAMPLE, metrics, params)


ARMS: dict[str, Arm] = {
    arm.__name__: arm for arm in (argmax, inject, explore, resample, adaptive, sample)
}


def confidence(metrics: Metrics, params: SamplerParams) -> jax.Array:
    """The documents' confidence score of a step. It is the same for every candidate, so it cannot
    change which one is kept: it is reported."""
    p = params.adaptive
    return (
        p.confidence_entropy * (1.0 - metrics.entropy)
        + p.confidence_attn_entropy * (1.0 - metrics.attn_entropy)
        + p.confidence_varentropy * (1.0 - metrics.varentropy)
        + p.confidence_attn_varentropy * (1.0 - metrics.attn_varentropy)
        + p.confidence_agreement * metrics.agreement
        + p.confidence_interaction * metrics.interaction_strength
    )


def _draw(
    action: int | jax.Array,
    metrics: Metrics,
    params: SamplerParams,
    *,
    temperature: float | jax.Array | None = None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    min_p: jax.Array | None = None,
    draws: int | jax.Array = 1,
) -> Proposal:
    """A proposal with the base values for whatever is not named."""
    base = params.base
    return Proposal(
        action=jnp.asarray(action, jnp.int32),
        temperature=jnp.maximum(base.temperature if temperature is None else temperature, 0.0),
        top_k=base.top_k if top_k is None else top_k,
        top_p=base.top_p if top_p is None else top_p,
        min_p=base.min_p if min_p is None else min_p,
        draws=jnp.asarray(draws, jnp.int32),
        confidence=confidence(metrics, params),
    )


def _or_off(params: SamplerParams, top_k: jax.Array) -> jax.Array:
    """A base top-k of 0 is "off", and stays so: it has no width that could be scaled."""
    return jnp.where(params.base.top_k == 0, 0, top_k)


def _to_int(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0.0, 2.0**30).astype(jnp.int32)
