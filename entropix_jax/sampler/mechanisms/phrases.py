"""`phrases`: takes a banned phrase back before its last token is written, and draws its first token
again without that one (Paech et al. 2025, "Antislop").

A phrase is the tokens of its text: other spellings are phrases of their own. Where the row may not
go back so far, because the tokens are forced or the phrase is longer than `MAX_REACH`, it goes back
as far as it may, even if only to draw the last token again. Tokens that begin a phrase are held
until it is clear that they are none.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, Verdict, rewind, when
from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, number, texts
from entropix_jax.sampler.state import MAX_ATTEMPTS, MAX_REACH

MAX_PHRASES = 8
MAX_PHRASE = 16  # tokens of one


@struct.dataclass
class PhrasesSettings:
    """The phrases, and how often a row goes back."""

    banned: jax.Array = texts(MAX_PHRASES, MAX_PHRASE)
    per_row: jax.Array = number(*COUNT, integer=True)


@struct.dataclass
class PhrasesState:
    """Of one row. What is banned where is in the `Trail`."""

    retracted: jax.Array  # int32, how often the row went back


def holds(ctx: Context) -> jax.Array:
    """How many of the row's last tokens begin a phrase and may be taken back: int32."""
    own: PhrasesSettings = ctx.settings.own["phrases"]
    places, numbers = jnp.arange(MAX_PHRASE)[None, :], jnp.arange(1, MAX_PHRASE, dtype=jnp.int32)
    lengths = jnp.sum(own.banned >= 0, axis=-1)

    def with_first(number: jax.Array) -> jax.Array:
        ends = ends_in(ctx.history, ctx.length, jnp.where(places < number, own.banned, -1))
        return jnp.any(ends & (lengths > number))

    begun = jnp.max(jnp.where(jax.vmap(with_first)(numbers), numbers, 0))
    held = jnp.minimum(begun, jnp.minimum(ctx.trail.drawn, MAX_REACH))
    return jnp.where(ctx.own["phrases"].retracted < own.per_row, held, 0)


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Goes back to the first token of the longest phrase that the drawn token completes: within the
    budget, and with a token left to draw there."""
    own: PhrasesSettings = ctx.settings.own["phrases"]
    row: PhrasesState = ctx.own["phrases"]
    complete = ends_in(ctx.history, ctx.length + 1, own.banned)
    lengths = jnp.sum(own.banned >= 0, axis=-1, dtype=jnp.int32)
    number = jnp.max(jnp.where(complete, lengths, 0))
    back = jnp.clip(number - 1, 0, ctx.reach)
    there = ctx.trail.at(ctx.length - back).attempts
    attempts = jnp.where(back == 0, ctx.attempt, there)
    bans = attempts + 1 + jnp.sum(ctx.settings.bans >= 0, dtype=jnp.int32)
    able = (attempts < MAX_ATTEMPTS) & (bans < ctx.vocab_size)
    acts = (number > 0) & able & (row.retracted < own.per_row)
    return when(acts, rewind(back), PhrasesState(retracted=row.retracted + 1))


PHRASES = Mechanism(
    "phrases",
    settings=PhrasesSettings,
    init=lambda: PhrasesState(retracted=jnp.int32(0)),
    active=lambda settings: (settings.own["phrases"].banned >= 0).any(axis=(-1, -2)),
    holds=holds,
    control=control,
    keep=("retracted",),
)
