"""Rows that branch, carried out within a step: gathered into lanes, rolled out, committed.

The branches of a row share its cache and have short suffixes of their own; the best one's suffix
becomes part of the cache. Only some lanes are computed at a time, and only while rows are left that
branch, so the cost follows how many do and not how large the batch is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.cache import KVCache, Suffixes, init_suffixes, write
from entropix_jax.decode_state import (
    WAITS_FOR_CHOICE,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    extras_of,
    finish_of,
)
from entropix_jax.information import AttnStats
from entropix_jax.sampler.branch import Branches, roll_out
from entropix_jax.sampler.params import MAX_DEPTH, MAX_WIDTH, SamplerParams
from entropix_jax.sampler.sample import advance, where_rows
from entropix_jax.sampler.state import Rows, Tally

LANES = 3  # the fewest rows whose branches are rolled out at a time
_ROWS_PER_LANE = 20

# The cache of A rows, tokens int32 [A, W], their depth and the suffixes to logits [A*W, V],
# statistics of A*W rows, and the suffixes with the tokens in them.
Read = Callable[[KVCache, jax.Array, jax.Array, Suffixes], tuple[jax.Array, AttnStats, Suffixes]]


@struct.dataclass
class Step:
    """What a step knows of all its rows when some of them branch; fields [B, ...]."""

    logits: jax.Array  # float32 [B, V]
    tally: Tally  # before the step
    rows: Rows  # what the sampler was told of them
    sampler: SamplerParams
    eos_ids: jax.Array  # int32 [B, E]


def commit_branches(
    pending: jax.Array,
    step: Step,
    read: Read,
    recording: Recording,
    window: int,
    carry: tuple[DecodeState, StepRecord, BranchLog],
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """Rolls out the rows that branch and commits the best branch of each, cut at its budget.

    A row whose choice is ambiguous, and that asks, commits nothing and waits for the host.

    Args:
        pending: bool [B], the rows that branch; the others stay as they are.
        step: what the step read and was told, of all rows.
        read: see `Read`.
        recording: static, what the log holds of each token.
        window: static, the slots of the cache that are read.
        carry: state, record and log after the step, nothing committed yet in the rows that branch;
            the log has room for B more.

    Returns:
        The carry, with the committed tokens in cache and history, the first of them in the record,
        and all branches in the log, where the record's `branch` says.
    """
    batch = pending.shape[0]
    number = lanes_of(batch)
    commit = partial(_commit_lanes, step, read, recording, window)
    if batch <= number:
        order = jnp.arange(batch, dtype=jnp.int32)
        return commit(carry, None, jnp.where(pending, order, batch))

    def some(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        pending, rest = carry
        lanes = jnp.nonzero(pending, size=number, fill_value=batch)[0].astype(jnp.int32)
        return pending.at[lanes].set(False, mode="drop"), commit(rest, lanes, lanes)

    return lax.while_loop(lambda carry: jnp.any(carry[0]), some, (pending, carry))[1]


def lanes_of(batch: int) -> int:
    """How many rows of a batch have their branches rolled out at a time: one in twenty."""
    return max(LANES, batch // _ROWS_PER_LANE)


def _commit_lanes(
    step: Step,
    read: Read,
    recording: Recording,
    window: int,
    carry: tuple[DecodeState, StepRecord, BranchLog],
    lanes: jax.Array | None,
    target: jax.Array,
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """The rows `lanes` (None: all, as they stand). `target[A]` is where a lane's outcome goes: its
    row, or past the last row for nowhere."""
    state, record, log = carry

    def gather(tree: Any) -> Any:
        if lanes is None:
            return tree
        return jax.tree.map(lambda x: jnp.take(x, lanes, axis=0, mode="clip"), tree)

    def put(all_rows: jax.Array, lane: jax.Array) -> jax.Array:
        return all_rows.at[target].set(lane, mode="drop")

    mine, lane, eos_ids = gather((step.sampler, step.rows, step.eos_ids))
    active = target < state.finish.shape[0]
    prefix = KVCache(
        keys=tuple(gather(lax.slice_in_dim(x, 0, window, axis=2)) for x in state.cache.keys),
        values=tuple(gather(lax.slice_in_dim(x, 0, window, axis=2)) for x in state.cache.values),
        length=gather(state.cache.length),
    )
    branches, suffixes = roll_out(
        gather(step.logits),
        gather(record.choice.observation),
        gather(record.extras),
        active,
        mine,
        lane,
        eos_ids,
        partial(read, prefix),
        init_suffixes(prefix, MAX_WIDTH, MAX_DEPTH),
        partial(extras_of, recording=recording),
    )
    best = (jnp.arange(active.shape[0], dtype=jnp.int32), branches.best)
    tokens, length = branches.tokens[best], branches.length[best]
    waits = active & branches.ambiguous & gather(state.asks_for_choice)
    wanted = jnp.minimum(jnp.where(mine.branch.commit_all, length, 1), lane.remaining)
    count = jnp.where(active & ~waits, wanted, 0)
    tally, sequence_varentropy = _advance(gather(step.tally), branches, count, mine, lane)
    # The last token is the next step's to read: it is not cached.
    cached = jnp.maximum(count - 1, 0)

    def extend(cache: tuple[jax.Array, ...], own: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(
            write(slots, suffix[best].swapaxes(1, 2), lane.length, cached, target)
            for slots, suffix in zip(cache, own, strict=True)
        )

    steps = jnp.arange(MAX_DEPTH, dtype=jnp.int32)[None, :]
    capacity = state.history.shape[1]
    slots = jnp.where(steps < count[:, None], lane.length[:, None] + steps, capacity)
    last = jnp.take_along_axis(tokens, cached[:, None], axis=1)[:, 0]
    finish = finish_of(lane.remaining - count, last, eos_ids)
    finish = jnp.where(waits, WAITS_FOR_CHOICE, finish)
    forwards = gather(record.forwards) + jnp.sum(branches.length, axis=-1)
    at = jnp.where(active, log.count + jnp.cumsum(active) - 1, log.committed.shape[0])
    at = at.astype(jnp.int32)
    state = replace(
        state,
        cache=KVCache(
            keys=extend(state.cache.keys, suffixes.keys),
            values=extend(state.cache.values, suffixes.values),
            length=put(state.cache.length, lane.length - 1 + count),
        ),
        history=state.history.at[target[:, None], slots].set(tokens, mode="drop"),
        sampler=replace(state.sampler, tally=jax.tree.map(put, state.sampler.tally, tally)),
        forwards=put(state.forwards, forwards),
        finish=put(state.finish, finish),
    )
    record = replace(
        record,
        choice=replace(
            record.choice,
            token=put(record.choice.token, tokens[:, 0]),
            logprob=put(record.choice.logprob, branches.logprobs[:, 0]),
            sequence_varentropy=put(record.choice.sequence_varentropy, sequence_varentropy[:, 0]),
        ),
        forwards=put(record.forwards, forwards),
        finish=put(record.finish, finish),
        branch=put(record.branch, at),
    )
    entries = jax.tree.map(
        lambda entries, new: entries.at[at].set(new, mode="drop"),
        (log.branches, log.committed, log.sequence_varentropy),
        (branches, count, sequence_varentropy),
    )
    return state, record, BranchLog(log.count + jnp.sum(active, dtype=jnp.int32), *entries)


def _advance(
    tally: Tally, branches: Branches, count: jax.Array, sampler: SamplerParams, rows: Rows
) -> tuple[Tally, jax.Array]:
    """The tally after the first `count` tokens of each best branch, and the variance of
    the row's entropies after each token: float32 [A, R]."""

    def one(tally: Tally, depth: jax.Array) -> tuple[Tally, jax.Array]:
        observation = jax.tree.map(lambda x: x[:, depth], branches.observation)
        nothing = jnp.zeros(count.shape, bool)
        moved, varentropy = advance(
            tally, sampler.inject, observation, rows.generated + depth, nothing
        )
        return where_rows(depth < count, moved, tally), varentropy

    tally, varentropies = lax.scan(one, tally, jnp.arange(MAX_DEPTH, dtype=jnp.int32))
    return replace(tally, branchings=tally.branchings + 1), varentropies.T
