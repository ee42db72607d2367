"""`inject`: writes a configured thought into the row, then waits out a cooldown.

A thought is written where a sentence has ended (`after`, see `sampler.sentences`), in place of a
drawn token that begins a new word. Its first token is committed by the step that injects, the rest
follow as forced tokens. The cooldown begins after the last one. Wherever no thought may be written,
the arm draws, warmer than the base:

    T = min(temperature_max, T0 * (temperature_scale + temperature_attn_entropy * Ea))
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.context import Context, Proposal, draw, either
from entropix_jax.sampler.filters import holds_banned
from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.regimes import LELV
from entropix_jax.sampler.sentences import SentenceFlags, begins_word, sentence_ended
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    TEMPERATURE,
    SamplerSettings,
    flag,
    marks,
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
    after: SentenceFlags = marks()  # what ends a sentence; none: a thought may be written anywhere
    earliest: jax.Array = number(*COUNT, integer=True)  # tokens before the first thought
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
    """Whether a thought may come next: bool [B].

    One is configured or asked for, fits, holds no banned token, a sentence has ended, and the row
    neither cools down nor ends in a thought (documents 000 and 001 ask no question right after
    one).
    """
    own: InjectSettings = settings.own["inject"]
    row: InjectState = state.tally.own["inject"]
    tokens, length = _turn(own, row.begun)
    fits = (length > 0) & (length <= rows.remaining) & ~holds_banned(settings, tokens)
    ends = jax.vmap(ends_in)(rows.history, rows.length, own.thought)  # injected or not
    just_asked = jnp.any(ends, axis=-1)
    budget = (row.begun < own.per_row) & (rows.generated >= own.earliest)
    free = (fits | rows.asks) & ~just_asked & (row.cooldown == 0) & budget
    # The look back reads the whole history, so only where it decides anything.
    look = partial(jax.vmap(sentence_ended), own.after, rows.history, rows.length)
    ended = lax.cond(jnp.any(free & own.after.given), look, lambda: jnp.ones_like(free))
    may: jax.Array = free & ended
    return may


def propose(ctx: Context) -> Proposal:
    """A thought, or the warmer draw."""
    own: InjectSettings = ctx.settings.own["inject"]
    scale = own.temperature_scale + own.temperature_attn_entropy * ctx.metrics.attn_entropy
    temperature = jnp.minimum(own.temperature_max, ctx.settings.base.temperature * scale)
    return either(
        ctx.may["inject"],
        draw("inject", ctx, temperature=temperature),
        draw("sample", ctx, temperature=temperature),
    )


def replaces(settings: SamplerSettings, step: Step, drawn: jax.Array) -> jax.Array:
    """Whether each row's arm proposes a thought and the drawn token, int32 [B], lets it be written:
    bool [B]. An end token does not."""
    own: InjectSettings = settings.own["inject"]
    rows = step.rows
    begins = jax.vmap(begins_word)(own.after, rows.history, rows.length, drawn)
    ends = jnp.any(drawn[:, None] == rows.eos_ids, axis=-1)
    anywhere = ~own.after.given
    proposed = step.proposal.action == settings.action("inject")
    writes: jax.Array = proposed & (anywhere | (begins & ~ends))
    return writes


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
    replaces=replaces,
    apply=apply,
    advance=advance,
    keep=("begun",),
    follows_regimes=True,
)
