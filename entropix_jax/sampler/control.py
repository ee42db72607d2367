"""Controls: decide what a row does with its drawn token.

A control returns a `Verdict` for one row. The functions below make them: `force`, `rewind`, `fork`,
`wait` and `end`; `when` limits one to a condition. A row without a verdict commits its token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import ARGMAX, SAMPLE, Context, draw, if_any, where
from entropix_jax.sampler.settings import MAX_WIDTH
from entropix_jax.sampler.state import MAX_ATTEMPTS, MAX_REACH, Trail

COMMIT, FORCE, REWIND, FORK, WAIT, END = range(6)


@struct.dataclass
class Verdict:
    """The decision of a control about a drawn token."""

    kind: jax.Array  # int32, COMMIT to END
    tokens: jax.Array  # int32 [n], padded with -1: forced tokens, or the branches' first tokens
    back: jax.Array  # int32, how many tokens are retracted, at most `Context.reach`
    state: Any = None  # the mechanism's new state if it acts; None: unchanged


# Returns the verdict of one row, given its drawn token, int32, which is `history[length]`.
Control = Callable[[Context, jax.Array], Verdict]


def force(tokens: jax.Array) -> Verdict:
    """Commits these tokens, int32 [n] padded with -1, one a step from this step on, as far as the
    budget reaches. Without tokens the row commits the drawn one."""
    return _verdict(FORCE, tokens)


def rewind(back: jax.Array) -> Verdict:
    """Retracts the last `back` tokens, int32, at most `Context.reach`, and draws again without the
    token at that position. 0 rejects the drawn token."""
    return _verdict(REWIND, back=back)


def fork(candidates: jax.Array) -> Verdict:
    """Continues the row as several branches, which begin with these tokens, int32 [n] padded with
    -1, and then as the best branch. Without tokens the row commits the drawn one."""
    return _verdict(FORK, candidates)


def wait() -> Verdict:
    """Waits for the result of the row's lookup. Valid only where `Context.looks_up`."""
    return _verdict(WAIT)


def end() -> Verdict:
    """Ends the row with the drawn token. Its finish reason is the mechanism's name."""
    return _verdict(END)


def when(condition: jax.Array, verdict: Verdict, state: Any = None) -> Verdict:
    """Returns the verdict if the condition, a bool, holds. Otherwise the row commits its token.
    `state` is the mechanism's new state if it acts."""
    return replace(verdict, kind=jnp.where(condition, verdict.kind, COMMIT), state=state)


def _verdict(kind: int, tokens: Any = (-1,), back: Any = 0) -> Verdict:
    return Verdict(jnp.int32(kind), jnp.asarray(tokens, jnp.int32), jnp.asarray(back, jnp.int32))


def reach(ctx: Context) -> jax.Array:
    """Returns how many of its last tokens one row may retract at most: int32."""
    held: jax.Array = jnp.int32(0)
    for _, mechanism in ctx.parts.having("holds"):
        held = jnp.maximum(held, mechanism.holds(ctx))
    return held


def act(ctx: Context, token: jax.Array, asked: jax.Array) -> tuple[Context, Verdict, jax.Array]:
    """Runs one row's controls until one acts, and carries out its verdict.

    Args:
        ctx: with the proposal, and with the token in its history.
        token: int32, the drawn token.
        asked: bool, whether the row runs its controls at all.

    Returns:
        The context, with forced tokens queued in its history, and restored if the row goes back.
        The verdict. The index of the mechanism that acts, int32, -1 for none.
    """
    taken, actor = _verdict(COMMIT, jnp.full(MAX_WIDTH, -1)), jnp.int32(-1)
    if not ctx.parts.acts:
        return ctx, taken, actor
    states, action = ctx.states, ctx.proposal.action
    for index, mechanism in ctx.parts.having("control"):
        name, is_arm = mechanism.name, mechanism.propose is not None
        asks = asked & (actor < 0)
        if is_arm:  # a position that is drawn again has the action of the control that rewound
            asks &= (ctx.proposal.action == index) & ~ctx.trail.again
        control = partial(_ask, mechanism.control, ctx, token)
        commits = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(control))
        verdict = if_any(asks, control, commits)
        acts = verdict.kind != COMMIT
        if verdict.state is not None:
            states = {**states, name: where(acts, verdict.state, states[name])}
        longest = max(verdict.tokens.shape[0], taken.tokens.shape[0])
        taken = where(acts, _padded(verdict, longest), _padded(taken, longest))
        # If an arm's control returns COMMIT, the action is recorded as `sample`.
        action = jnp.where(asks & ~acts & is_arm, ctx.parts.action(SAMPLE), action)
        action = jnp.where(acts & (verdict.kind != END), index, action)
        actor = jnp.where(acts, index, actor)
    ctx = replace(ctx, tally=replace(ctx.tally, states=states))
    ctx = _queue(ctx, taken, action)
    moved = "length", "generated", "remaining", "tally", "trail"
    stays = {name: getattr(ctx, name) for name in moved}
    went = if_any(taken.kind == REWIND, partial(_go_back, ctx, taken.back, action), stays)
    ctx = replace(ctx, **went)
    return replace(ctx, proposal=replace(ctx.proposal, action=action)), taken, actor


def _ask(control: Control, ctx: Context, token: jax.Array) -> Verdict:
    """Returns the verdict of one row's control, COMMIT if the row may not carry it out: it may
    force tokens or fork if it has any; go back within reach, to a position with an attempt and a
    token left; wait only if it has a lookup. Else a run might never end."""
    verdict = control(ctx, token)
    back, is_reached = verdict.back, (verdict.back >= 0) & (verdict.back <= ctx.reach)
    there = ctx.trail.at(ctx.length - back).attempts
    attempts = jnp.where(back == 0, ctx.attempt, there)
    bans = attempts + 1 + jnp.sum(ctx.settings.bans >= 0, dtype=jnp.int32)
    rewinds = is_reached & (attempts < MAX_ATTEMPTS) & (bans < ctx.vocab_size)
    kinds = [verdict.kind == kind for kind in (REWIND, WAIT, FORCE, FORK)]
    has_tokens = jnp.any(verdict.tokens >= 0)
    allowed = jnp.select(kinds, [rewinds, ctx.looks_up, has_tokens, has_tokens], True)
    return replace(verdict, kind=jnp.where(allowed, verdict.kind, COMMIT))


def _padded(verdict: Verdict, length: int) -> Verdict:
    """Returns the verdict with `length` tokens, and without the mechanism's state."""
    missing = length - verdict.tokens.shape[0]
    tokens = jnp.pad(verdict.tokens, (0, missing), constant_values=-1)
    return replace(verdict, tokens=tokens, state=None)


def _queue(ctx: Context, verdict: Verdict, action: jax.Array) -> Context:
    """Queues the tokens that the row is forced to commit in its history, for the action, int32."""
    count = jnp.sum(verdict.tokens >= 0, dtype=jnp.int32)
    forces = (verdict.kind == FORCE) & (count > 0)

    def write() -> jax.Array:
        place = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
        position = jnp.where(place < count, ctx.length + place, ctx.history.shape[0])
        return ctx.history.at[position].set(verdict.tokens, mode="drop")

    queued = replace(ctx.tally, queued=count, queue_action=action)
    history, tally = if_any(forces, write, ctx.history), where(forces, queued, ctx.tally)
    return replace(ctx, history=history, tally=tally)


def _go_back(ctx: Context, back: jax.Array, action: jax.Array) -> dict[str, Any]:
    """Returns the changed fields of one row that goes back `back` tokens. It draws the position
    again, under the action's name, without the token there.

    Invariants, before and after, with R the size of the trail: for each of the last `rewindable`
    positions p before `length`, the entry p modulo R is that of `history[p]`, which was drawn. If
    `again`, the entry of `length` has the proposal, bans and attempts of the next draw, and the
    row's tally, except for fields that mechanisms keep.
    """
    length = ctx.length - back

    # The token joins the bans of its position, which is drawn as it was, but as one candidate;
    # after an argmax, with the base values. The trail has no entry yet of the drawn token itself.
    there = where(back == 0, ctx.entry, ctx.trail.at(length))
    bans = there.bans.at[there.attempts].set(ctx.history[length], mode="drop")
    was_argmax = there.proposal.action == ctx.parts.action(ARGMAX)
    again = where(was_argmax, draw(SAMPLE, ctx), there.proposal)
    again = replace(again, action=action, num_candidates=jnp.int32(1))
    entry = replace(there, attempts=there.attempts + 1, bans=bans, proposal=again)
    # Tokens out of reach stay out of reach, although the row is shorter now. So does the
    # position whose place in the ring the entry takes.
    rewindable = jnp.minimum(ctx.reach - back, MAX_REACH - 1)
    trail = ctx.trail.put(length, jnp.bool_(True), entry)

    # The mechanisms' states are those from before the token, except for fields that count budgets.
    states = dict(there.tally.states)
    for name, keep in ((m.name, m.keep) for m in ctx.parts.mechanisms if m.keep):
        kept = {field: getattr(ctx.states[name], field) for field in keep}
        states[name] = replace(states[name], **kept)
    return {
        "length": length,
        "generated": ctx.generated - back,
        "remaining": ctx.remaining + back,
        "tally": replace(there.tally, states=states),
        "trail": replace(trail, rewindable=rewindable, again=jnp.bool_(True)),
    }


def remember(ctx: Context, moves: jax.Array, waits: jax.Array, was_drawn: jax.Array) -> Trail:
    """Returns the trail with the token of a row that moves. Tokens retracted at its position stay
    retracted, and the tokens before a wait for the host are final."""
    if not ctx.parts.acts:
        return ctx.trail
    trail = ctx.trail.put(ctx.length, moves, ctx.entry)
    rewindable = jnp.where(was_drawn, jnp.minimum(trail.rewindable + 1, MAX_REACH), 0)
    rewindable = jnp.where(moves | waits, rewindable, trail.rewindable)
    return replace(trail, rewindable=rewindable, again=trail.again & ~moves)
