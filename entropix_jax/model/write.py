"""Writes to the cache, in place: new tokens, and copies of those of other rows."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from entropix_jax.model.cache import KVCache
from entropix_jax.model.mesh import MODEL
from entropix_jax.platforms import for_platform

_LANES = 128  # of a TPU's registers


def append(
    cached: tuple[jax.Array, jax.Array],
    key: jax.Array,
    value: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens to a layer's keys and values [B, K, S, H], see `write`.

    Where a value is NaN or infinite, 0 is stored and the key becomes NaN: whoever sees that
    position has a NaN score, and with it a NaN result, and nobody else is any the worse for it.

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
    on_tpu = write_token if new.shape[1] == 1 else write_run
    return for_platform(cached, new, start, count, tpu=on_tpu, otherwise=_scatter)


def _scatter(cached: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    if new.shape[:2] == (1, 1):
        # A second token, which is dropped: XLA fuses a single-position update into every consumer
        # of the cache, and copies the entire cache for each.
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    number, tokens = new.shape[:2]
    steps = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    target = jnp.where(steps < count[:, None], start[:, None] + steps, cached.shape[2])
    rows = jnp.arange(number, dtype=jnp.int32)
    return cached.at[rows[:, None], :, target].set(new.astype(cached.dtype), mode="drop")


def write_token(
    cached: jax.Array,
    new: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`write` of one token, T = 1, on a TPU: a kernel that reads and writes the tiles it lies in.

    XLA would scatter into a layout of its own choice, twice as large, and copy the entire cache
    there and back in each call. With a loop over rows it would wait for each one's position.
    """
    write_rows = partial(_write_rows, interpret=interpret)
    mesh = jax.typeof(new).sharding.mesh
    if mesh.auto_axes:  # XLA cannot split a kernel over the devices
        heads = P(None, MODEL)
        write_rows = jax.shard_map(
            write_rows,
            mesh=mesh,
            axis_names=set(mesh.auto_axes),
            in_specs=(P(), heads, heads),
            out_specs=heads,
            check_vma=False,
        )
    target = jnp.where(count > 0, start, cached.shape[2])
    return write_rows(target, new[:, 0].astype(cached.dtype), cached)


def write_run(cached: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`write` on a TPU, row by row and in the cache's own layout, see `write_token`."""
    whole, axis = _as_it_lies(cached)
    positions = whole.shape[axis]
    size = min(new.shape[1], positions)
    new = jnp.moveaxis(new[:, :size].astype(whole.dtype), 1, axis)
    block = (1, *new.shape[1:])

    def put(row: jax.Array, whole: jax.Array) -> jax.Array:
        first = jnp.clip(start[row], 0, positions - size)  # of as many as there are, to the end
        at = [row, *[jnp.int32(0)] * 3]
        at[axis] = first
        position = first + lax.broadcasted_iota(jnp.int32, block, axis)
        is_new = (position >= start[row]) & (position < start[row] + count[row])
        run = jnp.roll(lax.dynamic_slice_in_dim(new, row, 1), start[row] - first, axis)
        run = jnp.where(is_new, run, lax.dynamic_slice(whole, at, block))
        return lax.dynamic_update_slice(whole, run, at)

    written: jax.Array = lax.fori_loop(0, new.shape[0], put, whole)
    return written.swapaxes(2, axis)


def copy_runs(
    cache: KVCache,
    number: jax.Array,
    source: jax.Array,
    target: jax.Array,
    start: jax.Array,
    end: jax.Array,
    *,
    block: int,
) -> KVCache:
    """Copies keys and values at positions `start[k]` up to `end[k]` of row `source[k]` to row
    `target[k]`, for the first `number` of k; int32 [], and int32 [n].

    Positions are copied in blocks of `block`, static. The last block may go past the run; at the
    end of the cache it begins earlier instead, where the rows must be alike, as those of a fork
    are.
    """
    args = cache, number, source, target, start, end
    copied: KVCache = for_platform(
        *args,
        tpu=partial(copy_as_it_lies, block=block),
        otherwise=partial(_copy_runs, block=block, axis=2),
    )
    return copied


def copy_as_it_lies(cache: KVCache, *runs: jax.Array, block: int) -> KVCache:
    """`copy_runs` on a TPU: a loop over the axes in another order would copy the cache into that,
    and back, in each call."""
    axis = _as_it_lies(cache.keys[0])[1]

    def turned(cache: KVCache) -> KVCache:
        keys, values = jax.tree.map(lambda x: x.swapaxes(2, axis), (cache.keys, cache.values))
        return replace(cache, keys=keys, values=values)

    return turned(_copy_runs(turned(cache), *runs, block=block, axis=axis))


def _copy_runs(cache: KVCache, *runs: jax.Array, block: int, axis: int) -> KVCache:
    """`copy_runs` where positions are that axis."""
    number, source, target, start, end = runs

    def copy(k: jax.Array, cache: KVCache) -> KVCache:
        def copy_block(i: jax.Array, cache: KVCache) -> KVCache:
            def put(x: jax.Array) -> jax.Array:
                place, shape = [jnp.int32(0)] * 4, [1, *x.shape[1:]]
                place[axis] = start[k] + i * block
                shape[axis] = min(block, x.shape[axis])
                run = lax.dynamic_slice(x, [source[k], *place[1:]], shape)
                return lax.dynamic_update_slice(x, run, [target[k], *place[1:]])

            keys, values = jax.tree.map(put, (cache.keys, cache.values))
            return replace(cache, keys=keys, values=values)

        blocks = (end[k] - start[k] + block - 1) // block
        copied: KVCache = lax.fori_loop(0, blocks, copy_block, cache)
        return copied

    copied: KVCache = lax.fori_loop(0, number, copy, cache)
    return copied


def _as_it_lies(cached: jax.Array) -> tuple[jax.Array, int]:
    """`cached[B, K, S, H]` with its axes in the order in which a TPU stores them, and where S is.

    The numbers of a head are a register's lanes. XLA pads no narrower ones: there the lanes are
    positions.
    """
    axis = 2 if cached.shape[3] % _LANES == 0 else 3
    return cached.swapaxes(2, axis), axis


def _write_rows(
    target: jax.Array, new: jax.Array, cached: jax.Array, *, interpret: bool
) -> jax.Array:
    """Writes `new[A, K, H]` to `cached[B, K, S, H]` at the positions `target[A]`, int32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    whole, axis = _as_it_lies(cached)
    positions = whole.shape[axis]
    tile = _LANES if axis == 3 else 32 // whole.dtype.itemsize
    block = (1, *whole.shape[1:axis], min(tile, positions), *whole.shape[axis + 1 :])

    def place(row: Any, target: Any) -> tuple[Any, ...]:
        number = jnp.minimum(target[row], positions - 1) // block[axis]
        return (row, 0, 0, number) if axis == 3 else (row, 0, number, 0)

    def put(target: Any, new: Any, old: Any, out: Any) -> None:
        row = pl.program_id(0)
        first = place(row, target)[axis] * block[axis]
        is_target = first + lax.broadcasted_iota(jnp.int32, block, axis) == target[row]
        # Wider, because a TPU turns no bfloat16.
        one, others = (x[...].astype(jnp.float32) for x in (new, old))
        out[...] = jnp.where(is_target, jnp.expand_dims(one, axis), others).astype(out.dtype)

    tiles = pl.BlockSpec(block, place)
    written: jax.Array = pl.pallas_call(
        put,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=new.shape[:1],
            in_specs=[pl.BlockSpec((1, *new.shape[1:]), lambda row, _: (row, 0, 0)), tiles],
            out_specs=tiles,
        ),
        # Else XLA moves the cache of one row to the fast memory, and all of it back.
        out_shape=pltpu.HBM(whole.shape, whole.dtype),
        input_output_aliases={2: 0},  # the cache, updated in place
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * math.prod(block) * new.shape[0] * whole.dtype.itemsize,
        ),
        interpret=interpret,
    )(target, new, whole)
    return written.swapaxes(2, axis)
