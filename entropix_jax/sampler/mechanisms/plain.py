"""Mechanisms that only draw: `argmax`, `sample`, `explore`, `resample`, `edt`, `dynatemp` and
`forking`."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, Proposal, draw, scaled_top_k, to_int
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COEFFICIENT, TEMPERATURE, number
from entropix_jax.stats import LN2


@struct.dataclass
class ExploreSettings:
    """T = min(temperature_max, T0 * (temperature_scale + temperature_interaction * I));
    k = max(top_k_min, floor(k0 * (1 + top_k_disagreement * (1 - A))))."""

    temperature_scale: jax.Array = number(*COEFFICIENT)
    temperature_interaction: jax.Array = number(*COEFFICIENT)
    temperature_max: jax.Array = number(*TEMPERATURE)
    top_k_disagreement: jax.Array = number(*COEFFICIENT)
    top_k_min: jax.Array = number(1, 2**31 - 1, integer=True)


@struct.dataclass
class ResampleSettings:
    """T = max(temperature_min, T0 * (temperature_scale + temperature_attn_varentropy * Va));
    top_p = max(top_p_min, p0 - top_p_attn_entropy * Ea)."""

    temperature_scale: jax.Array = number(*COEFFICIENT)
    temperature_attn_varentropy: jax.Array = number(*COEFFICIENT)
    temperature_min: jax.Array = number(*TEMPERATURE)
    top_p_attn_entropy: jax.Array = number(*COEFFICIENT)
    top_p_min: jax.Array = number(1e-6, 1.0)


@struct.dataclass
class EdtSettings:
    """T = T0 * base^(theta / h), h in nats."""

    base: jax.Array = number(1e-6, 1.0)
    theta: jax.Array = number(0.0, 100.0)


@struct.dataclass
class DynatempSettings:
    """T = temperature_min + (temperature_max - temperature_min) * (h / log2 V)^exponent."""

    temperature_min: jax.Array = number(*TEMPERATURE)
    temperature_max: jax.Array = number(*TEMPERATURE)
    exponent: jax.Array = number(0.0, 100.0)


@struct.dataclass
class ForkingSettings:
    """T = temperature_high where h is above the threshold, else temperature_low."""

    threshold: jax.Array = number(0.0, LARGEST)  # bits
    temperature_high: jax.Array = number(*TEMPERATURE)
    temperature_low: jax.Array = number(*TEMPERATURE)


def argmax(ctx: Context) -> Proposal:
    """The most likely token."""
    return draw("argmax", ctx, temperature=0.0)


def sample(ctx: Context) -> Proposal:
    """One draw at the base values: what every sampler without entropy does."""
    return draw("sample", ctx)


def explore(ctx: Context) -> Proposal:
    """One draw, warmer with the interaction strength and wider where the heads disagree."""
    own: ExploreSettings = ctx.settings.own["explore"]
    scale = own.temperature_scale + own.temperature_interaction * ctx.metrics.interaction_strength
    widening = 1.0 + own.top_k_disagreement * (1.0 - ctx.metrics.agreement)
    top_k = jnp.floor(ctx.settings.base.top_k.astype(jnp.float32) * widening)
    return draw(
        "explore",
        ctx,
        temperature=jnp.minimum(own.temperature_max, ctx.settings.base.temperature * scale),
        top_k=scaled_top_k(ctx, jnp.maximum(own.top_k_min, to_int(top_k))),
    )


def resample(ctx: Context) -> Proposal:
    """One hot draw from a nucleus that narrows with the attention entropy."""
    own: ResampleSettings = ctx.settings.own["resample"]
    scale = own.temperature_scale + own.temperature_attn_varentropy * ctx.metrics.attn_varentropy
    top_p = ctx.settings.base.top_p - own.top_p_attn_entropy * ctx.metrics.attn_entropy
    return draw(
        "resample",
        ctx,
        temperature=jnp.maximum(own.temperature_min, ctx.settings.base.temperature * scale),
        top_p=jnp.maximum(own.top_p_min, top_p),
    )


def edt(ctx: Context) -> Proposal:
    """One draw at a temperature that falls with the entropy (Zhang et al. 2024, "EDT: Improving
    Large Language Models' Generation by Entropy-based Dynamic Temperature Sampling")."""
    own: EdtSettings = ctx.settings.own["edt"]
    nats = ctx.metrics.entropy * LN2
    exponent = jnp.where(nats > 0, own.theta / nats, jnp.inf)
    # With theta = 0 it is T0 at any entropy; a certain distribution has one outcome anyway.
    cooling = jnp.where(own.theta > 0, own.base**exponent, 1.0)
    return draw("sample", ctx, temperature=ctx.settings.base.temperature * cooling)


def dynatemp(ctx: Context) -> Proposal:
    """One draw at a temperature that rises with the entropy, as a share of the largest possible
    (the dynamic temperature of KoboldCpp and llama.cpp, which take the share of what is left after
    truncation; here it is that of the whole vocabulary V)."""
    own: DynatempSettings = ctx.settings.own["dynatemp"]
    share = jnp.clip(ctx.metrics.entropy / math.log2(max(ctx.log_probs.shape[0], 2)), 0.0, 1.0)
    span = own.temperature_max - own.temperature_min
    return draw("sample", ctx, temperature=own.temperature_min + span * share**own.exponent)


def forking(ctx: Context) -> Proposal:
    """One draw at a temperature of its own where the text may fork (Wang et al. 2025, "Beyond the
    80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning")."""
    own: ForkingSettings = ctx.settings.own["forking"]
    forks = ctx.metrics.entropy > own.threshold
    temperature = jnp.where(forks, own.temperature_high, own.temperature_low)
    return draw("sample", ctx, temperature=temperature)


ARGMAX = Mechanism("argmax", argmax)
SAMPLE = Mechanism("sample", sample)
EXPLORE = Mechanism("explore", explore, ExploreSettings)
RESAMPLE = Mechanism("resample", resample, ResampleSettings)
EDT = Mechanism("edt", edt, EdtSettings)
DYNATEMP = Mechanism("dynatemp", dynatemp, DynatempSettings)
FORKING = Mechanism("forking", forking, ForkingSettings)
