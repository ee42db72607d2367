"""Grouped-query attention over a cache, and what its weights say about the model's uncertainty."""

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.information import AttnStats, entropy_and_varentropy


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    length: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of new tokens over the cache's slots, the token's own slot included.

    Args:
        queries: [B, T, N, H].
        keys, values: [B, K, S, H]. Query head `h` reads key/value head `h // G`; none is repeated.
        positions: int32 [B, T], the slot of each new token: it sees the slots up to its own.
        length: int32 [B], the slots that are in use, the new tokens' included. A token at or past
            it is padding, and what it mixes is meaningless.

    Returns:
        The mixed values [B, T, N*H] in the queries' type, and the scaled scores of each row's last
        real token, float32 [B, N, S] (meaningless from slot `length` on).
    """
    batch, tokens, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "btkgh,bksh->bkgts",
        grouped,
        keys,
        precision=precision,
        preferred_element_type=jnp.float32,
    ) * (head_dim**-0.5)
    slot = jnp.arange(slots, dtype=jnp.int32)
    visible = slot[None, None, :] <= positions[:, :, None]  # [B, T, S]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    # A weight of 0 does not silence a NaN: slots that are not in use are emptied too.
    used = slot[None, :] < length[:, None]  # [B, S]
    values = jnp.where(used[:, None, :, None], values, jnp.zeros((), values.dtype))
    mixed = jnp.einsum(
        "bkgts,bksh->btkgh",
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    mixed = mixed.reshape(batch, tokens, heads * head_dim).astype(queries.dtype)
    last = jnp.maximum(length - positions[:, 0] - 1, 0)
    last_scores = jnp.take_along_axis(scores, last[:, None, None, None, None], axis=3)
    return mixed, last_scores.reshape(batch, heads, slots)


def layer_stats(scores: jax.Array, count: jax.Array) -> AttnStats:
    """The statistics of one layer (fields without the L axis).

    Args:
        scores: float32 [B, N, S], the scaled scores of each row's last position.
        count: int32 [B], n: the keys that count, from slot 0 on; at least 1.
    """
    n = count.astype(jnp.float32)
    valid = (jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :] < count[:, None])[:, None, :]
    log_weights = jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    weights = jnp.exp(log_weights)  # 0 at invalid slots
    entropy, varentropy = entropy_and_varentropy(log_weights)
    mean_weights = jnp.mean(weights, axis=1, keepdims=True)
    divergence = jnp.mean(jnp.sum(jnp.abs(weights - mean_weights), axis=-1), axis=1)
    strength = jnp.sum(jnp.where(valid, jnp.abs(scores), 0.0), axis=(1, 2))
    return AttnStats(
        entropy=entropy,
        varentropy=varentropy,
        divergence=divergence,
        interaction=strength / (scores.shape[1] * n),
        keys=n,
    )


def stack_layers(layers: list[AttnStats]) -> AttnStats:
    """Joins the layers' statistics along the L axis."""
    return AttnStats(
        entropy=jnp.stack([layer.entropy for layer in layers], axis=1),
        varentropy=jnp.stack([layer.varentropy for layer in layers], axis=1),
        divergence=jnp.stack([layer.divergence for layer in layers], axis=1),
        interaction=jnp.stack([layer.interaction for layer in layers], axis=1),
        keys=layers[0].keys,
    )
