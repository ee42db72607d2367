"""Transforms against tokens that the row already holds.

`repetition`: penalties (Keskar et al. 2019, "CTRL"; `frequency_penalty` and `presence_penalty` of
OpenAI's API). `no_repeat_ngram`: a ban of whole stretches (Paulus et al. 2017, "A Deep Reinforced
Model for Abstractive Summarization").
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.history import MAX_MATCH, repeated
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COEFFICIENT, SamplerSettings, number


@struct.dataclass
class RepetitionSettings:
    """`penalty` divides positive and multiplies negative logits; 1 switches it off. `frequency` is
    subtracted for each time that a token was generated, `presence` once; 0 switches them off."""

    penalty: jax.Array = number(0.01, 100.0)
    frequency: jax.Array = number(*COEFFICIENT)
    presence: jax.Array = number(*COEFFICIENT)


@struct.dataclass
class NoRepeatNgramSettings:
    """No `size` tokens in a row occur twice."""

    size: jax.Array = number(0, MAX_MATCH, integer=True)  # 0: off


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Penalises the tokens of the row, prompt included, then those that were generated."""
    own: RepetitionSettings = ctx.settings.own["repetition"]
    position, vocab = jnp.arange(ctx.history.shape[0], dtype=jnp.int32), logits.shape[0]
    tokens = jnp.where(position < ctx.length, ctx.history, vocab)
    seen = jnp.zeros(vocab, bool).at[tokens].set(True, mode="drop")
    scaled = jnp.where(logits > 0, logits / own.penalty, logits * own.penalty)
    tokens = jnp.where(position >= ctx.length - ctx.generated, tokens, vocab)
    count = jnp.zeros(vocab, jnp.int32).at[tokens].add(1, mode="drop")
    cost = own.frequency * count.astype(jnp.float32) + jnp.where(count > 0, own.presence, 0.0)
    return jnp.where(seen, scaled - cost, logits)


def ban_repeated(logits: jax.Array, ctx: Context) -> jax.Array:
    """Bans each token that would complete a stretch that the row, prompt included, holds."""
    size, vocab = ctx.settings.own["no_repeat_ngram"].size, logits.shape[0]
    distances = jnp.arange(1, ctx.history.shape[0] + 1, dtype=jnp.int32)
    same = repeated(ctx.history, ctx.length, distances, MAX_MATCH - 1) >= size - 1
    same &= distances + size - 1 <= ctx.length
    tokens = jnp.where(same, jnp.take(ctx.history, ctx.length - distances, mode="clip"), vocab)
    return logits.at[tokens].set(-jnp.inf, mode="drop")


def _penalises(settings: SamplerSettings) -> jax.Array:
    own: RepetitionSettings = settings.own["repetition"]
    return (own.penalty != 1.0) | (own.frequency != 0.0) | (own.presence != 0.0)


REPETITION = Mechanism(
    "repetition", settings=RepetitionSettings, logits=penalise, active=_penalises
)
NO_REPEAT_NGRAM = Mechanism(
    "no_repeat_ngram",
    settings=NoRepeatNgramSettings,
    logits=ban_repeated,
    active=lambda settings: settings.own["no_repeat_ngram"].size > 0,
)
