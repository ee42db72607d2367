"""Attention from one new token of each row as a GPU kernel (Pallas, lowered by Triton).

Off unless `ENTROPIX_GPU_KERNELS=1`. The plain form, `attention.attend`, passes over the scores
several times and over the whole window; the kernel reads each row's keys and values once, up to its
position.
"""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 256  # positions of one program, for heads of up to 64 numbers; registers are limited


def is_enabled(keys: jax.Array) -> bool:
    """Whether `attend_next` runs in place of the plain form, for a cache's keys [P, K, S, H].

    It needs bfloat16 and a power of two for H. On a mesh each device holds only some of the heads.
    """
    head_dim = keys.shape[3]
    return (
        os.environ.get("ENTROPIX_GPU_KERNELS") == "1"
        and not jax.sharding.get_abstract_mesh().axis_names
        and head_dim & (head_dim - 1) == 0
        and keys.dtype == jnp.bfloat16
    )


@partial(jax.jit, static_argnames=("window", "interpret"))
def attend_next(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    *,
    window: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`attention.attend` for T = 1. With `interpret` it runs on any device, if BLOCK divides S."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    batch, _, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    size = min(BLOCK, BLOCK * 64 // head_dim)
    blocks = pl.cdiv(window, size)

    def attend_block(
        positions: Any, queries: Any, keys: Any, values: Any,
        scores: Any, mixed: Any, peak: Any, mass: Any,
    ) -> None:  # fmt: skip
        """The query heads of one key/value head over one block of positions."""
        row, kv_head, block = (pl.program_id(axis) for axis in range(3))
        at = block * size + jnp.arange(size, dtype=jnp.int32)
        visible = (at <= positions[row]) & (at < window)
        span = pl.ds(block * size, size)

        def load(cached: Any) -> jax.Array:
            mask = jnp.broadcast_to(visible[:, None], (size, head_dim))
            loaded = triton.load(cached.at[row, kv_head, span, :], mask=mask, other=0.0)
            return loaded.astype(jnp.float32)

        block_keys, block_values = load(keys), load(values)
        for i in range(heads // kv_heads):
            head = kv_head * (heads // kv_heads) + i
            query = queries[row, head, :].astype(jnp.float32)
            score = jnp.sum(block_keys * query[None], axis=1) * head_dim**-0.5
            triton.store(scores.at[row, head, span], score, mask=visible)
            score = jnp.where(visible, score, -jnp.inf)
            highest = jnp.max(score)
            weights = jnp.exp(score - jnp.where(highest == -jnp.inf, 0.0, highest))
            peak[row, head, block] = highest
            mass[row, head, block] = jnp.sum(weights)
            mixed[row, head, block, :] = jnp.sum(weights[:, None] * block_values, axis=0)

    shapes = (window,), (blocks, head_dim), (blocks,), (blocks,)
    scores, mixed, peak, mass = pl.pallas_call(
        attend_block,
        grid=(batch, kv_heads, blocks),
        out_shape=[jax.ShapeDtypeStruct((batch, heads, *own), jnp.float32) for own in shapes],
        compiler_params=triton.CompilerParams(num_warps=8),  # 4 have too few registers
        name="attend_block",
        interpret=interpret,
    )(positions[:, 0], queries[:, 0], keys, values)

    # Each block's sums are relative to its own highest score.
    scale = jnp.exp(peak - jnp.max(peak, axis=-1, keepdims=True))
    total = jnp.sum(scale * mass, axis=-1, keepdims=True)
    out = jnp.sum(scale[..., None] * mixed, axis=2) / total
    return out.reshape(batch, 1, -1).astype(queries.dtype), scores[:, :, None]
