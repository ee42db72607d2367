"""`backspace`: goes back to the most recent position whose token was in doubt, bans that token
there, and draws the position again (document 004).

The arm is triggered by a wide distribution after the last token. In text such a distribution
follows most function words, so a token of which the model was certain is never banned. All tokens
from the position on are retracted. The next step draws one candidate there with the old parameters.
Bans, attempts and budgets persist. The row's other state is restored as of the position.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, rewind, when
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import adaptive
from entropix_jax.sampler.settings import COUNT, number
from entropix_jax.sampler.state import MAX_ATTEMPTS, MAX_REACH, Proposal
from entropix_jax.sampler.user_functions import UserFunction


@struct.dataclass
class BackspaceSettings:
    """How far a row goes back, which tokens are in doubt, and how often."""

    reach: jax.Array = number(1, MAX_REACH, integer=True)  # positions back, at most
    max_prob: jax.Array = number(0.0, 1.0)  # a more likely token stays; 1: none does
    per_position: jax.Array = number(0, MAX_ATTEMPTS, integer=True)
    per_row: jax.Array = number(*COUNT, integer=True)


@struct.dataclass
class BackspaceState:
    """Of one row. Attempts and bans of the last positions are in the `Trail`."""

    backspaced: jax.Array  # int32, how often the row went back


def in_doubt(ctx: Context) -> jax.Array:
    """Returns the positions that the row may go back to, the last one first: bool [R].

    A position qualifies if it is within reach, all tokens from it on were drawn, its token had a
    probability below the bound, and budgets and other tokens remain.
    """
    own: BackspaceSettings = ctx.settings.own["backspace"]
    row: BackspaceState = ctx.states["backspace"]
    trail, distance = ctx.trail, jnp.arange(1, MAX_REACH + 1, dtype=jnp.int32)
    earlier = trail.at(ctx.length - distance)
    unsure = (jnp.exp(earlier.logprob) < own.max_prob) | (own.max_prob >= 1.0)
    bans = earlier.attempts + 1 + jnp.sum(ctx.settings.bans >= 0, dtype=jnp.int32)
    return (
        unsure
        & (distance <= jnp.minimum(own.reach, trail.rewindable))
        & (earlier.attempts < own.per_position)
        & (row.backspaced < own.per_row)
        & (bans < ctx.vocab_size)
    )


def propose(ctx: Context) -> Proposal:
    """Proposes backspace, or `adaptive` if no position qualifies."""
    return where(ctx.may["backspace"], draw("backspace", ctx), adaptive(ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Goes back to the last position in doubt."""
    doubted = in_doubt(ctx)
    back = 1 + jnp.argmax(doubted).astype(jnp.int32)
    row: BackspaceState = ctx.states["backspace"]
    return when(jnp.any(doubted), rewind(back), BackspaceState(backspaced=row.backspaced + 1))


def holds(ctx: Context) -> jax.Array:
    """Returns how far the row may go back if it has an arm that can: this one, or a user's own arm,
    which may propose any action. int32."""
    arms = [
        index
        for index, mechanism in enumerate(ctx.parts.mechanisms)
        if mechanism.name == "backspace" or isinstance(mechanism.propose, UserFunction)
    ]
    has_arm = jnp.any(jnp.isin(ctx.settings.arms, jnp.array(arms, jnp.int32)))
    distance = jnp.arange(1, MAX_REACH + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(in_doubt(ctx) & has_arm, distance, 0))


BACKSPACE = Mechanism(
    "backspace",
    propose,
    settings=BackspaceSettings,
    init=lambda: BackspaceState(backspaced=jnp.int32(0)),
    may=lambda ctx: jnp.any(in_doubt(ctx)),
    control=control,
    holds=holds,
    keep=("backspaced",),
)
