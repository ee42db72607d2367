"""Filters against tokens that the row already has.

`repetition`: penalties (Keskar et al. 2019, "CTRL"; `frequency_penalty` and `presence_penalty` of
OpenAI's API). `no_repeat_ngram`: a ban of whole stretches (Paulus et al. 2017, "A Deep Reinforced
Model for Abstractive Summarization"). `dry`: a penalty on the token that would prolong a
repetition, which grows with the repetition's length (Weidmann 2024, "DRY: Don't Repeat Yourself").
"""

from typing import Any

import jax
import jax.numpy as jnp

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.history import ends_in, repeated
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    SamplerSettings,
    number,
    section,
    texts,
)

MAX_MATCH = 64  # tokens of the longest repetition that is looked for
MAX_BREAKERS = 16  # texts that no repetition reaches across
MAX_BREAKER = 8  # tokens of one


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Divides positive and multiplies negative logits of the row's tokens, prompt included, by
    `penalty`. Subtracts `frequency` for each time that a token was generated, and `presence` once.
    """
    own = ctx.settings.own["repetition"]
    position, vocab = jnp.arange(ctx.history.shape[0], dtype=jnp.int32), logits.shape[0]
    tokens = jnp.where(position < ctx.length, ctx.history, vocab)
    seen = jnp.zeros(vocab, bool).at[tokens].set(True, mode="drop")
    scaled = jnp.where(logits > 0, logits / own.penalty, logits * own.penalty)
    tokens = jnp.where(position >= ctx.length - ctx.generated, tokens, vocab)
    count = jnp.zeros(vocab, jnp.int32).at[tokens].add(1, mode="drop")
    cost = own.frequency * count.astype(jnp.float32) + jnp.where(count > 0, own.presence, 0.0)
    return jnp.where(seen, scaled - cost, logits)


def ban_repeated(logits: jax.Array, ctx: Context) -> jax.Array:
    """Bans each token that would complete a repeated n-gram of `size` tokens, prompt included."""
    size, vocab = ctx.settings.own["no_repeat_ngram"].size, logits.shape[0]
    distances = jnp.arange(1, ctx.history.shape[0] + 1, dtype=jnp.int32)
    same = repeated(ctx.history, ctx.length, distances, MAX_MATCH - 1) >= size - 1
    same &= distances + size - 1 <= ctx.length
    tokens = jnp.where(same, jnp.take(ctx.history, ctx.length - distances, mode="clip"), vocab)
    return logits.at[tokens].set(-jnp.inf, mode="drop")


def penalise_repetition(logits: jax.Array, ctx: Context) -> jax.Array:
    """Penalises each token that has already followed the row's last n tokens, by `multiplier *
    base^(n - allowed_length)`, for n >= `allowed_length`.

    The largest n counts, up to `MAX_MATCH`. Matches lie within the last `window` tokens and after
    the row's last breaker. A single-token breaker is never penalised.
    """
    own = ctx.settings.own["dry"]
    distances = jnp.arange(1, ctx.history.shape[0], dtype=jnp.int32)
    run = repeated(ctx.history, ctx.length, distances, MAX_MATCH)
    run = jnp.minimum(run, jnp.minimum(ctx.length, own.window) - distances)

    since = jnp.arange(MAX_MATCH, dtype=jnp.int32)  # tokens after a breaker
    broken = jax.vmap(lambda n: jnp.any(ends_in(ctx.history, ctx.length - n, own.breakers)))(since)
    run = jnp.minimum(run, jnp.min(jnp.where(broken, since, MAX_MATCH)))

    following = jnp.take(ctx.history, ctx.length - distances, mode="clip")
    first, second = own.breakers[:, 0], own.breakers[:, 1]
    single = jnp.where(second < 0, first, -1)
    breaks = jnp.any(following[:, None] == single[None, :], axis=1)
    penalty = own.multiplier * own.base ** (run - own.allowed_length).astype(jnp.float32)
    token = jnp.where((run >= own.allowed_length) & ~breaks, following, logits.shape[0])
    # A token that follows several places gets the penalty of the longest.
    penalised = logits.at[token].get(mode="fill", fill_value=0.0) - penalty
    return logits.at[token].min(penalised, mode="drop")


def _penalises(settings: SamplerSettings) -> Any:
    own = settings.own["repetition"]
    return (own.penalty != 1.0) | (own.frequency != 0.0) | (own.presence != 0.0)


REPETITION = Mechanism(
    "repetition",
    settings=section(
        penalty=number(0.01, 100.0),  # 1: off
        frequency=number(*COEFFICIENT),
        presence=number(*COEFFICIENT),
    ),
    logits=penalise,
    active=_penalises,
)
NO_REPEAT_NGRAM = Mechanism(
    "no_repeat_ngram",
    settings=section(size=number(0, MAX_MATCH, integer=True)),  # 0: off
    logits=ban_repeated,
    active=lambda settings: settings.own["no_repeat_ngram"].size > 0,
)
DRY = Mechanism(
    "dry",
    settings=section(
        multiplier=number(0.0, 100.0),  # 0: off
        base=number(1.0, 100.0),
        allowed_length=number(1, MAX_MATCH, integer=True),
        window=number(*COUNT, integer=True),
        breakers=texts(MAX_BREAKERS, MAX_BREAKER),
    ),
    logits=penalise_repetition,
    active=lambda settings: settings.own["dry"].multiplier > 0,
)
