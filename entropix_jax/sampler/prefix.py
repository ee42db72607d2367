"""Prefixes: the first tokens of an order, found without sorting the vocabulary.

Usually the first `HEAD` tokens suffice. Otherwise bisection over the bits of the values finds the
prefix's end.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.context import if_needed, where
from entropix_jax.stats import sortable, sum_last, top

HEAD = 64  # on a CPU, top_k(64) of 128,256 takes 0.2 ms and a full sort 26 ms


@struct.dataclass
class Prefix:
    """The first tokens of one row's order, identified by the last of them."""

    value: jax.Array  # float32, its place in the order
    last: jax.Array  # int32, its id: those of the same value go by their ids

    def holds(self, order: jax.Array) -> jax.Array:
        """Returns which tokens of `order`, float32 [V], are inside: bool [V]."""
        token = jnp.arange(order.shape[0], dtype=jnp.int32)
        return (order > self.value) | ((order == self.value) & (token <= self.last))


def head_of(order: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values of an order's first tokens, and their ids: float32 and int32 [HEAD], fewer
    where the vocabulary is smaller."""
    return top(order, min(HEAD, order.shape[0]))


def shortest(
    order: jax.Array,
    head: tuple[jax.Array, jax.Array],
    weigh: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    total: jax.Array,
) -> Prefix:
    """Returns the shortest prefix of one row's tokens whose weights reach `target`.

    Args:
        order: float32 [V], the highest first, equal ones by id. Zeros have one sign.
        head: `head_of(order)`.
        weigh: returns tokens' weights, at least 0, from their values in the order: float32 [...].
        target: float32, above 0.
        total: float32, the sum of the weights. All tokens are inside if the target is not below it.
    """
    values, ids = head
    sums = cumulate(weigh(values))
    place = jnp.minimum(jnp.sum(sums < target, dtype=jnp.int32), ids.shape[0] - 1)
    found = Prefix(values[place], ids[place])
    whole = target >= total
    if ids.shape[0] < order.shape[0]:
        beyond = ~whole & (sums[-1] < target)
        found = if_needed(beyond, partial(_bisect, weigh), found, order, target)
    everything = Prefix(jnp.float32(-jnp.inf), jnp.int32(order.shape[0]))
    return where(whole, everything, found)


def first_k(order: jax.Array, head: tuple[jax.Array, jax.Array], k: jax.Array) -> Prefix:
    """Returns the first `k` tokens of one row's order, or all if no more than `k` are above -inf.

    `k` is float32, above 0; `order` and `head` are those of `shortest`.
    """

    def is_possible(order: jax.Array) -> jax.Array:
        return (order > -jnp.inf).astype(jnp.float32)

    return shortest(order, head, is_possible, k, sum_last(is_possible(order)))


def cumulate(mass: jax.Array) -> jax.Array:
    """Returns the running sums of `mass[..., n]`, n small: n sums are one kernel where a scan is
    dozens."""
    upto = jnp.tri(mass.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(upto, mass[..., None, :], jnp.float32(0.0)), axis=-1)


def _bisect(weigh: Callable[[jax.Array], jax.Array], order: jax.Array, target: jax.Array) -> Prefix:
    """Returns the prefix that `shortest` does, wherever it ends."""
    keys, weights = sortable(order), weigh(order)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at `low` the sum reaches the target, at `high` it does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the mean, without overflow
        reached = sum_last(jnp.where(keys >= middle, weights, 0.0)) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    # If rounding leaves the whole sum below the target, the last token with a weight is the end.
    lowest = jnp.min(jnp.where(weights > 0, keys, jnp.iinfo(jnp.int32).max))
    key, _ = lax.fori_loop(0, 32, halve, (lowest, jnp.max(keys) + 1))
    above = sum_last(jnp.where(keys > key, weights, 0.0))
    tied = keys == key
    rank = jnp.cumsum(tied, dtype=jnp.int32)
    needed = jnp.ceil((target - above) / jnp.max(jnp.where(tied, weights, 0.0)))
    needed = jnp.clip(needed.astype(jnp.int32), 1, rank[-1])
    last = jnp.argmax(rank >= needed).astype(jnp.int32)
    return Prefix(order[last], last)
