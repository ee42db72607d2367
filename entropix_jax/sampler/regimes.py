"""The regime of a step: four open boxes over six quantities, and the loop guard."""

import chex
import jax
import jax.numpy as jnp

from entropix_jax.names import BOXES, QUANTITIES, REGIMES
from entropix_jax.sampler.history import same_as_before
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings, SamplerSettings

LELV, HELV, LEHV, HEHV, MID = range(len(REGIMES))
MAX_DRIFT = 5.0  # of the logarithm of a threshold: a factor of 148


def classify(
    metrics: Metrics,
    settings: SamplerSettings,
    sequence_varentropy: jax.Array | float = 0.0,
    thresholds: jax.Array | None = None,
    p_wrong: jax.Array | float = jnp.nan,
) -> jax.Array:
    """Returns the regime of one row, int32: the first of LELV, HELV, LEHV, HEHV whose open box
    holds the point, else MID. NaN is in no box.

    Args:
        sequence_varentropy: of the row's tokens (bits^2), including the next one's entropy.
        thresholds: float32 [4], see `thresholds_of`; None: the configured ones.
        p_wrong: NaN without a table. Conditions on it then do not hold; others may.
    """
    if thresholds is None:
        thresholds = thresholds_of(settings)
    further = {"sequence_varentropy": sequence_varentropy, "p_wrong": p_wrong}
    values = {**vars(metrics), **further}
    point = jnp.stack([values[quantity] for quantity in QUANTITIES])
    chex.assert_shape((point, thresholds), [(len(QUANTITIES),), (4,)])
    conditions = settings.conditions
    value = jnp.take(point, conditions.quantity, mode="clip")
    named = jnp.take(thresholds, conditions.threshold, mode="clip")
    bound = jnp.where(conditions.threshold < 0, conditions.bound, named)
    holds = jnp.where(conditions.above, value > bound, value < bound) | (conditions.quantity < 0)
    inside = jnp.all(holds, axis=-1) & jnp.all(jnp.isfinite(point[:-1]))  # [4]
    return jnp.where(jnp.any(inside), jnp.argmax(inside), len(BOXES)).astype(jnp.int32)


def thresholds_of(settings: SamplerSettings, drift: jax.Array | float = 0.0) -> jax.Array:
    """Returns one row's h1, h2 (bits), u1, u2 (bits^2): float32 [4].

    `drift`, float32 [4], is the log ratio of each current threshold to its configured value. h2 is
    clamped to at least h1, and u2 to at least u1.
    """
    chex.assert_shape(settings.thresholds.values, (4,))
    h1, h2, u1, u2 = settings.thresholds.values * jnp.exp(drift)
    return jnp.stack([h1, jnp.maximum(h1, h2), u1, jnp.maximum(u1, u2)])


def update_drift(metrics: Metrics, settings: SamplerSettings, drift: jax.Array) -> jax.Array:
    """Returns one row's drift, float32 [4], after one more token (document 004's "dynamic
    thresholds").

    Robbins and Monro's stochastic approximation of a quantile q, on a logarithmic scale, so that
    one rate serves bits and bits^2: a threshold rises by a factor of exp(rate * q) where the
    token's value is above it, and falls by exp(rate * (1 - q)) where it is below.
    """
    thresholds = settings.thresholds
    chex.assert_shape((drift, thresholds.values, thresholds.quantiles), (4,))
    values = jnp.stack([metrics.entropy] * 2 + [metrics.varentropy] * 2)
    below = (values < thresholds.values * jnp.exp(drift)).astype(jnp.float32)
    moves = thresholds.dynamic & (thresholds.quantiles >= 0)
    moved = drift + jnp.where(moves, thresholds.rate * (thresholds.quantiles - below), 0.0)
    return jnp.clip(moved, -MAX_DRIFT, MAX_DRIFT)


def count_rounds(
    history: jax.Array, length: jax.Array, generated: jax.Array, settings: LoopSettings
) -> jax.Array:
    """Counts how often one row has repeated itself (document 004's "doom loop"), int32: 0 without a
    loop, 1 once it ends in `repeats` copies of a stretch, 2 after one more copy, and so on.

    Copies need not be exact: a row that left a loop often returns to it, and a list may count up.
    `similarity` is the minimum share of tokens equal to the token one period before.

    Args:
        history: int32 [S], the row's tokens, prompt included.
        length: int32, the number of tokens.
        generated: int32, the number of generated tokens; a prompt never counts as a loop.
        settings: stretches of q <= `max_period` tokens count.
    """
    chex.assert_rank((history, length, generated), [1, 0, 0])
    periods = jnp.arange(1, MAX_PERIOD + 1, dtype=jnp.int32)
    # How many of the last tokens equal the one a period before, and how far back enough do: [P, W].
    same = same_as_before(history, length, periods, LOOP_WINDOW)
    counts = jnp.arange(1, LOOP_WINDOW + 1, dtype=jnp.int32)[None, :]
    alike = jnp.cumsum(same, axis=1, dtype=jnp.int32).astype(jnp.float32)
    enough = alike >= settings.similarity * counts.astype(jnp.float32)
    enough &= counts <= generated - periods[:, None]
    copies = 1 + jnp.max(jnp.where(enough, counts, 0), axis=1) // periods
    looping = (periods <= settings.max_period) & (settings.repeats >= 2)
    rounds = jnp.where(looping, copies - settings.repeats + 1, 0)
    return jnp.maximum(jnp.max(rounds), 0)


def heated(temperature: jax.Array, rounds: jax.Array, settings: LoopSettings) -> jax.Array:
    """Returns the temperature of one row's arm, raised by each further round of a loop."""
    chex.assert_rank((temperature, rounds), 0)
    heat = 1.0 + settings.heating * (rounds - 1).astype(jnp.float32)
    return jnp.where(rounds > 0, jnp.minimum(temperature * heat, settings.hottest), temperature)
