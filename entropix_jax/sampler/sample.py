"""One row of logits and attention statistics in, one token out: where the sampler's parts meet.

log-probabilities -> metrics -> regime -> arm -> proposal -> draw -> token
"""

from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.information import AttnStats
from entropix_jax.metrics import apply_noise_floor, measure
from entropix_jax.sampler.arms import (
    ARGMAX,
    ARMS,
    BACKSPACE,
    BRANCH,
    INJECT,
    SAMPLE,
    Arm,
    Proposal,
    RowView,
    as_seen,
    confidence,
    draw,
    propose,
)
from entropix_jax.sampler.draw import truncated_draw
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, uniforms
from entropix_jax.sampler.params import MAX_DRAWS, MAX_THOUGHT, InjectParams, SamplerParams
from entropix_jax.sampler.regimes import LEHV, LELV, classify, is_looping
from entropix_jax.sampler.state import LastToken, Observation, Rows, SamplerState, Tally
from entropix_jax.sampler.truncation import MIROSTAT, mirostat_update, surprise

Tree = TypeVar("Tree")


@struct.dataclass
class Choice:
    """The token of each row and all that led to it; every field [B].

    A token that takes another's place (action `backspace`) stands one position before the row's
    length, and everything told of it but the action is that position's.
    """

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    observation: Observation
    sequence_varentropy: jax.Array  # float32, bits^2, this token included
    proposal: Proposal  # a forced token carries the action that it is forced for
    begins: jax.Array  # bool, a thought or a branching begins here
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


def choose(
    logits: jax.Array,
    stats: AttnStats,
    params: SamplerParams,
    state: SamplerState,
    rows: Rows,
    arms: tuple[Arm, ...],
) -> tuple[Choice, SamplerState]:
    """Chooses each row's next token. A row that retracts has its last token chosen again instead.

    Args:
        logits: float32 [B, V], as the model gave them.
        stats: the attention of each row's last position.
        params: each leaf with a leading row axis.
        state: as the step before left it.
        rows: the text up to the token to be chosen, and what the row may still do.
        arms: static, what `params.arms` chooses from.

    Returns:
        The choices, and the state after them. For a row that begins to branch the token and the
        state are meaningless; so they are where the choice is not `finite`.
    """
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    heard = apply_noise_floor(log_probs, params.noise_epsilon)
    observation = observe(heard, stats, params, rows)
    arm = jnp.take_along_axis(params.arms, observation.regime[:, None], axis=1)[:, 0]
    seen = jax.vmap(as_seen)(observation.metrics, params)
    view = _view(params, state, rows)
    proposal = jax.vmap(partial(propose, arms=arms))(arm, seen, params, view)
    # An arm of one's own may ask for more than its row may do.
    may_not = (
        ((proposal.action == INJECT) & ~view.may_inject)
        | ((proposal.action == BRANCH) & ~view.may_branch)
        | ((proposal.action == BACKSPACE) & ~view.may_retract)
    )
    proposal = replace(proposal, action=jnp.where(may_not, SAMPLE, proposal.action))

    tally = state.tally
    forced = tally.queued > 0
    action = jnp.where(forced, tally.queue_action, proposal.action)
    injects, branches = ~forced & (action == INJECT), ~forced & (action == BRANCH)
    retracts = action == BACKSPACE
    now = LastToken(
        logits=logits,
        observation=observation,
        proposal=replace(proposal, action=action),
        mirostat=tally.mirostat,
        was_drawn=~forced & ~injects & ~branches,
        attempts=jnp.zeros_like(rows.length),
        bans=jnp.full_like(state.last.bans, -1),
    )
    moved, sequence_varentropy = advance(tally, params.inject, observation, rows.generated, injects)
    now, log_probs, heard, rows = _take_back(
        now, log_probs, heard, retracts, state.last, params, rows
    )
    proposal = where_rows(retracts, _again(now.proposal, params), now.proposal)
    drawn, mirostat = _draw_best(log_probs, heard, proposal, now, params, rows)
    token = jnp.where(injects, thought(params.inject, tally.injections)[0][:, 0], drawn)
    ahead = jnp.take_along_axis(rows.history, rows.length[:, None], axis=1)[:, 0]
    token = jnp.where(forced, ahead, token)

    # A token in another's place leaves all else as it was after the first.
    taken_back = replace(tally, retractions=tally.retractions + 1)
    varentropy_now = tally.entropy_squares / jnp.maximum(rows.generated + 1, 1).astype(jnp.float32)
    tally = replace(
        where_rows(retracts, taken_back, moved),
        mirostat=jnp.where(now.was_drawn, mirostat, now.mirostat),
    )
    return Choice(
        token=token,
        logprob=jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0],
        observation=now.observation,
        sequence_varentropy=jnp.where(retracts, varentropy_now, sequence_varentropy),
        proposal=proposal,
        begins=injects | branches,
        finite=finite,
    ), SamplerState(tally=tally, last=now)


def observe(
    log_probs: jax.Array, stats: AttnStats, params: SamplerParams, rows: Rows
) -> Observation:
    """What each row's `log_probs[B, V]` (nats, the noise floor applied) and attention say."""
    metrics = measure(log_probs, stats, params.layer_weights)
    looping = jax.vmap(is_looping)(rows.history, rows.length, rows.generated, params.loop)
    seen = jax.vmap(as_seen)(metrics, params)
    return Observation(
        metrics=metrics,
        regime=jnp.where(looping, LEHV, jax.vmap(classify)(metrics, params)),
        looping=looping,
        confidence=jax.vmap(confidence)(seen, params),
    )


def advance(
    tally: Tally,
    inject: InjectParams,
    observation: Observation,
    generated: jax.Array,
    injects: jax.Array,
) -> tuple[Tally, jax.Array]:
    """The tally after one more token, which the queue held, or which begins a thought where
    `injects`, or which is any other; and the variance of the committed tokens' entropies.

    `generated` is int32 [B], the tokens generated before it.
    """
    length = jnp.where(injects, thought(inject, tally.injections)[1], tally.queued)
    left = jnp.maximum(length - 1, 0)
    thinking = injects | ((tally.queued > 0) & (tally.queue_action == INJECT))
    confident = inject.until_confident & (observation.regime == LELV)
    waited = jnp.where(confident, 0, jnp.maximum(tally.cooldown - 1, 0))

    count = (generated + 1).astype(jnp.float32)
    entropy = observation.metrics.entropy
    deviation = entropy - tally.entropy_mean
    mean = tally.entropy_mean + deviation / count
    squares = tally.entropy_squares + deviation * (entropy - mean)
    return replace(
        tally,
        queued=left,
        queue_action=jnp.where(injects, INJECT, tally.queue_action),
        cooldown=jnp.where(thinking & (left == 0), inject.cooldown, waited),
        injections=tally.injections + injects.astype(jnp.int32),
        entropy_mean=mean,
        entropy_squares=squares,
    ), squares / count


def modify(
    logits: jax.Array, heard: jax.Array, params: SamplerParams, rows: Rows, bans: jax.Array
) -> jax.Array:
    """The logits that are drawn from: repetition penalty, bans, noise floor.

    `heard` is float32 [B, V], -inf under the noise floor; `bans` int32 [B, n], those of a row's
    position beside the sampler's own, -1 for none.
    """
    batch, vocab = logits.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def penalised() -> jax.Array:
        slot = jnp.arange(rows.history.shape[1], dtype=jnp.int32)[None, :]
        tokens = jnp.where(slot < rows.length[:, None], rows.history, vocab)
        seen = jnp.zeros((batch, vocab), bool).at[row, tokens].set(True, mode="drop")
        penalty = params.repetition.penalty[:, None]
        return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)

    logits = lax.cond(jnp.any(params.repetition.penalty != 1.0), penalised, lambda: logits)
    bans = jnp.concatenate([params.bans, bans], axis=1)
    logits = logits.at[row, jnp.where(bans < 0, vocab, bans)].set(-jnp.inf, mode="drop")
    audible = jnp.where(heard > -jnp.inf, logits, -jnp.inf)
    # Where the bans take all that rose above the noise, the noise is what there is to draw from.
    return jnp.where(jnp.any(audible > -jnp.inf, axis=-1, keepdims=True), audible, logits)


def thought(inject: InjectParams, injections: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whose turn it is: the thought's tokens, int32 [B, MAX_THOUGHT], and its length [B]."""
    number = jnp.maximum(jnp.sum(inject.lengths > 0, axis=-1), 1).astype(jnp.int32)
    turn = jnp.mod(injections, number)
    tokens = jnp.take_along_axis(inject.thoughts, turn[:, None, None], axis=1)[:, 0]
    return tokens, jnp.take_along_axis(inject.lengths, turn[:, None], axis=1)[:, 0]


def begin_thoughts(
    history: jax.Array, length: jax.Array, begins: jax.Array, inject: InjectParams, turn: jax.Array
) -> jax.Array:
    """The history [B, S] with a thought from slot `length` on, in the rows that begin one; `turn`
    is int32 [B], the thoughts begun before."""

    def written() -> jax.Array:
        tokens, number = thought(inject, turn)
        steps = jnp.arange(MAX_THOUGHT, dtype=jnp.int32)[None, :]
        inside = begins[:, None] & (steps < number[:, None])
        target = jnp.where(inside, length[:, None] + steps, history.shape[1])
        rows = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
        return history.at[rows, target].set(tokens, mode="drop")

    begun: jax.Array = lax.cond(jnp.any(begins), written, lambda: history)
    return begun


def may_return(state: SamplerState, params: SamplerParams) -> jax.Array:
    """Whether the next step may take each row's last token back: bool [B]."""
    retracting = (params.arms == list(ARMS).index("backspace")) | (params.arms >= len(ARMS))
    last = state.last
    return (
        jnp.any(retracting, axis=-1)
        & last.was_drawn
        & (last.attempts < params.backspace.per_position)
        & (state.tally.retractions < params.backspace.per_row)
    )


def where_rows(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` in the rows where the condition [B] holds, else `other`; leaves [B, ...]."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    chosen: Tree = jax.tree.map(choose, one, other)
    return chosen


def _view(params: SamplerParams, state: SamplerState, rows: Rows) -> RowView:
    """What each row may do: budgets, cooldown, and what its last token was."""
    length = thought(params.inject, state.tally.injections)[1]
    fits = rows.asks | ((length > 0) & (length <= rows.remaining))
    just_asked = jax.vmap(_ends_in_a_thought)(rows.history, rows.length, params.inject)
    tally, last, limits = state.tally, state.last, params.backspace
    bans = last.attempts + 1 + jnp.sum(params.bans >= 0, axis=-1, dtype=jnp.int32)
    return RowView(
        may_inject=fits
        & ~just_asked
        & (tally.cooldown == 0)
        & (tally.injections < params.inject.per_row),
        may_branch=tally.branchings < params.branch.per_row,
        may_retract=last.was_drawn
        & (last.attempts < limits.per_position)
        & (tally.retractions < limits.per_row)
        & (bans < last.logits.shape[-1]),  # some token must be left to draw
    )


def _ends_in_a_thought(history: jax.Array, length: jax.Array, inject: InjectParams) -> jax.Array:
    """Whether one row's last tokens are a thought, injected or not (documents 000 and 001: no
    question is asked right after it was)."""
    offsets = jnp.arange(MAX_THOUGHT, dtype=jnp.int32)[None, :]
    lengths = inject.lengths[:, None]
    tokens = jnp.take(history, length - lengths + offsets, mode="clip")  # [MAX_THOUGHTS, ...]
    same = jnp.all((tokens == inject.thoughts) | (offsets >= lengths), axis=-1)
    return jnp.any(same & (inject.lengths > 0) & (inject.lengths <= length))


def _take_back(
    now: LastToken,
    log_probs: jax.Array,
    heard: jax.Array,
    retracts: jax.Array,
    last: LastToken,
    params: SamplerParams,
    rows: Rows,
) -> tuple[LastToken, jax.Array, jax.Array, Rows]:
    """The rows that retract as they were before their last token, which joins the bans; the others
    as they are."""
    row = jnp.arange(rows.length.shape[0], dtype=jnp.int32)
    token = jnp.take_along_axis(rows.history, jnp.maximum(rows.length - 1, 0)[:, None], axis=1)
    before = replace(
        last,
        attempts=last.attempts + 1,
        bans=last.bans.at[row, last.attempts].set(token[:, 0], mode="drop"),
    )

    def earlier() -> tuple[jax.Array, jax.Array, jax.Array]:
        logs = jax.nn.log_softmax(last.logits, axis=-1)
        again = (last.logits, logs, apply_noise_floor(logs, params.noise_epsilon))
        return where_rows(retracts, again, (now.logits, log_probs, heard))

    logits, log_probs, heard = lax.cond(
        jnp.any(retracts), earlier, lambda: (now.logits, log_probs, heard)
    )
    # The logits, large, were chosen under the condition.
    same = replace(now, logits=logits)
    now = where_rows(retracts, replace(before, logits=logits), same)
    back = retracts.astype(jnp.int32)
    rows = replace(rows, length=rows.length - back, generated=rows.generated - back)
    return now, log_probs, heard, rows


def _again(proposal: Proposal, params: SamplerParams) -> Proposal:
    """How a position is drawn again: as it was drawn, as one candidate; after an argmax, with the
    base values."""
    base = jax.vmap(partial(draw, SAMPLE))(params)
    proposal = where_rows(proposal.action == ARGMAX, base, proposal)
    return replace(
        proposal,
        action=jnp.full_like(proposal.action, BACKSPACE),
        draws=jnp.ones_like(proposal.draws),
    )


def _draw_best(
    log_probs: jax.Array,
    heard: jax.Array,
    proposal: Proposal,
    now: LastToken,
    params: SamplerParams,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """The likeliest, under the unmodified logits, of the proposal's candidates, int32 [B], and the
    state of mirostat after it, float32 [B]."""
    logits = modify(now.logits, heard, params, rows, now.bans)
    stream = jnp.where(proposal.draws > 1, STREAM_CANDIDATE, STREAM_DRAW)
    numbers = uniforms(rows.keys, rows.length, now.attempts, stream, MAX_DRAWS)
    mu = 2.0 * params.truncation.mirostat_target + now.mirostat
    candidates = truncated_draw(logits, proposal, numbers, params.truncation, mu).ids
    drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32)[None, :] < proposal.draws[:, None]
    scores = jnp.take_along_axis(log_probs, candidates, axis=1)
    best = jnp.argmax(jnp.where(drawn, scores, -jnp.inf), axis=-1)
    token = jnp.take_along_axis(candidates, best[:, None], axis=1)[:, 0]

    def learned() -> jax.Array:
        bits = surprise(logits, proposal.temperature, token)
        change = mirostat_update(mu, bits, params.truncation) - mu
        return jnp.where(proposal.rule == MIROSTAT, now.mirostat + change, now.mirostat)

    return token, lax.cond(jnp.any(proposal.rule == MIROSTAT), learned, lambda: now.mirostat)
