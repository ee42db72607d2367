"""The two ways in which the model reads a matrix, in the form that XLA runs fastest for its
operands: the product `x @ weight.T`, and single rows of it.

The caller need not know the backend: the types say it. Where activations and weights share a type
(any GPU or TPU, float32 on a CPU) it is a plain product. Where the weights are narrower than the
activations (bfloat16 weights on a CPU) they stay narrow in memory, where they lie as `arranged`
puts them, and are widened inside the product; a few vectors are split into bfloat16 numbers
instead, where the processor multiplies those. Weights of 8 bits carry a scale for each output
channel, which the product is multiplied with.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

# XLA's CPU backend fuses "widen, then multiply" into one pass over the weights only while the
# vector fits in 8 KiB. Measured at 1B's shapes: 38 GB/s, which is all that the memory gives; with
# longer vectors, 1 GB/s, or 18 as a multiply and a sum.
_FUSED_PRODUCT_BYTES = 8192
# Rows of a weight that are widened at a time for several vectors. At 1B's shapes and 16 to 512
# vectors 256 rows run as fast as float32 weights, or faster; all rows at once take 1.4 to 3.6 times
# as long.
_BLOCK = 256
# Vectors that are few enough to be split. On two cores of an AMD EPYC with AVX-512 BF16 a step of
# 1B's takes, of the time that widening takes: 2 rows 0.56, 4 rows 0.58, 8 rows 0.74, 16 rows 0.81;
# of 24 rows the products alone take as long.
_FEW = 16


@struct.dataclass
class Columns:
    """A matrix [out, in] that lies in memory as blocks of its columns, each by itself."""

    blocks: tuple[jax.Array, ...]  # [out, in_i], from left to right

    @property
    def dtype(self) -> jnp.dtype:
        """Of the blocks."""
        return self.blocks[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole matrix."""
        return self.blocks[0].shape[0], sum(block.shape[1] for block in self.blocks)


@struct.dataclass
class Quantized:
    """A matrix [out, in] of 8-bit integers; row i stands for `values[i] * scale[i]`."""

    values: Any  # int8 [out, in], an array or Columns
    scale: jax.Array  # float32 [out]


Weight = jax.Array | Columns | Quantized


@jax.jit
def quantized(weight: jax.Array) -> Quantized:
    """The matrix rounded to 8 bits, the largest entry of each row (output channel) to +-127."""
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=1) / 127.0
    values = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)[:, None]).astype(jnp.int8)
    return Quantized(values=values, scale=scale)


def arranged(weight: Weight, activations: jnp.dtype) -> Weight:
    """A parameter as products with activations of this type read it fastest: a matrix that is
    narrower than float32 ones in blocks of columns whose vectors are short enough, else as it
    is."""
    if isinstance(weight, Quantized):
        return replace(weight, values=arranged(weight.values, activations))
    if isinstance(weight, Columns) or activations != jnp.float32:
        return weight
    narrow = weight.ndim == 2 and weight.dtype.itemsize < activations.itemsize
    most = _FUSED_PRODUCT_BYTES // activations.itemsize
    if not narrow or weight.shape[1] <= most:
        return weight
    number = -(-weight.shape[1] // most)
    bounds = [weight.shape[1] * i // number for i in range(number + 1)]
    return Columns(tuple(weight[:, start:end] for start, end in pairwise(bounds)))


def whole(weight: jax.Array | Columns) -> np.ndarray:
    """A matrix as a checkpoint has it."""
    if isinstance(weight, Columns):
        return np.concatenate([np.asarray(block) for block in weight.blocks], axis=1)
    return np.asarray(weight)


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """`x[..., in] @ weight[out, in].T + bias[out] -> [..., out]`, accumulated in float32, in x's
    type."""
    out = product(x, weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return out.astype(x.dtype)


def product(x: jax.Array, weight: Weight) -> jax.Array:
    """As `linear`, but float32 out: what the logits are made of."""
    if isinstance(weight, Quantized):
        return product(x, weight.values) * weight.scale.reshape((1,) * (x.ndim - 1) + (-1,))
    if isinstance(weight, Columns):
        ends = [sum(b.shape[1] for b in weight.blocks[:i]) for i in range(1, len(weight.blocks))]
        parts = zip(jnp.split(x, ends, axis=-1), weight.blocks, strict=True)
        return sum((product(part, block) for part, block in parts), jnp.float32(0))
    if x.dtype == weight.dtype:
        return _dot(x, weight)
    if x.dtype != jnp.float32:  # 8 bits where bfloat16 is multiplied: widened on the way there
        weight, x = _in_this_step(weight, x)
        return _dot(x, weight.astype(x.dtype))
    vectors = x.reshape(-1, x.shape[-1])
    if len(vectors) == 1:
        out = _vector_product(vectors, weight)
    elif len(vectors) <= _FEW and weight.dtype == jnp.bfloat16 and multiplies_bfloat16():
        out = _split_product(vectors, weight)
    else:
        out = _blocked_product(vectors, weight)
    return out.reshape(*x.shape[:-1], weight.shape[0])


@cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's processor has instructions for products of bfloat16 numbers. Without
    them XLA widens both factors, each time anew. Only x86 is looked at: ARM's count as none."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in known


def _vector_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x[1, in]` times narrower `weight[out, in]`: the widening fuses into the product."""
    weight, x = _in_this_step(weight, x)
    # A function of its own in the compiled program, too: else XLA fuses what makes x into the
    # product, and computes it anew for each of the weight's rows, at half the speed.
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
    """`x[rows, in]` times bfloat16 `weight[out, in]`, none of it widened: x is a sum of three
    bfloat16 numbers, whose products with the weight's are exact in float32. (But for numbers near
    the ends of float32's range. What is not finite makes NaN.)"""
    weight, x = _in_this_step(weight, x)
    parts, rest = [], x
    for _ in range(3):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)  # a bfloat16 number
        parts.append(part.astype(weight.dtype))
        rest = rest - part
    high, middle, low = jnp.split(_dot(jnp.concatenate(parts), weight), 3)
    return high + (middle + low)


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


def rows(weight: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The rows `weight[ids]`: [R, D] and int32 [...] within range to [..., D] in `dtype`."""
    if isinstance(weight, Quantized):
        values = rows(weight.values, ids, jnp.dtype(jnp.float32))
        return (values * jnp.take(weight.scale, ids, axis=0)[..., None]).astype(dtype)
    if isinstance(weight, Columns):
        return jnp.concatenate([rows(block, ids, dtype) for block in weight.blocks], axis=-1)
    if weight.dtype != dtype:
        weight, ids = _in_this_step(weight, ids)
    return jnp.take(weight, ids, axis=0).astype(dtype)


def _in_this_step(weight: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ties a weight to a value of the current step, so that it is widened there and nowhere else.

    Without it XLA widens all weights once, before the decode loop, holds a float32 copy of the
    model (5 GB at 1B) and reads twice the bytes in each step.
    """
    tied: tuple[jax.Array, jax.Array] = lax.optimization_barrier((weight, other))
    return tied


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    # HIGHEST keeps float32 products float32 where a GPU or TPU would round their operands.
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
