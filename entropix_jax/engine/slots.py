"""Slots of a batch: `insert` puts a row into one, whatever the other slots hold.

A row's entire state lives in its slot of the `DecodeState`, its sampler parameters and its end
tokens, so rows are independent.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.engine.state import FINISHED_LENGTH, RUNNING, DecodeState, init_state
from entropix_jax.errors import UserError
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.finite import NOWHERE
from entropix_jax.model.mesh import ROWS, Rules, broadcast_row, local_index, place, split_rows
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import init_sampler_state

_MAX_EOS = 8

Value = jax.Array | np.ndarray | np.generic


@struct.dataclass
class Slots:
    """A batch: its state, and the per-row arguments of its step."""

    state: DecodeState
    sampler: SamplerSettings  # each leaf [B, ...]
    eos_ids: jax.Array  # int32 [B, E], see `padded_ids`


@struct.dataclass
class Arrival:
    """A row to insert; see `init_state` for the fields."""

    history: Value  # int32 [S], the prompt, then padding
    prompt_length: Value  # int32
    budget: Value  # int32
    key: Value  # uint32 [2]
    asks_for_text: Value  # bool
    asks_for_choice: Value  # bool
    sampler: SamplerSettings  # of one row
    eos_ids: Value  # int32 [E]


def empty_slots(
    config: ModelConfig,
    number: int,
    sampler: SamplerSettings,
    *,
    capacity: int,
    dtype: jnp.dtype,
    rules: Rules | None = None,
) -> Slots:
    """Slots without rows, sharded by `rules`; `sampler` is any one row's, for its shapes."""
    no_keys = np.zeros((number, 2), np.uint32)
    state = init_state(
        config,
        [()] * number,
        [0] * number,
        no_keys,
        capacity=capacity,
        dtype=dtype,
        mechanisms=sampler.mechanisms,
    )
    slots = Slots(
        state=replace(state, finish=jnp.full(number, FINISHED_LENGTH, jnp.int32)),
        sampler=jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), sampler),
        eos_ids=jnp.full((number, _MAX_EOS), -1, jnp.int32),
    )
    return slots if rules is None else place(slots, rules.rows(slots))


def padded_ids(ids: Sequence[int]) -> np.ndarray:
    """End tokens as int32 [E], so that their number compiles nothing; -1 matches none.

    Raises:
        UserError: more of them than there is room for.
    """
    if len(ids) > _MAX_EOS:
        raise UserError(f"there are {len(ids)} end tokens, at most {_MAX_EOS} are possible")
    return np.array([*ids, *[-1] * (_MAX_EOS - len(ids))], np.int32)


@partial(jax.jit, donate_argnames="slots")
def insert(slots: Slots, number: jax.Array, row: Arrival) -> Slots:
    """Puts a row into slot `number`, nothing of its prompt cached yet. The slots are donated."""
    state = slots.state

    def put(rows: jax.Array, one: Value) -> jax.Array:
        return rows.at[number].set(jnp.asarray(one, rows.dtype))

    fresh = init_sampler_state(1, state.sampler.last.logits.shape[1], slots.sampler.mechanisms)
    zero = jnp.int32(0)
    return Slots(
        state=replace(
            state,
            cache=replace(state.cache, length=put(state.cache.length, zero)),
            history=put(state.history, row.history),
            prompt_length=put(state.prompt_length, row.prompt_length),
            budget=put(state.budget, row.budget),
            keys=put(state.keys, row.key),
            asks_for_text=put(state.asks_for_text, row.asks_for_text),
            asks_for_choice=put(state.asks_for_choice, row.asks_for_choice),
            sampler=jax.tree.map(lambda all_, one: put(all_, one[0]), state.sampler, fresh),
            forwards=put(state.forwards, zero),
            finish=put(state.finish, jnp.int32(RUNNING)),
            unsound=put(state.unsound, jnp.int32(NOWHERE)),
        ),
        sampler=jax.tree.map(put, slots.sampler, row.sampler),
        eos_ids=put(slots.eos_ids, row.eos_ids),
    )


@partial(jax.jit, donate_argnames="state")
@split_rows(rows={"state": 1}, returns=ROWS)
def share_prefix(
    state: DecodeState, source: jax.Array, target: jax.Array, count: jax.Array
) -> DecodeState:
    """Copies the first `count` cached tokens of slot `source` to slot `target`, whose prompt begins
    with the same. The state is donated."""
    target = local_index(target, state.finish.shape[0])

    def share(rows: jax.Array) -> jax.Array:
        return rows.at[target].set(broadcast_row(rows, source), mode="drop")

    cache = jax.tree.map(share, state.cache)
    length = state.cache.length.at[target].set(count, mode="drop")
    return replace(state, cache=replace(cache, length=length), unsound=share(state.unsound))
