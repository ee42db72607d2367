"""`backspace`: goes back to the most recent position whose token was in doubt, bans that token
there, and draws the position again (document 004).

What triggers the arm is a wide distribution after the last token, which in text follows any sure
function word; a token that the model was sure of is therefore never banned. All from the position
on is retracted. The next step reads the distribution there again and draws from it as the token was
drawn, as one candidate. Bans, attempts and budgets persist; the row's other state is what it was
before the position.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, Proposal, draw, either, where_rows
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.adaptive import adaptive
from entropix_jax.sampler.settings import COUNT, SamplerSettings, number
from entropix_jax.sampler.state import (
    MAX_ATTEMPTS,
    MAX_REACH,
    Rows,
    SamplerState,
    Step,
)


@struct.dataclass
class BackspaceSettings:
    """How far a row goes back, which tokens are in doubt, and how often."""

    reach: jax.Array = number(1, MAX_REACH, integer=True)  # positions back, at most
    max_prob: jax.Array = number(0.0, 1.0)  # a likelier token stays; 1: none does
    per_position: jax.Array = number(0, MAX_ATTEMPTS, integer=True)
    per_row: jax.Array = number(*COUNT, integer=True)


@struct.dataclass
class BackspaceState:
    """Of one row. Attempts and bans of the last positions are in the `Trail`."""

    backspaced: jax.Array  # int32, how often the row went back


def in_doubt(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Which of the last positions each row may go back to, the last one first: bool [B, R].

    Those within reach, if this and all later tokens were drawn, this one with a probability below
    the bound, and if neither the budgets nor the tokens there are used up.
    """
    own: BackspaceSettings = settings.own["backspace"]
    row: BackspaceState = state.tally.own["backspace"]
    trail, distance = state.trail, jnp.arange(1, MAX_REACH + 1, dtype=jnp.int32)[None, :]
    index = jnp.mod(rows.length[:, None] - distance, MAX_REACH)
    logprob, attempts = (
        jnp.take_along_axis(x, index, axis=1) for x in (trail.logprob, trail.attempts)
    )
    unsure = (jnp.exp(logprob) < own.max_prob[:, None]) | (own.max_prob >= 1.0)[:, None]
    bans = attempts + 1 + jnp.sum(settings.bans >= 0, axis=-1, dtype=jnp.int32)[:, None]
    return (
        unsure
        & (distance <= jnp.minimum(own.reach, trail.drawn)[:, None])
        & (attempts < own.per_position[:, None])
        & (row.backspaced < own.per_row)[:, None]
        & (bans < rows.vocab_size)
    )


def may_backspace(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether there is a position to go back to: bool [B]."""
    return jnp.any(in_doubt(settings, state, rows), axis=-1)


def propose(ctx: Context) -> Proposal:
    """Backspaces, or what `adaptive` does."""
    return either(ctx.may["backspace"], draw("backspace", ctx), adaptive(ctx))


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Moves the row back."""
    state = SamplerState(tally=step.tally, trail=step.trail)
    back = 1 + jnp.argmax(in_doubt(settings, state, step.rows), axis=-1).astype(jnp.int32)
    step = go_back(acts, step, settings, back, "backspace")
    backspaced = step.tally.own["backspace"].backspaced + acts.astype(jnp.int32)
    own = {**step.tally.own, "backspace": BackspaceState(backspaced=backspaced)}
    return replace(step, tally=replace(step.tally, own=own))


def go_back(
    acts: jax.Array, step: Step, settings: SamplerSettings, back: jax.Array, action: str
) -> Step:
    """The step with the rows of `acts` moved back by `back`, int32 [B], at most the step's `reach`.
    The position is drawn again under the name of `action`, without the token there, which a trail's
    entry must be of."""
    rows, trail = step.rows, step.trail
    back = jnp.where(acts, back, 0)
    length = rows.length - back

    # The token joins the bans of its position.
    there = trail.at(length)
    token = jnp.take_along_axis(rows.history, length[:, None], axis=1)[:, 0]
    row = jnp.arange(acts.shape[0], dtype=jnp.int32)
    bans = there.bans.at[row, there.attempts].set(token, mode="drop")
    again = _draw_again(there.proposal, step.context, action)
    trail = trail.put(length, acts, attempts=there.attempts + 1, bans=bans, proposal=again)
    # What was out of reach stays so, although the row is shorter now: see `settled`.
    drawn = jnp.where(acts, step.reach - back, trail.drawn)
    trail = replace(trail, drawn=drawn, again=trail.again | acts)

    # The rest is as it was, but for what counts.
    kept = {m.name: m.keep for m in settings.mechanisms if m.keep}
    before, now = there.tally.own, step.tally.own
    states = {
        name: replace(before[name], **{f: getattr(now[name], f) for f in kept.get(name, ())})
        for name in now
    }
    return replace(
        step,
        rows=replace(
            rows,
            length=length,
            generated=rows.generated - back,
            remaining=rows.remaining + back,
        ),
        tally=where_rows(acts, replace(there.tally, own=states), step.tally),
        trail=trail,
        rewinds=step.rewinds | acts,
    )


def _draw_again(proposal: Proposal, contexts: Context, action: str) -> Proposal:
    """What a token was drawn by, as one candidate; after an argmax, the base values."""
    base, settings = jax.vmap(lambda ctx: draw("sample", ctx))(contexts), contexts.settings
    proposal = where_rows(proposal.action == settings.action("argmax"), base, proposal)
    return replace(
        proposal,
        action=jnp.full_like(proposal.action, settings.action(action)),
        draws=jnp.ones_like(proposal.draws),
    )


BACKSPACE = Mechanism(
    "backspace",
    propose,
    settings=BackspaceSettings,
    init=lambda: BackspaceState(backspaced=jnp.int32(0)),
    may=may_backspace,
    apply=apply,
    keep=("backspaced",),
)
