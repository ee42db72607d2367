"""The Llama forward pass: tokens and a cache in, hidden states, attention statistics and a cache
out.

Legend, used in every shape and einsum of the package:

    B rows               L layers               D model width
    T tokens in a call   N query heads          F MLP width
    S cache slots        K key/value heads      V vocabulary
    n valid keys         G = N/K, H head dim

The model knows nothing of sampling.
"""

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.attention import attend, layer_stats, stack_layers
from entropix_jax.cache import KVCache, write
from entropix_jax.config import ModelConfig
from entropix_jax.information import AttnStats
from entropix_jax.linear import linear, product, rows
from entropix_jax.params import LayerParams, Params
from entropix_jax.rope import rotate, rotations


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    count: jax.Array,
    cache: KVCache,
    *,
    window: int,
) -> tuple[jax.Array, AttnStats, KVCache]:
    """Runs new tokens of each row through the layers, from the row's length on.

    Args:
        params: the weights; their type may differ from the activations' (see `linear`).
        config: static.
        tokens: int32 [B, T].
        count: int32 [B], how many of a row's T tokens are real, from the first on. The rest is
            padding: it is not cached, and its hidden states are meaningless.
        cache: its type is the activations' type.
        window: static; only slots below it are read. `length + count <= window` must hold, so cost
            follows the rows' lengths and not the capacity.

    Returns:
        The final hidden states [B, T, D], the statistics of each row's last real position, and the
        cache with each length grown by `count`. With `count` 0 a row's cache is as it was.
    """
    start = cache.length
    length = start + count
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    cos, sin = rotations(config, positions)

    hidden = rows(params.embedding, tokens, cache.keys[0].dtype)
    keys, values, stats = [], [], []
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
            query, key, value = _project(normed, layer, config)
            keys.append(write(cache.keys[i], rotate(key, cos, sin), start, count))
            values.append(write(cache.values[i], value, start, count))
            mixed, scores = attend(
                rotate(query, cos, sin),
                lax.slice_in_dim(keys[i], 0, window, axis=2),
                lax.slice_in_dim(values[i], 0, window, axis=2),
                positions,
                length,
            )
            hidden = hidden + linear(mixed, layer.output)
            stats.append(layer_stats(scores, jnp.maximum(length, 1)))
            normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
            hidden = hidden + _swiglu(normed, layer)
    hidden = rms_norm(hidden, params.final_norm, config.norm_eps)
    cache = KVCache(keys=tuple(keys), values=tuple(values), length=length)
    return hidden, stack_layers(stats), cache


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of final hidden states: [..., D] to float32 [..., V]."""
    return product(hidden, params.unembedding)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32, returned in x's type."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale * weight).astype(x.dtype)


def _project(
    x: jax.Array, layer: LayerParams, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H] of `x[B, T, D]`."""

    def heads(weight: jax.Array, number: int) -> jax.Array:
        return linear(x, weight).reshape(*x.shape[:2], number, config.head_dim)

    return (
        heads(layer.query, config.num_heads),
        heads(layer.key, config.num_kv_heads),
        heads(layer.value, config.num_kv_heads),
    )


def _swiglu(x: jax.Array, layer: LayerParams) -> jax.Array:
    return linear(jax.nn.silu(linear(x, layer.gate)) * linear(x, layer.up), layer.down)
