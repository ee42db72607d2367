"""The two ways in which the model reads a matrix, in the form that XLA runs fastest for its
operands: the product `x @ weight.T`, and single rows of it.

The caller need not know the backend: the types say it. Where activations and weights share a type
(any GPU or TPU, float32 on a CPU) it is a plain product. Where the weights are narrower than the
activations (bfloat16 weights on a CPU) they are widened inside the product, so that they stay
narrow in memory.
"""

import jax
import jax.numpy as jnp
from jax import lax

# XLA's CPU backend fuses "widen, then multiply" into one pass over the weights only while the
# vector fits in 8 KiB; past that, a multiply and a sum is the fused form. Measured: 15-36 GB/s
# against 1.
_FUSED_PRODUCT_BYTES = 8192
# Rows of a weight that are widened at a time for several vectors. At 1B's shapes and 16 to 512
# vectors 256 rows run as fast as float32 weights, or faster; all rows at once take 1.4 to 3.6 times
# as long.
_BLOCK = 256


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[..., in] @ weight[out, in].T -> [..., out]`, accumulated in float32, in x's type."""
    return product(x, weight).astype(x.dtype)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `linear`, but float32 out: what the logits are made of."""
    if x.dtype == weight.dtype:
        return _dot(x, weight)
    out = _vector_product if x.size == x.shape[-1] else _blocked_product
    return out(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.shape[0])


def _vector_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[1, in]` times narrower `weight[out, in]`: the widening fuses into the product."""
    weight, x = _in_this_step(weight, x)
    widened = weight.astype(x.dtype)
    if x.nbytes <= _FUSED_PRODUCT_BYTES:
        return x @ widened.T
    return jnp.sum(widened * x, axis=-1)[None, :]


def _blocked_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[rows, in]` times narrower `weight[out, in]`: a few rows of the weight are widened at a
    time, and used while they are in the processor's cache."""
    blocks = weight.shape[0] // _BLOCK

    def block(i: jax.Array) -> jax.Array:
        narrow, i = _in_this_step(weight, i)
        return _dot(x, lax.dynamic_slice_in_dim(narrow, i * _BLOCK, _BLOCK).astype(x.dtype))

    parts = []
    if blocks:
        mapped = lax.map(block, jnp.arange(blocks, dtype=jnp.int32))  # [blocks, rows, _BLOCK]
        parts.append(mapped.transpose(1, 0, 2).reshape(x.shape[0], blocks * _BLOCK))
    if rest := weight.shape[0] - blocks * _BLOCK:
        narrow, x = _in_this_step(weight, x)
        parts.append(_dot(x, narrow[-rest:].astype(x.dtype)))
    return jnp.concatenate(parts, axis=1)


def rows(weight: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows `weight[ids]`: [R, D] and int32 [...] within range to [..., D] in `dtype`."""
    if weight.dtype != dtype:
        weight, ids = _in_this_step(weight, ids)
    return jnp.take(weight, ids, axis=0).astype(dtype)


def _in_this_step(weight: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ties a weight to a value of the current step, so that it is widened there and nowhere else.

    Without it XLA widens all weights once, before the decode loop, holds a float32 copy of the
    model (5 GB at 1B) and reads twice the bytes in each step.
    """
    return lax.optimization_barrier((weight, other))


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    # HIGHEST keeps float32 products float32 where a GPU or TPU would round their operands.
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
