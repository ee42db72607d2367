"""The regime of a step: four open boxes over five quantities, and the loop guard."""

import jax
import jax.numpy as jnp

from entropix_jax.names import BOXES, QUANTITIES, REGIMES
from entropix_jax.sampler.history import same_as_before
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import LOOP_WINDOW, MAX_PERIOD, LoopSettings, SamplerSettings

LELV, HELV, LEHV, HEHV, MID = range(len(REGIMES))


def classify(
    metrics: Metrics, settings: SamplerSettings, sequence_varentropy: jax.Array | float = 0.0
) -> jax.Array:
    """The regime of one row, int32: the first of LELV, HELV, LEHV, HEHV whose open box holds the
    point, else MID. NaN is in no box. `sequence_varentropy` is that of the row's tokens (bits^2),
    the next one's entropy included."""
    values = {**vars(metrics), "sequence_varentropy": sequence_varentropy}
    point = jnp.stack([values[quantity] for quantity in QUANTITIES])[None, :]
    inside = jnp.all((settings.low < point) & (point < settings.high), axis=-1)  # [4]
    return jnp.where(jnp.any(inside), jnp.argmax(inside), len(BOXES)).astype(jnp.int32)


def count_rounds(
    history: jax.Array, length: jax.Array, generated: jax.Array, settings: LoopSettings
) -> jax.Array:
    """How often one row has repeated itself (document 004's "doom loop"), int32: 0 where it does
    not loop, 1 once it ends in `repeats` copies of a stretch, 2 after one copy more, and so on.

    The copies need not be exact: a row that was drawn out of a loop soon falls back into it, and a
    list may count on. So `similarity` is the least share of tokens that equal the one a period
    before.

    Args:
        history: int32 [S], the row's tokens, prompt included.
        length: int32, how many of them there are.
        generated: int32, how many of those were generated; a prompt never counts as a loop.
        settings: stretches of q <= `max_period` tokens count.
    """
    periods = jnp.arange(1, MAX_PERIOD + 1, dtype=jnp.int32)
    # How many of the last tokens equal the one a period before, and how far back enough do: [P, W].
    same = same_as_before(history, length, periods, LOOP_WINDOW)
    number = jnp.arange(1, LOOP_WINDOW + 1, dtype=jnp.int32)[None, :]
    alike = jnp.cumsum(same, axis=1, dtype=jnp.int32).astype(jnp.float32)
    enough = alike >= settings.similarity * number.astype(jnp.float32)
    enough &= number <= generated - periods[:, None]
    copies = 1 + jnp.max(jnp.where(enough, number, 0), axis=1) // periods
    looping = (periods <= settings.max_period) & (settings.repeats >= 2)
    rounds = jnp.where(looping, copies - settings.repeats + 1, 0)
    return jnp.maximum(jnp.max(rounds), 0)
