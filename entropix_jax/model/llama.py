"""The forward pass of Llama and its close kin: tokens and a cache in, hidden states, attention
statistics and a cache out.

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

from entropix_jax.model import gpu_kernels
from entropix_jax.model.attention import (
    attend,
    attend_next,
    attention_stats,
    empty_scores,
    join_layers,
)
from entropix_jax.model.cache import KVCache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.linear import linear, product, rows
from entropix_jax.model.mesh import gather_logits
from entropix_jax.model.params import LayerParams, Params
from entropix_jax.model.rope import rotate, rotations
from entropix_jax.model.write import append
from entropix_jax.platforms import for_platform
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
    check: bool = False,
) -> tuple[jax.Array, AttnStats, KVCache]:
    """Runs new tokens of each row through the model, appending to the cache.

    Args:
        params: the weights; their dtype may differ from the activations' (see `linear`).
        config: static.
        tokens: int32 [B, T].
        count: int32 [B], the number of real tokens of each row. The rest is padding: it is not
            cached, and its hidden states are meaningless.
        cache: rows of keys and values past B stay as they are.
        window: static; only positions below it are read, so that the cost follows the rows' lengths
            and not the capacity. Requires `length + count <= window`.
        every: static; statistics of all positions instead of each row's last real one.
        check: static; the statistics also say which activations are finite: bool [B, T, 1+2L], of
            the embedding, then of attention inputs and output of each layer.

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

    # A single new token of each row takes another way, which puts all layers' scores in one array.
    is_next = new == 1 and not every
    shape = (batch,) if is_next else tokens.shape
    sizes = batch, config.num_layers, config.num_heads, window
    scores = empty_scores(*sizes) if is_next else None

    # Jitted so that identical layers are traced once; XLA inlines it.
    @partial(jax.jit, static_argnames="rotates")
    def one_layer(
        layer: LayerParams,
        next_norm: jax.Array,
        index: jax.Array,
        hidden: jax.Array,
        normed: jax.Array,
        cached: tuple[jax.Array, jax.Array],
        scores: jax.Array | None,
        *,
        rotates: bool,
    ) -> tuple[Any, ...]:
        note: Any  # what the statistics are made of
        new = query, key, value = _project(normed, layer, config, shape)
        turns = (cos, sin) if rotates else (jnp.ones_like(cos), jnp.zeros_like(sin))
        if scores is not None:
            place = scores, index, start, count
            mixed, cached, scores, note = attend_next(*new, turns, cached, *place)
        else:
            query, key = rotate(query, *turns), rotate(key, *turns)
            cached = append(cached, key, value, start, count)
            keys, values = (x[:batch, :, :window] for x in cached)
            mixed, all_scores = attend(query, keys, values, positions)
            if every:  # reduced layer by layer: the scores of all positions are large
                all_scores = all_scores.swapaxes(1, 2).reshape(-1, 1, config.num_heads, window)
                note = attention_stats(all_scores, visible)
            else:
                last = jnp.maximum(count - 1, 0)[:, None, None, None]
                note = jnp.take_along_axis(all_scores, last, axis=2)[:, :, 0]
        out = linear(mixed.reshape(tokens.size, mixed.shape[-1]), layer.output)
        hidden, normed = add_and_norm(hidden, out, layer.mlp_norm)
        hidden, normed = add_and_norm(hidden, _swiglu(normed, layer), next_norm)
        sound = [finite(*new), finite(hidden)] if check else []
        return hidden, normed, cached, scores, note, sound

    def add_and_norm(
        hidden: jax.Array, out: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A block's output added, and what the next block is given."""

        def plain(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden, out, weight, _ = args
            hidden = hidden + out
            return hidden, rms_norm(hidden, weight, config.norm_eps)

        gpu = gpu_kernels.add_and_norm if is_next and gpu_kernels.are_there() else None
        args = hidden, out, weight, jnp.float32(config.norm_eps)
        added: tuple[jax.Array, jax.Array] = for_platform(*args, gpu=gpu, otherwise=plain)
        return added

    def finite(*activations: jax.Array) -> jax.Array:
        """Whether all activations of a token are finite: bool [B, T]."""
        each = [jnp.isfinite(x).reshape(*tokens.shape, -1).all(axis=-1) for x in activations]
        return jnp.all(jnp.stack(each), axis=0)

    # Between layers rows and tokens share one axis, [B*T, D], as the products need them. With two
    # axes, XLA's reshape mover pushes each product's reshape through the next layer, one layer per
    # pass over the entire program, which slows down compilation.
    hidden = rows(params.embedding, tokens.reshape(-1), cache.activations)
    noted, kept, sound = [], [], [finite(hidden)] if check else []
    norms = [*(layer.attention_norm for layer in params.layers), params.final_norm]
    normed = rms_norm(hidden, norms[0], config.norm_eps)
    layers = zip(params.layers, norms[1:], cache.keys, cache.values, strict=True)
    for i, (layer, next_norm, *cached) in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            hidden, normed, own, scores, note, checked = one_layer(
                *(layer, next_norm, jnp.int32(i), hidden, normed, tuple(cached), scores),
                rotates=i not in config.layers_without_rope,
            )
        noted.append(note)
        kept.append(own)
        sound += checked
    hidden = normed.reshape(*tokens.shape, config.width)

    # Statistics of all layers at once, where they were not reduced already.
    if every:
        stats = join_layers(noted)
    else:
        stacked = jnp.stack(noted, axis=1)
        told = (stacked, visible) if scores is None else (scores, visible, stacked)
        stats = attention_stats(*told)
    if sound:
        padding = (positions >= length[:, None])[:, :, None]
        stats = replace(stats, sound=jnp.stack(sound, axis=-1) | padding)
    keys, values = zip(*kept, strict=True)
    return hidden, stats, replace(cache, keys=keys, values=values, length=length)


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
    """Queries [..., N, H], keys and values [..., K, H] of `x[B*T, D]`; `shape` is that of `...`."""

    def heads(weight: Any, bias: jax.Array | None) -> jax.Array:
        return linear(x, weight, bias).reshape(*shape, -1, config.head_dim)

    query = heads(layer.query, layer.query_bias)
    if layer.key is None:  # see `pack`
        ends = config.num_heads, config.num_heads + config.num_kv_heads
        query, key, value = jnp.split(query, ends, axis=-2)
    else:
        key = heads(layer.key, layer.key_bias)
        value = heads(layer.value, layer.value_bias)
    if layer.query_norm is not None:
        query = rms_norm(query, layer.query_norm, config.norm_eps)
        key = rms_norm(key, layer.key_norm, config.norm_eps)
    return query, key, value


def _swiglu(x: jax.Array, layer: LayerParams) -> jax.Array:
    gate = linear(x, layer.gate)
    gate, up = jnp.split(gate, 2, axis=-1) if layer.up is None else (gate, linear(x, layer.up))
    return linear(jax.nn.silu(gate) * up, layer.down)
