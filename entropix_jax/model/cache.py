"""The functional key/value cache: a pytree that a step takes and returns.

Each row has its own length, and validity is defined by the length alone. A position at or past it
never changes a result: its key may hold anything, NaN included, its value anything finite.

No value is ever NaN or infinite (see `append`), so that attention may multiply the values of all
positions by their weights: those past the length have the weight 0.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.model.config import ModelConfig
from entropix_jax.platforms import traced_for_all

CACHE_AXES = ("batch", "kv_heads", "positions", "head_dim")  # of each layer's keys and values


@struct.dataclass
class KVCache:
    """Keys and values of each row's tokens.

    One array per layer instead of a stacked one, so that a step updates each in place. The head
    axis comes before positions, so that attention reads a head's positions contiguously.
    """

    keys: tuple[jax.Array, ...]  # L of [B, K, S, H]
    values: tuple[jax.Array, ...]  # L of [B, K, S, H]
    length: jax.Array  # int32 [B], the valid positions of each row
    activations: jnp.dtype = struct.field(pytree_node=False)  # of the hidden states beside it

    @property
    def capacity(self) -> int:
        """S, the positions of a row."""
        return self.keys[0].shape[2]


def cache_dtype(activations: jnp.dtype) -> jnp.dtype:
    """The dtype of a cache beside activations of a dtype: the same, but float32 on a CPU, where XLA
    would widen an entire bfloat16 cache, and narrow it again, to write one token."""
    on_cpu = jax.default_backend() == "cpu" and not traced_for_all.value
    return jnp.dtype(jnp.float32) if on_cpu else activations


def init_cache(config: ModelConfig, batch: int, capacity: int, activations: jnp.dtype) -> KVCache:
    """An empty cache of `batch` rows with `capacity` positions each."""
    dtype = cache_dtype(activations)
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(batch, jnp.int32),
        activations=jnp.dtype(activations),
    )


def append(
    cached: tuple[jax.Array, jax.Array],
    key: jax.Array,
    value: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens to a layer's keys and values [B, K, S, H], see `write`.

    Where a value is NaN or infinite, 0 is stored and the key becomes NaN: whoever sees that
    position has a NaN score, and with it a NaN result, and nobody else is any the worse for it.

    Args:
        cached: keys and values.
        key, value: [A, T, K, H].
        start, count: int32 [A].
    """
    value = value.astype(cached[1].dtype)
    finite = jnp.isfinite(value)
    key = jnp.where(finite, key, jnp.nan)
    value = jnp.where(finite, value, jnp.zeros((), value.dtype))
    return write(cached[0], key, start, count), write(cached[1], value, start, count)


@jax.jit  # traced once for all layers
def write(
    cached: jax.Array,
    new: jax.Array,
    start: jax.Array,
    count: jax.Array,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Writes the first `count[A]` of `new[A, T, K, H]` to `cached[B, K, S, H]`, at positions from
    `start[A]` on, of the rows `rows[A]` (None: all in order). `start`, `count`, `rows`: int32.

    Positions past the end are dropped, never clamped onto older ones.
    """
    if new.shape[:2] == (1, 1):
        # A second token, which is dropped: XLA fuses a single-position update into every consumer
        # of the cache, and copies the entire cache for each.
        new = jnp.pad(new, ((0, 0), (0, 1), (0, 0), (0, 0)))
    number, tokens = new.shape[:2]
    steps = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    target = jnp.where(steps < count[:, None], start[:, None] + steps, cached.shape[2])
    rows = jnp.arange(number, dtype=jnp.int32) if rows is None else rows
    return cached.at[rows[:, None], :, target].set(new.astype(cached.dtype), mode="drop")
