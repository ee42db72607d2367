"""`adaptive_p`: prefers tokens of a certain probability, and moves the one it aims at against what
the row drew before, so that the mean comes to the target (MrJackSpade 2026, "Adaptive-P", as in
llama.cpp). The logits of what truncation has left become

    5 - 10 d^2 / (1 + d)    with d = |p - aim| / 0.3, aim = target - e, from 0 to 1

where e, at first 0, is a running mean of how far the tokens drawn were above the target.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import number
from entropix_jax.sampler.state import DrawnToken

_PEAK, _SHARPNESS, _WIDTH = 5.0, 10.0, 0.3


@struct.dataclass
class AdaptivePSettings:
    """The probability that is aimed at, and how slowly the mean forgets."""

    target: jax.Array = number(-1.0, 1.0)  # below 0: off
    decay: jax.Array = number(0.0, 0.99)  # of an earlier token's weight, at each later one


@struct.dataclass
class AdaptivePState:
    """Of one row."""

    excess: jax.Array  # float32, e


def aim(logits: jax.Array, ctx: Context) -> jax.Array:
    """Replaces the logits by how near their probabilities are to the one aimed at."""
    own: AdaptivePSettings = ctx.settings.own["adaptive_p"]
    wanted = jnp.clip(own.target - ctx.own["adaptive_p"].excess, 0.0, 1.0)
    distance = jnp.abs(jax.nn.softmax(logits) - wanted) / _WIDTH
    return _PEAK - _SHARPNESS * jnp.square(distance) / (1.0 + distance)


def learn(drawn: DrawnToken, ctx: Context) -> AdaptivePState:
    """Counts the probability that the token had before this transform."""
    own: AdaptivePSettings = ctx.settings.own["adaptive_p"]
    before = ctx.own["adaptive_p"].excess
    prob = jax.nn.softmax(drawn.given["adaptive_p"])[drawn.token]
    excess = own.decay * before + (1.0 - own.decay) * (prob - own.target)
    return AdaptivePState(excess=jnp.where(own.target < 0, before, excess))


ADAPTIVE_P = Mechanism(
    "adaptive_p",
    settings=AdaptivePSettings,
    init=lambda: AdaptivePState(excess=jnp.float32(0.0)),
    reweigh=aim,
    active=lambda settings: settings.own["adaptive_p"].target >= 0,
    learn=learn,
)
