"""Grouped-query attention over a key/value cache, and statistics of its weights."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.platforms import for_platform
from entropix_jax.stats import AttnLooks, AttnStats, entropy_and_varentropy, sum_last, top

# From this many new tokens on, a CPU uses the other devices' form for scores: half the time for a
# prompt of 512, with the same digits.
_MANY = 32
_LARGE = 1 << 24  # bytes of a row's scores, above which blocks of tokens are faster on a CPU
_BLOCK = 128  # tokens
# Up to this many positions the queries of a single token are multiplied one by one, in 0.4 to 0.8
# of the time. Each query reads the keys again, so they must fit into the processor's cache.
_NEAR = 4096
# Scales the sum of scores down so that it cannot overflow; a power of two, which is exact.
_TINY = 2.0**-32
_HEADS, _POSITIONS = 3, 5  # of `AttnLooks`
_SINK = 0.5  # weight of the first position above which a head is an attention sink


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    last: jax.Array | None = None,
    *,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes causal attention of new tokens over a cache that has their keys and values.

    Args:
        queries: [B, T, N, H].
        keys, values: [P, K, S, H], P at least B. Query head `h` reads key/value head `h // G`; none
            is repeated. All values are finite, also of positions that no token sees: their weight
            is 0, and 0 times NaN would be NaN.
        positions: int32 [B, T], of each new token, which sees the keys up to its own. The output of
            padding is undefined.
        last: int32 [B], which new token's scores are returned; None: those of all.
        window: static, W; only positions below it are read.

    Returns:
        The attention output [B, T, N*H] in the queries' type, and the scaled scores, float32
        [B, N, T or 1, W] (meaningless where masked).
    """
    chex.assert_shape((keys, values), (None, None, None, queries.shape[3]))
    chex.assert_shape(positions, queries.shape[:2])
    args, tokens = (queries, keys, values, positions), queries.shape[1]
    if tokens == 1 or last is None:
        return _attend(*args, window=window)
    is_large = 4 * tokens * queries.shape[2] * window > _LARGE
    mix = partial(_mix, window=window)
    blocks = partial(_mix_in_blocks, window=window) if is_large else None
    mixed: jax.Array = for_platform(*args, cpu=blocks, otherwise=mix)
    only, at = jnp.take_along_axis(queries, last[:, None, None, None], axis=1), last[:, None]
    at = jnp.take_along_axis(positions, at, axis=1)
    _, scores = _attend(only, keys, values, at, window=window)
    return mixed, scores


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, *, window: int
) -> tuple[jax.Array, jax.Array]:
    """Returns output and scores of all new tokens, see `attend`."""
    batch, tokens, heads, head_dim = queries.shape
    keys, values = keys[:batch, :, :window], values[:batch, :, :window]

    # Scores, without repeating a key/value head for its G query heads.
    grouped = queries.reshape(batch, tokens, keys.shape[1], -1, head_dim)  # [B, T, K, G, H]
    scores = _scores(grouped, keys) * (head_dim**-0.5)
    key_positions = jnp.arange(window, dtype=jnp.int32)
    visible = key_positions[None, None, :] <= positions[:, :, None]  # [B, T, W]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)

    # Weighted sum of the values. They come first because einsum passes its operands on in reverse:
    # with the weights on the left, XLA's CPU backend needs no transposed copy of the values and is
    # several times faster.
    mixed = _product("bksh,bkgts->bkgth", values, weights.astype(values.dtype))
    mixed = mixed.transpose(0, 3, 1, 2, 4)  # [B, T, K, G, H]
    mixed = mixed.reshape(batch, tokens, heads * head_dim).astype(queries.dtype)
    return mixed, scores.reshape(batch, heads, tokens, window)


def _mix(*args: jax.Array, window: int) -> jax.Array:
    """The output of `attend`, without the scores."""
    mixed, _ = _attend(*args, window=window)
    return mixed


def _mix_in_blocks(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, *, window: int
) -> jax.Array:
    """`_mix` on a CPU, one key/value head and one block of tokens after another, so that scores are
    still in the processor's cache when they become weights. For 512 tokens at Llama-3.2-1B's shape
    it takes 0.4 of the time, with 512 positions and with 2,048."""
    batch, tokens, heads, head_dim = queries.shape
    groups, size = keys.shape[1], tokens if tokens % _BLOCK else _BLOCK
    at = jnp.moveaxis(positions.reshape(batch, -1, size), 1, 0)

    def mix_head(head: tuple[jax.Array, ...]) -> jax.Array:
        queries, keys, values = head

        def mix(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            queries, positions = block
            return _mix(queries, keys[:, None], values[:, None], positions, window=window)

        blocks: jax.Array = lax.map(mix, (queries, at))
        return blocks

    split = queries.reshape(batch, -1, size, groups, heads // groups, head_dim)
    each = (
        split.transpose(3, 1, 0, 2, 4, 5),
        *(jnp.moveaxis(x[:batch, :, :window], 1, 0) for x in (keys, values)),
    )
    mixed: jax.Array = lax.map(mix_head, each)  # [K, blocks, B, block, G*H]
    return mixed.transpose(2, 1, 3, 0, 4).reshape(batch, tokens, heads * head_dim)


def attention_stats(scores: jax.Array, valid: jax.Array, *, looks: bool = False) -> AttnStats:
    """Computes statistics of the attention of one position of each row.

    Args:
        scores: float32 [B, L, N, S], scaled.
        valid: bool [B, S], the mask of valid keys; at least one in each row.
        looks: static; adds `AttnLooks`.
    """
    batch, _, heads, keys = scores.shape
    chex.assert_shape(valid, (batch, keys))
    n = jnp.sum(valid, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    valid = valid[:, None, None, :]
    log_weights = jax.nn.log_softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
    weights = jnp.exp(log_weights)  # 0 where invalid
    entropy, varentropy = entropy_and_varentropy(log_weights)
    mean_weights = jnp.mean(weights, axis=2, keepdims=True)
    divergence = sum_last(jnp.abs(weights - mean_weights))
    strength = sum_last(jnp.where(valid, jnp.abs(scores) * _TINY, 0.0))
    # Keeps XLA from fusing the sums over keys with later ones over heads or layers: the order of
    # summation, and with it the last digits, would then depend on the size of the cache.
    entropy, varentropy, divergence, strength = lax.optimization_barrier(
        (entropy, varentropy, divergence, strength)
    )
    interaction = jnp.sum(strength, axis=-1) / (heads * n[:, None]) / _TINY
    looked = attention_looks(weights, entropy) if looks else None
    return AttnStats(entropy, varentropy, jnp.mean(divergence, axis=-1), interaction, n, looked)


def attention_looks(weights: jax.Array, entropy: jax.Array) -> AttnLooks:
    """Returns the 5 positions with the highest weights of the 3 heads with the lowest entropy.

    The heads are those of the upper half of the layers, since lower ones mostly attend to
    neighbours. Heads with most of their weight on the first position come last.

    Args:
        weights: float32 [B, L, N, S].
        entropy: float32 [B, L, N], bits.
    """
    batch, layers, heads, keys = weights.shape
    skipped = layers // 2
    weights, entropy = weights[:, skipped:], entropy[:, skipped:]
    sharp = jnp.where(weights[..., 0] > _SINK, -jnp.inf, -entropy).reshape(batch, -1)
    _, chosen = top(sharp, min(_HEADS, sharp.shape[1]))
    flat = weights.reshape(batch, -1, keys)
    own = jnp.take_along_axis(flat, chosen[:, :, None], axis=1)
    most, positions = top(own, min(_POSITIONS, keys))
    return AttnLooks(skipped + chosen // heads, chosen % heads, positions, most)


def join_layers(parts: list[AttnStats]) -> AttnStats:
    """Concatenates statistics along the layer axis."""

    def join(*leaves: jax.Array) -> jax.Array:
        return leaves[0] if leaves[0].ndim == 1 else jnp.concatenate(leaves, axis=1)  # 1: `keys`

    joined: AttnStats = jax.tree.map(join, *parts)
    return joined


def _product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum, accumulated and returned in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jnp.einsum(form, x, y, precision=precision, preferred_element_type=jnp.float32)


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Unscaled scores [B, K, G, T, S] of queries [B, T, K, G, H] and keys [B, K, S, H].

    einsum passes its operands on in reverse. With the queries on the left the result needs no
    transpose. For few tokens XLA's CPU backend is faster with the keys on the left.
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
