"""One step of the sampler: from logits and attention statistics to each row's next token.

measure -> classify -> propose -> filter -> draw -> control -> the state after it

All but the measures is written for one row, and mapped over the rows of the batch once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.names import SERVED
from entropix_jax.sampler.context import (
    COMMIT,
    END,
    FORCE,
    FORK,
    REWIND,
    WAIT,
    Context,
    Verdict,
    any_row,
    as_configured,
    context_of,
    draw,
    force,
    when,
    where,
)
from entropix_jax.sampler.draw import draw_tokens
from entropix_jax.sampler.filters import penalise, truncate
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, STREAM_ROLLOUT, uniforms
from entropix_jax.sampler.mechanisms import MECHANISMS, backspace
from entropix_jax.sampler.mechanisms.adaptive import confidence
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH
from entropix_jax.sampler.mechanisms.branch import follow as follow_branch
from entropix_jax.sampler.metrics import Metrics, apply_noise_floor, measure, measure_confidence
from entropix_jax.sampler.regimes import classify, count_rounds, current_thresholds, update_drift
from entropix_jax.sampler.settings import MAX_DRAWS, Parts, SamplerSettings
from entropix_jax.sampler.state import (
    MAX_REACH,
    DrawnToken,
    Observation,
    Proposal,
    Rows,
    SamplerState,
    Step,
    Tally,
    Trail,
    init_sampler_state,
)
from entropix_jax.stats import AttnStats


@struct.dataclass
class Choice:
    """The token of each row and all that led to it; every field [B]."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    observation: Observation
    proposal: Proposal  # a forced token has the action that it is forced for
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


@struct.dataclass
class _Measures:
    """What a distribution and the attention say, whatever row they are of."""

    log_probs: jax.Array  # float32 [V], nats
    metrics: Metrics
    token_confidence: jax.Array  # float32, nats
    self_certainty: jax.Array


def choose(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
    parts: Parts,
) -> tuple[Choice, Step, SamplerState]:
    """Chooses each row's next token.

    Args:
        logits: float32 [B, V], as the model gave them.
        stats: the attention of each row's last position.
        settings: each leaf with a leading row axis.
        state: as the step before left it.
        rows: the text up to the token to be chosen, and what the row may still do.
        parts: static.

    Returns:
        The choices, what else was decided, and the state after it. The token of a row that goes
        back, forks or waits means nothing, and so does that of a choice that is not `finite`.
    """
    batch, _ = logits.shape
    chex.assert_shape(rows.history, (batch, None))
    chex.assert_tree_shape_prefix((stats.entropy, settings, state, rows), (batch,))
    measures = _measure(logits, stats, settings)
    chosen = jax.vmap(partial(_choose, parts))(logits, measures, settings, state, rows)
    chex.assert_tree_shape_prefix(chosen, (batch,))
    return chosen


def _choose(
    parts: Parts,
    logits: jax.Array,
    measures: _Measures,
    settings: SamplerSettings,
    state: SamplerState,
    row: Rows,
) -> tuple[Choice, Step, SamplerState]:
    """The step of one row."""
    finite = jnp.all(jnp.isfinite(logits))
    ctx, observation = _observe(context_of(settings, state, row, parts), logits, measures, state)
    ctx = replace(ctx, proposal=_propose(ctx))
    drawn = _draw(ctx)

    # A row whose token is forced draws nothing, and a branch just grows.
    is_branch = ctx.branch >= 0
    draws = row.running & finite & ~is_branch & (ctx.queued == 0)
    ctx = replace(ctx, history=_with_token(ctx.history, ctx.length, drawn.token, draws))
    verdict, action, own = _control(ctx, drawn.token, draws, state.tally.own)
    ctx, tally, trail = _carry_out(verdict, action, own, ctx, state)

    # The token: the drawn one, unless one is forced, perhaps in its place.
    is_forced = ctx.queued > 0
    token = jnp.where(is_forced, ctx.history[ctx.length], drawn.token)
    logprob = measures.log_probs[token]
    choice = Choice(token, logprob, observation, ctx.proposal, finite)

    # The state after it.
    kind = verdict.kind
    moves = row.running & ~((kind == REWIND) | (kind == WAIT))
    was_drawn = moves & ~is_forced & (kind != FORK) & ~is_branch
    after = _advance(ctx, tally, observation, drawn, was_drawn)
    trail = _remember(ctx, trail, tally, moves, was_drawn, logprob, row.running & (kind == WAIT))
    forks = kind == FORK
    candidates = verdict.tokens[:MAX_WIDTH]
    step = Step(
        rows=replace(
            row,
            history=ctx.history,
            length=ctx.length,
            generated=ctx.generated,
            remaining=ctx.remaining,
        ),
        log_probs=measures.log_probs,
        tally=tally,
        rewinds=kind == REWIND,
        forks=forks,
        candidates=jnp.where(forks, jnp.maximum(candidates, 0), 0),
        width=jnp.where(forks, jnp.sum(candidates >= 0, dtype=jnp.int32), 0),
        waits=kind == WAIT,
        ends=kind == END,
    )
    return choice, step, SamplerState(tally=where(moves, after, tally), trail=trail)


# Measure, classify


def _measure(logits: jax.Array, stats: AttnStats, settings: SamplerSettings) -> _Measures:
    """The measures of each row, [B, ...]."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    floored = apply_noise_floor(log_probs, settings.noise_epsilon)
    likeliest = settings.own["confidence"].likeliest
    return _Measures(
        log_probs,
        measure(floored, stats, settings.layer_weights),
        *measure_confidence(log_probs, likeliest),
    )


def _observe(
    ctx: Context, logits: jax.Array, measures: _Measures, state: SamplerState
) -> tuple[Context, Observation]:
    """The context with what was measured, and what the row may do; and what is recorded of it."""
    tally, settings, metrics = state.tally, ctx.settings, measures.metrics
    _, squares = _add_entropy(tally, metrics.entropy, ctx.generated)
    sequence_varentropy = squares / (ctx.generated + 1).astype(jnp.float32)
    mechanisms = ctx.parts.mechanisms
    ctx = replace(
        ctx,
        logits=logits,
        log_probs=measures.log_probs,
        metrics=as_configured(metrics, settings),
        regime=classify(metrics, settings, sequence_varentropy, tally.drift),
        rounds=count_rounds(ctx.history, ctx.length, ctx.generated, settings.loop),
        thresholds=current_thresholds(settings, tally.drift),
        may={m.name: m.may(ctx) for m in mechanisms if m.may is not None},
        reach=_reach(ctx),
        own=_learnt(ctx),
    )
    observation = Observation(
        metrics=metrics,
        sequence_varentropy=sequence_varentropy,
        regime=ctx.regime,
        rounds=ctx.rounds,
        confidence=confidence(ctx),
        token_confidence=measures.token_confidence,
        self_certainty=measures.self_certainty,
    )
    return ctx, observation


def _learnt(ctx: Context) -> dict[str, Any]:
    """The mechanisms' states. They learn only from committed tokens, so a branch has those of a new
    row."""
    new = init_sampler_state(1, ctx.parts.mechanisms).tally.own
    new = {m.name: new[m.name] for m in ctx.parts.mechanisms if m.learn is not None}
    new = jax.tree.map(lambda x: jnp.asarray(x[0]), new)
    return {**ctx.own, **{n: where(ctx.branch >= 0, new[n], ctx.own[n]) for n in new}}


def _add_entropy(
    tally: Tally, entropy: jax.Array, generated: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and summed squared deviation of a row's entropies with one more, each float32."""
    deviation = entropy - tally.entropy_mean
    mean = tally.entropy_mean + deviation / (generated + 1).astype(jnp.float32)
    return mean, tally.entropy_squares + deviation * (entropy - mean)


# Propose


def propose(arm: jax.Array, ctx: Context) -> Proposal:
    """Returns the proposal of one row's arm, an index into its mechanisms."""
    mechanisms = enumerate(ctx.parts.mechanisms)
    proposes = {i: m.propose for i, m in mechanisms if m.propose is not None}
    which = jnp.argmax(jnp.array([*proposes]) == arm)
    # Closures: a mapped switch selects every leaf of an operand.
    proposal: Proposal = lax.switch(which, [lambda own=own: own(ctx) for own in proposes.values()])
    return proposal


def _propose(ctx: Context) -> Proposal:
    """What the row's next token is drawn by."""
    settings, parts, looping = ctx.settings, ctx.parts, ctx.rounds > 0
    proposal = propose(settings.arms[jnp.where(looping, SERVED.index("loop"), ctx.regime)], ctx)

    # Each further round of a loop is hotter.
    heat = 1.0 + settings.loop.heating * (ctx.rounds - 1).astype(jnp.float32)
    heated = jnp.minimum(proposal.temperature * heat, settings.loop.hottest)

    # An arm may propose more than its row may do: then it just draws.
    action = proposal.action
    for name, allowed in ctx.may.items():
        refused = (proposal.action == parts.action(name)) & ~allowed
        action = jnp.where(refused, parts.action("sample"), action)

    proposal = replace(
        proposal,
        rule=settings.rule,  # the sampler's, not the arm's: no other is compiled
        temperature=jnp.where(looping, heated, proposal.temperature),
        # A forced token stands for the action that it is forced for.
        action=jnp.where(ctx.queued > 0, ctx.queue_action, action),
    )
    # A branch is followed. A position that is drawn again is drawn as it was, as one candidate.
    proposal = where(ctx.branch >= 0, follow_branch(ctx), proposal)
    return where(ctx.trail.again, ctx.trail.at(ctx.length).proposal, proposal)


# Filter, draw


def _draw(ctx: Context) -> DrawnToken:
    """Returns the likeliest, under the unmodified logits, of the proposal's candidates."""
    proposal, branch = ctx.proposal, ctx.branch

    # Branches share their row's key, so each takes the number at its own index.
    stream = jnp.where(proposal.draws > 1, STREAM_CANDIDATE, STREAM_DRAW)
    stream = jnp.where(branch >= 0, STREAM_ROLLOUT, stream)
    numbers = uniforms(ctx.key, ctx.length, ctx.attempt, stream, MAX_DRAWS)
    numbers = jnp.where(branch >= 0, numbers[jnp.maximum(branch, 0)], numbers)

    logits = penalise(ctx.logits, ctx)
    left, given = truncate(logits, ctx)
    candidates = draw_tokens(left, numbers)
    is_drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32) < proposal.draws
    best = jnp.argmax(jnp.where(is_drawn, ctx.log_probs[candidates], -jnp.inf))
    return DrawnToken(logits=logits, token=candidates[best], given=given)


# Control


def _control(
    ctx: Context, token: jax.Array, draws: jax.Array, own: dict[str, Any]
) -> tuple[Verdict, jax.Array, dict[str, Any]]:
    """What the row does: the verdict of the first mechanism that does not just let it commit, the
    action that this is, and the mechanisms' states, of which that one's may be new. `draws`, a
    bool, says whether any is asked."""
    waiting, action = draws, ctx.proposal.action
    verdicts: list[tuple[jax.Array, Verdict]] = []
    for index, mechanism in enumerate(ctx.parts.mechanisms):
        name, is_arm = mechanism.name, mechanism.propose is not None
        if mechanism.control is None or not (is_arm or name in ctx.parts.used):
            continue
        asked = waiting
        if is_arm:  # a position that is drawn again has the action of what took it back
            asked &= (ctx.proposal.action == index) & ~ctx.trail.again
        verdict = _if_any(asked, partial(mechanism.control, ctx, token))
        acts = asked & (verdict.kind != COMMIT)
        waiting &= ~acts
        if verdict.own is not None:
            own = {**own, name: where(acts, verdict.own, own[name])}
        verdicts.append((acts, replace(verdict, own=None)))
        # An arm's action that the drawn token does not allow: the row draws.
        refused = asked & ~acts & is_arm
        action = jnp.where(refused, ctx.parts.action("sample"), jnp.where(acts, index, action))
    return _first(verdicts), action, own


def _first(verdicts: list[tuple[jax.Array, Verdict]]) -> Verdict:
    """The verdict that acts, of which there is one at most; else that the row commits its token."""
    longest = max([MAX_WIDTH, *(verdict.tokens.shape[0] for _, verdict in verdicts)])
    taken = when(jnp.bool_(False), force(jnp.full(longest, -1)))
    for acts, verdict in verdicts:
        missing = longest - verdict.tokens.shape[0]
        tokens = jnp.pad(verdict.tokens, (0, missing), constant_values=-1)
        taken = where(acts, replace(verdict, tokens=tokens), taken)
    return taken


def _if_any(asked: jax.Array, control: Callable[[], Verdict]) -> Verdict:
    """The verdict of a control, if any row asks for it; else that the row commits its token."""
    commits = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(control))
    verdict: Verdict = lax.cond(any_row(asked), control, lambda: commits)
    return verdict


def _carry_out(
    verdict: Verdict, action: jax.Array, own: dict[str, Any], ctx: Context, state: SamplerState
) -> tuple[Context, Tally, Trail]:
    """The row before its token, once it has done what comes first: its context, tally and trail."""
    count = jnp.sum(verdict.tokens >= 0, dtype=jnp.int32)
    forces = (verdict.kind == FORCE) & (count > 0)

    def write(history: jax.Array) -> jax.Array:
        place = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
        position = jnp.where(forces & (place < count), ctx.length + place, history.shape[0])
        return history.at[position].set(verdict.tokens, mode="drop")

    tally = replace(
        state.tally,
        queued=jnp.where(forces, count, ctx.queued),
        queue_action=jnp.where(forces, action, ctx.queue_action),
        own=own,
    )
    history = lax.cond(any_row(forces), write, lambda history: history, ctx.history)
    ctx, tally, trail = _rewind(verdict, action, replace(ctx, history=history), tally, state.trail)
    return (
        replace(
            ctx,
            proposal=replace(ctx.proposal, action=action),
            own=tally.own,
            queued=tally.queued,
            queue_action=tally.queue_action,
        ),
        tally,
        trail,
    )


def _rewind(
    verdict: Verdict, action: jax.Array, ctx: Context, tally: Tally, trail: Trail
) -> tuple[Context, Tally, Trail]:
    """The row moved back, if that is the verdict. The position is drawn again under the name of the
    action, without the token there."""
    rewinds = verdict.kind == REWIND
    back = jnp.where(rewinds, verdict.back, 0)
    length = ctx.length - back

    # Where the drawn token alone is taken back, the position has no entry of its own yet.
    here = {"proposal": ctx.proposal, "tally": tally, "attempts": ctx.attempt, "bans": ctx.bans}
    trail = trail.put(ctx.length, rewinds & (back == 0), **here)
    # The token joins the bans of its position, which is drawn as it was, but as one candidate;
    # after an argmax, by the base values.
    there = trail.at(length)
    bans = there.bans.at[there.attempts].set(ctx.history[length], mode="drop")
    was_argmax = there.proposal.action == ctx.parts.action("argmax")
    again = where(was_argmax, draw("sample", ctx), there.proposal)
    again = replace(again, action=action, draws=jnp.int32(1))
    trail = trail.put(length, rewinds, attempts=there.attempts + 1, bans=bans, proposal=again)
    # What was out of reach stays so, although the row is shorter now: see `settled`.
    drawn = jnp.where(rewinds, ctx.reach - back, trail.drawn)
    trail = replace(trail, drawn=drawn, again=trail.again | rewinds)

    # The rest is as it was, but for what counts.
    before, now = there.tally.own, tally.own
    kept = {m.name: m.keep for m in ctx.parts.mechanisms}
    own = {n: replace(before[n], **{f: getattr(now[n], f) for f in kept[n]}) for n in now}
    tally = where(rewinds, replace(there.tally, own=own), tally)
    generated, remaining = ctx.generated - back, ctx.remaining + back
    return replace(ctx, length=length, generated=generated, remaining=remaining), tally, trail


def settled(settings: SamplerSettings, state: SamplerState, rows: Rows, parts: Parts) -> jax.Array:
    """The position that the next steps cannot go back beyond: int32 [B], at most the length."""

    def of_row(settings: SamplerSettings, state: SamplerState, row: Rows) -> jax.Array:
        return row.length - _reach(context_of(settings, state, row, parts))

    return jax.vmap(of_row)(settings, state, rows)


def _reach(ctx: Context) -> jax.Array:
    """How many of its last tokens the row may take back at most: int32. An arm that is not of this
    package may propose any action."""
    ours = {m for m in MECHANISMS if m != backspace.BACKSPACE}
    able = [i for i, m in enumerate(ctx.parts.mechanisms) if m not in ours]
    has_arm = jnp.any(jnp.isin(ctx.settings.arms, jnp.array(able, jnp.int32)))
    held = jnp.where(has_arm, backspace.holds(ctx), 0)
    for _, mechanism in ctx.parts.having("holds"):
        held = jnp.maximum(held, mechanism.holds(ctx))
    return held


# The state after the token


def _advance(
    ctx: Context, tally: Tally, observation: Observation, drawn: DrawnToken, was_drawn: jax.Array
) -> Tally:
    """The tally after one more committed token."""
    mechanisms, metrics = ctx.parts.mechanisms, observation.metrics
    own = {**tally.own, **{m.name: m.advance(ctx) for m in mechanisms if m.advance is not None}}
    for _, mechanism in ctx.parts.having("learn"):
        name = mechanism.name
        learnt = mechanism.learn(drawn, replace(ctx, own=own))
        own[name] = where(was_drawn, learnt, own[name])
    mean, squares = _add_entropy(tally, metrics.entropy, ctx.generated)
    return replace(
        tally,
        queued=jnp.maximum(tally.queued - 1, 0),
        entropy_mean=mean,
        entropy_squares=squares,
        drift=update_drift(metrics, ctx.settings, tally.drift),
        own=own,
    )


def _remember(
    ctx: Context,
    trail: Trail,
    tally: Tally,
    moves: jax.Array,
    was_drawn: jax.Array,
    logprob: jax.Array,
    waits: jax.Array,
) -> Trail:
    """The trail with the token of a row that moves on; what was retracted at its position stays
    retracted."""
    here, first = trail.at(ctx.length), moves & ~trail.again
    trail = trail.put(
        ctx.length,
        moves,
        logprob=logprob,
        proposal=ctx.proposal,
        tally=tally,
        attempts=jnp.where(first, 0, here.attempts),
        bans=jnp.where(first, -1, here.bans),
    )
    # What a row had when it waited for the host stands.
    drawn = jnp.where(was_drawn, jnp.minimum(trail.drawn + 1, MAX_REACH), 0)
    drawn = jnp.where(moves | waits, drawn, trail.drawn)
    return replace(trail, drawn=drawn, again=trail.again & ~moves)


def _with_token(
    history: jax.Array, position: jax.Array, token: jax.Array, draws: jax.Array
) -> jax.Array:
    """The history, int32 [S], with a token at a position where the row draws."""
    place = jnp.arange(history.shape[0], dtype=jnp.int32)
    return jnp.where(draws & (place == position), token, history)
