"""The largest numbers of long rows, without sorting the rows.

`lax.top_k` is a selection on a CPU, and on a TPU of two rows or more. Otherwise it is a sort of the
whole row, of which a step would do two for each row's vocabulary.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.platforms import for_platform

# A GPU sorts so many in the memory of one of its multiprocessors, which is one kernel.
_SORTED = 1024
_LEAST = -(2**31)


def top(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row and their places, as `lax.top_k`: [..., k] and int32 [..., k].

    Equal ones go by place. The order is the total one of floats: NaN first, or last where its sign
    is set, and -0 after 0.

    Args:
        values: float32 [..., V], V at least k.
        k: static.
    """

    def select(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest, places = lax.top_k(values, k)
        return largest, places

    found = for_platform(
        values,
        gpu=partial(top_in_chunks, k=k),
        tpu=partial(top_of_pair, k=k) if math.prod(values.shape[:-1]) == 1 else None,
        otherwise=select,
    )
    # Without the barrier XLA rewrites a top_k whose result is sliced into a full sort: of 128,256
    # on a CPU 20 ms, not 0.2.
    largest, places = lax.optimization_barrier(found)
    return largest, places


def top_in_chunks(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The same by sorts of short rows alone."""
    places = _places(sortable(values), k)
    return jnp.take_along_axis(values, places, axis=-1), places


def top_of_pair(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The same of one row, beside another that is padding."""
    pair = jnp.pad(values.reshape(1, -1), ((0, 1), (0, 0)))
    # The barrier keeps XLA from leaving the padding out.
    largest, places = lax.optimization_barrier(lax.top_k(pair, k))
    shape = (*values.shape[:-1], k)
    return largest[0].reshape(shape), places[0].reshape(shape)


def sortable(values: jax.Array) -> jax.Array:
    """An int32 with the order of the float32: negative ones get their magnitude bits flipped."""
    return flipped(lax.bitcast_convert_type(values, jnp.int32))


def flipped(bits: jax.Array) -> jax.Array:
    """The inverse of itself, on int32: between the bits of floats and what `sortable` makes."""
    turned: jax.Array = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return turned


def _places(keys: jax.Array, k: int) -> jax.Array:
    """Where the k largest of `keys[..., n]`, int32, stand, in order; equal ones by place.

    A row is cut into chunks. In order of their largest, equal ones by place, the first k chunks
    hold the k keys: before a key of any other chunk come the largest of each of those. They are cut
    into smaller chunks, down to single keys.
    """
    few = max(_SORTED, 16 * k)
    size = _chunk(keys.shape[-1], few)
    rows = keys.shape[:-1]
    padding = [(0, 0)] * len(rows) + [(0, -keys.shape[-1] % size)]
    keys = jnp.pad(keys, padding, constant_values=_LEAST)
    chunks = keys.reshape(*rows, -1, size)
    numbers = lax.broadcasted_iota(jnp.int32, chunks.shape[:-1], len(rows))
    while True:
        falling = ~jnp.max(chunks, axis=-1)
        numbers = lax.sort((falling, numbers), num_keys=2, is_stable=False)[1][..., :k]
        if size == 1:
            return numbers
        smaller = _chunk(k * size, few)
        parts, size = size // smaller, smaller
        part = lax.broadcasted_iota(jnp.int32, (*numbers.shape, parts), numbers.ndim)
        numbers = (numbers[..., None] * parts + part).reshape(*rows, -1)
        chunks = keys.reshape(*rows, -1, size)
        chunks = jnp.take_along_axis(chunks, numbers[..., None], axis=-2)


def _chunk(number: int, few: int) -> int:
    """Of how many a chunk is so that so many numbers are few chunks: a power of two."""
    return 1 << (-(-number // few) - 1).bit_length()
