"""The Llama forward pass: tokens and a cache in, hidden states, attention statistics and a cache
out.

Legend, used in every shape and einsum of the package:

    B rows               L layers               D model width
    T tokens in a call   N query heads          F MLP width
    S cache slots        K key/value heads      V vocabulary
    n valid keys         G = N/K, H head dim

The model knows nothing of sampling.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.attention import attend, attend_branches, layer_stats, stack_layers
from entropix_jax.cache import KVCache, Suffixes, write
from entropix_jax.config import ModelConfig
from entropix_jax.information import AttnStats
from entropix_jax.linear import linear, product, rows
from entropix_jax.params import LayerParams, Params
from entropix_jax.rope import rotate, rotations
from entropix_jax.sharding import gathered

# Layer, queries [B, T, N, H], keys and values [B, T, K, H] of new tokens to the mixed values
# [B, T, N*H], the layer's statistics, and the layer's keys and values that hold the new ones.
_Attention = Callable[
    [int, jax.Array, jax.Array, jax.Array],
    tuple[jax.Array, AttnStats, tuple[jax.Array, jax.Array]],
]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    count: jax.Array,
    cache: KVCache,
    *,
    window: int,
    every: bool = False,
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
        every: static; statistics of all positions, not of each row's last real one alone.

    Returns:
        The final hidden states [B, T, D], the statistics (B rows, or with `every` B*T, position by
        position), and the cache with each length grown by `count`. With `count` 0 a row's cache is
        as it was.
    """
    start = cache.length
    length = start + count
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.arange(window, dtype=jnp.int32)

    def attention(
        i: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, AttnStats, tuple[jax.Array, jax.Array]]:
        keys = write(cache.keys[i], key, start, count)
        values = write(cache.values[i], value, start, count)
        mixed, scores = attend(
            query,
            lax.slice_in_dim(keys, 0, window, axis=2),
            lax.slice_in_dim(values, 0, window, axis=2),
            positions,
            length,
        )
        if every:
            scores = scores.swapaxes(1, 2).reshape(-1, config.num_heads, window)
            seen = positions.reshape(-1)
        else:
            last = jnp.maximum(count - 1, 0)
            scores = jnp.take_along_axis(scores, last[:, None, None, None], axis=2)[:, :, 0]
            seen = jnp.maximum(length, 1) - 1
        stats = layer_stats(scores, slot[None, :] <= seen[:, None])
        return mixed, stats, (keys, values)

    hidden, stats, slots = _layers(
        params, config, tokens, positions, attention, cache.keys[0].dtype
    )
    keys, values = zip(*slots, strict=True)
    return hidden, stats, KVCache(keys=keys, values=values, length=length)


def forward_branches(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    depth: jax.Array,
    cache: KVCache,
    suffixes: Suffixes,
    *,
    window: int,
) -> tuple[jax.Array, AttnStats, Suffixes]:
    """Runs one more token of each branch through the layers; the branches of a row share its cache.

    Args:
        tokens: int32 [B, W].
        depth: int32, how many tokens each branch holds beyond the cache.
        cache: is read below `window`, and not written.
        suffixes: the branches' own slots.

    Returns:
        The final hidden states [B, W, D], the statistics of B*W rows, and the suffixes with the
        tokens in slot `depth`.
    """
    positions = jnp.broadcast_to(cache.length[:, None] + depth, tokens.shape)

    def attention(
        i: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, AttnStats, tuple[jax.Array, jax.Array]]:
        own = (_put(suffixes.keys[i], key, depth), _put(suffixes.values[i], value, depth))
        prefix = (
            lax.slice_in_dim(cache.keys[i], 0, window, axis=2),
            lax.slice_in_dim(cache.values[i], 0, window, axis=2),
        )
        mixed, scores, visible = attend_branches(query, prefix, own, cache.length, depth)
        scores = scores.swapaxes(1, 2).reshape(-1, config.num_heads, scores.shape[-1])
        return mixed, layer_stats(scores, jnp.repeat(visible, tokens.shape[1], axis=0)), own

    hidden, stats, slots = _layers(
        params, config, tokens, positions, attention, cache.keys[0].dtype
    )
    keys, values = zip(*slots, strict=True)
    return hidden, stats, Suffixes(keys=keys, values=values)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of final hidden states: [..., D] to float32 [..., V]."""
    return gathered(product(hidden, params.unembedding))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32, returned in x's type."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale * weight).astype(x.dtype)


def _layers(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attention: _Attention,
    dtype: jnp.dtype,
) -> tuple[jax.Array, AttnStats, list[tuple[jax.Array, jax.Array]]]:
    """Embedding, all layers, final norm: hidden states [B, T, D] in `dtype`, statistics, and what
    each layer's attention keeps."""
    cos, sin = rotations(config, positions)
    hidden = rows(params.embedding, tokens, dtype)
    stats, slots = [], []
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
            query, key, value = _project(normed, layer, config)
            mixed, one, kept = attention(i, rotate(query, cos, sin), rotate(key, cos, sin), value)
            hidden = hidden + linear(mixed, layer.output)
            normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
            hidden = hidden + _swiglu(normed, layer)
        stats.append(one)
        slots.append(kept)
    return rms_norm(hidden, params.final_norm, config.norm_eps), stack_layers(stats), slots


def _put(slots: jax.Array, new: jax.Array, depth: jax.Array) -> jax.Array:
    """`slots[B, W, K, R, H]` with `new[B, W, K, H]` in slot `depth`."""
    new = new.astype(slots.dtype)[:, :, :, None, :]
    return lax.dynamic_update_slice_in_dim(slots, new, depth, axis=3)


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
