"""Searches of one row's tokens."""

import jax
import jax.numpy as jnp


def repeated(
    history: jax.Array, length: jax.Array, distances: jax.Array, longest: int
) -> jax.Array:
    """Counts the last tokens, from the last one back without a gap, that equal the one `distances`
    before them: int32 [D], at most `longest`. For the arguments see `same_as_before`.
    """
    same = same_as_before(history, length, distances, longest)
    back = jnp.arange(longest, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(same, longest, back), axis=1)


def same_as_before(
    history: jax.Array, length: jax.Array, distances: jax.Array, count: int
) -> jax.Array:
    """Returns whether each of the last `count` tokens, from the last one back, equals the one
    `distances` before it: bool [D, count].

    Args:
        history: int32 [S], the row's tokens, then anything.
        length: int32, how many there are.
        distances: int32 [D], at least 1. Results beyond the first `length - distances` compare with
            positions before the row's first token and are undefined.
    """
    back = jnp.arange(count, dtype=jnp.int32)
    latest_first = jnp.take(history, length - 1 - back, mode="clip")
    earlier = jnp.take(history, length - 1 - back[None, :] - distances[:, None], mode="clip")
    return latest_first[None, :] == earlier


def ends_in(history: jax.Array, length: jax.Array, texts: jax.Array) -> jax.Array:
    """Returns whether the first `length` tokens of `history[S]` end in each text, int32 [n, T],
    padded with -1: bool [n], False for an empty text."""
    lengths = jnp.sum(texts >= 0, axis=-1, dtype=jnp.int32)
    offsets = jnp.arange(texts.shape[1], dtype=jnp.int32)[None, :]
    tokens = jnp.take(history, length - lengths[:, None] + offsets, mode="clip")
    same = jnp.all((tokens == texts) | (texts < 0), axis=-1)
    return same & (lengths > 0) & (lengths <= length)
