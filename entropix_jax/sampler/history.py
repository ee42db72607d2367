"""Searches of one row's tokens: what repeats, and what they end in."""

import jax
import jax.numpy as jnp

MAX_MATCH = 64  # tokens of the longest repetition that transforms look for


def with_token(values: jax.Array, position: jax.Array, new: jax.Array) -> jax.Array:
    """`values[B, S]` with `new[B]` at a position of each row, int32 [B]; S: nowhere.

    A GPU scatters by two kernels of its own; a comparison is fused with what is around it.
    """
    place = jnp.arange(values.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(place == position[:, None], new[:, None], values)


def repeated(
    history: jax.Array, length: jax.Array, distances: jax.Array, longest: int
) -> jax.Array:
    """How many of the last tokens are each the same as the one `distances` before it, from the last
    one back, without a gap: int32 [D], at most `longest`. For the arguments see `same_as_before`.
    """
    same = same_as_before(history, length, distances, longest)
    back = jnp.arange(longest, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(same, longest, back), axis=1)


def same_as_before(
    history: jax.Array, length: jax.Array, distances: jax.Array, number: int
) -> jax.Array:
    """Whether each of the last `number` tokens, from the last one back, is the same as the one
    `distances` before it: bool [D, number].

    Args:
        history: int32 [S], the row's tokens, then anything.
        length: int32, how many there are.
        distances: int32 [D], at least 1. For the tokens before the row's first one nothing is
            promised: at most `length - distances` are the row's.
    """
    back = jnp.arange(number, dtype=jnp.int32)
    latest_first = jnp.take(history, length - 1 - back, mode="clip")
    earlier = jnp.take(history, length - 1 - back[None, :] - distances[:, None], mode="clip")
    return latest_first[None, :] == earlier


def ends_in(history: jax.Array, length: jax.Array, texts: jax.Array) -> jax.Array:
    """Whether the first `length` tokens of `history[S]` end in each text, int32 [n, T], padded with
    -1: bool [n], False for a text without tokens."""
    lengths = jnp.sum(texts >= 0, axis=-1, dtype=jnp.int32)
    offsets = jnp.arange(texts.shape[1], dtype=jnp.int32)[None, :]
    tokens = jnp.take(history, length - lengths[:, None] + offsets, mode="clip")
    same = jnp.all((tokens == texts) | (texts < 0), axis=-1)
    return same & (lengths > 0) & (lengths <= length)
