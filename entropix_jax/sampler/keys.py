"""Random numbers by purpose, independent of slot, batch, device and the other rows.

The key of a draw is a function of the run's seed, the row's id, the position, the attempt at that
position, the stream and the index in it, and of nothing else.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

STREAM_DRAW = 0
STREAM_CANDIDATE = 1
STREAM_ROLLOUT = 2
STREAM_NOISE = 3
STREAM_XTC = 4


def row_key(seed: int, row_id: str) -> np.ndarray:
    """The key of a row: uint32 [2], the first half of SHA-256 over the seed and the row's id.

    Stable across runs, machines and versions.
    """
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return np.frombuffer(digest[:8], dtype=">u4").astype(np.uint32)


def uniforms(
    keys: jax.Array, position: jax.Array, attempt: jax.Array, stream: jax.Array, number: int
) -> jax.Array:
    """Uniform numbers in [0, 1) with 24 random bits, float32 [B, number].

    The bits are those of the key after the last `fold_in`, so no setting of JAX's generators
    changes them.

    `keys` is uint32 [B, 2]; `position`, `attempt` and `stream` are int32 [B].
    """

    def row(key_data: jax.Array, *path: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        for part in path:
            key = jax.random.fold_in(key, part)
        indices = jnp.arange(number, dtype=jnp.int32)
        named = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(indices)
        return (named[:, 0] >> 8).astype(jnp.float32) * 2.0**-24

    return jax.vmap(row)(keys, position, attempt, stream)
