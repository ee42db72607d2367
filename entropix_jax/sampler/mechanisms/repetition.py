"""`repetition`: a penalty on tokens that the row already holds (Keskar et al. 2019, "CTRL")."""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import RowView
from entropix_jax.sampler.settings import SamplerSettings, number


@struct.dataclass
class RepetitionSettings:
    """`penalty` divides positive and multiplies negative logits; 1 switches it off."""

    penalty: jax.Array = number(0.01, 100.0)


def penalise(
    logits: jax.Array, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> jax.Array:
    """Penalises the tokens of the row, prompt included."""
    position, vocab = jnp.arange(row.history.shape[0], dtype=jnp.int32), logits.shape[0]
    tokens = jnp.where(position < row.length, row.history, vocab)
    seen = jnp.zeros(vocab, bool).at[tokens].set(True, mode="drop")
    penalty = settings.own["repetition"].penalty
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


REPETITION = Mechanism(
    "repetition",
    settings=RepetitionSettings,
    logits=penalise,
    active=lambda settings: settings.own["repetition"].penalty != 1.0,
)
