"""Grouped-query attention over a key/value cache, and statistics of its weights."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.model import gpu_kernels
from entropix_jax.model.rope import rotate
from entropix_jax.model.write import append
from entropix_jax.platforms import for_platform
from entropix_jax.stats import AttnStats, entropy_and_varentropy, sum_last

# From so many new tokens on, a CPU computes scores as other devices do: those of a prompt of 512
# take half the time, to the same digits.
_MANY = 32
# Up to so many positions a single token's queries are multiplied one by one, in 0.4 to 0.8 of the
# time: each reads the keys anew, which must be in the processor's cache for that.
_NEAR = 4096


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of new tokens over the cache, which already holds their own keys and values.

    Args:
        queries: [B, T, N, H].
        keys, values: [B, K, S, H]. Query head `h` reads key/value head `h // G`; none is repeated.
            All values are finite, also of positions that no token sees: their weight is 0, and 0
            times NaN would be NaN.
        positions: int32 [B, T], of each new token, which sees the keys up to its own. The output of
            padding is meaningless.

    Returns:
        The attention output [B, T, N*H] in the queries' type, and the scaled scores, float32
        [B, N, T, S] (meaningless where masked).
    """
    batch, tokens, heads, head_dim = queries.shape
    chex.assert_shape((keys, values), (batch, None, None, head_dim))
    chex.assert_shape(positions, (batch, tokens))

    # Scores, without repeating a key/value head for its G query heads.
    key_positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    grouped = _group(queries, keys.shape[1])
    scores = _scores(grouped, keys) * (head_dim**-0.5)
    visible = key_positions[None, None, :] <= positions[:, :, None]  # [B, T, S]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)

    # Weighted sum of the values.
    mixed = _mix(weights.astype(values.dtype), values)
    mixed = mixed.transpose(0, 3, 1, 2, 4)  # [B, T, K, G, H]
    mixed = mixed.reshape(batch, tokens, heads * head_dim).astype(queries.dtype)
    return mixed, scores.reshape(batch, heads, tokens, -1)


def attend_next(
    queries: jax.Array,
    key: jax.Array,
    value: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    scores: jax.Array,
    layer: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """Rotates and caches one new token of each row, and attends from it.

    Args:
        queries: [B, N, H], not yet rotated, as the key.
        key, value: [B, K, H].
        turns: float32 [B, 1, 1, H/2], cosine and sine, see `rope.rotations`.
        cached: a layer's keys and values [P, K, S, H], P at least B.
        scores: float32 [B, L, N, W], those of all layers, over the positions that are read.
        layer: int32 [].
        start: int32 [B], the tokens' positions.
        count: int32 [B], 0 for a row that stays as it is, whose output means nothing; else 1.

    Returns:
        The attention output [B, N*H]; keys and values with the tokens; the scores with the layer's,
        meaningless past the tokens' positions; and the logarithm of the sum of `exp(score)` over
        the positions of each head, float32 [B, N].
    """

    def plain(keys: jax.Array, values: jax.Array, scores: jax.Array, *args: jax.Array) -> Any:
        queries, key, value, cos, sin, layer, start, count = args
        batch, window = queries.shape[0], scores.shape[3]
        queries, key = (rotate(x[:, None], cos, sin)[:, 0] for x in (queries, key))
        keys, values = append((keys, values), key[:, None], value[:, None], start, count)
        read = keys[:batch, :, :window], values[:batch, :, :window]
        mixed, own = attend(queries[:, None], *read, start[:, None])
        own = own[:, :, 0]
        visible = jnp.arange(window, dtype=jnp.int32)[None, :] <= start[:, None]
        log_mass = jax.nn.logsumexp(own, axis=-1, where=visible[:, None])
        return mixed[:, 0], keys, values, scores.at[:, layer].set(own), log_mass

    args = (*cached, scores, queries, key, value, *turns, layer, start, count)
    gpu = gpu_kernels.attend_next if gpu_kernels.take(cached[0]) else None
    mixed, keys, values, scores, log_mass = for_platform(*args, gpu=gpu, otherwise=plain)
    return mixed, (keys, values), scores, log_mass


def empty_scores(batch: int, layers: int, heads: int, window: int) -> jax.Array:
    """Float32 [B, L, N, W] for `attend_next`, which holds anything."""
    shape = batch, layers, heads, window
    gpu = partial(gpu_kernels.allocate, shape) if gpu_kernels.are_there() else None
    scores: jax.Array = for_platform(gpu=gpu, otherwise=partial(jnp.zeros, shape, jnp.float32))
    return scores


def attention_stats(
    scores: jax.Array, valid: jax.Array, log_mass: jax.Array | None = None
) -> AttnStats:
    """Statistics of the attention of one position of each row.

    Args:
        scores: float32 [B, L, N, S], scaled.
        valid: bool [B, S], the mask of valid keys; at least one in each row.
        log_mass: float32 [B, L, N], where the valid keys come first and `attend_next` has told it.
    """
    batch, _, _, keys = scores.shape
    chex.assert_shape(valid, (batch, keys))
    n = jnp.sum(valid, axis=-1, dtype=jnp.int32)
    has_kernel = log_mass is not None and gpu_kernels.are_there()
    gpu = gpu_kernels.measure if has_kernel else None
    plain = partial(_measure, valid)
    measured = for_platform(scores, log_mass, n, gpu=gpu, otherwise=plain)
    entropy, varentropy, divergence, interaction = measured
    return AttnStats(entropy, varentropy, divergence, interaction, keys=n.astype(jnp.float32))


def _measure(
    valid: jax.Array, scores: jax.Array, _: jax.Array | None, n: jax.Array
) -> tuple[jax.Array, ...]:
    """The statistics of `attention_stats` in plain form, but for the number of keys."""
    valid = valid[:, None, None, :]
    log_weights = jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    weights = jnp.exp(log_weights)  # 0 where invalid
    entropy, varentropy = entropy_and_varentropy(log_weights)
    mean_weights = jnp.mean(weights, axis=2, keepdims=True)
    divergence = sum_last(jnp.abs(weights - mean_weights))
    # Scaled down by a power of two, which is exact, so that the sum cannot overflow.
    strength = sum_last(jnp.where(valid, jnp.abs(scores) * gpu_kernels.TINY, 0.0))
    # Keeps XLA from fusing the sums over keys with later ones over heads or layers: the order of
    # summation, and with it the last digits, would then depend on the size of the cache.
    entropy, varentropy, divergence, strength = lax.optimization_barrier(
        (entropy, varentropy, divergence, strength)
    )
    number = scores.shape[2] * n.astype(jnp.float32)[:, None]
    interaction = jnp.sum(strength, axis=-1) / number / gpu_kernels.TINY
    return entropy, varentropy, jnp.mean(divergence, axis=-1), interaction


def join_layers(parts: list[AttnStats]) -> AttnStats:
    """Concatenates statistics along the layer axis."""
    joined = {
        name: jnp.concatenate([getattr(part, name) for part in parts], axis=1)
        for name in ("entropy", "varentropy", "divergence", "interaction")
    }
    return AttnStats(**joined, keys=parts[0].keys)


def _group(queries: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] to [B, T, K, G, H]: groups query heads by their key/value head."""
    batch, tokens, heads, head_dim = queries.shape
    return queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)


def _product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum, accumulated and returned in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=precision, preferred_element_type=jnp.float32)


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[B, T, K, G, H] by [B, K, S, H] to [B, K, G, T, S].

    einsum passes its operands on in reverse. For few tokens XLA's CPU backend is fast with the keys
    on the left; but the result has to be transposed then, and with the queries on the left it has
    the order that is wanted.
    """

    def queries_first(queries: jax.Array, keys: jax.Array) -> jax.Array:
        return _product("bksh,bkgth->bkgts", keys, queries.transpose(0, 2, 3, 1, 4))

    def one_by_one(queries: jax.Array, keys: jax.Array) -> jax.Array:
        each = [
            _product("bkh,bksh->bks", query, keys) for query in jnp.moveaxis(queries[:, 0], 2, 0)
        ]
        return jnp.stack(each, axis=2)[:, :, :, None]

    keys_first = partial(_product, "btkgh,bksh->bkgts")
    tokens = queries.shape[1]
    few = one_by_one if tokens == 1 and keys.shape[2] <= _NEAR else keys_first
    cpu = few if tokens < _MANY else queries_first
    return for_platform(queries, keys, cpu=cpu, otherwise=queries_first)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """[B, K, G, T, S] by [B, K, S, H] to [B, K, G, T, H].

    The values come first because einsum passes its operands on in reverse: with the weights on the
    left, XLA's CPU backend needs no transposed copy of the values and is several times faster.
    """
    return _product("bksh,bkgts->bkgth", values, weights)
