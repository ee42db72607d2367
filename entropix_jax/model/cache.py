"""The functional key/value cache: a pytree that a step takes and returns.

Each row has its own length, and only the length defines which positions are valid. A position at or
past it never changes a result: its key may be anything, including NaN, its value anything finite.

No value is ever NaN or infinite (see `write.append`), so that attention may multiply the values of
all positions by their weights: those past the length have the weight 0.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.model.config import ModelConfig
from entropix_jax.platforms import traces_cpu_alone

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
    activations: jnp.dtype = struct.field(pytree_node=False)  # dtype of the hidden states

    @property
    def capacity(self) -> int:
        """S, the positions of a row."""
        return self.keys[0].shape[2]


def cache_dtype(activations: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of a cache for activations of a dtype: the same, but float32 on a CPU,
    where XLA would widen and narrow an entire bfloat16 cache to write one token."""
    return jnp.dtype(jnp.float32) if traces_cpu_alone() else activations


def init_cache(config: ModelConfig, batch: int, capacity: int, activations: jnp.dtype) -> KVCache:
    """Returns an empty cache of `batch` rows with `capacity` positions each."""
    dtype = cache_dtype(activations)
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    layers = range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(batch, jnp.int32),
        activations=jnp.dtype(activations),
    )
