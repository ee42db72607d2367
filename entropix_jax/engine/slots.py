"""Slots of a batch: `insert` puts a row into one, independently of the other slots."""

from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from entropix_jax.engine.request import padded_ids
from entropix_jax.engine.state import RUNNING, STOPPED, DecodeState, Fork
from entropix_jax.model.cache import init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.mesh import (
    ONCE,
    ROWS,
    broadcast_row,
    in_shard,
    local_index,
    row_shardings,
    split_rows,
)
from entropix_jax.model.write import copy_runs
from entropix_jax.packed import Packed, pack
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import MAX_WIDTH, SamplerSettings
from entropix_jax.sampler.state import SamplerState, Tally, init_sampler_state

_BLOCK = 64  # cache positions that are copied at once

Value = jax.Array | np.ndarray | np.generic


@dataclass(frozen=True)
class Layout:
    """Positions of slots and lanes: each data shard has its slots first, then its lanes."""

    slots: int
    lanes: int  # of each shard
    shards: int

    @cached_property
    def slot_of(self) -> np.ndarray:
        """The slot of each row of the state, int32 [P]; -1 for a lane."""
        slots = np.arange(self.slots, dtype=np.int32).reshape(self.shards, -1)
        return np.pad(slots, [(0, 0), (0, self.lanes)], constant_values=-1).reshape(-1)

    @cached_property
    def indices(self) -> np.ndarray:
        """Row index in the state of each slot, int32 [B]. NumPy, because indexing a device array
        would need a program."""
        return np.flatnonzero(self.slot_of >= 0).astype(np.int32)


@struct.dataclass
class Arrival:
    """A row to insert. Its fields except `cached` and `tally` are those of a `DecodeState`."""

    history: Value  # int32 [S], prompt and tokens so far, then forced ones, then padding
    confidences: Value  # float32 [S], of the tokens so far, nats
    prompt_length: Value  # int32
    cached: Value  # int32, how much of the text the slot has cached
    budget: Value  # int32
    keys: Value  # uint32 [2]
    looks_up: Value  # bool
    asks_for_choice: Value  # bool
    clarifies: Value  # bool
    settings: Packed[SamplerSettings]  # of one row
    eos_ids: Value  # int32 [E]
    tally: Tally  # of one row
    forwards: Value  # int32


def empty_slots(
    config: ModelConfig,
    layout: Layout,
    settings: SamplerSettings,
    *,
    mechanisms: tuple[Mechanism, ...],
    capacity: int,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Returns a state of empty slots and lanes, sharded over `mesh`, by default on the default
    device.

    Args:
        settings: of any row, for their shapes.
        mechanisms: of the sampler.
        capacity: cache positions of a row.
        dtype: of the activations, see `cache_dtype`.
    """
    places = len(layout.slot_of)
    sampler = init_sampler_state(places, mechanisms)
    make_cache: Any = partial(init_cache, config, places, capacity, dtype)
    if mesh is not None:  # each device makes its own part
        shardings = row_shardings(mesh, jax.eval_shape(make_cache))
        make_cache = jax.jit(make_cache, out_shardings=shardings)

    # NumPy arrays, sent to the device together: creating each array there would need a program.
    def full(value: Any, *axes: int, dtype: Any = np.int32) -> Any:
        return np.full((places, *axes), value, dtype)

    state = DecodeState(
        cache=make_cache(),
        history=full(0, capacity),
        confidences=full(0, capacity, dtype=np.float32),
        prompt_length=full(0),
        budget=full(0),
        keys=full(0, 2, dtype=np.uint32),
        looks_up=full(False, dtype=bool),
        asks_for_choice=full(False, dtype=bool),
        clarifies=full(False, dtype=bool),
        settings=jax.tree.map(lambda x: np.broadcast_to(x, (places, *x.shape)), pack(settings)),
        eos_ids=full(-1, len(padded_ids(()))),
        sampler=sampler,
        fork=Fork(
            parent=np.arange(places, dtype=np.int32),  # type: ignore[arg-type]
            branch=full(-1),
            width=full(0),
            waited=full(0),
            candidates=full(0, MAX_WIDTH),
            scores=full(0, MAX_WIDTH, dtype=np.float32),
            start=full(0),
            forwards=full(0),
            tally=pack(jax.tree.map(np.array, sampler.tally), 1),  # donated: no leaf twice
            logprob=full(0, dtype=np.float32),
            sums=full(0, 3, dtype=np.float32),
            failed=full(False, dtype=bool),
        ),
        forwards=full(0),
        status=full(STOPPED),
        lanes=layout.lanes,
    )
    shardings = None if mesh is None else row_shardings(mesh, state)
    placed: DecodeState = jax.device_put(state, shardings)
    return placed


def emptied(state: DecodeState) -> DecodeState:
    """Returns the state with the rows and branches removed. Cached tokens stay."""
    fork = replace(state.fork, branch=jnp.full_like(state.fork.branch, -1))
    return replace(state, fork=fork, status=jnp.full_like(state.status, STOPPED))


def widen(state: DecodeState, layout: Layout, lanes: int) -> DecodeState:
    """Returns the rows with more lanes in each shard."""
    wide, new = replace(layout, lanes=lanes), lanes - layout.lanes

    def pad(rows: jax.Array) -> jax.Array:
        shards = rows.reshape(layout.shards, -1, *rows.shape[1:])
        shards = jnp.concatenate([shards, jnp.repeat(shards[:, :1], new, axis=1)], axis=1)
        return shards.reshape(-1, *rows.shape[1:])

    state = replace(jax.tree.map(pad, state), lanes=lanes)
    per_shard = len(layout.slot_of) // layout.shards
    number = np.arange(len(wide.slot_of)).reshape(layout.shards, -1)
    is_new = jnp.asarray((number % (per_shard + new) >= per_shard).reshape(-1))
    parent = state.fork.parent + state.fork.parent // per_shard * new
    trail = state.sampler.trail
    return replace(
        state,
        # The first slot's row may draw a position again, a branch never does.
        sampler=replace(state.sampler, trail=replace(trail, again=trail.again & ~is_new)),
        fork=replace(state.fork, parent=parent, branch=jnp.where(is_new, -1, state.fork.branch)),
        status=jnp.where(is_new, STOPPED, state.status),
    )


@cache
def fresh_tally(mechanisms: tuple[Mechanism, ...]) -> Tally:
    """The tally of one row that has committed nothing yet, NumPy."""
    tally = init_sampler_state(1, mechanisms).tally
    fresh: Tally = jax.tree.map(lambda x: x[0], tally)
    return fresh


@partial(jax.jit, static_argnames="mechanisms", donate_argnames="state")
def insert(
    state: DecodeState, number: jax.Array, row: Arrival, *, mechanisms: tuple[Mechanism, ...]
) -> DecodeState:
    """Inserts `row` as row `number` and frees the lanes of the row before. No mechanism goes back
    beyond its text so far. The state is donated; the mechanisms are static."""

    def put(rows: jax.Array, one: Value) -> jax.Array:
        return rows.at[number].set(jnp.asarray(one, rows.dtype))

    names = sorted(vars(row).keys() & vars(state).keys())
    own: Any = {n: jax.tree.map(put, getattr(state, n), getattr(row, n)) for n in names}
    fork = state.fork
    fresh = init_sampler_state(1, mechanisms).trail
    freed = (fork.parent == number) & (fork.branch >= 0)
    return replace(
        state,
        cache=replace(state.cache, length=put(state.cache.length, row.cached)),
        **own,
        sampler=SamplerState(
            tally=jax.tree.map(put, state.sampler.tally, row.tally),
            trail=jax.tree.map(lambda all_, one: put(all_, one[0]), state.sampler.trail, fresh),
        ),
        fork=replace(fork, branch=jnp.where(freed, -1, fork.branch)),
        status=put(jnp.where(freed, STOPPED, state.status), jnp.int32(RUNNING)),
    )


@partial(jax.jit, donate_argnames="state")
@split_rows(ROWS)
def share_prefix(
    state: DecodeState, source: jax.Array, target: jax.Array, count: jax.Array
) -> DecodeState:
    """Copies the first `count` cached tokens of slot `source` to slot `target`, whose text begins
    with the same tokens. The state is donated."""
    target = local_index(target, state.status.shape[0])
    if in_shard():

        def share(rows: jax.Array) -> jax.Array:
            return rows.at[target].set(broadcast_row(rows, source), mode="drop")

        cache = jax.tree.map(share, state.cache)
    else:  # only what is cached
        runs = (source[None], target[None], jnp.zeros(1, jnp.int32), count[None])
        cache = copy_runs(state.cache, jnp.int32(1), *runs, block=_BLOCK)
    length = state.cache.length.at[target].set(count, mode="drop")
    return replace(state, cache=replace(cache, length=length))


@partial(jax.jit, static_argnames="size")
@split_rows(ONCE)
def keep(state: DecodeState, source: jax.Array, *, size: int) -> list[jax.Array]:
    """Returns copies of the first `size` (static) cached tokens of slot `source`, [K, size, H]."""
    layers = (*state.cache.keys, *state.cache.values)
    return [broadcast_row(rows, source)[:, :size] for rows in layers]


@partial(jax.jit, donate_argnames="state")
@split_rows(ROWS)
def restore(
    state: DecodeState, target: jax.Array, kept: list[jax.Array], count: jax.Array
) -> DecodeState:
    """Writes `kept` tokens to slot `target`, whose text begins with the first `count` of them. The
    state is donated."""
    target = local_index(target, state.status.shape[0])
    cache, size = state.cache, kept[0].shape[1]
    layers = [
        rows.at[target, :, :size].set(own, mode="drop")
        for rows, own in zip((*cache.keys, *cache.values), kept, strict=True)
    ]
    number, length = len(cache.keys), cache.length.at[target].set(count, mode="drop")
    keys, values = tuple(layers[:number]), tuple(layers[number:])
    return replace(state, cache=replace(cache, keys=keys, values=values, length=length))


@partial(jax.jit, donate_argnames="state")
@split_rows(ROWS)
def answer(
    state: DecodeState, row: jax.Array, tokens: jax.Array, count: jax.Array, action: jax.Array
) -> DecodeState:
    """Resumes a waiting row, forcing the host's tokens next. With no tokens the row samples
    normally.

    Args:
        state: donated.
        row: int32, its index.
        tokens: int32 [S], the first `count` (int32) are forced.
        action: int32, index into the sampler's mechanisms, which the tokens carry.
    """
    row = local_index(row, state.status.shape[0])
    steps = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    target = jnp.where(steps < count, state.cache.length[row] + 1 + steps, state.history.shape[1])
    tally = state.sampler.tally
    tally = replace(
        tally,
        queued=tally.queued.at[row].set(count),
        queue_action=tally.queue_action.at[row].set(action),
    )
    return replace(
        state,
        history=state.history.at[row, target].set(tokens, mode="drop"),
        sampler=replace(state.sampler, tally=tally),
        status=state.status.at[row].set(RUNNING),
    )
