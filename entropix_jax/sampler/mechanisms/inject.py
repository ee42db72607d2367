"""`inject`: writes a configured thought into the row, then waits out a cooldown.

A thought is written after a token that ends a sentence (`after`), in place of a drawn token that
begins a new word. Its first token is committed by the step that injects, the rest follow as forced
tokens. The cooldown begins after the last one. If no thought may be written, the arm draws at a
higher temperature than the base:

    T = min(temperature_max, T0 * (temperature_scale + temperature_attn_entropy * Ea))
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, force, when
from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.regimes import LELV
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    TEMPERATURE,
    SamplerSettings,
    flag,
    number,
    setting,
    texts,
)
from entropix_jax.sampler.state import Proposal

MAX_THOUGHT = 64  # tokens of a thought
MAX_THOUGHTS = 4  # thoughts that take turns
ENDS, SPACED, CLOSED = 1, 2, 4  # flags of a token, see `SentenceFlags`


@struct.dataclass
class SentenceFlags:
    """Which tokens end a sentence (ENDS), begin with white space (SPACED), or end with it
    (CLOSED)."""

    enabled: jax.Array  # bool; False: a thought may follow any token
    of_token: jax.Array  # uint8 [V]

    def has(self, token: jax.Array, flag: int) -> jax.Array:
        """Returns whether a token, int32, has a flag: bool."""
        return (jnp.take(self.of_token, token, mode="clip") & flag) > 0


def sentence_flags(value: str | list[str], host: Any) -> SentenceFlags:
    """Flags the tokens of a vocabulary. A token ends a sentence if it ends with one of these marks,
    perhaps before quotes, brackets and white space."""
    marks = "".join(value)
    end = re.compile(rf"[{re.escape(marks)}][\s\"'\u2019\u201d)\]*]*\Z") if marks else None
    flags: Any = np.zeros(host.vocab_size, np.uint8)
    for token, text in enumerate(host.token_texts() if end else ()):
        flags[token] = ENDS * bool(end and end.search(text))
        flags[token] |= SPACED * text[:1].isspace() | CLOSED * text[-1:].isspace()
    return SentenceFlags(enabled=np.asarray(bool(marks)), of_token=flags)  # type: ignore[arg-type]


def are_marks(value: Any) -> bool:
    """Returns whether a value is a list of characters that end a sentence, or one as a text."""
    marks = [value] if isinstance(value, str) else value
    return isinstance(marks, list) and all(isinstance(m, str) and len(m) <= 1 for m in marks)


@struct.dataclass
class InjectSettings:
    """The thoughts, how often they are written, and the draw during a cooldown."""

    thought: jax.Array = texts(MAX_THOUGHTS, MAX_THOUGHT)
    # Characters that end a sentence. Empty: a thought may be written anywhere.
    after: SentenceFlags = setting(
        are_marks, 'a list of single characters, such as [".", "?"]', sentence_flags, ""
    )
    earliest: jax.Array = number(*COUNT, integer=True, default=0)  # tokens before the first thought
    per_row: jax.Array = number(*COUNT, integer=True)  # thoughts of a row
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


def may_inject(ctx: Context) -> jax.Array:
    """Returns whether a thought may come next.

    Requires a configured thought that fits and has no banned token, the end of a sentence, and no
    cooldown. A row that ends in a thought gets no other (documents 000 and 001).
    """
    own: InjectSettings = ctx.settings.own["inject"]
    row: InjectState = ctx.states["inject"]
    tokens, length = _turn(own, row.begun)
    fits = (length > 0) & (length <= ctx.remaining) & ~holds_banned(ctx.settings, tokens)
    just_asked = jnp.any(ends_in(ctx.history, ctx.length, own.thought))  # injected or not
    budget = (row.begun < own.per_row) & (ctx.generated >= own.earliest)
    free = fits & ~just_asked & (row.cooldown == 0) & budget
    return free & (~own.after.enabled | own.after.has(ctx.history[ctx.length - 1], ENDS))


def propose(ctx: Context) -> Proposal:
    """Proposes a thought, or the draw at a higher temperature."""
    own: InjectSettings = ctx.settings.own["inject"]
    scale = own.temperature_scale + own.temperature_attn_entropy * ctx.metrics.attn_entropy
    temperature = jnp.minimum(own.temperature_max, ctx.settings.base.temperature * scale)
    return where(
        ctx.may["inject"],
        draw("inject", ctx, temperature=temperature),
        draw("sample", ctx, temperature=temperature),
    )


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Forces the next thought, unless the drawn token is an end token."""
    own: InjectSettings = ctx.settings.own["inject"]
    row: InjectState = ctx.states["inject"]
    last = ctx.history[ctx.length - 1]
    begins = own.after.has(token, SPACED) | own.after.has(last, CLOSED)
    ends = jnp.any(token == ctx.eos_ids)
    thought, _ = _turn(own, row.begun)
    after = replace(row, begun=row.begun + 1)
    return when(~own.after.enabled | (begins & ~ends), force(thought), after)


def advance(ctx: Context) -> InjectState:
    """The cooldown counts tokens, and begins with the last token of a thought."""
    own: InjectSettings = ctx.settings.own["inject"]
    row: InjectState = ctx.states["inject"]
    confident = own.until_confident & (ctx.regime == LELV)
    cooled = jnp.where(confident, 0, jnp.maximum(row.cooldown - 1, 0))
    ends = (ctx.queued == 1) & (ctx.tally.queue_action == ctx.parts.action("inject"))
    return replace(row, cooldown=jnp.where(ends, own.cooldown, cooled))


def _turn(own: InjectSettings, begun: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The thought whose turn it is after `begun` others: its tokens, int32 [MAX_THOUGHT], and its
    length, 0 where there is none."""
    lengths = jnp.sum(own.thought >= 0, axis=-1, dtype=jnp.int32)
    count = jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.int32), 1)
    turn = jnp.mod(begun, count)
    return own.thought[turn], lengths[turn]


def holds_banned(settings: SamplerSettings, text: jax.Array) -> jax.Array:
    """Returns whether a text, int32 [n] padded with -1, has a banned token."""
    return jnp.any((text[:, None] == settings.unwritable[None, :]) & (text >= 0)[:, None])


INJECT = Mechanism(
    "inject",
    propose,
    settings=InjectSettings,
    init=lambda: InjectState(cooldown=jnp.int32(0), begun=jnp.int32(0)),
    may=may_inject,
    control=control,
    advance=advance,
    keep=("begun",),
)
