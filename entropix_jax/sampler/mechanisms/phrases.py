"""`phrases`: retracts a banned phrase before its last token is committed, and draws another first
token (Paech et al. 2025, "Antislop").

A phrase is a sequence of tokens, so another spelling is another phrase. If the row may not go back
to its start (forced tokens, or a phrase longer than `MAX_REACH`), it goes back as far as it may,
even if it only draws the last token again. Tokens that may begin a phrase are held back.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.control import Verdict, rewind, when
from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, number, section, texts

MAX_PHRASES = 8
MAX_PHRASE = 16  # tokens of one


@struct.dataclass
class PhrasesState:
    """Of one row. Bans are in the `Trail`."""

    retracted: jax.Array  # int32, how often the row went back


def holds(ctx: Context) -> jax.Array:
    """Returns how many of the row's last tokens begin a phrase and may be retracted: int32."""
    own = ctx.settings.own["phrases"]
    places, numbers = jnp.arange(MAX_PHRASE)[None, :], jnp.arange(1, MAX_PHRASE, dtype=jnp.int32)
    lengths = jnp.sum(own.banned >= 0, axis=-1)

    def with_first(number: jax.Array) -> jax.Array:
        ends = ends_in(ctx.history, ctx.length, jnp.where(places < number, own.banned, -1))
        return jnp.any(ends & (lengths > number))

    begun = jnp.max(jnp.where(jax.vmap(with_first)(numbers), numbers, 0))
    held = jnp.minimum(begun, ctx.trail.rewindable)
    return jnp.where(ctx.states["phrases"].retracted < own.per_row, held, 0)


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Goes back to the first token of the longest phrase that the drawn token completes, within
    the budget."""
    own = ctx.settings.own["phrases"]
    row: PhrasesState = ctx.states["phrases"]
    complete = ends_in(ctx.history, ctx.length + 1, own.banned)
    lengths = jnp.sum(own.banned >= 0, axis=-1, dtype=jnp.int32)
    length = jnp.max(jnp.where(complete, lengths, 0))
    back = jnp.clip(length - 1, 0, ctx.reach)
    acts = (length > 0) & (row.retracted < own.per_row)
    return when(acts, rewind(back), PhrasesState(retracted=row.retracted + 1))


PHRASES = Mechanism(
    "phrases",
    settings=section(banned=texts(MAX_PHRASES, MAX_PHRASE), per_row=number(*COUNT, integer=True)),
    init=lambda: PhrasesState(retracted=jnp.int32(0)),
    active=lambda settings: (settings.own["phrases"].banned >= 0).any(axis=(-1, -2)),
    holds=holds,
    control=control,
    keep=("retracted",),
)
