"""Several futures of a row, and which is the best: adaptive width, short rollouts, a score.

What evaluates a token is handed in: here nothing is known of the model (document 004, "Branching";
document 002, "Branching vs Thinking Tokens").
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.information import AttnStats
from entropix_jax.metrics import apply_noise_floor
from entropix_jax.sampler.arms import SAMPLE, draw
from entropix_jax.sampler.draw import cumulate, truncated_draw
from entropix_jax.sampler.keys import STREAM_NOISE, STREAM_ROLLOUT, uniforms
from entropix_jax.sampler.params import MAX_DEPTH, MAX_WIDTH, SamplerParams
from entropix_jax.sampler.regimes import HEHV, LEHV
from entropix_jax.sampler.sample import modify, observe
from entropix_jax.sampler.state import Observation, Rows

# Tokens int32 [B, W], their depth and the model's own state of the branches to logits float32
# [B*W, V], statistics of B*W rows, and that state with the tokens in it.
Evaluate = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, AttnStats, Any]]
# What a caller wants to keep of each evaluation, a tree with leaves [rows, ...].
Note = Callable[[jax.Array, AttnStats], Any]


@struct.dataclass
class Branches:
    """The futures of each row, W of them, R tokens at most; what lies past a length is junk."""

    tokens: jax.Array  # int32 [B, W, R]
    length: jax.Array  # int32 [B, W]; 0: no such branch
    score: jax.Array  # float32 [B, W]; -inf: no such branch, or its logits became NaN or infinite
    best: jax.Array  # int32 [B], the branch with the highest score
    ambiguous: jax.Array  # bool [B], the second-best score is closer to it than the margin
    # Of the best branch's tokens, and of the distribution that each was chosen from:
    logprobs: jax.Array  # float32 [B, R], nats, under the unmodified logits
    observation: Observation  # [B, R]
    notes: Any  # [B, R, ...]


def roll_out(
    logits: jax.Array,
    observation: Observation,
    notes: Any,
    active: jax.Array,
    params: SamplerParams,
    rows: Rows,
    eos_ids: jax.Array,
    evaluate: Evaluate,
    memory: Any,
    note: Note,
) -> tuple[Branches, Any]:
    """Follows the candidates of each active row, and scores what comes of them.

    A branch is a candidate and what follows it, greedily unless a rollout temperature is set. It
    ends with an end token, at the depth that the parameters allow, or where the distribution after
    its last token is neither LEHV nor HEHV. Its score is `mean(log p) - entropy_weight * mean(h) -
    varentropy_weight * mean(u)` over its tokens: p of each under the unmodified logits (nats), h
    (bits) and u (bits^2) of the distribution after it. Branches of equal score: the likelier
    candidate's wins.

    Args:
        logits: float32 [B, V], the distribution of the first token.
        observation, notes: of that distribution, [B].
        active: bool [B], which rows branch.
        eos_ids: int32 [B, E], the tokens that end each row; -1 matches none.
        evaluate: see `Evaluate`.
        memory: the model's own state of the branches, handed to `evaluate` and back.
        note: see `Note`.

    Returns:
        The branches, and the memory that holds them.
    """
    batch, width = logits.shape[0], MAX_WIDTH
    # Room for a branch past any row's end: how much the batch has must not matter.
    rows = replace(rows, history=jnp.pad(rows.history, ((0, 0), (0, MAX_DEPTH))))
    each = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), (params, rows, eos_ids))
    each_params: SamplerParams = each[0]
    each_rows: Rows = each[1]
    each_eos_ids: jax.Array = each[2]
    index = jnp.arange(batch * width, dtype=jnp.int32)
    candidates, number = _candidates(logits, params, rows)
    log_probs = jax.nn.log_softmax(logits, axis=-1)

    def first(x: jax.Array) -> jax.Array:
        """[B, ...] of the step as the first of [B*W, R, ...]."""
        buffer = jnp.zeros((batch * width, MAX_DEPTH, *x.shape[1:]), x.dtype)
        return buffer.at[:, 0].set(jnp.repeat(x, width, axis=0))

    def keep(buffer: jax.Array, x: jax.Array, depth: jax.Array) -> jax.Array:
        return buffer.at[:, depth].set(x, mode="drop")

    def unfinished(carry: tuple[Any, ...]) -> jax.Array:
        return jnp.any(carry[1])

    def extend(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        depth, live, history, memory, tokens, logprobs, kept, length, sums, failed = carry
        token = tokens[:, depth]
        logits, stats, memory = evaluate(token.reshape(batch, width), depth, memory)
        finite = jnp.all(jnp.isfinite(logits), axis=-1)
        history = history.at[index, each_rows.length + depth].set(token)
        here = replace(
            each_rows,
            history=history,
            length=each_rows.length + depth + 1,
            generated=each_rows.generated + depth + 1,
        )
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        heard = apply_noise_floor(log_probs, each_params.noise_epsilon)
        observation = observe(heard, stats, each_params, here)
        metrics = observation.metrics
        terms = jnp.stack([logprobs[:, depth], metrics.entropy, metrics.varentropy], axis=-1)
        length = jnp.where(live, depth + 1, length)
        sums = jnp.where(live[:, None], sums + terms, sums)
        failed = failed | (live & ~finite)

        ends = jnp.any(token[:, None] == each_eos_ids, axis=-1)
        outside = (observation.regime == LEHV) | (observation.regime == HEHV)
        live = live & finite & ~ends & outside & (depth + 1 < each_params.branch.depth)
        drawn = _follow(logits, heard, each_params, here, index % width)
        logprob = jnp.take_along_axis(log_probs, drawn[:, None], axis=1)[:, 0]
        tokens, logprobs = keep(tokens, drawn, depth + 1), keep(logprobs, logprob, depth + 1)
        kept = jax.tree.map(
            lambda buffer, x: keep(buffer, x, depth + 1), kept, (observation, note(logits, stats))
        )
        return depth + 1, live, history, memory, tokens, logprobs, kept, length, sums, failed

    exists = active[:, None] & (jnp.arange(width, dtype=jnp.int32)[None, :] < number[:, None])
    first_logprobs = jnp.take_along_axis(log_probs, candidates, axis=1)
    flat = batch * width
    carry = (
        jnp.int32(0),
        exists.reshape(flat),
        each_rows.history,
        memory,
        jnp.zeros((flat, MAX_DEPTH), jnp.int32).at[:, 0].set(candidates.reshape(flat)),
        jnp.zeros((flat, MAX_DEPTH), jnp.float32).at[:, 0].set(first_logprobs.reshape(flat)),
        jax.tree.map(first, (observation, notes)),
        jnp.zeros(flat, jnp.int32),
        jnp.zeros((flat, 3), jnp.float32),
        jnp.zeros(flat, bool),
    )
    carry = lax.while_loop(unfinished, extend, carry)
    _, _, _, memory, tokens, logprobs, kept, length, sums, failed = carry

    p = each_params.branch
    means = sums / jnp.maximum(length, 1)[:, None].astype(jnp.float32)
    score = means[:, 0] - p.entropy_weight * means[:, 1] - p.varentropy_weight * means[:, 2]
    score = jnp.where((length > 0) & ~failed, score, -jnp.inf).reshape(batch, width)
    two_best = lax.top_k(score, 2)[0]
    best = jnp.argmax(score, axis=-1).astype(jnp.int32)

    def of_best(x: jax.Array) -> jax.Array:
        return x[jnp.arange(batch, dtype=jnp.int32) * width + best]

    return Branches(
        tokens=tokens.reshape(batch, width, MAX_DEPTH),
        length=length.reshape(batch, width),
        score=score,
        best=best,
        ambiguous=(two_best[:, 1] > -jnp.inf)
        & (two_best[:, 0] - two_best[:, 1] < params.branch.margin),
        logprobs=of_best(logprobs),
        observation=jax.tree.map(of_best, kept[0]),
        notes=jax.tree.map(of_best, kept[1]),
    ), memory


def _candidates(
    logits: jax.Array, params: SamplerParams, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """The tokens that the branches begin with, likeliest first, int32 [B, W], and how many count.

    Of the distribution warmed by temperature and Gumbel noise (scaled, on its logits): those that
    min-p admits, of these the shortest prefix that reaches top-p, at most `width`.
    """
    p = params.branch
    heard = apply_noise_floor(jax.nn.log_softmax(logits, axis=-1), params.noise_epsilon)
    none = jnp.full((logits.shape[0], 1), -1, jnp.int32)
    logits = modify(logits, heard, params, rows, none)

    def noised() -> jax.Array:
        zero = jnp.zeros_like(rows.length)
        numbers = uniforms(rows.keys, rows.length, zero, zero + STREAM_NOISE, logits.shape[-1])
        # Else XLA's reshape mover moves a reshape through all that follows, one operation in each
        # round of its passes over the whole program: a tenth of the time to compile it.
        numbers = lax.optimization_barrier(numbers)
        # Finite always: times a row's zero noise, too, it must add nothing.
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, 2.0**-25)))
        return logits + p.noise[:, None] * gumbel

    logits = lax.cond(jnp.any(p.noise > 0), noised, lambda: logits)
    mass = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / p.temperature[:, None])
    mass = jnp.where((mass >= p.min_p[:, None]) & (logits > -jnp.inf), mass, 0.0)
    width = min(MAX_WIDTH, logits.shape[-1])
    # The barrier keeps XLA from turning a top_k whose result is sliced into a full sort.
    _, ids = lax.optimization_barrier(lax.top_k(logits, width))
    shares = jnp.take_along_axis(mass, ids, axis=1)
    before = cumulate(shares) - shares
    # At 1 it is off: rounding must not cut the tail.
    reached = jnp.where(p.top_p < 1, p.top_p * jnp.sum(mass, axis=-1), jnp.inf)
    admitted = (before < reached[:, None]) & (shares > 0)
    admitted = admitted.at[:, 0].set(True)
    ids = jnp.pad(ids, ((0, 0), (0, MAX_WIDTH - width)))
    number = jnp.sum(admitted, axis=-1, dtype=jnp.int32)
    return ids, jnp.minimum(number, p.width)


def _follow(
    logits: jax.Array,
    heard: jax.Array,
    params: SamplerParams,
    rows: Rows,
    branch: jax.Array,
) -> jax.Array:
    """The next token of each branch: the likeliest, or, with a rollout temperature, one drawn at it
    with the base values. int32 [rows]; `branch` is the index among a row's candidates."""
    none = jnp.full((logits.shape[0], 1), -1, jnp.int32)
    logits = modify(logits, heard, params, rows, none)
    base = jax.vmap(lambda row: draw(SAMPLE, row))(params)
    proposal = replace(base, temperature=params.branch.rollout_temperature)
    zero = jnp.zeros_like(rows.length)

    def drawn() -> jax.Array:
        numbers = uniforms(rows.keys, rows.length, zero, zero + STREAM_ROLLOUT, MAX_WIDTH)
        number = jnp.take_along_axis(numbers, branch[:, None], axis=1)
        # Mirostat learns from committed tokens alone: a rollout has the mu that a text starts with.
        mu = 2.0 * params.truncation.mirostat_target
        return truncated_draw(logits, proposal, number, params.truncation, mu).ids[:, 0]

    def likeliest() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    tokens: jax.Array = lax.cond(jnp.any(proposal.temperature > 0), drawn, likeliest)
    return tokens
