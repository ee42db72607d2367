"""`lookup`: looks something up where the row is unsure (document 002, "On-Demand Retrieval").

Before it commits a token, the row waits for the host, which calls `Request.lookup` with the text so
far and forces `before`, the result and `after`. Without a result the row samples, and the lookup
counts. A row without a lookup function samples, too.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, wait, when
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, number, texts
from entropix_jax.sampler.state import Proposal

MAX_AROUND = 32  # tokens of `before` and of `after`
MAX_RESULT = 1024  # tokens of a result


@struct.dataclass
class LookupSettings:
    """When a row looks something up, and the form of a result. The host reads the last three."""

    per_row: jax.Array = number(*COUNT, integer=True, default=2)  # lookups of a row
    cooldown: jax.Array = number(1, COUNT[1], integer=True, default=32)  # tokens after a lookup
    earliest: jax.Array = number(*COUNT, integer=True, default=0)  # tokens before the first lookup
    before: jax.Array = texts(1, MAX_AROUND, default=" [")
    after: jax.Array = texts(1, MAX_AROUND, default="]")
    most: jax.Array = number(1, MAX_RESULT, integer=True, default=64)  # tokens of a result


@struct.dataclass
class LookupState:
    """Of one row."""

    cooldown: jax.Array  # int32, tokens until the next lookup is possible
    begun: jax.Array  # int32, lookups, those without a result included


def may_look_up(ctx: Context) -> jax.Array:
    """Returns whether the row has a lookup function, budget, and no cooldown: bool."""
    own: LookupSettings = ctx.settings.own["lookup"]
    row: LookupState = ctx.states["lookup"]
    budget = (row.begun < own.per_row) & (ctx.generated >= own.earliest)
    return ctx.looks_up & budget & (row.cooldown == 0)


def propose(ctx: Context) -> Proposal:
    """Proposes a lookup, or one draw. Both have the base values."""
    return where(ctx.may["lookup"], draw("lookup", ctx), draw("sample", ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Waits for the result. The cooldown begins at once, also without a result."""
    own: LookupSettings = ctx.settings.own["lookup"]
    row: LookupState = ctx.states["lookup"]
    return when(jnp.bool_(True), wait(), LookupState(own.cooldown, row.begun + 1))


def advance(ctx: Context) -> LookupState:
    """The cooldown counts tokens after those of a result."""
    row: LookupState = ctx.states["lookup"]
    is_result = (ctx.queued > 0) & (ctx.tally.queue_action == ctx.parts.action("lookup"))
    cooled = jnp.maximum(row.cooldown - 1, 0)
    return LookupState(jnp.where(is_result, row.cooldown, cooled), row.begun)


LOOKUP = Mechanism(
    "lookup",
    propose,
    settings=LookupSettings,
    init=lambda: LookupState(cooldown=jnp.int32(0), begun=jnp.int32(0)),
    may=may_look_up,
    control=control,
    advance=advance,
    keep=("begun",),
)
