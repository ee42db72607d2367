"""Writes to the cache on a TPU, in the layout in which XLA stores it there.

Left to itself, XLA scatters into a layout of its own choice, twice as large, and copies the entire
cache there and back in each call.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

_LANES = 128  # of a TPU's registers


def position_axis(head_dim: int) -> int:
    """The axis of positions in a cache [B, K, S, H] as a TPU stores it.

    The numbers of a head are a register's lanes. XLA pads no narrower ones: there the lanes are
    positions.
    """
    return 2 if head_dim % _LANES == 0 else 3


def write_token(
    cached: jax.Array,
    new: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    mesh_axis: str,
    interpret: bool = False,
) -> jax.Array:
    """`write.write` of one token, T = 1: a kernel that reads and writes the tiles it lies in. With
    a loop over rows XLA would wait for each one's position.

    Args:
        mesh_axis: of the mesh, the axis that the heads are split over.
        interpret: run on any device, for tests.
    """
    write_rows = partial(_write_rows, interpret=interpret)
    mesh = jax.typeof(new).sharding.mesh
    if mesh.auto_axes:  # XLA cannot split a kernel over the devices
        heads = P(None, mesh_axis)
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
    """`write.write` of any number of tokens, row by row."""
    axis = position_axis(cached.shape[3])
    whole = cached.swapaxes(2, axis)
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


def _write_rows(
    target: jax.Array, new: jax.Array, cached: jax.Array, *, interpret: bool
) -> jax.Array:
    """Writes `new[A, K, H]` to `cached[B, K, S, H]` at the positions `target[A]`, int32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    axis = position_axis(cached.shape[3])
    whole = cached.swapaxes(2, axis)
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
        # In float32, because a TPU cannot transpose bfloat16.
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
