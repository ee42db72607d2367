"""`backspace`: goes back to the most recent position whose token was in doubt, bans that token
there, and draws the position again (document 004).

What triggers the arm is a wide distribution after the last token, which in text follows any sure
function word; a token that the model was sure of is therefore never banned. All from the position
on is retracted. The next step reads the distribution there again and draws from it as the token was
drawn, as one candidate. Bans, attempts and budgets persist; the row's other state is what it was
before the position.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, rewind, when
from entropix_jax.sampler.mechanism import Mechanism, UserFunction
from entropix_jax.sampler.mechanisms.plain import adaptive
from entropix_jax.sampler.settings import COUNT, number
from entropix_jax.sampler.state import MAX_ATTEMPTS, MAX_REACH, Proposal, entry_at


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
    """Which of the last positions the row may go back to, the last one first: bool [R].

    Those within reach, if this and all later tokens were drawn, this one with a probability below
    the bound, and if neither the budgets nor the tokens there are used up.
    """
    own: BackspaceSettings = ctx.settings.own["backspace"]
    row: BackspaceState = ctx.states["backspace"]
    trail, distance = ctx.trail, jnp.arange(1, MAX_REACH + 1, dtype=jnp.int32)
    entries = trail.entries.logprob, trail.entries.attempts
    logprob, attempts = entry_at(entries, ctx.length - distance)
    unsure = (jnp.exp(logprob) < own.max_prob) | (own.max_prob >= 1.0)
    bans = attempts + 1 + jnp.sum(ctx.settings.bans >= 0, dtype=jnp.int32)
    return (
        unsure
        & (distance <= jnp.minimum(own.reach, trail.rewindable))
        & (attempts < own.per_position)
        & (row.backspaced < own.per_row)
        & (bans < ctx.vocab_size)
    )


def propose(ctx: Context) -> Proposal:
    """Backspaces, or what `adaptive` does."""
    return where(ctx.may["backspace"], draw("backspace", ctx), adaptive(ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Goes back to the last position in doubt."""
    doubted = in_doubt(ctx)
    back = 1 + jnp.argmax(doubted).astype(jnp.int32)
    row: BackspaceState = ctx.states["backspace"]
    return when(jnp.any(doubted), rewind(back), BackspaceState(backspaced=row.backspaced + 1))


def holds(ctx: Context) -> jax.Array:
    """Returns how far the row may go back if an arm of it can: this one, or a user's own, which may
    propose any action. int32."""
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
