"""`adaptive`: several draws under parameters that follow all metrics; the likeliest is kept.

With U = h + u, each at most `most`, and Ua = Ea + Va (`metrics.units` has h and u in bits and
bits^2, or as multiples of the thresholds h2 and u2):

    T     = T0 * (1 + temperature_logits * U + temperature_attn * Ua - temperature_agreement * A)
    top_p = clip(p0 * (1 + top_p_attn_varentropy * Va), top_p_min, 1)
    k     = clip(round(k0 * (1 + top_k_interaction * I - top_k_agreement * A)),
                 top_k_min, top_k_max)
    min_p = clip(m0 * (1 - min_p_logits * U), min_p_min, min_p_max)
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, Proposal, draw, scaled_top_k, to_int
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COEFFICIENT, MAX_DRAWS, number

_SMALLEST = 1e-6  # a threshold of 0 is no unit


@struct.dataclass
class AdaptiveSettings:
    """The coefficients of the formulas, the number of candidates, and the weights of the reported
    confidence."""

    draws: jax.Array = number(1, MAX_DRAWS, integer=True)
    most: jax.Array = number(0.0, LARGEST)  # of h and of u, in `metrics.units`
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


def adaptive(ctx: Context) -> Proposal:
    """Several draws; the candidate that is likeliest under the unmodified logits is kept."""
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
    top_k = to_int(jnp.round(base.top_k.astype(jnp.float32) * widening))
    top_p = base.top_p * (1.0 + own.top_p_attn_varentropy * metrics.attn_varentropy)
    min_p = base.min_p * (1.0 - own.min_p_logits * logits_uncertainty)
    return draw(
        "adaptive",
        ctx,
        temperature=base.temperature * warming,
        top_k=scaled_top_k(ctx, jnp.clip(top_k, own.top_k_min, own.top_k_max)),
        top_p=jnp.clip(top_p, own.top_p_min, 1.0),
        min_p=jnp.clip(min_p, own.min_p_min, own.min_p_max),
        draws=own.draws,
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


ADAPTIVE = Mechanism("adaptive", adaptive, AdaptiveSettings)
