"""`inject`: writes a configured thought into the row, then waits out a cooldown.

The first token of the thought is committed by the step that injects, the rest follow as forced
tokens. The cooldown begins after the last one; until it is over, and wherever a thought does not
fit, the arm draws instead, warmer than the base:

    T = min(temperature_max, T0 * (temperature_scale + temperature_attn_entropy * Ea))
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView, draw, either
from entropix_jax.sampler.regimes import LELV
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    TEMPERATURE,
    SamplerSettings,
    flag,
    number,
    texts,
)
from entropix_jax.sampler.state import Observation, Rows, SamplerState, Step, Tally

MAX_THOUGHT = 64  # tokens of a thought
MAX_THOUGHTS = 4  # thoughts that take turns


@struct.dataclass
class InjectSettings:
    """The thoughts, how often they are written, and the draw during a cooldown."""

    thought: jax.Array = texts(MAX_THOUGHTS, MAX_THOUGHT)
    per_row: jax.Array = number(*COUNT, integer=True)  # thoughts of a row, asked for ones too
    cooldown: jax.Array = number(*COUNT, integer=True)  # tokens after a thought's last one
    until_confident: jax.Array = flag()  # the first LELV token ends the cooldown
    temperature_scale: jax.Array = number(*COEFFICIENT)
    temperature_attn_entropy: jax.Array = number(*COEFFICIENT)
    temperature_max: jax.Array = number(*TEMPERATURE)


@struct.dataclass
class InjectState:
    """Of one row."""

    cooldown: jax.Array  # int32, tokens until the next thought is possible
    begun: jax.Array  # int32, thoughts begun


def may_inject(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether a thought is configured or asked for, fits, and neither cools down nor was the last
    thing written (documents 000 and 001 ask no question right after one)."""
    own: InjectSettings = settings.own["inject"]
    row: InjectState = state.tally.own["inject"]
    length = _turn(own, row.begun)[1]
    fits = rows.asks | ((length > 0) & (length <= rows.remaining))
    ends = jax.vmap(ends_in)(rows.history, rows.length, own.thought)  # injected or not
    just_asked = jnp.any(ends, axis=-1)
    return fits & ~just_asked & (row.cooldown == 0) & (row.begun < own.per_row)


def propose(metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
    """A thought, or the warmer draw."""
    own: InjectSettings = settings.own["inject"]
    scale = own.temperature_scale + own.temperature_attn_entropy * metrics.attn_entropy
    temperature = jnp.minimum(own.temperature_max, settings.base.temperature * scale)
    return either(
        row.may["inject"],
        draw("inject", settings, temperature=temperature),
        draw("sample", settings, temperature=temperature),
    )


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Forces the thought whose turn it is. A row that asks for the text waits for it instead."""
    row: InjectState = step.tally.own["inject"]
    waits = acts & step.rows.asks
    step = step.force(acts & ~waits, *_turn(settings.own["inject"], row.begun))
    begun = replace(row, begun=row.begun + acts.astype(jnp.int32))
    tally = replace(step.tally, own={**step.tally.own, "inject": begun})
    return replace(step, tally=tally, waits=step.waits | waits)


def advance(settings: SamplerSettings, tally: Tally, observation: Observation) -> InjectState:
    """The cooldown counts tokens, and begins with the last token of a thought."""
    own: InjectSettings = settings.own["inject"]
    row: InjectState = tally.own["inject"]
    confident = own.until_confident & (observation.regime == LELV)
    cooled = jnp.where(confident, 0, jnp.maximum(row.cooldown - 1, 0))
    ends = (tally.queued == 1) & (tally.queue_action == settings.action("inject"))
    return replace(row, cooldown=jnp.where(ends, own.cooldown, cooled))


def _turn(own: InjectSettings, begun: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The thought whose turn it is after `begun` [B] others: its tokens, int32 [B, MAX_THOUGHT],
    and its length [B], 0 where there is none."""
    lengths = jnp.sum(own.thought >= 0, axis=-1, dtype=jnp.int32)
    number = jnp.maximum(jnp.sum(lengths > 0, axis=-1, dtype=jnp.int32), 1)
    turn = jnp.mod(begun, number)
    tokens = jnp.take_along_axis(own.thought, turn[:, None, None], axis=1)[:, 0]
    return tokens, jnp.take_along_axis(lengths, turn[:, None], axis=1)[:, 0]


INJECT = Mechanism(
    "inject",
    propose,
    settings=InjectSettings,
    init=lambda: InjectState(cooldown=jnp.int32(0), begun=jnp.int32(0)),
    may=may_inject,
    apply=apply,
    advance=advance,
    keep=("begun",),
    follows_regimes=True,
)
