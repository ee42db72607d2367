"""Branching within a step: gathers the rows into lanes, rolls out, commits the best.

The branches of a row share its cache and have short suffixes of their own; the best branch's suffix
becomes part of the cache. Lanes are rolled out a few at a time, as long as some row is left, so the
cost follows how many rows branch and not how large the batch is.
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

from entropix_jax.engine.state import (
    WAITS_FOR_CHOICE,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    extras_of,
    finish_of,
)
from entropix_jax.model.cache import KVCache, Suffixes, init_suffixes, write
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.rollout import Branches, roll_out
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows, Tally, where_rows
from entropix_jax.sampler.step import advance, sequence_varentropy
from entropix_jax.stats import AttnStats

LANES = 3  # the fewest rows whose branches are rolled out at a time
_ROWS_PER_LANE = 20

# The cache of A rows, tokens int32 [A, W], their depth and the suffixes to logits [A*W, V],
# statistics of A*W rows, and the suffixes with the tokens in them.
Read = Callable[[KVCache, jax.Array, jax.Array, Suffixes], tuple[jax.Array, AttnStats, Suffixes]]

Carry = tuple[DecodeState, StepRecord, BranchLog]


@struct.dataclass
class Inputs:
    """What a step knows of its rows besides state and record; fields [B, ...]."""

    logits: jax.Array  # float32 [B, V]
    rows: Rows
    settings: SamplerSettings
    eos_ids: jax.Array  # int32 [B, E]


def commit_branches(
    pending: jax.Array,
    inputs: Inputs,
    read: Read,
    recording: Recording,
    window: int,
    carry: Carry,
) -> Carry:
    """Rolls out the rows that branch and commits the best branch of each, cut at its budget.

    A row whose choice is ambiguous, and that asks, commits nothing and waits for the host.

    Args:
        pending: bool [B], the rows that branch; the others stay as they are.
        inputs: of all rows.
        read: see `Read`.
        recording: static, what the log holds of each token.
        window: static, the cache positions that are read.
        carry: state, record and log after the step, nothing committed yet in the rows that branch;
            the log has room for B more.

    Returns:
        The carry, with the committed tokens in cache and history, the first of them in the record,
        and all branches in the log, where the record's `branch` says.
    """
    batch = pending.shape[0]
    chex.assert_tree_shape_prefix((inputs, carry[:2]), (batch,))
    number = lanes_of(batch)
    commit = partial(_commit_lanes, inputs, read, recording, window)
    if batch <= number:
        order = jnp.arange(batch, dtype=jnp.int32)
        return commit(carry, None, jnp.where(pending, order, batch))

    def commit_some(carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        pending, rest = carry
        lanes = jnp.nonzero(pending, size=number, fill_value=batch)[0].astype(jnp.int32)
        return pending.at[lanes].set(False, mode="drop"), commit(rest, lanes, lanes)

    return lax.while_loop(lambda carry: jnp.any(carry[0]), commit_some, (pending, carry))[1]


def lanes_of(batch: int) -> int:
    """How many rows of a batch have their branches rolled out at a time: one in twenty."""
    return max(LANES, batch // _ROWS_PER_LANE)


def _commit_lanes(
    inputs: Inputs,
    read: Read,
    recording: Recording,
    window: int,
    carry: Carry,
    lanes: jax.Array | None,
    target: jax.Array,
) -> Carry:
    """Rolls out and commits the rows `lanes` (None: all, in order). A lane's outcome goes to the
    row `target[A]`, or nowhere if that is past the last row."""
    state, record, log = carry

    def gather(tree: Any) -> Any:
        if lanes is None:
            return tree
        return jax.tree.map(lambda x: jnp.take(x, lanes, axis=0, mode="clip"), tree)

    def put(all_rows: jax.Array, lane: jax.Array) -> jax.Array:
        return all_rows.at[target].set(lane, mode="drop")

    # Rollouts, over the part of the cache that all branches of a row share.
    active = target < state.finish.shape[0]
    mine: Inputs = gather(inputs)
    rows, own = mine.rows, mine.settings.own["branch"]
    prefix = KVCache(
        keys=tuple(gather(lax.slice_in_dim(x, 0, window, axis=2)) for x in state.cache.keys),
        values=tuple(gather(lax.slice_in_dim(x, 0, window, axis=2)) for x in state.cache.values),
        length=gather(state.cache.length),
    )
    branches, suffixes = roll_out(
        mine.logits,
        gather(record.choice.observation),
        gather(record.extras),
        active,
        mine.settings,
        rows,
        mine.eos_ids,
        partial(read, prefix),
        init_suffixes(prefix, MAX_WIDTH, MAX_DEPTH),
        partial(extras_of, recording=recording),
    )
    chex.assert_shape(branches.tokens, (*active.shape, MAX_WIDTH, MAX_DEPTH))

    # How many tokens of the best branch are committed; none where the host is asked for a choice.
    best = (jnp.arange(active.shape[0], dtype=jnp.int32), branches.best)
    tokens, length = branches.tokens[best], branches.length[best]
    waits = active & branches.ambiguous & gather(state.asks_for_choice)
    wanted = jnp.minimum(jnp.where(own.commit_all, length, 1), rows.remaining)
    count = jnp.where(active & ~waits, wanted, 0)
    last = jnp.maximum(count - 1, 0)

    # The row after them.
    tally, varentropies = _advance(gather(state.sampler.tally), branches, count, mine)
    token = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
    finish = finish_of(rows.remaining - count, token, mine.eos_ids)
    finish = jnp.where(waits, WAITS_FOR_CHOICE, finish)
    forwards = gather(record.forwards) + jnp.sum(branches.length, axis=-1)

    def extend(cache: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The last token is not cached: the next step reads it.
        return tuple(
            write(cached, suffix[best].swapaxes(1, 2), rows.length, last, target)
            for cached, suffix in zip(cache, own, strict=True)
        )

    steps = jnp.arange(MAX_DEPTH, dtype=jnp.int32)[None, :]
    capacity = state.history.shape[1]
    positions = jnp.where(steps < count[:, None], rows.length[:, None] + steps, capacity)
    state = replace(
        state,
        cache=KVCache(
            keys=extend(state.cache.keys, suffixes.keys),
            values=extend(state.cache.values, suffixes.values),
            length=put(state.cache.length, rows.length - 1 + count),
        ),
        history=state.history.at[target[:, None], positions].set(tokens, mode="drop"),
        sampler=replace(state.sampler, tally=jax.tree.map(put, state.sampler.tally, tally)),
        forwards=put(state.forwards, forwards),
        finish=put(state.finish, finish),
    )

    # The record holds the first token, the log all branches.
    at = jnp.where(active, log.count + jnp.cumsum(active) - 1, log.committed.shape[0])
    at = at.astype(jnp.int32)
    choice = record.choice
    record = replace(
        record,
        choice=replace(
            choice,
            token=put(choice.token, tokens[:, 0]),
            logprob=put(choice.logprob, branches.logprobs[:, 0]),
            sequence_varentropy=put(choice.sequence_varentropy, varentropies[:, 0]),
        ),
        forwards=put(record.forwards, forwards),
        finish=put(record.finish, finish),
        branch=put(record.branch, at),
    )
    entries = jax.tree.map(
        lambda entries, new: entries.at[at].set(new, mode="drop"),
        (log.branches, log.committed, log.sequence_varentropy),
        (branches, count, varentropies),
    )
    return state, record, BranchLog(log.count + jnp.sum(active, dtype=jnp.int32), *entries)


def _advance(
    tally: Tally, branches: Branches, count: jax.Array, inputs: Inputs
) -> tuple[Tally, jax.Array]:
    """The tally after the first `count` tokens of each best branch, and the variance of
    the row's entropies after each token: float32 [A, R]."""

    def one(tally: Tally, depth: jax.Array) -> tuple[Tally, jax.Array]:
        observation = jax.tree.map(lambda x: x[:, depth], branches.observation)
        generated = inputs.rows.generated + depth
        advanced = advance(tally, inputs.settings, observation, generated)
        varentropy = sequence_varentropy(advanced, generated + 1)
        return where_rows(depth < count, advanced, tally), varentropy

    tally, varentropies = lax.scan(one, tally, jnp.arange(MAX_DEPTH, dtype=jnp.int32))
    return tally, varentropies.T
