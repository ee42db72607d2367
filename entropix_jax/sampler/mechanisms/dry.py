"""`dry`: a penalty on the token that would prolong a repetition, which grows with the repetition's
length (Weidmann 2024, "DRY: Don't Repeat Yourself")."""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.history import MAX_MATCH, ends_in, repeated
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, number, texts

MAX_BREAKERS = 16  # texts that no repetition reaches across
MAX_BREAKER = 8  # tokens of one


@struct.dataclass
class DrySettings:
    """A repetition of n tokens costs the next one `multiplier * base^(n - allowed_length)`, of the
    logit, from n = `allowed_length` on."""

    multiplier: jax.Array = number(0.0, 100.0)  # 0: off
    base: jax.Array = number(1.0, 100.0)
    allowed_length: jax.Array = number(1, MAX_MATCH, integer=True)
    window: jax.Array = number(*COUNT, integer=True)  # how many of the last tokens count
    breakers: jax.Array = texts(MAX_BREAKERS, MAX_BREAKER)


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Penalises, at every place where tokens stand that the row ends in, the token after them.

    The longest such place counts, up to `MAX_MATCH` tokens. The tokens of it lie within the window
    and after the row's last breaker; a token that is a breaker by itself is never penalised.
    """
    own: DrySettings = ctx.settings.own["dry"]
    distances = jnp.arange(1, ctx.history.shape[0], dtype=jnp.int32)
    run = repeated(ctx.history, ctx.length, distances, MAX_MATCH)
    run = jnp.minimum(run, jnp.minimum(ctx.length, own.window) - distances)

    since = jnp.arange(MAX_MATCH, dtype=jnp.int32)  # tokens after a breaker
    broken = jax.vmap(lambda n: jnp.any(ends_in(ctx.history, ctx.length - n, own.breakers)))(since)
    run = jnp.minimum(run, jnp.min(jnp.where(broken, since, MAX_MATCH)))

    following = jnp.take(ctx.history, ctx.length - distances, mode="clip")
    first, second = own.breakers[:, 0], own.breakers[:, 1]
    single = jnp.where(second < 0, first, -1)
    breaks = jnp.any(following[:, None] == single[None, :], axis=1)
    penalty = own.multiplier * own.base ** (run - own.allowed_length).astype(jnp.float32)
    token = jnp.where((run >= own.allowed_length) & ~breaks, following, logits.shape[0])
    # A token that follows several places gets the penalty of the longest.
    penalised = logits.at[token].get(mode="fill", fill_value=0.0) - penalty
    return logits.at[token].min(penalised, mode="drop")


DRY = Mechanism(
    "dry",
    settings=DrySettings,
    logits=penalise,
    active=lambda settings: settings.own["dry"].multiplier > 0,
)
