"""Arms that only draw: `argmax`, `sample`, `explore`, `resample`, `adaptive`, `edt`, `dynatemp` and
`forking`.

In formulas h is the entropy (bits) and u the varentropy (bits^2) of the next token's distribution;
Ea, Va, A and I are the attention's entropy, its variance over the heads, the heads' agreement and
their interaction strength, as `[metrics]` chooses them. T0, k0, p0, m0 are the values of `[base]`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.names import LARGEST
from entropix_jax.sampler import context
from entropix_jax.sampler.context import Context, draw
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    MAX_DRAWS,
    TEMPERATURE,
    number,
    section,
)
from entropix_jax.sampler.state import Proposal
from entropix_jax.stats import LN2

_SMALLEST = 1e-6  # a threshold of 0 is no unit


@struct.dataclass
class AdaptiveSettings:
    """The coefficients of the formulas, the number of candidates, and the weights of the reported
    confidence."""

    draws: jax.Array = number(1, MAX_DRAWS, integer=True)
    most: jax.Array = number(0.0, LARGEST, default=LARGEST)  # of h and of u, in `metrics.units`
    temperature_logits: jax.Array = number(*COEFFICIENT)
    temperature_attn: jax.Array = number(*COEFFICIENT)
    temperature_agreement: jax.Array = number(*COEFFICIENT)
    top_p_attn_varentropy: jax.Array = number(*COEFFICIENT)
    top_p_min: jax.Array = number(1e-6, 1.0)
    top_k_interaction: jax.Array = number(*COEFFICIENT)
    top_k_agreement: jax.Array = number(*COEFFICIENT)
    top_k_min: jax.Array = number(1, 2**31 - 1, integer=True)
    top_k_max: jax.Array = number(1, 2**31 - 1, integer=True)
    min_p_logits: jax.Array = number(*COEFFICIENT)
    min_p_min: jax.Array = number(0.0, 1.0)
    min_p_max: jax.Array = number(0.0, 1.0)
    confidence_entropy: jax.Array = number(*COEFFICIENT)
    confidence_attn_entropy: jax.Array = number(*COEFFICIENT)
    confidence_varentropy: jax.Array = number(*COEFFICIENT)
    confidence_attn_varentropy: jax.Array = number(*COEFFICIENT)
    confidence_agreement: jax.Array = number(*COEFFICIENT)
    confidence_interaction: jax.Array = number(*COEFFICIENT)


def scaled_top_k(
    ctx: Context,
    factor: jax.Array,
    to_whole: Callable[[jax.Array], jax.Array],
    least: jax.Array,
    most: int | jax.Array = COUNT[1],
) -> jax.Array:
    """Returns the base top-k times a factor, as an integer and clipped; 0 if top-k is off."""
    base = ctx.settings.base.top_k
    scaled = jnp.clip(to_whole(base.astype(jnp.float32) * factor), 0.0, 2.0**30)
    return jnp.where(base == 0, 0, jnp.clip(scaled.astype(jnp.int32), least, most))


def argmax(ctx: Context) -> Proposal:
    """The most likely token."""
    return draw(context.ARGMAX, ctx, temperature=0.0)


def sample(ctx: Context) -> Proposal:
    """One draw at the base values."""
    return draw(context.SAMPLE, ctx)


def explore(ctx: Context) -> Proposal:
    """One draw, warmer with the interaction strength and wider where the heads disagree:

    T = min(temperature_max, T0 * (temperature_scale + temperature_interaction * I))
    k = max(top_k_min, floor(k0 * (1 + top_k_disagreement * (1 - A))))
    """
    own = ctx.settings.own["explore"]
    scale = own.temperature_scale + own.temperature_interaction * ctx.metrics.interaction_strength
    widening = 1.0 + own.top_k_disagreement * (1.0 - ctx.metrics.agreement)
    return draw(
        "explore",
        ctx,
        temperature=jnp.minimum(own.temperature_max, ctx.settings.base.temperature * scale),
        top_k=scaled_top_k(ctx, widening, jnp.floor, own.top_k_min),
    )


def resample(ctx: Context) -> Proposal:
    """One hot draw from a nucleus that narrows with the attention entropy:

    T = max(temperature_min, T0 * (temperature_scale + temperature_attn_varentropy * Va))
    top_p = max(top_p_min, p0 - top_p_attn_entropy * Ea)
    """
    own = ctx.settings.own["resample"]
    scale = own.temperature_scale + own.temperature_attn_varentropy * ctx.metrics.attn_varentropy
    top_p = ctx.settings.base.top_p - own.top_p_attn_entropy * ctx.metrics.attn_entropy
    return draw(
        "resample",
        ctx,
        temperature=jnp.maximum(own.temperature_min, ctx.settings.base.temperature * scale),
        top_p=jnp.maximum(own.top_p_min, top_p),
    )


def edt(ctx: Context) -> Proposal:
    """One draw at a temperature that falls with the entropy, T0 * base^(theta / h), h in nats
    (Zhang et al. 2024, "EDT: Improving Large Language Models' Generation by Entropy-based Dynamic
    Temperature Sampling")."""
    own = ctx.settings.own["edt"]
    nats = ctx.metrics.entropy * LN2
    exponent = jnp.where(nats > 0, own.theta / nats, jnp.inf)
    # With theta = 0 it is T0 at any entropy; a certain distribution has one outcome anyway.
    cooling = jnp.where(own.theta > 0, own.base**exponent, 1.0)
    return draw(context.SAMPLE, ctx, temperature=ctx.settings.base.temperature * cooling)


def dynatemp(ctx: Context) -> Proposal:
    """One draw at a temperature that rises with the entropy's share of the largest possible,
    temperature_min + (temperature_max - temperature_min) * (h / log2 V)^exponent (the dynamic
    temperature of KoboldCpp and llama.cpp, which take the share after truncation)."""
    own = ctx.settings.own["dynatemp"]
    share = jnp.clip(ctx.metrics.entropy / math.log2(max(ctx.log_probs.shape[0], 2)), 0.0, 1.0)
    span = own.temperature_max - own.temperature_min
    return draw(context.SAMPLE, ctx, temperature=own.temperature_min + span * share**own.exponent)


def forking(ctx: Context) -> Proposal:
    """One draw, at a separate temperature if the entropy is high (Wang et al. 2025, "Beyond the
    80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning")."""
    own = ctx.settings.own["forking"]
    forks = ctx.metrics.entropy > own.threshold
    temperature = jnp.where(forks, own.temperature_high, own.temperature_low)
    return draw(context.SAMPLE, ctx, temperature=temperature)


def adaptive(ctx: Context) -> Proposal:
    """Several draws; the candidate that is most likely under the unmodified logits is kept.

    With U = h + u, each at most `most`, and Ua = Ea + Va (`metrics.units` has h and u in bits and
    bits^2, or as multiples of the thresholds h2 and u2):

        T     = T0 * (1 + temperature_logits * U + temperature_attn * Ua
                      - temperature_agreement * A)
        top_p = clip(p0 * (1 + top_p_attn_varentropy * Va), top_p_min, 1)
        k     = clip(round(k0 * (1 + top_k_interaction * I - top_k_agreement * A)),
                     top_k_min, top_k_max)
        min_p = clip(m0 * (1 - min_p_logits * U), min_p_min, min_p_max)
    """
    own: AdaptiveSettings = ctx.settings.own["adaptive"]
    base, metrics = ctx.settings.base, ctx.metrics
    logits_uncertainty = sum(_uncertainty(ctx))
    attn_uncertainty = metrics.attn_entropy + metrics.attn_varentropy
    warming = (
        1.0
        + own.temperature_logits * logits_uncertainty
        + own.temperature_attn * attn_uncertainty
        - own.temperature_agreement * metrics.agreement
    )
    widening = (
        1.0
        + own.top_k_interaction * metrics.interaction_strength
        - own.top_k_agreement * metrics.agreement
    )
    top_k = scaled_top_k(ctx, widening, jnp.round, own.top_k_min, own.top_k_max)
    top_p = base.top_p * (1.0 + own.top_p_attn_varentropy * metrics.attn_varentropy)
    min_p = base.min_p * (1.0 - own.min_p_logits * logits_uncertainty)
    return draw(
        "adaptive",
        ctx,
        temperature=base.temperature * warming,
        top_k=top_k,
        top_p=jnp.clip(top_p, own.top_p_min, 1.0),
        min_p=jnp.clip(min_p, own.min_p_min, own.min_p_max),
        num_candidates=own.draws,
    )


def confidence(ctx: Context) -> jax.Array:
    """Returns the documents' confidence score of one row's step. It is the same for every
    candidate, so it is reported and changes nothing."""
    own: AdaptiveSettings = ctx.settings.own["adaptive"]
    metrics = ctx.metrics
    entropy, varentropy = _uncertainty(ctx)
    return (
        own.confidence_entropy * (1.0 - entropy)
        + own.confidence_attn_entropy * (1.0 - metrics.attn_entropy)
        + own.confidence_varentropy * (1.0 - varentropy)
        + own.confidence_attn_varentropy * (1.0 - metrics.attn_varentropy)
        + own.confidence_agreement * metrics.agreement
        + own.confidence_interaction * metrics.interaction_strength
    )


def _uncertainty(ctx: Context) -> tuple[jax.Array, jax.Array]:
    """Returns one row's entropy and varentropy in the sampler's units, each at most `most`."""
    own: AdaptiveSettings = ctx.settings.own["adaptive"]
    units = jnp.maximum(ctx.thresholds, _SMALLEST)
    _, h2, _, u2 = jnp.where(ctx.settings.in_thresholds, units, 1.0)
    return (
        jnp.minimum(ctx.metrics.entropy / h2, own.most),
        jnp.minimum(ctx.metrics.varentropy / u2, own.most),
    )


ARGMAX = Mechanism(context.ARGMAX, argmax)
SAMPLE = Mechanism(context.SAMPLE, sample)
EXPLORE = Mechanism(
    "explore",
    explore,
    section(
        temperature_scale=number(*COEFFICIENT),
        temperature_interaction=number(*COEFFICIENT),
        temperature_max=number(*TEMPERATURE),
        top_k_disagreement=number(*COEFFICIENT),
        top_k_min=number(1, 2**31 - 1, integer=True),
    ),
)
RESAMPLE = Mechanism(
    "resample",
    resample,
    section(
        temperature_scale=number(*COEFFICIENT),
        temperature_attn_varentropy=number(*COEFFICIENT),
        temperature_min=number(*TEMPERATURE),
        top_p_attn_entropy=number(*COEFFICIENT),
        top_p_min=number(1e-6, 1.0),
    ),
)
EDT = Mechanism("edt", edt, section(base=number(1e-6, 1.0), theta=number(0.0, 100.0)))
DYNATEMP = Mechanism(
    "dynatemp",
    dynatemp,
    section(
        temperature_min=number(*TEMPERATURE),
        temperature_max=number(*TEMPERATURE),
        exponent=number(0.0, 100.0),
    ),
)
FORKING = Mechanism(
    "forking",
    forking,
    section(
        threshold=number(0.0, LARGEST),  # bits
        temperature_high=number(*TEMPERATURE),
        temperature_low=number(*TEMPERATURE),
    ),
)
ADAPTIVE = Mechanism("adaptive", adaptive, AdaptiveSettings, confidence=confidence)
