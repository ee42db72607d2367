"""The forward pass of Llama and its close kin: tokens and a cache in, hidden states, attention
statistics and a cache out.

Legend, used in the shapes and einsums of the whole package:

    B rows               L layers               D model width
    T tokens in a call   N query heads          F MLP width
    S cache slots        K key/value heads      V vocabulary
    n valid keys         G = N/K, H head dim    E end tokens
    A rows, of all B     W branches of a row    R tokens of a branch

The model knows nothing of sampling.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.attention import attend, attend_branches, attention_stats, join_layers
from entropix_jax.cache import KVCache, Suffixes, write
from entropix_jax.config import ModelConfig
from entropix_jax.linear import linear, product, rows
from entropix_jax.params import LayerParams, Params
from entropix_jax.rope import rotate, rotations
from entropix_jax.sharding import gathered
from entropix_jax.stats import AttnStats

_Slots = tuple[jax.Array, ...]  # the keys and values of one layer
# Those, queries [B, T, N, H], keys and values [B, T, K, H] of new tokens to the mixed values
# [B, T, N*H], what is to be known of the scores, and the keys and values that hold the new ones.
_Attention = Callable[[_Slots, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any, _Slots]]


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    count: jax.Array,
    cache: KVCache,
    *,
    window: int,
    every: bool = False,
    check: bool = False,
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
        check: static; the statistics tell where activations are finite, too.

    Returns:
        The final hidden states [B, T, D], the statistics (B rows, or with `every` B*T, position by
        position), and the cache with each length grown by `count`. With `count` 0 a row's cache is
        as it was.
    """
    start = cache.length
    length = start + count
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.arange(window, dtype=jnp.int32)
    seen = positions.reshape(-1) if every else jnp.maximum(length, 1) - 1
    visible = slot[None, :] <= seen[:, None]

    def attention(
        slots: _Slots, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, Any, _Slots]:
        keys = write(slots[0], key, start, count)
        values = write(slots[1], value, start, count)
        mixed, scores = attend(
            query,
            lax.slice_in_dim(keys, 0, window, axis=2),
            lax.slice_in_dim(values, 0, window, axis=2),
            positions,
            length,
        )
        if every:  # a layer at a time: the scores of all positions are large
            scores = scores.swapaxes(1, 2).reshape(-1, 1, config.num_heads, window)
            return mixed, attention_stats(scores, visible), (keys, values)
        last = jnp.maximum(count - 1, 0)
        scores = jnp.take_along_axis(scores, last[:, None, None, None], axis=2)[:, :, 0]
        return mixed, scores, (keys, values)

    slots: list[_Slots] = list(zip(cache.keys, cache.values, strict=True))
    hidden, noted, slots, sound = _layers(
        params, config, tokens, positions, attention, slots, check=check
    )
    keys, values = zip(*slots, strict=True)
    stats = join_layers(noted) if every else attention_stats(jnp.stack(noted, axis=1), visible)
    if sound is not None:
        padding = (positions >= length[:, None])[:, :, None]
        stats = replace(stats, sound=sound | padding)
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
    check: bool = False,
) -> tuple[jax.Array, AttnStats, Suffixes]:
    """Runs one more token of each branch through the layers; the branches of a row share its cache.

    Args:
        tokens: int32 [B, W].
        depth: int32, how many tokens each branch holds beyond the cache.
        cache: is read below `window`, and not written.
        suffixes: the branches' own slots.
        check: static; the statistics tell where activations are finite, too, of B*W rows.

    Returns:
        The final hidden states [B, W, D], the statistics of B*W rows, and the suffixes with the
        tokens in slot `depth`.
    """
    positions = jnp.broadcast_to(cache.length[:, None] + depth, tokens.shape)

    def attention(
        slots: _Slots, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, Any, _Slots]:
        prefix = (
            lax.slice_in_dim(slots[0], 0, window, axis=2),
            lax.slice_in_dim(slots[1], 0, window, axis=2),
        )
        own = (_put(slots[2], key, depth), _put(slots[3], value, depth))
        mixed, scores, visible = attend_branches(query, prefix, own, cache.length, depth)
        scores = scores.swapaxes(1, 2).reshape(-1, config.num_heads, scores.shape[-1])
        return mixed, (scores, visible), own

    slots: list[_Slots] = list(
        zip(cache.keys, cache.values, suffixes.keys, suffixes.values, strict=True)
    )
    hidden, noted, slots, sound = _layers(
        params, config, tokens, positions, attention, slots, check=check
    )
    keys, values = zip(*slots, strict=True)
    scores = jnp.stack([scores for scores, _ in noted], axis=1)
    stats = attention_stats(scores, jnp.repeat(noted[0][1], tokens.shape[1], axis=0))
    if sound is not None:
        stats = replace(stats, sound=sound.reshape(tokens.size, 1, -1))
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
    slots: list[_Slots],
    *,
    check: bool,
) -> tuple[jax.Array, list[Any], list[_Slots], jax.Array | None]:
    """Embedding, all layers, final norm: hidden states [B, T, D] in the slots' type, what each
    layer's attention noted and keeps, and, to check, where activations are finite: bool
    [B, T, 1+2L]."""
    cos, sin = rotations(config, positions)

    # Jitted to be traced once for all layers that are alike: XLA inlines it.
    @partial(jax.jit, static_argnames="rotates")
    def one_layer(
        layer: LayerParams, hidden: jax.Array, slots: _Slots, *, rotates: bool
    ) -> tuple[jax.Array, Any, _Slots, list[jax.Array]]:
        normed = rms_norm(hidden, layer.attention_norm, config.norm_eps)
        query, key, value = _project(normed, layer, config, tokens.shape)
        if rotates:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed, note, kept = attention(slots, query, key, value)
        hidden = hidden + linear(mixed.reshape(tokens.size, mixed.shape[-1]), layer.output)
        normed = rms_norm(hidden, layer.mlp_norm, config.norm_eps)
        hidden = hidden + _swiglu(normed, layer)
        return hidden, note, kept, [finite(query, key, value), finite(hidden)] if check else []

    def finite(*activations: jax.Array) -> jax.Array:
        """Whether all of a token's are: bool [B, T]."""
        each = [jnp.isfinite(x).reshape(*tokens.shape, -1).all(axis=-1) for x in activations]
        return jnp.all(jnp.stack(each), axis=0)

    # Between layers the tokens of all rows lie in one axis, as products have them. With two, XLA's
    # reshape mover moves each product's reshape through the layer after it, one layer in each round
    # of its passes over the whole program.
    hidden = rows(params.embedding, tokens.reshape(-1), slots[0][0].dtype)
    noted, kept, sound = [], [], [finite(hidden)] if check else []
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{i}"):
            hidden, note, own, checked = one_layer(
                layer, hidden, slots[i], rotates=i not in config.layers_without_rope
            )
        noted.append(note)
        kept.append(own)
        sound += checked
    hidden = rms_norm(hidden, params.final_norm, config.norm_eps)
    hidden = hidden.reshape(*tokens.shape, config.width)
    return hidden, noted, kept, jnp.stack(sound, axis=-1) if sound else None


def _put(slots: jax.Array, new: jax.Array, depth: jax.Array) -> jax.Array:
    """`slots[B, W, K, R, H]` with `new[B, W, K, H]` in slot `depth`."""
    new = new.astype(slots.dtype)[:, :, :, None, :]
    return lax.dynamic_update_slice_in_dim(slots, new, depth, axis=3)


def _project(
    x: jax.Array, layer: LayerParams, config: ModelConfig, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, T, K, H] of `x[B*T, D]`, of `shape` (B, T)."""

    def heads(
        weight: jax.Array, bias: jax.Array | None, norm: jax.Array | None, number: int
    ) -> jax.Array:
        out = linear(x, weight, bias).reshape(*shape, number, config.head_dim)
        return out if norm is None else rms_norm(out, norm, config.norm_eps)

    return (
        heads(layer.query, layer.query_bias, layer.query_norm, config.num_heads),
        heads(layer.key, layer.key_bias, layer.key_norm, config.num_kv_heads),
        heads(layer.value, layer.value_bias, None, config.num_kv_heads),
    )


def _swiglu(x: jax.Array, layer: LayerParams) -> jax.Array:
    return linear(jax.nn.silu(linear(x, layer.gate)) * linear(x, layer.up), layer.down)
