"""Writes to the cache in place: new tokens, and copies of other rows' tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.accelerators.tpu_write import position_axis, write_run, write_token
from entropix_jax.model.cache import KVCache
from entropix_jax.model.mesh import MODEL
from entropix_jax.platforms import for_platform


def append(
    cached: tuple[jax.Array, jax.Array],
    key: jax.Array,
    value: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens to a layer's keys and values [B, K, S, H], see `write`.

    Where a value is NaN or infinite, 0 is stored and the key becomes NaN. Tokens that see that
    position then have NaN scores and results. Other rows are unaffected.

    Args:
        cached: keys and values.
        key, value: [A, T, K, H].
        start, count: int32 [A].
    """
    value = value.astype(cached[1].dtype)
    finite = jnp.isfinite(value)
    key = jnp.where(finite, key, jnp.nan)
    value = jnp.where(finite, value, jnp.zeros((), value.dtype))
    return write(cached[0], key, start, count), write(cached[1], value, start, count)


@jax.jit  # traced once for all layers
def write(cached: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Writes the first `count[A]` of `new[A, T, K, H]` to the first A rows of `cached[B, K, S, H]`,
    at positions from `start[A]` on. `start`, `count`: int32.

    Positions past the end are dropped, never clamped onto older ones.
    """
    on_tpu = partial(write_token, mesh_axis=MODEL) if new.shape[1] == 1 else write_run
    return for_platform(cached, new, start, count, tpu=on_tpu, otherwise=_scatter)


def _scatter(cached: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    if new.shape[:2] == (1, 1):
        # A second token, which is dropped. XLA fuses a single-position update into every consumer
        # of the cache, and copies the entire cache for each.
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    number, tokens = new.shape[:2]
    steps = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    target = jnp.where(steps < count[:, None], start[:, None] + steps, cached.shape[2])
    rows = jnp.arange(number, dtype=jnp.int32)
    return cached.at[rows[:, None], :, target].set(new.astype(cached.dtype), mode="drop")


def copy_runs(
    cache: KVCache,
    count: jax.Array,
    source: jax.Array,
    target: jax.Array,
    start: jax.Array,
    end: jax.Array,
    *,
    block: int,
) -> KVCache:
    """Copies keys and values at positions `start[k]` up to `end[k]` of row `source[k]` to row
    `target[k]`, for the first `count` of k; int32 [], and int32 [n].

    Positions are copied in blocks of `block`, static. The last block may extend past the run. At
    the end of the cache it starts earlier instead, where both rows must have the same tokens, as
    the rows of a fork do.
    """
    args = cache, count, source, target, start, end
    on_tpu = partial(_copy_runs, block=block, axis=position_axis(cache.keys[0].shape[3]))
    plain = partial(_copy_runs, block=block, axis=2)
    copied: KVCache = for_platform(*args, tpu=on_tpu, otherwise=plain)
    return copied


def _copy_runs(cache: KVCache, *runs: jax.Array, block: int, axis: int) -> KVCache:
    """`copy_runs` with positions at axis `axis`. A loop over another order of the axes than the
    stored one would copy the cache into it, and back, in each call."""
    count, source, target, start, end = runs
    swapped = partial(jax.tree.map, lambda x: x.swapaxes(2, axis))

    def copy(k: jax.Array, arrays: Any) -> Any:
        def copy_block(i: jax.Array, arrays: Any) -> Any:
            @jax.jit  # traced once for all layers
            def put(x: jax.Array) -> jax.Array:
                place, shape = [jnp.int32(0)] * 4, [1, *x.shape[1:]]
                place[axis] = start[k] + i * block
                shape[axis] = min(block, x.shape[axis])
                run = lax.dynamic_slice(x, [source[k], *place[1:]], shape)
                return lax.dynamic_update_slice(x, run, [target[k], *place[1:]])

            return jax.tree.map(put, arrays)

        return lax.fori_loop(0, (end[k] - start[k] + block - 1) // block, copy_block, arrays)

    copied = lax.fori_loop(0, count, copy, swapped((cache.keys, cache.values)))
    keys, values = swapped(copied)
    return replace(cache, keys=keys, values=values)
