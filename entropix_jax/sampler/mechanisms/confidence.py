"""`confidence`: ends a row that has become unsure (Fu et al. 2025, "Deep Think with Confidence").

A row's group confidence is the mean token confidence (`metrics.measure_confidence`) of its last
`window` tokens. The row ends with the token whose group, the first full one at the earliest, lies
below the threshold. While a row is forked it goes on; what it commits counts.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import MOST_LIKELIEST
from entropix_jax.sampler.settings import SamplerSettings, number
from entropix_jax.sampler.state import Rows
from entropix_jax.stats import sum_last


@struct.dataclass
class ConfidenceSettings:
    """What is measured, and what ends a row; a threshold of 0 never does."""

    likeliest: jax.Array = number(2, MOST_LIKELIEST, integer=True)  # k, tokens of a distribution
    window: jax.Array = number(1, 2**31 - 1, integer=True)  # tokens of a group
    threshold: jax.Array = number(0.0, 1e6)  # nats


def is_low(confidences: jax.Array, settings: SamplerSettings, rows: Rows) -> jax.Array:
    """Whether the group that ends with the token at `rows.length` is below the threshold: bool [B].

    `confidences` are the token confidences of all positions up to that one, float32 [B, S].
    """
    own: ConfidenceSettings = settings.own["confidence"]
    back = rows.length[:, None] - jnp.arange(confidences.shape[1], dtype=jnp.int32)[None, :]
    in_group = (back >= 0) & (back < own.window[:, None])
    total = sum_last(jnp.where(in_group, confidences, 0.0))
    is_full = rows.generated + 1 >= own.window
    return is_full & (total / own.window.astype(jnp.float32) < own.threshold)


CONFIDENCE = Mechanism(
    "confidence",
    settings=ConfidenceSettings,
    active=lambda settings: settings.own["confidence"].threshold > 0,
)
