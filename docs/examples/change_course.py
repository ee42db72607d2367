"""A mechanism of your own: after several scattered tokens in a row it writes a fixed text.

A scattered model rarely recovers by itself. After `patience` HEHV tokens in a row (high entropy,
high varentropy) the next one starts a text such as "\\nIn short:". Until then the arm does what
`resample` does.

    sampler = entropix_jax.load_sampler("entropix").with_mechanism(CHANGE_COURSE)
    sampler = sampler.with_values({"arms.hehv": "change_course", "change_course.patience": 4})
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, force
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import resample
from entropix_jax.sampler.regimes import HEHV
from entropix_jax.sampler.settings import number, texts
from entropix_jax.sampler.state import Proposal


@struct.dataclass
class Settings:
    """Keys of the sampler: `change_course.patience` and `change_course.words`."""

    patience: jax.Array = number(1, 1000, integer=True, default=3)
    words: jax.Array = texts(1, 32, default="\nIn short:")  # int32 [1, 32], padded with -1


@struct.dataclass
class State:
    """State of a row."""

    lost: jax.Array  # int32, HEHV tokens in a row


def may(ctx: Context) -> jax.Array:
    """Whether the row has been lost for long enough."""
    lost: jax.Array = ctx.states["change_course"].lost
    return lost >= ctx.settings.own["change_course"].patience


def propose(ctx: Context) -> Proposal:
    """The text, or, for one more token, what `resample` does."""
    return where(ctx.may["change_course"], draw("change_course", ctx), resample(ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Forces the text in place of the drawn token; its first token is this step's."""
    return force(ctx.settings.own["change_course"].words[0])


def advance(ctx: Context) -> State:
    """Counts HEHV tokens in a row. The text's own tokens reset the count."""
    own: State = ctx.states["change_course"]
    lost = (ctx.regime == HEHV) & (ctx.queued == 0)
    return replace(own, lost=jnp.where(lost, own.lost + 1, 0))


CHANGE_COURSE = Mechanism(
    "change_course",
    propose,
    settings=Settings,
    init=lambda: State(lost=jnp.int32(0)),
    may=may,
    control=control,
    advance=advance,
)
