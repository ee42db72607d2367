"""One row of logits and attention statistics in, one token out: where the sampler's parts meet.

log-probabilities -> metrics -> regime -> arm -> proposal -> draw -> token
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.information import AttnStats
from entropix_jax.metrics import Metrics, apply_noise_floor, measure
from entropix_jax.sampler.arms import INJECT, Proposal, RowView, propose
from entropix_jax.sampler.draw import truncated_draw
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, uniforms
from entropix_jax.sampler.params import MAX_DRAWS, MAX_THOUGHT, InjectParams, SamplerParams
from entropix_jax.sampler.regimes import LEHV, LELV, classify, is_looping


@struct.dataclass
class SamplerState:
    """What the sampler remembers of each row from step to step."""

    queue: jax.Array  # int32 [B, MAX_THOUGHT], tokens that are yet to be forced, the next one first
    queued: jax.Array  # int32 [B], how many of them
    cooldown: jax.Array  # int32 [B], tokens until a thought may be injected again
    entropy_mean: jax.Array  # float32 [B], of the committed tokens' entropies, bits
    entropy_squares: jax.Array  # float32 [B], their summed squared deviation from it (Welford)


@struct.dataclass
class Rows:
    """What the sampler is told of each row."""

    keys: jax.Array  # uint32 [B, 2], see `sampler.keys`
    history: jax.Array  # int32 [B, S], the tokens so far, prompt included
    length: jax.Array  # int32 [B], how many: also the position of the token to be chosen
    generated: jax.Array  # int32 [B], how many of them were generated
    remaining: jax.Array  # int32 [B], how many may still be committed, at least 1


@struct.dataclass
class Choice:
    """The token of each row and all that led to it; every field [B]."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    regime: jax.Array  # int32, index into REGIMES
    looping: jax.Array  # bool, the loop guard made the regime LEHV
    metrics: Metrics
    sequence_varentropy: jax.Array  # float32, bits^2, this token included
    proposal: Proposal  # a forced token carries the action `inject`
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


def init_sampler_state(batch: int) -> SamplerState:
    """The state of rows that have committed nothing yet."""
    return SamplerState(
        queue=jnp.zeros((batch, MAX_THOUGHT), jnp.int32),
        queued=jnp.zeros(batch, jnp.int32),
        cooldown=jnp.zeros(batch, jnp.int32),
        entropy_mean=jnp.zeros(batch, jnp.float32),
        entropy_squares=jnp.zeros(batch, jnp.float32),
    )


def choose(
    logits: jax.Array, stats: AttnStats, params: SamplerParams, state: SamplerState, rows: Rows
) -> tuple[Choice, SamplerState]:
    """Chooses each row's next token from `logits[B, V]`; `params` carries a leading row axis."""
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    heard = apply_noise_floor(log_probs, params.noise_epsilon)
    metrics = measure(heard, stats, params.layer_weights)

    looping = jax.vmap(is_looping)(rows.history, rows.length, rows.generated, params.loop)
    regime = jnp.where(looping, LEHV, jax.vmap(classify)(metrics, params))
    arm = jnp.take_along_axis(params.arms, regime[:, None], axis=1)[:, 0]

    thought = params.inject.thought_length
    fits = (thought > 0) & (thought <= rows.remaining)
    view = RowView(may_inject=fits & (state.cooldown == 0))
    proposal = jax.vmap(propose)(arm, metrics, params, view)

    forced = state.queued > 0
    proposal = replace(proposal, action=jnp.where(forced, INJECT, proposal.action))
    modified = _modify(logits, heard, params, rows)
    drawn = _draw_best(modified, log_probs, proposal, rows)
    token = jnp.where(proposal.action == INJECT, params.inject.thought[:, 0], drawn)
    token = jnp.where(forced, state.queue[:, 0], token)

    state, sequence_varentropy = _advance(state, params.inject, proposal, regime, metrics, rows)
    return Choice(
        token=token,
        logprob=jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0],
        regime=regime,
        looping=looping,
        metrics=metrics,
        sequence_varentropy=sequence_varentropy,
        proposal=proposal,
        finite=finite,
    ), state


def _modify(logits: jax.Array, heard: jax.Array, params: SamplerParams, rows: Rows) -> jax.Array:
    """The logits that are drawn from: repetition penalty, bans, noise floor."""
    batch, vocab = logits.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def penalised() -> jax.Array:
        slot = jnp.arange(rows.history.shape[1], dtype=jnp.int32)[None, :]
        tokens = jnp.where(slot < rows.length[:, None], rows.history, vocab)
        seen = jnp.zeros((batch, vocab), bool).at[row, tokens].set(True, mode="drop")
        penalty = params.repetition.penalty[:, None]
        return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)

    logits = lax.cond(jnp.any(params.repetition.penalty != 1.0), penalised, lambda: logits)
    bans = jnp.where(params.bans < 0, vocab, params.bans)
    logits = logits.at[row, bans].set(-jnp.inf, mode="drop")
    audible = jnp.where(heard > -jnp.inf, logits, -jnp.inf)
    # Where the bans take all that rose above the noise, the noise is what there is to draw from.
    return jnp.where(jnp.any(audible > -jnp.inf, axis=-1, keepdims=True), audible, logits)


def _draw_best(
    logits: jax.Array, log_probs: jax.Array, proposal: Proposal, rows: Rows
) -> jax.Array:
    """The likeliest, under the unmodified logits, of the proposal's candidates: int32 [B]."""
    stream = jnp.where(proposal.draws > 1, STREAM_CANDIDATE, STREAM_DRAW)
    attempt = jnp.zeros_like(rows.length)
    numbers = uniforms(rows.keys, rows.length, attempt, stream, MAX_DRAWS)
    candidates = truncated_draw(logits, proposal, numbers).ids
    drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32)[None, :] < proposal.draws[:, None]
    scores = jnp.take_along_axis(log_probs, candidates, axis=1)
    best = jnp.argmax(jnp.where(drawn, scores, -jnp.inf), axis=-1)
    return jnp.take_along_axis(candidates, best[:, None], axis=1)[:, 0]


def _advance(
    state: SamplerState,
    inject: InjectParams,
    proposal: Proposal,
    regime: jax.Array,
    metrics: Metrics,
    rows: Rows,
) -> tuple[SamplerState, jax.Array]:
    """The state after the token, and the variance of the committed tokens' entropies."""
    begins = (proposal.action == INJECT) & (state.queued == 0)
    queue = jnp.where(begins[:, None], inject.thought, state.queue)
    thinking = begins | (state.queued > 0)
    left = jnp.where(begins, inject.thought_length, state.queued) - thinking.astype(jnp.int32)

    confident = inject.until_confident & (regime == LELV)
    waited = jnp.where(confident, 0, jnp.maximum(state.cooldown - 1, 0))
    cooldown = jnp.where(thinking & (left == 0), inject.cooldown, waited)

    count = (rows.generated + 1).astype(jnp.float32)
    deviation = metrics.entropy - state.entropy_mean
    mean = state.entropy_mean + deviation / count
    squares = state.entropy_squares + deviation * (metrics.entropy - mean)
    state = SamplerState(
        queue=jnp.where(thinking[:, None], jnp.roll(queue, -1, axis=1), queue),
        queued=left,
        cooldown=cooldown,
        entropy_mean=mean,
        entropy_squares=squares,
    )
    return state, squares / count
