"""A truncation rule of your own, with settings and a state: Mirostat 2 (Basu et al. 2021,
algorithm 2). It keeps the tokens whose surprise is at most `mu`, and each drawn token moves `mu`.

    PYTHONPATH=docs/examples .venv/bin/python -m entropix_jax.main --model tiny --prompt "Once" \\
        --plugin mirostat_2 --sampler temperature --set sampler.truncation.rule=mirostat_2
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import RowView
from entropix_jax.sampler.settings import SamplerSettings, number
from entropix_jax.sampler.state import DrawnToken
from entropix_jax.sampler.truncation import Masked


@struct.dataclass
class Settings:
    """Keys of the sampler: `mirostat_2.target` and `mirostat_2.rate`."""

    target: jax.Array = number(0.0, 100.0, default=3.0)  # bits
    rate: jax.Array = number(0.0, 100.0, default=0.1)


@struct.dataclass
class State:
    """State of a row."""

    learnt: jax.Array  # float32, mu - 2 * target, bits


def keep(logits: jax.Array, metrics: Metrics, settings: SamplerSettings, row: RowView) -> jax.Array:
    """The tokens that may be drawn, bool [V]. This is code for one row."""
    mu = 2.0 * settings.own["mirostat_2"].target + row.own["mirostat_2"].learnt
    return -jax.nn.log_softmax(logits) / jnp.log(2.0) <= mu


def learn(drawn: DrawnToken, metrics: Metrics, settings: SamplerSettings, row: RowView) -> State:
    """The state after a token was drawn."""
    own: Settings = settings.own["mirostat_2"]
    scores = jax.nn.log_softmax(drawn.logits / drawn.proposal.temperature)
    error = -scores[drawn.token] / jnp.log(2.0) - own.target
    return State(learnt=row.own["mirostat_2"].learnt - own.rate * error)


MIROSTAT_2 = Mechanism(
    "mirostat_2",
    settings=Settings,
    init=lambda: State(learnt=jnp.float32(0.0)),
    cut=Masked(keep),
    learn=learn,
)
MECHANISMS = [MIROSTAT_2]  # for --plugin
