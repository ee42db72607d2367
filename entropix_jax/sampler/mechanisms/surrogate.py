"""`surrogate`: replaces the varentropy by a control, for studies of the quadrants.

Regimes, arms and branch scores see u' in place of the varentropy u. With Q(r | h) the r-quantile of
the varentropies that the model has at the entropy h, from its calibration:

    permuted    u' = Q(r | h), r uniform in [0, 1): u permuted among tokens of equal entropy
    max_prob    u' = Q(r | h), r the rank of p1 among the model's own at h: p1 in place of u
    median      u' = Q(1/2 | h): a function of h alone

The first two keep the joint distribution of h and u, and so the shares of the regimes, as far as
the tables are those of the text. The tables are of the model's own distribution, so a `view` and a
surrogate do not go together. A trace records the measured u.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.errors import UserError
from entropix_jax.sampler.calibration import AT_ENTROPY, LEVELS
from entropix_jax.sampler.context import Context
from entropix_jax.sampler.draw import STREAM_OBSERVE, uniforms
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import MAX_WIDTH, SamplerSettings, choice

KINDS = ("measured", "permuted", "max_prob", "median")
_MEASURED, _PERMUTED, _MAX_PROB, _MEDIAN = range(len(KINDS))


@struct.dataclass
class Surrogate:
    """The kind of u', and the quantiles at each of K = `calibration.KNOTS` entropies."""

    kind: jax.Array  # int32, index into KINDS
    entropies: jax.Array  # float32 [K], bits, ascending
    varentropies: jax.Array  # float32 [K, len(LEVELS)], bits^2
    max_probs: jax.Array  # float32 [K, len(LEVELS)]


def _from_tables(value: str, host: Any) -> Surrogate:
    kind: jax.Array = np.int32(KINDS.index(value))  # type: ignore[assignment]
    tables = None if host.calibration is None else host.calibration.at_entropy
    if tables is None:
        if kind != _MEASURED:
            missing = "the model's calibration lacks its varentropies at each entropy"
            raise UserError(f"= '{value}': {missing}: run entropix-jax calibrate")
        tables = {name: np.zeros(shape) for name, shape in AT_ENTROPY.items()}
    entropies, varentropies, max_probs = (tables[name].astype(np.float32) for name in AT_ENTROPY)
    return Surrogate(kind, entropies, varentropies, max_probs)


@struct.dataclass
class SurrogateSettings:
    """Selects the value that regimes and arms use as varentropy."""

    varentropy: Surrogate = choice(KINDS, _from_tables, "measured")


def observe(ctx: Context) -> Metrics:
    """Returns the metrics with u' as varentropy."""
    own: Surrogate = ctx.settings.own["surrogate"].varentropy
    levels = jnp.asarray(LEVELS, jnp.float32)
    knots = jnp.arange(own.entropies.shape[0], dtype=jnp.float32)
    knot = jnp.interp(ctx.metrics.entropy, own.entropies, knots)

    def at_knot(table: jax.Array) -> jax.Array:
        """The quantiles at the row's entropy: float32 [len(LEVELS)]."""
        below = jnp.minimum(knot.astype(jnp.int32), table.shape[0] - 2)
        share = knot - below.astype(jnp.float32)
        return (1.0 - share) * table[below] + share * table[below + 1]

    stream = jnp.int32(STREAM_OBSERVE)
    # Branches share their row's key, so each uses the number at its own index. A position that is
    # drawn again has the same distribution, and so the same u'.
    numbers = uniforms(ctx.key, ctx.length, jnp.int32(0), stream, 1 + MAX_WIDTH)
    rank = jnp.interp(ctx.observation.max_prob, at_knot(own.max_probs), levels)
    rank = jnp.where(own.kind == _PERMUTED, numbers[ctx.branch + 1], rank)
    rank = jnp.where(own.kind == _MEDIAN, 0.5, rank)
    other = jnp.interp(rank, levels, at_knot(own.varentropies))
    measured = own.kind == _MEASURED
    return replace(ctx.metrics, varentropy=jnp.where(measured, ctx.metrics.varentropy, other))


def is_active(settings: SamplerSettings) -> bool:
    """Returns whether the varentropy is replaced."""
    return bool(settings.own["surrogate"].varentropy.kind != _MEASURED)


SURROGATE = Mechanism("surrogate", observe=observe, settings=SurrogateSettings, active=is_active)
