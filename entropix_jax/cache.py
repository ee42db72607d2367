"""The functional key/value cache: a value that a step takes and returns.

Each row has its own length, and only the length says which slots count: a slot at or past it may
hold anything, NaN included, and never changes a result.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.config import ModelConfig

CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")  # of each layer's keys and values


@struct.dataclass
class KVCache:
    """Keys and values of the tokens that each row has seen.

    One array per layer rather than one stacked array, so that a step updates each in place. Heads
    stand before slots, so that attention reads each head's slots in one run.
    """

    keys: tuple[jax.Array, ...]  # L of [B, K, S, H]
    values: tuple[jax.Array, ...]  # L of [B, K, S, H]
    length: jax.Array  # int32 [B], the slots of each row that are in use

    @property
    def capacity(self) -> int:
        """S, the slots of a row."""
        return self.keys[0].shape[2]


def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `batch` rows with `capacity` slots each."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(batch, jnp.int32),
    )


@struct.dataclass
class Suffixes:
    """Keys and values of the tokens that each branch of a row has beyond the row's cache.

    The branches of a batch grow in step, so one depth tells which slots are in use.
    """

    keys: tuple[jax.Array, ...]  # L of [B, W, K, R, H]
    values: tuple[jax.Array, ...]  # L of [B, W, K, R, H]


def init_suffixes(cache: KVCache, width: int, depth: int) -> Suffixes:
    """Empty suffixes of `depth` slots for `width` branches of each row."""
    batch, kv_heads, _, head_dim = cache.keys[0].shape
    shape = (batch, width, kv_heads, depth, head_dim)
    return Suffixes(
        keys=tuple(jnp.zeros(shape, x.dtype) for x in cache.keys),
        values=tuple(jnp.zeros(shape, x.dtype) for x in cache.values),
    )


@jax.jit  # traced once for all layers
def write(
    slots: jax.Array,
    new: jax.Array,
    start: jax.Array,
    count: jax.Array,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Puts the first `count[A]` of `new[A, T, K, H]` into `slots[B, K, S, H]` from slot `start[A]`
    on, of the rows `rows[A]`, or of all in order; `start`, `count` and `rows` are int32.

    What would fall past the last slot is dropped, never moved onto an older one.
    """
    if new.shape[:2] == (1, 1):
        # A second token that is dropped. XLA makes of the write of one slot alone an update that it
        # joins with whatever reads the slots, once for each, and copies all of them for that.
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    number, tokens = new.shape[:2]
    steps = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    target = jnp.where(steps < count[:, None], start[:, None] + steps, slots.shape[2])
    rows = jnp.arange(number, dtype=jnp.int32) if rows is None else rows
    return slots.at[rows[:, None], :, target].set(new.astype(slots.dtype), mode="drop")
