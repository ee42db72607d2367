"""`phrases`: takes a banned phrase back before its last token is written, and draws its first token
again without that one (Paech et al. 2025, "Antislop").

A phrase is the tokens of its text: other spellings are phrases of their own. Where the row may not
go back so far, because the tokens are forced or the phrase is longer than `MAX_REACH`, it goes back
as far as it may, even if only to draw the last token again. Tokens that begin a phrase are held
until it is clear that they are none.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.backspace import go_back
from entropix_jax.sampler.settings import COUNT, SamplerSettings, number, texts
from entropix_jax.sampler.state import MAX_ATTEMPTS, MAX_REACH, Rows, SamplerState, Step

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


def holds(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """How many of each row's last tokens begin a phrase and may be taken back: int32 [B]."""
    own: PhrasesSettings = settings.own["phrases"]
    places, numbers = jnp.arange(MAX_PHRASE)[None, :], jnp.arange(1, MAX_PHRASE, dtype=jnp.int32)

    def begun(history: jax.Array, length: jax.Array, banned: jax.Array) -> jax.Array:
        def with_first(number: jax.Array) -> jax.Array:
            ends = ends_in(history, length, jnp.where(places < number, banned, -1))
            return jnp.any(ends & (jnp.sum(banned >= 0, axis=-1) > number))

        return jnp.max(jnp.where(jax.vmap(with_first)(numbers), numbers, 0))

    held = jax.vmap(begun)(rows.history, rows.length, own.banned)
    held = jnp.minimum(held, jnp.minimum(state.trail.drawn, MAX_REACH))
    return jnp.where(state.tally.own["phrases"].retracted < own.per_row, held, 0)


def replaces(settings: SamplerSettings, step: Step, drawn: jax.Array) -> jax.Array:
    """Whether the drawn token completes a phrase that the row may take back: within its budget, and
    with a token left to draw where it goes back to."""
    number, back = _completed(settings, step)
    attempts, _ = _retracted(step, back)
    bans = attempts + 1 + jnp.sum(settings.bans >= 0, axis=-1, dtype=jnp.int32)
    able = (attempts < MAX_ATTEMPTS) & (bans < step.rows.vocab_size)
    own: PhrasesSettings = settings.own["phrases"]
    row: PhrasesState = step.tally.own["phrases"]
    return (number > 0) & able & (row.retracted < own.per_row)


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Moves the row back to the phrase's first token."""
    _, back = _completed(settings, step)
    attempts, bans = _retracted(step, back)
    # Where it does not go back, the position has no entry of its own yet.
    here = {"proposal": step.proposal, "tally": step.tally, "attempts": attempts, "bans": bans}
    trail = step.trail.put(step.rows.length, acts & (back == 0), **here)
    step = go_back(acts, replace(step, trail=trail), settings, back, "phrases")
    retracted = step.tally.own["phrases"].retracted + acts.astype(jnp.int32)
    own = {**step.tally.own, "phrases": PhrasesState(retracted=retracted)}
    return replace(step, tally=replace(step.tally, own=own))


def _completed(settings: SamplerSettings, step: Step) -> tuple[jax.Array, jax.Array]:
    """How many tokens the longest phrase has that each row ends in with its drawn token, 0 for
    none, and how many of them the row goes back: int32 [B] each."""
    banned, rows = settings.own["phrases"].banned, step.rows
    complete = jax.vmap(ends_in)(rows.history, rows.length + 1, banned)
    lengths = jnp.sum(banned >= 0, axis=-1, dtype=jnp.int32)
    number = jnp.max(jnp.where(complete, lengths, 0), axis=-1)
    return number, jnp.clip(number - 1, 0, step.reach)


def _retracted(step: Step, back: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many tokens were retracted `back` positions ago, and which; see `Trail.retracted`."""
    attempts, bans = step.trail.retracted(step.rows.length)
    there, here = step.trail.at(step.rows.length - back), back == 0
    attempts = jnp.where(here, attempts, there.attempts)
    return attempts, jnp.where(here[:, None], bans, there.bans)


PHRASES = Mechanism(
    "phrases",
    settings=PhrasesSettings,
    init=lambda: PhrasesState(retracted=jnp.int32(0)),
    active=lambda settings: (settings.own["phrases"].banned >= 0).any(axis=(-1, -2)),
    holds=holds,
    replaces=replaces,
    apply=apply,
    keep=("retracted",),
)
