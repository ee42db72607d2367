"""Filters of the tokens that truncation kept: `xtc` and `adaptive_p`."""

import jax
import jax.numpy as jnp

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.draw import STREAM_XTC, uniforms
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import MAX_WIDTH, number, section
from entropix_jax.sampler.state import DrawnToken

_PEAK, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3


def exclude(logits: jax.Array, ctx: Context) -> jax.Array:
    """With probability `probability` per step, removes all tokens with a probability of at least
    `threshold` except the least likely of them (Weidmann 2024, "Exclude Top Choices"). Of equally
    likely tokens the one with the highest id stays."""
    own = ctx.settings.own["xtc"]
    numbers = uniforms(ctx.key, ctx.length, ctx.attempt, jnp.int32(STREAM_XTC), MAX_WIDTH + 1)
    acts = numbers[ctx.branch + 1] < own.probability
    p = jax.nn.softmax(logits)
    top = (p >= own.threshold) & (logits > -jnp.inf)
    ids = jnp.arange(p.shape[0], dtype=jnp.int32)
    last = p.shape[0] - 1 - jnp.argmin(jnp.where(top, p, jnp.inf)[::-1])
    return jnp.where(acts & top & (ids != last), -jnp.inf, logits)


def aim(logits: jax.Array, ctx: Context) -> jax.Array:
    """Prefers tokens with a given probability (MrJackSpade 2026, "Adaptive-P", as in llama.cpp).
    The logits become

        5 - 10 d^2 / (1 + d)    with d = |p - aim| / 0.3, aim = target - e, from 0 to 1

    The state e, float32, starts at 0. It is a running mean of the drawn tokens' probability above
    the target.
    """
    wanted = jnp.clip(ctx.settings.own["adaptive_p"].target - ctx.states["adaptive_p"], 0.0, 1.0)
    distance = jnp.abs(jax.nn.softmax(logits) - wanted) / _WIDTH
    return _PEAK - _SHARPNESS * jnp.square(distance) / (1.0 + distance)


def count_excess(drawn: DrawnToken, ctx: Context) -> jax.Array:
    """Counts the probability that the token had before this filter."""
    own, before = ctx.settings.own["adaptive_p"], ctx.states["adaptive_p"]
    prob = jax.nn.softmax(drawn.inputs["adaptive_p"])[drawn.token]
    excess = own.decay * before + (1.0 - own.decay) * (prob - own.target)
    return jnp.where(own.target < 0, before, excess)


XTC = Mechanism(
    "xtc",
    settings=section(probability=number(0.0, 1.0), threshold=number(0.0, 1.0)),
    reweigh=exclude,
    active=lambda settings: settings.own["xtc"].probability > 0,
)
ADAPTIVE_P = Mechanism(
    "adaptive_p",
    settings=section(target=number(-1.0, 1.0), decay=number(0.0, 0.99)),  # target below 0: off
    init=lambda: jnp.float32(0.0),
    reweigh=aim,
    active=lambda settings: settings.own["adaptive_p"].target >= 0,
    learn=count_excess,
)
