"""A truncation rule of your own, with settings and a state: Mirostat 2 (Basu et al. 2021,
algorithm 2). It keeps the tokens whose surprise is at most `mu`, and each drawn token moves `mu`.

    PYTHONPATH=docs/examples .venv/bin/python -m entropix_jax.main --model tiny --prompt "Once" \\
        --plugin mirostat_2 --sampler temperature --set sampler.truncation.rule=mirostat_2
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import number
from entropix_jax.sampler.state import DrawnToken


@struct.dataclass
class Settings:
    """Keys of the sampler: `mirostat_2.target` and `mirostat_2.rate`."""

    target: jax.Array = number(0.0, 100.0, default=3.0)  # bits
    rate: jax.Array = number(0.0, 100.0, default=0.1)


@struct.dataclass
class State:
    """State of a row."""

    learnt: jax.Array  # float32, mu - 2 * target, bits


def keep(logits: jax.Array, ctx: Context) -> jax.Array:
    """Returns one row's logits with the tokens whose surprise is above `mu` at -inf."""
    mu = 2.0 * ctx.settings.own["mirostat_2"].target + ctx.states["mirostat_2"].learnt
    surprise = -jax.nn.log_softmax(logits) / jnp.log(2.0)
    return jnp.where((surprise <= mu) | (logits >= jnp.max(logits)), logits, -jnp.inf)


def learn(drawn: DrawnToken, ctx: Context) -> State:
    """The state after a token was drawn."""
    own: Settings = ctx.settings.own["mirostat_2"]
    temperature = jnp.maximum(ctx.proposal.temperature, 1e-6)  # 0 is greedy
    scores = jax.nn.log_softmax(drawn.logits / temperature)
    error = -scores[drawn.token] / jnp.log(2.0) - own.target
    return State(learnt=ctx.states["mirostat_2"].learnt - own.rate * error)


MIROSTAT_2 = Mechanism(
    "mirostat_2",
    settings=Settings,
    init=lambda: State(learnt=jnp.float32(0.0)),
    rule=keep,
    learn=learn,
)
MECHANISMS = [MIROSTAT_2]  # for --plugin
