"""The compiled call that reads prompts into the cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.engine.state import DecodeState
from entropix_jax.model.cache import KVCache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward
from entropix_jax.model.mesh import ROWS, apply_if_any, local_index, local_rows, split_rows
from entropix_jax.model.params import Params


@partial(jax.jit, static_argnames=("config", "window"), donate_argnames="state")
@split_rows(ROWS)
def prefill(
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    count: jax.Array,
    slots: jax.Array | None = None,
    *,
    config: ModelConfig,
    window: int,
) -> DecodeState:
    """Caches more prompt tokens of some rows, independently of the other rows.

    Args:
        state: donated.
        tokens: int32 [A, T].
        count: int32 [A], how many of a row's T tokens are real, from the first on.
        slots: int32 [A], the rows; None for all slots in order. Out-of-range row indices are
            ignored.
        config: static.
        window: static, the cache positions that are read: at least as many as any of the rows has
            afterwards.
    """
    whole = state.cache

    def cached(part: KVCache) -> KVCache:
        _, _, grown = forward(params, config, tokens, count, part, window=window)
        return grown

    # All slots in place.
    if slots is None:
        batch = whole.length.shape[0] - state.lanes
        tokens, count = local_rows((tokens, count), batch)
        part = replace(whole, length=whole.length[:batch])
        cache = cached(part)
        length = whole.length.at[:batch].set(cache.length)
        return replace(state, cache=replace(cache, length=length))

    # Some rows: gathered, read, and scattered back, on the shards that have any of them.
    slots = local_index(slots, whole.length.shape[0])

    def picked(rows: jax.Array) -> jax.Array:
        return jnp.take(lax.slice_in_dim(rows, 0, window, axis=2), slots, axis=0, mode="clip")

    def put(rows: jax.Array, part: jax.Array) -> jax.Array:
        return rows.at[slots, :, :window].set(part, mode="drop")

    def read(whole: KVCache) -> KVCache:
        part = replace(
            whole,
            keys=tuple(map(picked, whole.keys)),
            values=tuple(map(picked, whole.values)),
            length=jnp.take(whole.length, slots, mode="clip"),
        )
        part = cached(part)
        return replace(
            whole,
            keys=tuple(map(put, whole.keys, part.keys)),
            values=tuple(map(put, whole.values, part.values)),
            length=whole.length.at[slots].set(part.length, mode="drop"),
        )

    ours_here = slots < whole.length.shape[0]
    return replace(state, cache=apply_if_any(ours_here, read, whole))
