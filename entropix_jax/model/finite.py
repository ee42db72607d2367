"""Locates NaN and infinity in activations."""

import jax
import jax.numpy as jnp

NOWHERE = -1


def first_unsound(sound: jax.Array, start: jax.Array) -> jax.Array:
    """Position and stage of each row's first NaN or infinite activation: int32 [B, 2]; NOWHERE
    twice where all are finite.

    The earliest stage wins, then the earliest position: after a layer's attention a single bad
    token has contaminated the later ones. `sound` is bool [B, T, 1+2L], see `stats.AttnStats`;
    `start` is int32 [B], the position of each row's first token.
    """
    tokens = sound.shape[1]
    unsound = ~sound.swapaxes(1, 2).reshape(sound.shape[0], -1)
    first = jnp.argmax(unsound, axis=-1).astype(jnp.int32)
    place = jnp.stack([start + first % tokens, first // tokens], axis=-1)
    return jnp.where(jnp.any(unsound, axis=-1)[:, None], place, NOWHERE)


def earlier(one: jax.Array, other: jax.Array) -> jax.Array:
    """`one` where it found something, else `other`: int32 [B, 2] each."""
    return jnp.where(one[:, :1] != NOWHERE, one, other)


def describe(position: int, stage: int) -> str:
    """Formats a result of `first_unsound`."""
    part = "the queries, keys or values of " if stage % 2 else ""
    where = f"{part}layer {(stage - 1) // 2}" if stage else "the embedding"
    return f"NaN or infinity in {where} at position {position}"
