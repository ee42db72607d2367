"""The forward pass of Llama and close relatives: from tokens and a cache to hidden states,
attention statistics and a cache.

Legend, used in the shapes and einsums of the whole package:

    B rows               L layers               D model width
    T tokens in a call   N query heads          F MLP width
    S cache positions    K key/value heads      V vocabulary
    n valid keys         G = N/K, H head dim    E end tokens
    A some of B rows     W branches of a fork
"""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.model.attention import attend, attention_stats, join_layers
from entropix_jax.model.cache import KVCache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.linear import linear, product, rows
from entropix_jax.model.mesh import gather_logits
from entropix_jax.model.params import LayerParams, Params
from entropix_jax.model.rope import rotate, rotations
from entropix_jax.model.write import append
from entropix_jax.stats import AttnStats


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    count: jax.Array,
    cache: KVCache,
    *,
    window: int,
    every: bool = False,
    looks: bool = False,
) -> tuple[jax.Array, AttnStats, KVCache]:
    """Runs new tokens of each row through the model, appending to the cache.

    Args:
        params: the weights; their dtype may differ from the activations' (see `linear`).
        config: static.
        tokens: int32 [B, T].
        count: int32 [B], the number of real tokens of each row. The rest is padding: it is not
            cached, and its hidden states are undefined.
        cache: rows of keys and values past B stay as they are.
        window: static; only positions below it are read, so that the cost follows the rows' lengths
            and not the capacity. Requires `length + count <= window`.
        every: static; statistics of all positions instead of each row's last real one.
        looks: static; the statistics have `looks`, without `every` only.

    Returns:
        The final hidden states [B, T, D], the statistics (B rows, or B*T with `every`), and the
        cache with each length increased by `count`. A row with `count` 0 keeps its cache.
    """
    batch, new = tokens.shape
    chex.assert_shape((count, cache.length), (batch,))
    chex.assert_shape(cache.keys + cache.values, (None, config.num_kv_heads, None, config.head_dim))

    # Positions of the new tokens, and the keys that the statistics count.
    start = cache.length
    length = start + count
    positions = start[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]
    key_positions = jnp.arange(window, dtype=jnp.int32)
    measured = positions.reshape(-1) if every else jnp.maximum(length, 1) - 1
    visible = key_positions[None, :] <= measured[:, None]
    cos, sin = rotations(config, positions)

    # Jitted so that identical layers are traced once; XLA inlines it.
    @partial(jax.jit, static_argnames="rotates")
    def one_layer(
        layer: LayerParams, hidden: jax.Array, cached: tuple[jax.Array, jax.Array], *, rotates: bool
    ) -> tuple[Any, ...]:
        # Attention.
        normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
        query, key, value = _project(normed, layer, config, tokens.shape)
        if rotates:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cached = append(cached, key, value, start, count)
        last = None if every else jnp.maximum(count - 1, 0)
        mixed, scores = attend(query, *cached, positions, last, window=window)
        hidden = hidden + linear(mixed.reshape(tokens.size, -1), layer.output)

        # MLP.
        normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
        hidden = hidden + _swiglu(normed, layer)

        # The scores for the attention statistics.
        if every:  # reduced here, layer by layer: the scores of all positions are large
            scores = scores.swapaxes(1, 2).reshape(-1, 1, config.num_heads, window)
            return hidden, cached, attention_stats(scores, visible)
        return hidden, cached, scores[:, :, 0]

    # Between layers rows and tokens share one axis, [B*T, D], as the products need them. With two
    # axes, XLA's reshape mover pushes each product's reshape through the next layer, one layer per
    # pass over the entire program, which slows down compilation.
    hidden = rows(params.embedding, tokens.reshape(-1), cache.activations)
    attended, kept = [], []
    for i, (layer, *cached) in enumerate(zip(params.layers, cache.keys, cache.values, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            hidden, own, measurable = one_layer(
                layer, hidden, tuple(cached), rotates=i not in config.layers_without_rope
            )
        attended.append(measurable)
        kept.append(own)
    hidden = rms_norm(hidden, params.final_norm, config.norm_eps)

    if every:
        stats = join_layers(attended)
    else:
        stats = attention_stats(jnp.stack(attended, axis=1), visible, looks=looks)
    keys, values = zip(*kept, strict=True)
    cache = replace(cache, keys=keys, values=values, length=length)
    return hidden.reshape(*tokens.shape, config.width), stats, cache


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of final hidden states: [..., D] to float32 [..., V]."""
    chex.assert_axis_dimension(hidden, -1, params.final_norm.shape[0])
    return gather_logits(product(hidden, params.unembedding))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32, returned in x's type."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * scale * weight).astype(x.dtype)


def _project(
    x: jax.Array, layer: LayerParams, config: ModelConfig, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H] of `x[B*T, D]`; `shape` is [B, T]."""

    def heads(weight: Any, bias: jax.Array | None) -> jax.Array:
        return linear(x, weight, bias).reshape(*shape, -1, config.head_dim)

    query = heads(layer.query, layer.query_bias)
    key = heads(layer.key, layer.key_bias)
    value = heads(layer.value, layer.value_bias)
    if layer.query_norm is not None:
        query = rms_norm(query, layer.query_norm, config.norm_eps)
        key = rms_norm(key, layer.key_norm, config.norm_eps)
    return query, key, value


def _swiglu(x: jax.Array, layer: LayerParams) -> jax.Array:
    return linear(jax.nn.silu(linear(x, layer.gate)) * linear(x, layer.up), layer.down)
