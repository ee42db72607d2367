"""Grouped-query attention over a cache, and what its weights say about the model's uncertainty."""

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.stats import AttnStats, entropy_and_varentropy, sum_last

_TINY = 2.0**-32


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
        The mixed values [B, T, N*H] in the queries' type, and the scaled scores, float32
        [B, N, T, S] (meaningless for slots that a token does not see).
    """
    slot = jnp.arange(keys.shape[2], dtype=jnp.int32)
    grouped = _group(queries, keys.shape[1])
    scores = _product("btkgh,bksh->bkgts", grouped, keys) * (queries.shape[-1] ** -0.5)
    visible = slot[None, None, :] <= positions[:, :, None]  # [B, T, S]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    mixed = _mix(weights.astype(values.dtype), _used(values, length)).transpose(0, 3, 1, 2, 4)
    batch, tokens, heads, head_dim = queries.shape
    mixed = mixed.reshape(batch, tokens, heads * head_dim).astype(queries.dtype)
    return mixed, scores.reshape(batch, heads, tokens, -1)


def attend_branches(
    queries: jax.Array,
    prefix: tuple[jax.Array, jax.Array],
    suffix: tuple[jax.Array, jax.Array],
    length: jax.Array,
    depth: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one new token of each branch over the prefix that its row's branches share and
    over the branch's own suffix, the token's own slot included.

    Args:
        queries: [B, W, N, H].
        prefix: keys and values [B, K, S, H].
        suffix: keys and values [B, W, K, R, H].
        length: int32 [B], the prefix slots that are in use.
        depth: int32, the new tokens' slot in the suffixes.

    Returns:
        The mixed values [B, W, N*H] in the queries' type, the scaled scores, float32
        [B, N, W, S+R], and which of those slots count, bool [B, S+R].
    """
    batch, width, heads, head_dim = queries.shape
    slots, own_slots = prefix[0].shape[2], suffix[0].shape[3]
    grouped = _group(queries, prefix[0].shape[1])
    shared = _product("bwkgh,bksh->bkgws", grouped, prefix[0])
    own = _product("bwkgh,bwkrh->bkgwr", grouped, suffix[0])
    scores = jnp.concatenate([shared, own], axis=-1) * (head_dim**-0.5)
    in_prefix = jnp.arange(slots, dtype=jnp.int32)[None, :] < length[:, None]
    in_suffix = jnp.arange(own_slots, dtype=jnp.int32)[None, :] <= depth
    in_suffix = jnp.broadcast_to(in_suffix, (batch, own_slots))
    visible = jnp.concatenate([in_prefix, in_suffix], axis=-1)
    masked = jnp.where(visible[:, None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(masked, axis=-1).astype(prefix[1].dtype)
    mixed = _mix(weights[..., :slots], _used(prefix[1], length)).transpose(0, 3, 1, 2, 4)
    mixed += _product("bwkrh,bkgwr->bwkgh", suffix[1], weights[..., slots:])
    mixed = mixed.reshape(batch, width, heads * head_dim).astype(queries.dtype)
    return mixed, scores.reshape(batch, heads, width, -1), visible


def attention_stats(scores: jax.Array, valid: jax.Array) -> AttnStats:
    """The statistics of one position of each row.

    Args:
        scores: float32 [B, L, N, S], the scaled scores.
        valid: bool [B, S], the keys that count; at least one of each row.
    """
    n = jnp.sum(valid, axis=-1).astype(jnp.float32)
    valid = valid[:, None, None, :]
    log_weights = jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    weights = jnp.exp(log_weights)  # 0 at invalid slots
    entropy, varentropy = entropy_and_varentropy(log_weights)
    mean_weights = jnp.mean(weights, axis=2, keepdims=True)
    divergence = sum_last(jnp.abs(weights - mean_weights))
    # So small that no sum of them overflows; by a power of two, so no digit changes.
    strength = sum_last(jnp.where(valid, jnp.abs(scores) * _TINY, 0.0))
    # Over the keys first: were a later sum over heads or layers joined with it, its order and with
    # it the last digits would depend on how many slots there are.
    entropy, varentropy, divergence, strength = lax.optimization_barrier(
        (entropy, varentropy, divergence, strength)
    )
    return AttnStats(
        entropy=entropy,
        varentropy=varentropy,
        divergence=jnp.mean(divergence, axis=-1),
        interaction=jnp.sum(strength, axis=-1) / (scores.shape[2] * n[:, None]) / _TINY,
        keys=n,
    )


def join_layers(parts: list[AttnStats]) -> AttnStats:
    """The statistics of some layers each, in order, as one."""

    def joined(name: str) -> jax.Array:
        return jnp.concatenate([getattr(part, name) for part in parts], axis=1)

    return AttnStats(
        entropy=joined("entropy"),
        varentropy=joined("varentropy"),
        divergence=joined("divergence"),
        interaction=joined("interaction"),
        keys=parts[0].keys,
    )


def _group(queries: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] to [B, T, K, G, H]: the query heads by the key/value head that they read."""
    batch, tokens, heads, head_dim = queries.shape
    return queries.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)


def _product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum, accumulated and returned in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=precision, preferred_element_type=jnp.float32)


def _mix(weights: jax.Array, values: jax.Array) -> jax.Array:
    """[B, K, G, T, S] by [B, K, S, H] to [B, K, G, T, H].

    The values come first because einsum hands its operands on in reverse: with the weights on the
    left XLA's CPU backend multiplies the values as they lie, and is several times as fast.
    """
    return _product("bksh,bkgts->bkgth", values, weights)


def _used(values: jax.Array, length: jax.Array) -> jax.Array:
    """`values[B, K, S, H]` with 0 in the slots that are not in use: a weight of 0 does not silence
    a NaN."""
    used = jnp.arange(values.shape[2], dtype=jnp.int32)[None, :] < length[:, None]
    return jnp.where(used[:, None, :, None], values, jnp.zeros((), values.dtype))
