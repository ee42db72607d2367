"""`xtc`: now and then all likely tokens but the least likely one of them are left out (Weidmann
2024, "Exclude Top Choices")."""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.keys import STREAM_XTC, uniforms
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH
from entropix_jax.sampler.settings import number


@struct.dataclass
class XtcSettings:
    """How often tokens are left out, and from which probability on a token is a top choice."""

    probability: jax.Array = number(0.0, 1.0)  # 0: off
    threshold: jax.Array = number(0.0, 1.0)  # above 0.5 there is one top choice, which stays


def exclude(logits: jax.Array, ctx: Context) -> jax.Array:
    """Leaves out the top choices but the last one, in a step in which a number of the row's own is
    below the probability; of equals the one with the highest id is last."""
    own: XtcSettings = ctx.settings.own["xtc"]
    stream = jnp.full(1, STREAM_XTC, jnp.int32)
    where = ctx.key[None], ctx.length[None], ctx.attempt[None], stream
    acts = uniforms(*where, MAX_WIDTH + 1)[0, ctx.branch + 1] < own.probability
    p = jax.nn.softmax(logits)
    top = (p >= own.threshold) & (logits > -jnp.inf)
    ids = jnp.arange(p.shape[0], dtype=jnp.int32)
    last = p.shape[0] - 1 - jnp.argmin(jnp.where(top, p, jnp.inf)[::-1])
    return jnp.where(acts & top & (ids != last), -jnp.inf, logits)


XTC = Mechanism(
    "xtc",
    settings=XtcSettings,
    reweigh=exclude,
    active=lambda settings: settings.own["xtc"].probability > 0,
)
