"""Matrix products `x @ weight.T` and row lookups for weights of any dtype, in the form that XLA
runs fastest.

The dtypes select the form. Where activations and weights share a dtype (any GPU or TPU, float32 on
a CPU) it is a plain product. Narrower weights (bfloat16 on a CPU) stay narrow in memory, in the
layout that `arranged` chooses, and are widened inside the product; few vectors are instead split
into terms of the weights' dtype if the processor has AVX-512 BF16. Bfloat16 activations on a CPU
are multiplied in bfloat16 where that is faster, else widened. Int8 weights carry a scale per output
channel, which is applied to the product.
"""

import math
import operator
from dataclasses import replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from entropix_jax.model.precision import multiplies_bfloat16
from entropix_jax.platforms import for_platform

# XLA's CPU backend fuses "widen, then multiply" into one pass over the weights only while the
# vector fits in 8 KiB. Measured at Llama-3.2-1B's shapes: 38 GB/s, the memory bandwidth; with
# longer vectors 1 GB/s, or 18 as a multiply and a sum.
_FUSED_PRODUCT_BYTES = 8192
# Rows of a weight that are widened at a time for several vectors. At 1B's shapes and 16 to 512
# vectors 256 rows run as fast as float32 weights, or faster; all rows at once take 1.4 to 3.6 times
# as long.
_BLOCK = 256
# The most vectors that are split. On two cores of an AMD EPYC with AVX-512 BF16 a step at 1B's
# shapes takes, relative to widening bfloat16 weights: 2 rows 0.56, 4 rows 0.58, 8 rows 0.74, 16
# rows 0.81; at 24 rows the products alone take as long. A step of smollm2 with int8 weights: 2 rows
# 0.39, 4 rows 0.46, 16 rows 0.70.
_FEW = 16
# Rows of a TPU's register. XLA multiplies a single vector without the matrix unit, which takes four
# times as long as eight vectors.
_TPU_ROWS = 8
# More than 16 and fewer than 65 bfloat16 vectors are padded to a multiple of 12: XLA computes some
# other counts at half the speed (20, 28, 40, 44, 52, 62 to 64).
_UNPADDED, _ANY_NUMBER, _TILE = 16, 65, 12


@struct.dataclass
class Columns:
    """A matrix [out, in] stored as separate blocks of columns."""

    blocks: tuple[jax.Array, ...]  # [out, in_i], from left to right


@struct.dataclass
class Quantized:
    """A matrix [out, in] of 8-bit integers; row i represents `values[i] * scale[i]`."""

    values: Any  # int8 [out, in], an array or Columns
    scale: jax.Array  # float32 [out]


Weight = jax.Array | Columns | Quantized


@jax.jit
def quantized(weight: jax.Array) -> Quantized:
    """Quantizes a matrix to int8 with one scale per row (output channel)."""
    return Quantized(*_rounded(weight.astype(jnp.float32)))


def _rounded(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds float32 vectors `[..., n]` to int8. Returns them and the scale of each."""
    scale = jnp.max(jnp.abs(vectors), axis=-1) / 127.0
    values = jnp.round(vectors / jnp.where(scale > 0, scale, 1.0)[..., None])
    return values.astype(jnp.int8), scale


def arranged(weight: Weight) -> Weight:
    """Returns the layout of a weight that a CPU's products read fastest: blocks of columns for a
    matrix narrower than float32 with long rows, else unchanged."""
    if isinstance(weight, Quantized):
        return replace(weight, values=arranged(weight.values))
    if isinstance(weight, Columns):
        return weight
    most = _FUSED_PRODUCT_BYTES // 4  # a vector is float32 there
    if weight.ndim != 2 or weight.dtype.itemsize == 4 or weight.shape[1] <= most:
        return weight
    count = -(-weight.shape[1] // most)
    bounds = [weight.shape[1] * i // count for i in range(count + 1)]
    return Columns(tuple(weight[:, start:end] for start, end in pairwise(bounds)))


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`x[..., in] @ weight[out, in].T + bias[out] -> [..., out]`, accumulated in float32, in x's
    type."""
    out = product(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return out.astype(x.dtype)


def product(x: jax.Array, weight: Weight) -> jax.Array:
    """Returns `x[..., in] @ weight[out, in].T` in float32, or in int32 if x is int8."""
    if isinstance(weight, Quantized):
        return product(x, weight.values) * weight.scale.reshape((1,) * (x.ndim - 1) + (-1,))
    if isinstance(weight, Columns):
        ends = [*accumulate(block.shape[1] for block in weight.blocks[:-1])]
        parts = zip(jnp.split(x, ends, axis=-1), weight.blocks, strict=True)
        return reduce(operator.add, (product(part, block) for part, block in parts))
    if x.dtype == jnp.int8:
        return lax.dot_general(
            x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
    if x.dtype == weight.dtype == jnp.float32:
        return _dot(x, weight)
    on_cpu = _bfloat16_product if x.dtype == jnp.bfloat16 else _float32_product
    return for_platform(x, weight, cpu=on_cpu, otherwise=_plain_product)


def _float32_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product` of float32 activations and a narrower weight on a CPU."""
    vectors = x.reshape(-1, x.shape[-1])
    is_few = len(vectors) <= _FEW and multiplies_bfloat16()
    if len(vectors) == 1:
        out = _vector_product(vectors, weight)
    elif is_few and weight.dtype == jnp.bfloat16:
        out = _split_product(vectors, weight)
    elif is_few and weight.dtype == jnp.int8:
        out = _integer_product(vectors, weight)
    else:
        out = _blocked_product(vectors, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _plain_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product` in the activations' type."""
    if x.dtype == weight.dtype:
        return _dot(x, weight)
    weight, x = _in_this_step(weight, x)
    return _dot(x, weight.astype(x.dtype))


def _bfloat16_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product` of bfloat16 activations on a CPU, in bfloat16 where that is faster. A single vector
    is converted to float32: its product takes XLA twenty times as long in bfloat16. With int8
    weights a few vectors are converted, too."""
    vectors = x.reshape(-1, x.shape[-1])
    count = len(vectors)
    few = 1 if weight.dtype == jnp.bfloat16 else _FEW
    if count <= few or weight.dtype.itemsize > 2 or not multiplies_bfloat16():
        return product(x.astype(jnp.float32), weight)
    if _UNPADDED < count < _ANY_NUMBER:
        vectors = jnp.pad(vectors, ((0, -count % _TILE), (0, 0)))
    out = _plain_product(vectors, weight)[:count]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _vector_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[1, in]` times narrower `weight[out, in]`: the widening fuses into the product."""
    weight, x = _in_this_step(weight, x)
    # Not inlined: XLA would fuse the producer of x into the product and recompute it for each row
    # of the weight, at half the speed.
    with set_xla_metadata(inlineable="false"):
        out: jax.Array = _widening_product(x, weight)
        return out


@jax.jit
def _widening_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    widened = weight.astype(x.dtype)
    if x.nbytes <= _FUSED_PRODUCT_BYTES:
        return x @ widened.T
    return jnp.sum(widened * x, axis=-1)[None, :]


def _split_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[rows, in]` times bfloat16 `weight[out, in]` without widening: x is split into a sum of
    three bfloat16 terms, whose products with the weight are exact in float32. (Except near the
    limits of float32's range; non-finite values become NaN.)"""
    weight, x = _in_this_step(weight, x)
    parts, rest = [], x
    for _ in range(3):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)  # to bfloat16
        parts.append(part.astype(weight.dtype))
        rest = rest - part
    high, middle, low = jnp.split(_dot(jnp.concatenate(parts), weight), 3)
    return high + (middle + low)


def _integer_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[rows, in]` times int8 `weight[out, in]` as integers: each vector is split into a sum of
    three int8 terms, each with a scale. They represent it to 1e-7 of its largest entry, as accurate
    as a float32 sum of products. A non-finite vector gives a non-finite result."""
    parts, scales, rest = [], [], x.astype(jnp.float32)
    for _ in range(3):
        part, scale = _rounded(rest)
        parts.append(part)
        scales.append(scale)
        rest = rest - part.astype(jnp.float32) * scale[..., None]
    sums = product(jnp.concatenate(parts), weight).astype(jnp.float32)
    sums = sums * jnp.concatenate(scales)[..., None]
    return reduce(operator.add, jnp.split(sums, 3)[::-1])


def _blocked_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[rows, in]` times narrower `weight[out, in]`: widens one block of the weight's rows at a
    time, and multiplies with it while it is in the processor's cache."""
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


def rows(weight: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows `weight[ids]`: [R, D] and int32 [...] within range to [..., D] in `dtype`."""
    if isinstance(weight, Quantized):
        values = rows(weight.values, ids, jnp.dtype(jnp.float32))
        return (values * jnp.take(weight.scale, ids, axis=0)[..., None]).astype(dtype)
    if isinstance(weight, Columns):
        return jnp.concatenate([rows(block, ids, dtype) for block in weight.blocks], axis=-1)
    if weight.dtype != dtype:
        weight, ids = _in_this_step(weight, ids)
    elif dtype == jnp.bfloat16:  # a CPU looks rows up in float32
        tied: tuple[jax.Array, jax.Array]
        tied = for_platform(weight, ids, cpu=_in_this_step, otherwise=lambda *same: same)
        weight, ids = tied
    return jnp.take(weight, ids, axis=0).astype(dtype)


def _in_this_step(weight: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Makes a weight depend on a value of the current step, so that it is widened there.

    Otherwise XLA hoists the widening out of the decode loop, holds a float32 copy of the model
    (5 GB at 1B) and reads twice the bytes in each step.
    """
    tied: tuple[jax.Array, jax.Array] = lax.optimization_barrier((weight, other))
    return tied


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    if math.prod(x.shape[:-1]) >= _TPU_ROWS:
        return _plain_dot(x, weight)
    return for_platform(x, weight, tpu=padded_dot, otherwise=_plain_dot)


def _plain_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    # HIGHEST keeps float32 products float32 where a GPU or TPU would round their operands.
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def padded_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[..., in] @ weight[out, in].T` of less than 8 vectors as of 8, in float32, on a TPU."""
    vectors = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(vectors, ((0, _TPU_ROWS - len(vectors)), (0, 0)))
    out = _plain_dot(padded, weight)[: len(vectors)]
    return out.reshape(*x.shape[:-1], -1)
