"""What each regime does: an arm turns one row's metrics into a proposal, a handful of scalars.

Arms are branches of a `lax.switch`. Under `vmap` every branch runs for every row, so an arm
computes scalars only; whatever is expensive belongs to the step that carries a proposal out. All
numbers come from the traced parameters; the formulas are those of documents 000, 001, 002 and 004,
which the README lists among its sources.

An arm of one's own is a function of the same form that returns `draw(...)`; `Sampler.with_arm` puts
it beside these.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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

_LN2 = math.log(2.0)


@struct.dataclass
class Proposal:
    """How a row's next token is to be drawn; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into ACTIONS
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off
    draws: jax.Array  # int32, candidates
    rule: jax.Array  # int32, index into RULES; top_k, top_p and min_p belong to `nucleus`


@struct.dataclass
class RowView:
    """What an arm may know of its row besides the metrics."""

    may_inject: jax.Array  # bool: a thought is configured, fits the budgets, and none cools down
    may_branch: jax.Array  # bool: the row's budget of branches is not spent
    may_retract: jax.Array  # bool: the last token was drawn, and the budgets are not spent


Arm = Callable[[Metrics, SamplerParams, RowView], Proposal]


def propose(
    arm: jax.Array,
    metrics: Metrics,
    params: SamplerParams,
    row: RowView,
    arms: tuple[Arm, ...],
) -> Proposal:
    """The proposal of `arms[arm]` for one row; `metrics` are `as_seen`."""
    proposal: Proposal = lax.switch(arm, [partial(one, metrics, params, row) for one in arms])
    return proposal


def as_seen(metrics: Metrics, params: SamplerParams) -> Metrics:
    """What the arms see: `attn_entropy_norm` and `agreement_published` stand under the plain names
    where the parameters say so."""
    return replace(
        metrics,
        attn_entropy=jnp.where(
            params.attn_entropy_normalised, metrics.attn_entropy_norm, metrics.attn_entropy
        ),
        agreement=jnp.where(
            params.agreement_published, metrics.agreement_published, metrics.agreement
        ),
    )


def argmax(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """The most likely token."""
    return draw(ARGMAX, params, temperature=0.0)


def inject(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """A configured thought, or, while one cools down or none fits, a warmer draw."""
    p = params.inject
    scale = p.temperature_scale + p.temperature_attn_entropy * metrics.attn_entropy
    return draw(
        jnp.where(row.may_inject, INJECT, SAMPLE),
        params,
        temperature=jnp.minimum(p.temperature_max, params.base.temperature * scale),
    )


def explore(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One draw, warmer with the interaction strength and wider where the heads disagree."""
    p = params.explore
    scale = p.temperature_scale + p.temperature_interaction * metrics.interaction_strength
    widening = 1.0 + p.top_k_disagreement * (1.0 - metrics.agreement)
    top_k = jnp.floor(params.base.top_k.astype(jnp.float32) * widening)
    return draw(
        EXPLORE,
        params,
        temperature=jnp.minimum(p.temperature_max, params.base.temperature * scale),
        top_k=_or_off(params, jnp.maximum(p.top_k_min, _to_int(top_k))),
    )


def branch(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """The best of several futures, or, with the budget of branches spent, what `explore` does.

    The proposal holds what the candidates are chosen by: temperature, most candidates (`top_k`),
    `top_p` and `min_p`.
    """
    p = params.branch
    branching = draw(
        BRANCH, params, temperature=p.temperature, top_k=p.width, top_p=p.top_p, min_p=p.min_p
    )
    return _either(row.may_branch, branching, explore(metrics, params, row))


def resample(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One hot draw from a nucleus that narrows with the attention entropy."""
    p = params.resample
    scale = p.temperature_scale + p.temperature_attn_varentropy * metrics.attn_varentropy
    top_p = params.base.top_p - p.top_p_attn_entropy * metrics.attn_entropy
    return draw(
        RESAMPLE,
        params,
        temperature=jnp.maximum(p.temperature_min, params.base.temperature * scale),
        top_p=jnp.maximum(p.top_p_min, top_p),
    )


def backspace(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """The last token is taken back, or, where it may not be, what `resample` does.

    How its position is drawn again is told by the proposal that it was drawn with.
    """
    return _either(row.may_retract, draw(BACKSPACE, params), resample(metrics, params, row))


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
    return draw(
        ADAPTIVE,
        params,
        temperature=base.temperature * warming,
        top_k=_or_off(params, jnp.clip(top_k, 1, p.top_k_max)),
        top_p=jnp.clip(top_p, p.top_p_min, 1.0),
        min_p=jnp.clip(min_p, p.min_p_min, p.min_p_max),
        draws=p.draws,
    )


def edt(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One draw at a temperature that falls as the entropy does: T0 * base^(theta / h), h in nats
    (Zhang et al. 2024, "EDT: Improving Large Language Models' Generation by Entropy-based Dynamic
    Temperature Sampling")."""
    nats = metrics.entropy * _LN2
    exponent = jnp.where(nats > 0, params.edt.theta / nats, jnp.inf)
    # With theta = 0 it is T0 at any entropy; a certain distribution has one outcome anyway.
    cooling = jnp.where(params.edt.theta > 0, params.edt.base**exponent, 1.0)
    return draw(SAMPLE, params, temperature=params.base.temperature * cooling)


def sample(metrics: Metrics, params: SamplerParams, row: RowView) -> Proposal:
    """One draw at the base values: what every sampler without entropy does."""
    return draw(SAMPLE, params)


ARMS: dict[str, Arm] = {
    arm.__name__: arm
    for arm in (argmax, inject, explore, branch, resample, backspace, adaptive, sample, edt)
}


def confidence(metrics: Metrics, params: SamplerParams) -> jax.Array:
    """The documents' confidence score of a step, from metrics `as_seen`. It is the same for every
    candidate, so it cannot change which one is kept: it is reported."""
    p = params.adaptive
    return (
        p.confidence_entropy * (1.0 - metrics.entropy)
        + p.confidence_attn_entropy * (1.0 - metrics.attn_entropy)
        + p.confidence_varentropy * (1.0 - metrics.varentropy)
        + p.confidence_attn_varentropy * (1.0 - metrics.attn_varentropy)
        + p.confidence_agreement * metrics.agreement
        + p.confidence_interaction * metrics.interaction_strength
    )


def draw(
    action: int | jax.Array,
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
        rule=params.truncation.rule,
    )


def _either(condition: jax.Array, one: Proposal, other: Proposal) -> Proposal:
    chosen: Proposal = jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
    return chosen


def _or_off(params: SamplerParams, top_k: jax.Array) -> jax.Array:
    """A base top-k of 0 is "off", and stays so: it has no width that could be scaled."""
    return jnp.where(params.base.top_k == 0, 0, top_k)


def _to_int(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0.0, 2.0**30).astype(jnp.int32)
