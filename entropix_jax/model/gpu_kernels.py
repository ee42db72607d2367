"""Kernels for a GPU (Pallas, lowered with Triton), for a step of one new token of each row. The
plain form of each, which is its oracle, stands where it is used.

Attention reads each row's keys and values once, as far as the row goes, and writes the scores
once; the plain form passes over the scores several times, and over the whole window.
"""

import os
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from entropix_jax.stats import LN2

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # it is to leave JAX one day
    triton = None

BLOCK = 256  # positions of one program; of heads larger than 64 fewer, as its registers are as many
_PARTS = 16  # partial results that are joined at once
_MEASURED = 2048  # scores whose statistics are taken at once, of at most 64 positions
TINY = 2.0**-32  # scales the sum of scores down, so that it cannot overflow


def are_there() -> bool:
    """Whether there are kernels: not on a mesh, whose devices each hold a part of the heads, not
    where `ENTROPIX_GPU_KERNELS=0` asks for the plain form, and not for every GPU."""
    if os.environ.get("ENTROPIX_GPU_KERNELS") == "0" or triton is None:
        return False
    return _runs_triton() and not jax.sharding.get_abstract_mesh().axis_names


@cache
def _runs_triton() -> bool:
    """Whether all GPUs that are there run what XLA makes of Triton: NVIDIA's from Ampere on."""
    try:
        gpus = jax.local_devices(backend="gpu")
    except RuntimeError:  # there is none: programs are compiled for one that is elsewhere
        return True
    try:
        return all(float(gpu.compute_capability) >= 8 for gpu in gpus)
    except ValueError:  # AMD's have names
        return False


def take(keys: jax.Array) -> bool:
    """Whether there are kernels for a cache of this kind, [P, K, S, H]."""
    head_dim = keys.shape[3]
    return are_there() and head_dim & (head_dim - 1) == 0 and keys.dtype == jnp.bfloat16


@partial(jax.jit, static_argnames="interpret")
def add_and_norm(
    x: jax.Array, y: jax.Array, weight: jax.Array, eps: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """`x + y` and `rms_norm(x + y)` of [B, D]. With `interpret` it runs on any device, if D is a
    power of two."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    whole, normed = pl.pallas_call(
        _add_and_norm_row,
        grid=x.shape[:1],
        out_shape=(out, out),
        compiler_params=triton.CompilerParams(),
        name="add_and_norm",
        interpret=interpret,
    )(x, y, weight, eps[None])
    return whole, normed


def _add_and_norm_row(x: Any, y: Any, weight: Any, eps: Any, whole: Any, normed: Any) -> None:
    row, width = pl.program_id(0), x.shape[1]
    size = pl.next_power_of_2(width)
    there = jnp.arange(size) < width

    def load(ref: Any) -> jax.Array:
        loaded: jax.Array = triton.load(ref, mask=there, other=0.0)
        return loaded

    dims = pl.ds(0, size)
    total = load(x.at[row, dims]) + load(y.at[row, dims])
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(jnp.square(wide)) / width + eps[0])
    out = wide * scale * load(weight.at[dims]).astype(jnp.float32)
    triton.store(whole.at[row, dims], total, mask=there)
    triton.store(normed.at[row, dims], out.astype(normed.dtype), mask=there)


def allocate(shape: tuple[int, ...]) -> jax.Array:
    """A float32 array that holds anything."""

    def fill_nothing(_: Any) -> None:
        pass

    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    array: jax.Array = pl.pallas_call(
        fill_nothing,
        out_shape=out,
        compiler_params=triton.CompilerParams(),
        name="allocate",
        metadata=_moves(0),
    )()
    return array


@partial(jax.jit, static_argnames="interpret")
def attend_next(
    keys: jax.Array,
    values: jax.Array,
    scores: jax.Array,
    queries: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `attention.attend_next`. With `interpret` it runs on any device, if BLOCK divides W.

    Returns the attention output [B, N*H], keys, values, scores, and the logarithm of each head's
    sum of `exp(score)`, [B, N].
    """
    batch, heads, head_dim = queries.shape
    block = min(BLOCK, BLOCK * 64 // head_dim)
    kv_heads, blocks = keys.shape[1], pl.cdiv(scores.shape[3], block)
    parts = pl.next_power_of_2(blocks)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    new = jnp.concatenate([queries, key, value], axis=1)
    angles = cos.reshape(batch, -1), sin.reshape(batch, -1)
    out = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values, scores)),
           shape(batch, heads, parts, head_dim), *[shape(batch, heads, parts)] * 2)  # fmt: skip
    read = 2 * batch * kv_heads * scores.shape[3] * head_dim * keys.dtype.itemsize
    written = 4 * batch * heads * (scores.shape[3] + parts * (head_dim + 2))
    keys, values, scores, mixed, peak, mass = pl.pallas_call(
        partial(_attend_block, heads=heads, size=block),
        grid=(batch, kv_heads, blocks),
        out_shape=out,
        input_output_aliases={6: 0, 7: 1, 8: 2},
        compiler_params=triton.CompilerParams(num_warps=8),  # with 4 its registers are too few
        name="attend_block",
        metadata=_moves(read + written),
        interpret=interpret,
    )(layer[None], start, count, new, *angles, keys, values, scores)
    out, log_mass = pl.pallas_call(
        partial(_join_blocks, block=block, blocks=blocks),
        grid=(batch, heads),
        compiler_params=triton.CompilerParams(),
        out_shape=(jax.ShapeDtypeStruct(queries.shape, queries.dtype), shape(batch, heads)),
        name="join_blocks",
        interpret=interpret,
    )(start, mixed, peak, mass)
    return out.reshape(batch, -1), keys, values, scores, log_mass


def _moves(number: int) -> dict[str, str]:
    """Says how many bytes a kernel reads and writes, where that is not all of its arrays."""
    return {"bytes": str(number)}


def _attend_block(
    layer: Any, start: Any, count: Any, new: Any, cos: Any, sin: Any,
    keys: Any, values: Any, _: Any, new_keys: Any, new_values: Any, scores: Any,
    mixed: Any, peak: Any, mass: Any, *, heads: int, size: int,
) -> None:  # fmt: skip
    """The query heads of one key/value head over one block of positions.

    Args:
        new: [B, N+2K, H], the new tokens' queries, keys and values, not yet rotated.
        cos, sin: float32 [B, H/2].
        mixed, peak, mass: float32 [B, N, blocks, H] and twice [B, N, blocks], the weighted sum of
            the values, and the largest score and the sum of weights that it is relative to.
    """
    row, kv_head, block = (pl.program_id(axis) for axis in range(3))
    position, first = start[row], block * size
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    halves = [pl.ds(0, head_dim // 2), pl.ds(head_dim // 2, head_dim // 2)]

    def turned(head: Any) -> tuple[jax.Array, jax.Array]:
        """The halves of a query or a key, rotated."""
        one, two = (new[row, head, half].astype(jnp.float32) for half in halves)
        c, s = cos[row, :], sin[row, :]
        return (one * c - two * s).astype(new.dtype), (two * c + one * s).astype(new.dtype)

    @pl.when(first <= position)
    def attend() -> None:
        # The new key and value, as `write.append` has them.
        value = new[row, heads + kv_heads + kv_head, :]
        parts = [new[row, heads + kv_heads + kv_head, half] for half in halves]
        own = [
            jnp.where(jnp.abs(part) < jnp.inf, key, jnp.nan)
            for key, part in zip(turned(heads + kv_head), parts, strict=True)
        ]
        value = jnp.where(jnp.abs(value) < jnp.inf, value, 0.0)

        # The cache's keys and values, and among them those of the new token.
        span = pl.ds(first, size)
        at = first + jnp.arange(size, dtype=jnp.int32)
        is_read = at < scores.shape[3]
        is_new = ((at == position) & (count[row] > 0))[:, None]

        def seen(cached: Any, dims: Any, own: jax.Array) -> jax.Array:
            is_old = jnp.broadcast_to((at < position)[:, None], (size, own.shape[0]))
            old = triton.load(cached.at[row, kv_head, span, dims], mask=is_old, other=0.0)
            return jnp.where(is_new, own[None], old).astype(jnp.float32)

        key_halves = [seen(keys, *half) for half in zip(halves, own, strict=True)]
        seen_values = seen(values, slice(None), value)

        # The softmax and the weighted sum of this block alone, one query head after another.
        group = heads // kv_heads
        for number in range(group):
            head = kv_head * group + number
            products = [
                jnp.sum(half * query.astype(jnp.float32)[None], axis=1)
                for half, query in zip(key_halves, turned(head), strict=True)
            ]
            score = (products[0] + products[1]) * head_dim**-0.5
            triton.store(scores.at[row, layer[0], head, span], score, mask=is_read)
            score = jnp.where(at <= position, score, -jnp.inf)
            most = jnp.max(score)
            weights = jnp.exp(score - jnp.where(most == -jnp.inf, 0.0, most))
            peak[row, head, block] = most
            mass[row, head, block] = jnp.sum(weights)
            mixed[row, head, block, :] = jnp.sum(weights[:, None] * seen_values, axis=0)

        # The cache takes the token.
        @pl.when((count[row] > 0) & (position < first + size))
        def write() -> None:
            for half, part in zip(halves, own, strict=True):
                new_keys[row, kv_head, position, half] = part.astype(new_keys.dtype)
            new_values[row, kv_head, position, :] = value.astype(new_values.dtype)


def _join_blocks(
    start: Any, mixed: Any, peak: Any, mass: Any, out: Any, log_mass: Any,
    *, block: int, blocks: int,
) -> None:  # fmt: skip
    """The output of one head from those of its blocks, which weigh as much as their scores."""
    row, head = pl.program_id(0), pl.program_id(1)
    size = peak.shape[2]
    used = jnp.minimum(start[row] // block + 1, blocks)  # a row that is full is not running

    def load(part: Any, first: jax.Array | int, number: int, other: float) -> jax.Array:
        """`number` of a head's blocks, `other` for those past the row's position."""
        there = first + jnp.arange(number, dtype=jnp.int32) < used
        ref = part.at[row, head, pl.ds(first, number)]
        if len(part.shape) == 4:
            there = jnp.broadcast_to(there[:, None], (number, part.shape[3]))
        loaded: jax.Array = triton.load(ref, mask=there, other=other)
        return loaded

    most = jnp.max(load(peak, 0, size, -jnp.inf))
    parts = min(_PARTS, size)

    def join(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first = i * parts
        weights = jnp.exp(load(peak, first, parts, -jnp.inf) - most)
        total = jnp.sum(weights * load(mass, first, parts, 0.0))
        part = jnp.sum(weights[:, None] * load(mixed, first, parts, 0.0), axis=0)
        return sums[0] + total, sums[1] + part

    none = jnp.float32(0.0), jnp.zeros(mixed.shape[3], jnp.float32)
    total, part = lax.fori_loop(0, (used + parts - 1) // parts, join, none)
    out[row, head, :] = (part / total).astype(out.dtype)
    log_mass[row, head] = most + jnp.log(total)


@partial(jax.jit, static_argnames="interpret")
def measure(
    scores: jax.Array, log_mass: jax.Array, keys: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Entropy and varentropy [B, L, N], divergence and interaction [B, L], see `AttnStats`, of the
    first `keys` positions of each row.

    Args:
        scores: float32 [B, L, N, W]; what lies past a row's keys may be anything.
        log_mass: float32 [B, L, N], see `attend_next`.
        keys: int32 [B], at least 1.
        interpret: run on any device, for tests.
    """
    batch, layers, heads, _ = scores.shape
    by_layer = jax.ShapeDtypeStruct((batch, layers), jnp.float32)
    entropy, varentropy, divergence, strength = pl.pallas_call(
        _measure_layer,
        grid=(batch, layers),
        out_shape=(log_mass, log_mass, by_layer, by_layer),
        compiler_params=triton.CompilerParams(),
        name="measure_layer",
        interpret=interpret,
    )(scores, log_mass, keys)
    number = heads * keys.astype(jnp.float32)[:, None]
    return entropy, varentropy, divergence / heads, strength / number / TINY


def _measure_layer(
    scores: Any, log_mass: Any, keys: Any,
    entropy: Any, varentropy: Any, divergence: Any, strength: Any,
) -> None:  # fmt: skip
    """One row's statistics of one layer, in one pass over its scores."""
    row, layer = pl.program_id(0), pl.program_id(1)
    heads, last, valid = scores.shape[2], scores.shape[3] - 1, keys[row]
    # A GPU's arrays have powers of two: the last head stands for those that are none.
    number = jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32)
    head, is_head = jnp.minimum(number, heads - 1), (number < heads)[:, None]
    positions = min(64, _MEASURED // len(number))
    total = log_mass[row, layer, head][:, None]

    def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mass, mean, squares, apart, size = sums
        at = i * positions + jnp.arange(positions, dtype=jnp.int32)
        score = scores[row, layer, head[:, None], jnp.minimum(at, last)[None]]
        is_valid = (at < valid)[None]
        weights = jnp.where(is_valid, jnp.exp(score - total), 0.0)
        bits = jnp.where(weights > 0, (score - total) / LN2, 0.0)

        # The mean of the bits and their squares about it, joined with those so far.
        own = jnp.sum(weights, axis=1)
        joined = mass + own
        share = jnp.where(own > 0, own / joined, 0.0)
        own_mean = jnp.sum(weights * bits, axis=1) / jnp.where(own > 0, own, 1.0)
        own_squares = jnp.sum(weights * jnp.square(bits - own_mean[:, None]), axis=1)
        step = own_mean - mean
        squares = squares + own_squares + jnp.square(step) * mass * share

        # The distance of the heads from their mean, and the scores' size.
        middle = jnp.sum(jnp.where(is_head, weights, 0.0), axis=0) / heads
        distance = jnp.where(is_head, jnp.abs(weights - middle[None]), 0.0)
        sizes = jnp.where(is_head & is_valid, jnp.abs(score) * TINY, 0.0)
        return (
            joined,
            mean + step * share,
            squares,
            apart + jnp.sum(distance),
            size + jnp.sum(sizes),
        )

    zeros, zero = jnp.zeros(number.shape, jnp.float32), jnp.float32(0.0)
    blocks = (valid + positions - 1) // positions
    mass, mean, squares, apart, size = lax.fori_loop(
        0, blocks, add, (zeros, zeros, zeros, zero, zero)
    )
    entropy[row, layer, head] = -mean
    varentropy[row, layer, head] = squares / mass
    divergence[row, layer], strength[row, layer] = apart, size
