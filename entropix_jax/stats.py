"""Reductions of rows: entropy and varentropy, sums, the largest numbers; and `AttnStats`."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.platforms import for_platform

LN2 = math.log(2.0)  # nats of a bit
_LANES = 128  # of a TPU's registers; any vector of a CPU's divides it


@struct.dataclass
class AttnLooks:
    """The positions that some heads of each row attend to most, see `attention_looks`."""

    layer: jax.Array  # int32 [B, 3]
    head: jax.Array  # int32 [B, 3]
    positions: jax.Array  # int32 [B, 3, 5], by falling weight
    weights: jax.Array  # float32 [B, 3, 5], 0 where there are fewer keys


@struct.dataclass
class AttnStats:
    """Statistics of the attention of each row's last position, over its `n` valid keys only.

    With scaled scores `s` and weights `a = softmax(s)` of one head over those keys:
    """

    entropy: jax.Array  # [B, L, N] bits: E = -sum a log2 a
    varentropy: jax.Array  # [B, L, N] bits^2: sum a (log2 a + E)^2
    divergence: jax.Array  # [B, L] mean over heads of sum_j |a_j - mean over heads of a_j|
    interaction: jax.Array  # [B, L] mean of |s| over heads and valid keys
    keys: jax.Array  # float32 [B], n
    looks: AttnLooks | None = None  # None unless requested


def entropy_and_varentropy(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entropy (bits) and varentropy (bits^2) of `log_probs[..., n]` in nats: two float32 [...].

    `h = -sum p log2 p` and `u = sum p (log2 p + h)^2`, the variance of the information content. A
    term with p = 0 adds 0.
    """
    probs = jnp.exp(log_probs)
    bits = jnp.where(probs > 0, log_probs / LN2, 0.0)
    entropy = -sum_last(probs * bits)
    varentropy = sum_last(probs * jnp.square(bits + entropy[..., None]))
    return entropy, varentropy


def sum_last(x: jax.Array) -> jax.Array:
    """The sum over the last axis, [..., n] to [...], on a CPU as 128 partial sums.

    XLA's CPU backend sums a last axis sequentially, which takes 3 to 7 times as long for a long
    one. There, zeros appended to the axis do not change the result, to the last digit. Elsewhere
    the partial sums would only be written and read again.
    """
    return for_platform(x, cpu=_sum_last_in_lanes, otherwise=partial(jnp.sum, axis=-1))


def _sum_last_in_lanes(x: jax.Array) -> jax.Array:
    lanes = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _LANES)])
    lanes = jnp.sum(lanes.reshape(*x.shape[:-1], -1, _LANES), axis=-2)
    return jnp.sum(lax.optimization_barrier(lanes), axis=-1)  # else XLA merges the two sums


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
        tpu=partial(top_of_pair, k=k) if math.prod(values.shape[:-1]) == 1 else None,
        otherwise=select,
    )
    # Without the barrier XLA rewrites a top_k whose result is sliced into a full sort: of 128,256
    # on a CPU 20 ms, not 0.2.
    largest, places = lax.optimization_barrier(found)
    return largest, places


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
