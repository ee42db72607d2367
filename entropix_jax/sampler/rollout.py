"""The rollouts of `branch`: adaptive width, short continuations, a score for each.

The model is passed in as a function, so this module imports none of it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.draw import cumulate, truncated_draw
from entropix_jax.sampler.keys import STREAM_NOISE, STREAM_ROLLOUT, uniforms
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH, BranchSettings
from entropix_jax.sampler.metrics import apply_noise_floor
from entropix_jax.sampler.proposal import draw
from entropix_jax.sampler.regimes import HEHV, LEHV
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Observation, Rows
from entropix_jax.sampler.step import modify, observe
from entropix_jax.stats import AttnStats

# Evaluates the branches' last tokens, int32 [B, W], at their depth, given the model's own state of
# the branches: logits float32 [B*W, V], statistics of B*W rows, and that state with the tokens.
Evaluate = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, AttnStats, Any]]
# What the caller keeps of each evaluation: a tree with leaves [rows, ...].
Note = Callable[[jax.Array, AttnStats], Any]


@struct.dataclass
class Branches:
    """The branches of each row, W of them, R tokens at most; past a length is junk."""

    tokens: jax.Array  # int32 [B, W, R]
    length: jax.Array  # int32 [B, W]; 0: no such branch
    score: jax.Array  # float32 [B, W]; -inf: no such branch, or its logits became NaN or infinite
    best: jax.Array  # int32 [B], the branch with the highest score
    ambiguous: jax.Array  # bool [B], the second-best score is closer to it than the margin
    # Of the best branch's tokens, and of the distribution that each was chosen from:
    logprobs: jax.Array  # float32 [B, R], nats, under the unmodified logits
    observation: Observation  # [B, R]
    notes: Any  # [B, R, ...]


@struct.dataclass
class _Growth:
    """Branches while they grow, side by side: W of each row, N in all, R tokens at most of each."""

    depth: jax.Array  # int32, of the last token
    live: jax.Array  # bool [N], goes on from there
    history: jax.Array  # int32 [N, S], the row's text and the branch
    memory: Any  # the model's own state of the branches
    tokens: jax.Array  # int32 [N, R]
    logprobs: jax.Array  # float32 [N, R], nats
    observation: Observation  # [N, R], of the distribution that each was chosen from
    notes: Any  # [N, R, ...]
    length: jax.Array  # int32 [N]
    sums: jax.Array  # float32 [N, 3]: ln p (nats), h (bits), u (bits^2)
    failed: jax.Array  # bool [N], the logits became NaN or infinite


def roll_out(
    logits: jax.Array,
    observation: Observation,
    notes: Any,
    active: jax.Array,
    settings: SamplerSettings,
    rows: Rows,
    eos_ids: jax.Array,
    evaluate: Evaluate,
    memory: Any,
    note: Note,
) -> tuple[Branches, Any]:
    """Rolls out the candidates of each active row, and scores them.

    A branch is a candidate and what follows it, greedily unless a rollout temperature is set. It
    ends with an end token, at the maximum depth, or where the distribution after
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
    # Candidates. The history gets room for a branch past any row's end, whatever its capacity.
    rows = replace(rows, history=jnp.pad(rows.history, ((0, 0), (0, MAX_DEPTH))))
    candidates, number = _candidates(logits, settings, rows)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    exists = active[:, None] & (jnp.arange(MAX_WIDTH, dtype=jnp.int32)[None] < number[:, None])

    def each(tree: Any) -> Any:
        """[B, ...] of rows as [N, ...] of their branches."""
        return jax.tree.map(lambda x: jnp.repeat(x, MAX_WIDTH, axis=0), tree)

    def first(x: jax.Array) -> jax.Array:
        """[N, ...] of the first tokens as part of [N, R, ...]."""
        return jnp.zeros((x.shape[0], MAX_DEPTH, *x.shape[1:]), x.dtype).at[:, 0].set(x)

    # All branches side by side, one token deep.
    each_rows, flat = each(rows), exists.size
    growth = _Growth(
        depth=jnp.int32(0),
        live=exists.reshape(flat),
        history=each_rows.history,
        memory=memory,
        tokens=first(candidates.reshape(flat)),
        logprobs=first(jnp.take_along_axis(log_probs, candidates, axis=1).reshape(flat)),
        observation=jax.tree.map(first, each(observation)),
        notes=jax.tree.map(first, each(notes)),
        length=jnp.zeros(flat, jnp.int32),
        sums=jnp.zeros((flat, 3), jnp.float32),
        failed=jnp.zeros(flat, bool),
    )
    # Growth, until every branch has ended.
    extend = partial(_extend, each(settings), each_rows, each(eos_ids), evaluate, note)
    growth = lax.while_loop(lambda growth: jnp.any(growth.live), extend, growth)
    return _scored(growth, settings), growth.memory


def _extend(
    settings: SamplerSettings,
    rows: Rows,
    eos_ids: jax.Array,
    evaluate: Evaluate,
    note: Note,
    growth: _Growth,
) -> _Growth:
    """Evaluates the last token of each branch, and extends those that do not end there. All
    arguments but `growth` are of the rows that the N branches belong to."""
    # The distribution after the last token.
    depth, index = growth.depth, jnp.arange(growth.live.size, dtype=jnp.int32)
    token = growth.tokens[:, depth]
    logits, stats, memory = evaluate(token.reshape(-1, MAX_WIDTH), depth, growth.memory)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    history = growth.history.at[index, rows.length + depth].set(token)
    here = replace(
        rows,
        history=history,
        length=rows.length + depth + 1,
        generated=rows.generated + depth + 1,
    )
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    floored = apply_noise_floor(log_probs, settings.noise_epsilon)
    observation = observe(floored, stats, settings, here)
    metrics = observation.metrics
    # Its terms of the score, and whether the branch goes on.
    terms = jnp.stack([growth.logprobs[:, depth], metrics.entropy, metrics.varentropy], axis=-1)
    live = growth.live
    ends = jnp.any(token[:, None] == eos_ids, axis=-1)
    outside = (observation.regime == LEHV) | (observation.regime == HEHV)

    # The next token. Of a branch that has ended it is junk, past its length.
    drawn = _follow(logits, floored, settings, here, index % MAX_WIDTH)
    logprob = jnp.take_along_axis(log_probs, drawn[:, None], axis=1)[:, 0]

    def keep(buffer: jax.Array, x: jax.Array) -> jax.Array:
        return buffer.at[:, depth + 1].set(x, mode="drop")

    return _Growth(
        depth=depth + 1,
        live=live & finite & ~ends & outside & (depth + 1 < settings.own["branch"].depth),
        history=history,
        memory=memory,
        tokens=keep(growth.tokens, drawn),
        logprobs=keep(growth.logprobs, logprob),
        observation=jax.tree.map(keep, growth.observation, observation),
        notes=jax.tree.map(keep, growth.notes, note(logits, stats)),
        length=jnp.where(live, depth + 1, growth.length),
        sums=jnp.where(live[:, None], growth.sums + terms, growth.sums),
        failed=growth.failed | (live & ~finite),
    )


def _scored(growth: _Growth, settings: SamplerSettings) -> Branches:
    """Branches that have ended, by row, and the best of each row."""
    own: BranchSettings = settings.own["branch"]
    rows = (own.depth.shape[0], MAX_WIDTH)
    means = growth.sums / jnp.maximum(growth.length, 1)[:, None].astype(jnp.float32)
    logprob, entropy, varentropy = means.T.reshape(3, *rows)
    score = logprob - own.entropy_weight[:, None] * entropy
    score = score - own.varentropy_weight[:, None] * varentropy
    counts = ((growth.length > 0) & ~growth.failed).reshape(rows)
    score = jnp.where(counts, score, -jnp.inf)
    first, second = lax.top_k(score, 2)[0].T
    best = jnp.argmax(score, axis=-1).astype(jnp.int32)

    def of_best(x: jax.Array) -> jax.Array:
        return x[jnp.arange(rows[0], dtype=jnp.int32) * MAX_WIDTH + best]

    return Branches(
        tokens=growth.tokens.reshape(*rows, MAX_DEPTH),
        length=growth.length.reshape(rows),
        score=score,
        best=best,
        ambiguous=(second > -jnp.inf) & (first - second < own.margin),
        logprobs=of_best(growth.logprobs),
        observation=jax.tree.map(of_best, growth.observation),
        notes=jax.tree.map(of_best, growth.notes),
    )


def _candidates(
    logits: jax.Array, settings: SamplerSettings, rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """The tokens that the branches begin with, likeliest first, int32 [B, W], and how many count.

    Of the distribution warmed by temperature and Gumbel noise (scaled, on its logits): those that
    min-p admits, of these the shortest prefix that reaches top-p, at most `width`.
    """
    own: BranchSettings = settings.own["branch"]
    floored = apply_noise_floor(jax.nn.log_softmax(logits, axis=-1), settings.noise_epsilon)
    none = jnp.full((logits.shape[0], 1), -1, jnp.int32)
    logits = modify(logits, floored, settings, rows, none)

    def noised() -> jax.Array:
        zero = jnp.zeros_like(rows.length)
        numbers = uniforms(rows.keys, rows.length, zero, zero + STREAM_NOISE, logits.shape[-1])
        # Else XLA's reshape mover moves a reshape through all that follows, one operation in each
        # round of its passes over the whole program: a tenth of the time to compile it.
        numbers = lax.optimization_barrier(numbers)
        # Finite always: times a row's zero noise, too, it must add nothing.
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, 2.0**-25)))
        return logits + own.noise[:, None] * gumbel

    logits = lax.cond(jnp.any(own.noise > 0), noised, lambda: logits)
    mass = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / own.temperature[:, None])
    mass = jnp.where((mass >= own.min_p[:, None]) & (logits > -jnp.inf), mass, 0.0)
    width = min(MAX_WIDTH, logits.shape[-1])
    # The barrier keeps XLA from turning a top_k whose result is sliced into a full sort.
    _, ids = lax.optimization_barrier(lax.top_k(logits, width))
    shares = jnp.take_along_axis(mass, ids, axis=1)
    before = cumulate(shares) - shares
    # At 1 it is off: rounding must not cut the tail.
    reached = jnp.where(own.top_p < 1, own.top_p * jnp.sum(mass, axis=-1), jnp.inf)
    admitted = (before < reached[:, None]) & (shares > 0)
    admitted = admitted.at[:, 0].set(True)
    ids = jnp.pad(ids, ((0, 0), (0, MAX_WIDTH - width)))
    number = jnp.sum(admitted, axis=-1, dtype=jnp.int32)
    return ids, jnp.minimum(number, own.width)


def _follow(
    logits: jax.Array,
    floored: jax.Array,
    settings: SamplerSettings,
    rows: Rows,
    branch: jax.Array,
) -> jax.Array:
    """The next token of each branch: the likeliest, or, with a rollout temperature, one drawn at it
    with the base values. int32 [rows]; `branch` is the index among a row's candidates."""
    none = jnp.full((logits.shape[0], 1), -1, jnp.int32)
    logits = modify(logits, floored, settings, rows, none)
    base = jax.vmap(lambda settings: draw("sample", settings))(settings)
    proposal = replace(base, temperature=settings.own["branch"].rollout_temperature)
    zero = jnp.zeros_like(rows.length)

    def drawn() -> jax.Array:
        numbers = uniforms(rows.keys, rows.length, zero, zero + STREAM_ROLLOUT, MAX_WIDTH)
        number = jnp.take_along_axis(numbers, branch[:, None], axis=1)
        # Mirostat learns from committed tokens alone: a rollout has the mu that a text starts with.
        mu = 2.0 * settings.truncation.mirostat_target
        return truncated_draw(logits, proposal, number, settings.truncation, mu).ids[:, 0]

    def likeliest() -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    tokens: jax.Array = lax.cond(jnp.any(proposal.temperature > 0), drawn, likeliest)
    return tokens
