"""One step of the sampler: from logits and attention statistics to each row's next token.

measure -> classify -> propose -> filter -> draw -> control -> update state

`metrics.py` measures the distribution, and observers may replace what is seen of it. `regimes.py`
classifies the row, and an arm of `mechanisms/` proposes how its token is drawn. `filters.py`
removes tokens, `draw.py` draws, and the controls of `control.py` may act instead of committing the
token. A row that forks commits its best branch some steps later (`engine.fork.join_forks`).
Everything after the measures is written for one row and mapped over the rows of the batch once.
Each stage adds to the row's `Context`.
"""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.names import SERVED
from entropix_jax.sampler.context import (
    SAMPLE,
    Context,
    as_configured,
    draw,
    if_any,
    where,
    with_attempts,
)
from entropix_jax.sampler.control import END, FORK, REWIND, WAIT, act, reach, remember
from entropix_jax.sampler.draw import draw_tokens, numbers_of_candidates
from entropix_jax.sampler.filters import penalise, truncate
from entropix_jax.sampler.metrics import apply_noise_floor, measure, measure_confidence, spread
from entropix_jax.sampler.regimes import classify, count_rounds, heated, thresholds_of, update_drift
from entropix_jax.sampler.settings import MAX_DRAWS, MAX_WIDTH, Parts, SamplerSettings
from entropix_jax.sampler.state import (
    Choice,
    DrawnToken,
    Observation,
    Proposal,
    RowView,
    SamplerState,
    Step,
    Tally,
    with_token,
)
from entropix_jax.stats import AttnStats


def choose(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: RowView,
    parts: Parts,
) -> tuple[Choice, Step, SamplerState]:
    """Chooses each row's next token.

    Args:
        logits: float32 [B, V], the model's.
        stats: the attention of each row's last position.
        settings: each leaf with a leading row axis.
        state: the sampler's, after the previous step.
        rows: the text up to the token to be chosen, and what the row may still do.
        parts: static.

    Returns:
        The choices, the step's other decisions, and the next state. The token is undefined if the
        row goes back, forks or waits, or if the choice is not `finite`.
    """
    batch, _ = logits.shape
    chex.assert_shape(rows.history, (batch, None))
    chex.assert_tree_shape_prefix((stats.entropy, settings, state, rows), (batch,))
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    above_floor = apply_noise_floor(log_probs, settings.noise_epsilon)
    metrics = measure(above_floor, stats, settings.layer_weights)
    confidences = measure_confidence(log_probs, settings.confidence.likeliest)
    contexts = Context(
        **vars(rows),
        **vars(state),
        settings=settings,
        parts=parts,
        logits=logits,
        log_probs=log_probs,
        observation=Observation(metrics, *confidences),
    )
    chosen = jax.vmap(_choose)(contexts)
    chex.assert_tree_shape_prefix(chosen, (batch,))
    return chosen


def _choose(ctx: Context) -> tuple[Choice, Step, SamplerState]:
    """The step of one row."""
    # The regime's arm proposes how the token is drawn, filters rule tokens out, and one is drawn.
    ctx = _classify(with_attempts(ctx))
    ctx = replace(ctx, proposal=_propose(ctx))
    ctx = replace(ctx, penalised=penalise(ctx.logits, ctx))
    truncated, inputs = truncate(ctx.penalised, ctx)
    ctx = replace(ctx, truncated=truncated)
    drawn = DrawnToken(logits=ctx.penalised, token=_draw(ctx), inputs=inputs)

    # Controls may act in place of the drawn token. Branches and rows with a forced token ask none.
    finite, is_branch = jnp.all(jnp.isfinite(ctx.logits)), ctx.branch >= 0
    asks = ctx.running & finite & ~is_branch & (ctx.queued == 0)
    ctx = replace(ctx, history=with_token(ctx.history, ctx.length, drawn.token, asks))
    ctx, verdict, actor = act(ctx, drawn.token, asks)

    # The token is the drawn one unless one is forced, possibly by this step.
    is_forced = ctx.queued > 0
    token = jnp.where(is_forced, ctx.history[ctx.length], drawn.token)
    choice = Choice(token, ctx.log_probs[token], ctx.observation, ctx.proposal, finite)

    # A row that goes back or waits is not advanced. One that forks commits no token.
    rewinds, forks, waits = verdict.kind == REWIND, verdict.kind == FORK, verdict.kind == WAIT
    moves = ctx.running & ~(rewinds | waits)
    commits = moves & ~forks
    was_drawn = commits & ~is_forced & ~is_branch
    ctx = replace(ctx, history=with_token(ctx.history, ctx.length, token, commits))
    after = SamplerState(
        tally=where(moves, _advance(ctx, drawn, was_drawn), ctx.tally),
        trail=remember(ctx, moves, waits, was_drawn),
    )
    next_length = ctx.length + commits.astype(jnp.int32)
    candidates = jnp.where(forks, verdict.tokens[:MAX_WIDTH], -1)
    step = Step(
        rows=RowView(**{name: getattr(ctx, name) for name in RowView.__dataclass_fields__}),
        log_probs=ctx.log_probs,
        scored=_score(ctx),
        metrics=ctx.metrics,
        tally_before=ctx.tally,
        rewinds=rewinds,
        forks=forks,
        candidates=jnp.maximum(candidates, 0),
        width=jnp.sum(candidates >= 0, dtype=jnp.int32),
        waits=waits,
        settled=next_length - reach(replace(ctx, **vars(after), length=next_length)),
        ended_by=jnp.where(verdict.kind == END, actor, -1),
    )
    return choice, step, after


def _classify(ctx: Context) -> Context:
    """Adds the row's regime, other measures of its text, and its permitted actions."""
    settings, tally, seen = ctx.settings, ctx.tally, ctx.observation
    thresholds = thresholds_of(settings, tally.drift)
    ctx = replace(ctx, metrics=seen.metrics, thresholds=thresholds)
    for _, mechanism in ctx.parts.having("observe"):
        ctx = replace(ctx, metrics=mechanism.observe(ctx))
    entropies, varentropy = spread(tally.entropies, seen.metrics.entropy, ctx.generated + 1)
    estimates = [mechanism.p_wrong(ctx) for _, mechanism in ctx.parts.having("p_wrong")]
    p_wrong = jnp.float32(estimates[0] if estimates else jnp.nan)
    seen = replace(
        seen,
        sequence_varentropy=varentropy,
        p_wrong=p_wrong,
        regime=classify(ctx.metrics, settings, varentropy, thresholds, p_wrong),
        rounds=count_rounds(ctx.history, ctx.length, ctx.generated, settings.loop),
    )
    ctx = replace(
        ctx,
        observation=seen,
        metrics=as_configured(ctx.metrics, settings),
        entropies=entropies,
        confidences=with_token(ctx.confidences, ctx.length, seen.token_confidence, ctx.running),
    )
    ctx = replace(ctx, may={m.name: m.may(ctx) for _, m in ctx.parts.having("may")})
    confidence = sum(m.confidence(ctx) for m in ctx.parts.mechanisms if m.confidence is not None)
    seen = replace(seen, confidence=jnp.float32(confidence))
    return replace(ctx, observation=seen, reach=reach(ctx))


def propose(arm: jax.Array, ctx: Context) -> Proposal:
    """Returns the proposal of one row's arm, an index into its mechanisms."""
    arms = {index: mechanism.propose for index, mechanism in ctx.parts.having("propose")}
    which = jnp.argmax(jnp.array([*arms]) == arm)
    # Closures: a mapped switch selects every leaf of an operand.
    proposal: Proposal = lax.switch(which, [lambda arm=arm: arm(ctx) for arm in arms.values()])
    return proposal


def _propose(ctx: Context) -> Proposal:
    """Returns the sampling parameters of the row's next token, from the arm of its regime."""
    settings, parts, rounds = ctx.settings, ctx.parts, ctx.observation.rounds
    starts = ctx.generated < settings.start.tokens
    served = jnp.where(starts, SERVED.index("start"), ctx.regime)
    served = jnp.where(rounds > 0, SERVED.index("loop"), served)
    proposal = propose(settings.arms[served], ctx)

    # An arm may propose an action that its row may not take: then the row just draws.
    action = proposal.action
    for name, allowed in ctx.may.items():
        refused = (proposal.action == parts.action(name)) & ~allowed
        action = jnp.where(refused, parts.action(SAMPLE), action)
    proposal = replace(
        proposal,
        temperature=heated(proposal.temperature, rounds, settings.loop),
        # A forced token stands for the action that it is forced for.
        action=jnp.where(ctx.queued > 0, ctx.tally.queue_action, action),
    )
    if not parts.acts:
        return proposal
    rollout = draw("branch", ctx, temperature=settings.own["branch"].rollout_temperature)
    if "clarify" in parts.used:
        own = draw("clarify", ctx, temperature=settings.own["clarify"].temperature)
        rollout = where(ctx.states["clarify"].measured, own, rollout)
    proposal = where(ctx.branch >= 0, rollout, proposal)
    # A position that is drawn again is drawn as it was, as one candidate.
    return if_any(ctx.trail.again, lambda: ctx.trail.at(ctx.length).proposal, proposal)


def _draw(ctx: Context) -> jax.Array:
    """Returns the candidate that is most likely under the unmodified logits."""
    candidates = draw_tokens(ctx.truncated, numbers_of_candidates(ctx))
    is_drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32) < ctx.proposal.num_candidates
    return candidates[jnp.argmax(jnp.where(is_drawn, ctx.log_probs[candidates], -jnp.inf))]


def _score(ctx: Context) -> jax.Array:
    """Returns the log-probabilities for branch scores: the model's, or those of the draw."""
    if not ctx.parts.acts:
        return ctx.log_probs
    processed = ctx.settings.own["branch"].processed
    return if_any(processed, lambda: jax.nn.log_softmax(ctx.truncated), ctx.log_probs)


def _advance(ctx: Context, drawn: DrawnToken, was_drawn: jax.Array) -> Tally:
    """Returns the tally after one more committed token."""
    states = {**ctx.tally.states}
    states |= {m.name: m.advance(ctx) for m in ctx.parts.mechanisms if m.advance is not None}
    for _, m in ctx.parts.having("learn"):
        learned = m.learn(drawn, replace(ctx, tally=replace(ctx.tally, states=states)))
        states[m.name] = where(was_drawn, learned, states[m.name])
    return replace(
        ctx.tally,
        queued=jnp.maximum(ctx.tally.queued - 1, 0),
        entropies=ctx.entropies,
        drift=update_drift(ctx.metrics, ctx.settings, ctx.tally.drift),
        states=states,
    )
