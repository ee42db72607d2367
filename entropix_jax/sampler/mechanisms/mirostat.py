"""`mirostat`: top-k, steered to a mean surprise (Basu et al. 2021, "Mirostat: A Neural Text
Decoding Algorithm that Directly Controls Perplexity").

The surprise that it allows for, `mu`, starts at twice the target, and each drawn token moves it
(algorithm 1):

    mu = mu - rate * (surprise - target)
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.filters import keep_top_k
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import number
from entropix_jax.sampler.state import DrawnToken
from entropix_jax.sampler.top import top
from entropix_jax.stats import LN2

ZIPF_TOKENS = 100  # m, the likeliest tokens that Zipf's exponent is measured on


@struct.dataclass
class MirostatSettings:
    """The surprise to steer to, and how fast."""

    target: jax.Array = number(0.0, 100.0)  # tau, bits
    rate: jax.Array = number(0.0, 100.0)  # eta


@struct.dataclass
class MirostatState:
    """Of one row."""

    learnt: jax.Array  # float32, mu - 2 * target, bits


def keep(logits: jax.Array, ctx: Context) -> jax.Array:
    """As many tokens as would have a mean surprise of about `mu` if p followed Zipf's law.

    With `t = ln((i + 1) / i)` and `b = ln(p_i / p_(i+1))` of the m likeliest tokens, the exponent
    is `s = sum t b / sum t^2`; with `epsilon = s - 1` and N possible tokens,
    `k = (epsilon * 2^mu / (1 - N^-epsilon))^(1 / s)`, rounded, from 1 to N. (The authors' program
    takes one token more; their paper does not.)
    """
    own: MirostatSettings = ctx.settings.own["mirostat"]
    mu = 2.0 * own.target + ctx.own["mirostat"].learnt
    size = min(ZIPF_TOKENS, logits.shape[-1])
    first, _ = top(logits, size)
    there = first[1:] > -jnp.inf
    falls = jnp.where(there, first[:-1] - first[1:], 0.0)
    ratios = jnp.where(there, np.log1p(1.0 / np.arange(1, size)).astype(np.float32), 0.0)
    squares = jnp.sum(jnp.square(ratios))
    s = jnp.sum(ratios * falls) / jnp.where(squares > 0, squares, 1.0)
    # A flat top has s = 0, a cold one may have any: what the formula tends to there.
    s = jnp.clip(s, 1e-30, 1e30)
    log_number = jnp.log(jnp.sum(logits > -jnp.inf, dtype=jnp.float32))
    x = (s - 1.0) * log_number
    # epsilon / (1 - N^-epsilon), which is 1 / ln N at epsilon = 0.
    scale = jnp.where(x == 0, 1.0, x / -jnp.expm1(-x)) / log_number
    log_k = (mu * LN2 + jnp.log(scale)) / s
    k = jnp.round(jnp.exp(jnp.minimum(log_k, log_number)))
    return keep_top_k(logits, k.astype(jnp.int32))


def learn(drawn: DrawnToken, ctx: Context) -> MirostatState:
    """Moves `mu` where the token was drawn by this rule."""
    own: MirostatSettings = ctx.settings.own["mirostat"]
    learnt = ctx.own["mirostat"].learnt
    # Of the distribution that was cut.
    drawn_at = ctx.proposal.temperature
    waits = ctx.settings.base.temperature_last & (drawn_at > 0)
    bits = surprise(drawn.logits, jnp.where(waits, 1.0, drawn_at), drawn.token)
    acts = ctx.proposal.rule == ctx.settings.action("mirostat")
    moved = learnt - own.rate * (bits - own.target)
    return MirostatState(learnt=jnp.where(acts, moved, learnt))


def surprise(logits: jax.Array, temperature: jax.Array, token: jax.Array) -> jax.Array:
    """The surprise `-log2 p` of a row's token before any truncation: float32, bits. At temperature
    0 it was certain: 0."""
    greedy = temperature <= 0
    y = (logits - jnp.max(logits)) / jnp.where(greedy, 1.0, temperature)
    return jnp.where(greedy, 0.0, -jax.nn.log_softmax(y)[token] / LN2)


MIROSTAT = Mechanism(
    "mirostat",
    settings=MirostatSettings,
    init=lambda: MirostatState(learnt=jnp.float32(0.0)),
    rule=keep,
    learn=learn,
)
