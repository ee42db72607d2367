"""One step of the sampler: from logits and attention statistics to each row's next token.

log-probabilities -> metrics -> regime -> arm -> proposal -> action -> draw -> token
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.draw import truncated_draw
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, STREAM_ROLLOUT, uniforms
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.adaptive import confidence
from entropix_jax.sampler.mechanisms.backspace import BACKSPACE, may_backspace
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH, follow
from entropix_jax.sampler.metrics import Metrics, apply_noise_floor, measure
from entropix_jax.sampler.modify import modify
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.regimes import LEHV, classify, is_looping
from entropix_jax.sampler.settings import MAX_DRAWS, SamplerSettings
from entropix_jax.sampler.state import (
    Observation,
    Origin,
    Rows,
    SamplerState,
    Step,
    Tally,
    where_rows,
)
from entropix_jax.sampler.truncation import MIROSTAT, mirostat_update, surprise
from entropix_jax.stats import AttnStats


@struct.dataclass
class Choice:
    """The token of each row and all that led to it; every field [B].

    A token that takes another's place (action `backspace`) stands one position before the row's
    length, and everything about it but the action is that position's.
    """

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    observation: Observation
    sequence_varentropy: jax.Array  # float32, bits^2, this token included
    proposal: Proposal  # a forced token has the action that it is forced for
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


def choose(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
) -> tuple[Choice, Step, SamplerState]:
    """Chooses each row's next token. A row that backspaces has its last token chosen again instead.

    Args:
        logits: float32 [B, V], as the model gave them.
        stats: the attention of each row's last position.
        settings: each leaf with a leading row axis.
        state: as the step before left it.
        rows: the text up to the token to be chosen, and what the row may still do.

    Returns:
        The choices, the step as the actions left it, and the state after it. The token of a row
        that forks or waits means nothing, and so does that of a choice that is not `finite`.
    """
    batch, vocab = logits.shape
    chex.assert_shape(rows.history, (batch, None))
    chex.assert_shape(state.last.logits, (batch, vocab))
    chex.assert_tree_shape_prefix((stats.entropy, settings, state, rows), (batch,))

    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    step = _propose(logits, stats, settings, state, rows)

    # Actions: each mechanism changes the step in the rows that act. A forced token's row does not,
    # and a branch just grows.
    action, is_branch = step.proposal.action, rows.branch >= 0
    free = rows.running & finite & (step.tally.queued == 0) & ~is_branch
    for index, mechanism in enumerate(settings.mechanisms):
        if mechanism.apply is not None:
            step = mechanism.apply(free & (action == index), step, settings)

    # The token: drawn, unless one is forced.
    forced = step.tally.queued > 0
    drawn, mirostat = _draw_best(step, settings)
    ahead = jnp.take_along_axis(step.rows.history, step.rows.length[:, None], axis=1)[:, 0]
    token = jnp.where(forced, ahead, drawn)

    # The state after it. One that takes another's place leaves the rest as it was after the first.
    stays = ~rows.running | step.backspaces | step.waits
    was_drawn = ~forced & ~step.waits & ~step.forks & ~is_branch
    advanced = advance(step.tally, settings, step.origin.observation, rows.generated)
    tally = replace(
        where_rows(stays, step.tally, advanced),
        mirostat=jnp.where(was_drawn, mirostat, step.origin.mirostat),
    )
    choice = Choice(
        token=token,
        logprob=jnp.take_along_axis(step.log_probs, token[:, None], axis=1)[:, 0],
        observation=step.origin.observation,
        sequence_varentropy=sequence_varentropy(tally, step.rows.generated + 1),
        proposal=step.proposal,
        finite=finite,
    )
    chex.assert_tree_shape_prefix(choice, (batch,))
    return choice, step, SamplerState(tally=tally, last=replace(step.origin, drawn=was_drawn))


def observe(
    log_probs: jax.Array, stats: AttnStats, settings: SamplerSettings, rows: Rows
) -> Observation:
    """What each row's `log_probs[B, V]` (nats, the noise floor applied) and attention say."""
    chex.assert_shape(log_probs, (rows.length.shape[0], None))
    metrics = measure(log_probs, stats, settings.layer_weights)
    looping = jax.vmap(is_looping)(rows.history, rows.length, rows.generated, settings.loop)
    seen = jax.vmap(as_seen)(metrics, settings)
    return Observation(
        metrics=metrics,
        regime=jnp.where(looping, LEHV, jax.vmap(classify)(metrics, settings)),
        looping=looping,
        confidence=jax.vmap(confidence)(seen, settings),
    )


def as_seen(metrics: Metrics, settings: SamplerSettings) -> Metrics:
    """What the arms see: `attn_entropy_norm` and `agreement_published` under the plain names where
    the settings say so."""
    return replace(
        metrics,
        attn_entropy=jnp.where(
            settings.attn_entropy_normalised, metrics.attn_entropy_norm, metrics.attn_entropy
        ),
        agreement=jnp.where(
            settings.agreement_published, metrics.agreement_published, metrics.agreement
        ),
    )


def propose(arm: jax.Array, metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
    """The proposal of one row's arm, an index into its mechanisms; `metrics` are `as_seen`."""
    arms = [partial(m.propose, metrics, settings, row) for m in settings.mechanisms]
    proposal: Proposal = lax.switch(arm, arms)
    return proposal


def advance(
    tally: Tally, settings: SamplerSettings, observation: Observation, generated: jax.Array
) -> Tally:
    """The tally after one more committed token; `generated` is int32 [B], the tokens generated
    before it."""
    own = {
        m.name: m.advance(settings, tally, observation)
        for m in settings.mechanisms
        if m.advance is not None
    }
    count = (generated + 1).astype(jnp.float32)
    entropy = observation.metrics.entropy
    deviation = entropy - tally.entropy_mean
    mean = tally.entropy_mean + deviation / count
    return replace(
        tally,
        queued=jnp.maximum(tally.queued - 1, 0),
        entropy_mean=mean,
        entropy_squares=tally.entropy_squares + deviation * (entropy - mean),
        own={**tally.own, **own},
    )


def sequence_varentropy(tally: Tally, generated: jax.Array) -> jax.Array:
    """The variance of the entropies of a row's `generated[B]` tokens: float32 [B], bits^2."""
    return tally.entropy_squares / jnp.maximum(generated, 1).astype(jnp.float32)


def may_backspace_next(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether the step after `state` may backspace: bool [B], False where no arm of the row can.
    An arm that is not of this package may propose any action."""
    able = [i for i, m in enumerate(settings.mechanisms) if m == BACKSPACE or m not in MECHANISMS]
    has_arm = jnp.any(jnp.isin(settings.arms, jnp.array(able, jnp.int32)), axis=-1)
    return has_arm & may_backspace(settings, state, rows)


def _propose(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
) -> Step:
    """The step before any action: what the distribution says, and what each row's arm proposes."""
    tally = state.tally
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    floored = apply_noise_floor(log_probs, settings.noise_epsilon)
    observation = observe(floored, stats, settings, rows)

    may = {m.name: m.may(settings, state, rows) for m in settings.mechanisms if m.may is not None}
    arm = jnp.take_along_axis(settings.arms, observation.regime[:, None], axis=1)[:, 0]
    seen = jax.vmap(as_seen)(observation.metrics, settings)
    proposal = jax.vmap(propose)(arm, seen, settings, RowView(may=may, own=tally.own))

    # An arm may propose more than its row may do: then it just draws.
    action = proposal.action
    for name, allowed in may.items():
        refused = (proposal.action == settings.action(name)) & ~allowed
        action = jnp.where(refused, settings.action("sample"), action)
    # A forced token stands for the action that it is forced for. A branch is followed.
    proposal = replace(proposal, action=jnp.where(tally.queued > 0, tally.queue_action, action))
    proposal = where_rows(rows.branch >= 0, jax.vmap(follow)(settings), proposal)

    no = jnp.zeros_like(rows.running)
    origin = Origin(
        logits=logits,
        observation=observation,
        proposal=proposal,
        mirostat=tally.mirostat,
        drawn=no,
        attempts=jnp.zeros_like(rows.length),
        bans=jnp.full_like(state.last.bans, -1),
    )
    return Step(
        rows=rows,
        last=state.last,
        origin=origin,
        log_probs=log_probs,
        floored=floored,
        proposal=proposal,
        tally=tally,
        backspaces=no,
        forks=no,
        candidates=jnp.zeros((*no.shape, MAX_WIDTH), jnp.int32),
        width=jnp.zeros_like(rows.length),
        waits=no,
        ends=no,
    )


def _draw_best(step: Step, settings: SamplerSettings) -> tuple[jax.Array, jax.Array]:
    """The likeliest, under the unmodified logits, of the proposal's candidates, int32 [B], and the
    state of mirostat after it, float32 [B]."""
    rows, origin, proposal = step.rows, step.origin, step.proposal
    logits = modify(origin.logits, step.floored, settings, rows, origin.bans)
    stream = jnp.where(proposal.draws > 1, STREAM_CANDIDATE, STREAM_DRAW)
    stream = jnp.where(rows.branch >= 0, STREAM_ROLLOUT, stream)
    numbers = uniforms(rows.keys, rows.length, origin.attempts, stream, MAX_DRAWS)
    # Branches of a row have the same key: each takes the number at its own index.
    own = jnp.take_along_axis(numbers, jnp.maximum(rows.branch, 0)[:, None], axis=1)
    numbers = jnp.where(rows.branch[:, None] >= 0, own, numbers)
    # Mirostat learns from committed tokens alone: a branch has the mu that a text starts with.
    learnt = jnp.where(rows.branch >= 0, 0.0, origin.mirostat)
    mu = 2.0 * settings.truncation.mirostat_target + learnt
    candidates = truncated_draw(logits, proposal, numbers, settings.truncation, mu).ids
    drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32)[None, :] < proposal.draws[:, None]
    scores = jnp.take_along_axis(step.log_probs, candidates, axis=1)
    best = jnp.argmax(jnp.where(drawn, scores, -jnp.inf), axis=-1)
    token = jnp.take_along_axis(candidates, best[:, None], axis=1)[:, 0]

    def learn() -> jax.Array:
        bits = surprise(logits, proposal.temperature, token)
        change = mirostat_update(mu, bits, settings.truncation) - mu
        return jnp.where(proposal.rule == MIROSTAT, origin.mirostat + change, origin.mirostat)

    return token, lax.cond(jnp.any(proposal.rule == MIROSTAT), learn, lambda: origin.mirostat)
