"""`wrong`: the estimated probability that the answer is wrong, at each token.

P(wrong) is a quantity of the regimes' conditions. It is the table's value at a weighted sum of four
exponential means over the row's generated tokens, the one to be chosen included. `sampler.wrong`
computes it in float64. The means are those of the model's own distribution, without a `view` or a
surrogate. Another table needs no other program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import SamplerSettings, setting
from entropix_jax.sampler.wrong import EXPECTED, KNOTS, MEASURES, RATE, find_table, is_table


@struct.dataclass
class Table:
    """The table, NaN without one. Knots after its last one repeat its last probability."""

    weights: jax.Array  # float32 [5]
    scores: jax.Array  # float32 [KNOTS], ascending
    probabilities: jax.Array  # float32 [KNOTS], ascending


def _to_arrays(value: Any, host: Any) -> Table:
    table = find_table(value, host.calibration and host.calibration.wrong)
    if table is None:
        return Table(*(np.full(n, np.nan, np.float32) for n in (5, KNOTS, KNOTS)))  # type: ignore[arg-type]
    scores, probabilities = table.knots.T
    more = np.arange(KNOTS - len(scores))
    scores = np.append(scores, scores[-1] + 1.0 + more)
    probabilities = np.append(probabilities, probabilities[-1] + 0.0 * more)
    arrays = (x.astype(np.float32) for x in (table.weights, scores, probabilities))
    return Table(*arrays)  # type: ignore[arg-type]


@struct.dataclass
class WrongSettings:
    """The table of P(wrong): the model's, from its calibration file, or rows as in `EXPECTED`."""

    table: Table = setting(
        lambda value: value == "model" or is_table(value),
        f'"model", or {EXPECTED}',
        _to_arrays,
        "model",
    )


def update_means(ctx: Context) -> jax.Array:
    """Returns the row's means of `MEASURES` with this step's, float32 [4]."""
    seen, means = ctx.observation, ctx.states["wrong"]
    values = {**vars(seen.metrics), "max_prob": seen.max_prob}
    rate = jnp.maximum(RATE, 1.0 / (ctx.generated + 1).astype(jnp.float32))
    moved: jax.Array = means + rate * (jnp.stack([values[name] for name in MEASURES]) - means)
    return moved


def estimate(ctx: Context) -> jax.Array:
    """Returns P(wrong) at the next token, float32; NaN without a table."""
    table: Table = ctx.settings.own["wrong"].table
    score = jnp.sum(table.weights[:-1] * update_means(ctx)) + table.weights[-1]
    # Each interval between knots adds its share: constant beyond the first and the last.
    share = jnp.clip((score - table.scores[:-1]) / jnp.diff(table.scores), 0.0, 1.0)
    found = table.probabilities[0] + jnp.sum(share * jnp.diff(table.probabilities))
    return jnp.minimum(found, table.probabilities[-1])


def has_table(settings: SamplerSettings) -> bool:
    """Returns whether there is a table."""
    return not np.isnan(settings.own["wrong"].table.weights[0])


WRONG = Mechanism(
    "wrong",
    settings=WrongSettings,
    init=lambda: jnp.zeros(len(MEASURES), jnp.float32),
    p_wrong=estimate,
    advance=update_means,
    active=has_table,
)
