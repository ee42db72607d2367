"""`clarify` and `question`: the row asks a question where the user's text has several readings.

The arm forks the row into sampled continuations (`engine.fork`), up to the end of a sentence. The
row commits none of them. The host computes the entropy over their intents (`text.intents`), and
the row returns to the fork:

- Below `least` the model means one thing: the row samples.
- From `least` to `most` the user did not say which of a few things is meant: the host forces
  `prompt`, after which the model writes a question.
- Above `most` the model guesses: the row samples.

`question` ends the row with the first token after the prompt that contains a question mark or a
line break, at the latest after `length` tokens. Only rows with `Request.clarify` fork.
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, draw, where
from entropix_jax.sampler.control import Verdict, end, fork, when
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.branch import PATTERNS, draw_candidates
from entropix_jax.sampler.mechanisms.inject import holds_banned
from entropix_jax.sampler.settings import (
    COUNT,
    ENDS_BRANCH,
    MAX_DEPTH,
    MAX_WIDTH,
    TEMPERATURE,
    choice,
    number,
    texts,
)
from entropix_jax.sampler.state import Proposal

MAX_PROMPT = 32  # tokens of the prompt for a question
ENDS_QUESTION = 2  # flag of a token, next to `ENDS_BRANCH`
_QUESTION = re.compile(r"[?\n]")
_MARK = re.compile(r"[.,?!:;)\]}\n]")  # in every token with a flag


def _end_flags(value: str, host: Any) -> np.ndarray:
    """Returns the flags of each token, uint8 [V], for `until`."""
    flags: Any = np.zeros(host.vocab_size, np.uint8)
    for token, text in enumerate(host.token_texts()):
        if _MARK.search(text):
            flags[token] = ENDS_BRANCH * (PATTERNS[value].fullmatch(text) is not None)
            flags[token] |= ENDS_QUESTION * (_QUESTION.search(text) is not None)
    return flags  # type: ignore[no-any-return]


@struct.dataclass
class ClarifySettings:
    """The continuations, the entropies between which the row asks, and the question."""

    width: jax.Array = number(2, MAX_WIDTH, integer=True, default=8)  # continuations
    tokens: jax.Array = number(1, MAX_DEPTH, integer=True, default=12)  # at most, of each
    temperature: jax.Array = number(*TEMPERATURE, default=1.0)  # of the continuations
    until: jax.Array = choice([*PATTERNS], _end_flags, "sentence")  # uint8 [V]
    least: jax.Array = number(0.0, LARGEST, default=0.5)  # bits
    most: jax.Array = number(0.0, LARGEST, default=1.8)  # bits
    prompt: jax.Array = texts(1, MAX_PROMPT, " One question:")
    length: jax.Array = number(1, 2**31 - 1, integer=True, default=32)  # tokens of a question
    per_row: jax.Array = number(*COUNT, integer=True, default=1)  # forks of a row


@struct.dataclass
class ClarifyState:
    """Of one row. Its branches have a copy."""

    begun: jax.Array  # int32, forks
    measured: jax.Array  # bool, the arm has forked the row at the next position


def may_clarify(ctx: Context) -> jax.Array:
    """Returns whether the row may ask, has a fork left, and has room for the prompt."""
    own: ClarifySettings = ctx.settings.own["clarify"]
    row: ClarifyState = ctx.states["clarify"]
    prompt = own.prompt[0]
    length = jnp.sum(prompt >= 0)
    fits = (length > 0) & (length < ctx.remaining) & ~holds_banned(ctx.settings, prompt)
    is_free = (row.begun < own.per_row) & ~row.measured & (ctx.states["question"] == 0)
    may: jax.Array = ctx.clarifies & fits & is_free
    return may


def propose(ctx: Context) -> Proposal:
    """Proposes a fork, or one draw."""
    own: ClarifySettings = ctx.settings.own["clarify"]
    forks = draw("clarify", ctx, temperature=own.temperature)
    return where(ctx.may["clarify"], forks, draw("sample", ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Forks the row into branches whose first tokens are drawn with replacement."""
    own: ClarifySettings = ctx.settings.own["clarify"]
    rank = jnp.arange(MAX_WIDTH, dtype=jnp.int32)
    candidates = jnp.where(rank < own.width, draw_candidates(ctx), -1)
    after = ClarifyState(begun=ctx.states["clarify"].begun + 1, measured=jnp.bool_(True))
    return when(jnp.bool_(True), fork(candidates), after)


def advance(ctx: Context) -> ClarifyState:
    """Clears `measured` with the first token that the row commits after the fork."""
    row: ClarifyState = ctx.states["clarify"]
    is_own = ctx.proposal.action == ctx.parts.action("clarify")
    return replace(row, measured=row.measured & (is_own | (ctx.branch >= 0)))


def end_question(ctx: Context, token: jax.Array) -> Verdict:
    """Ends the row with the last token of a question. The state is the number of its tokens so far
    plus 1, int32. 0 before the question."""
    own: ClarifySettings = ctx.settings.own["clarify"]
    count = ctx.states["question"]
    is_last = (jnp.take(own.until, token, mode="clip") & ENDS_QUESTION) > 0
    return when((count > 0) & (is_last | (count >= own.length)), end())


def count_question(ctx: Context) -> jax.Array:
    """Begins to count with the last token of the prompt."""
    count = ctx.states["question"]
    asks = (ctx.queued == 1) & (ctx.tally.queue_action == ctx.parts.action("clarify"))
    return jnp.where(asks | (count > 0), count + 1, count)


CLARIFY = Mechanism(
    "clarify",
    propose,
    settings=ClarifySettings,
    init=lambda: ClarifyState(begun=jnp.int32(0), measured=jnp.bool_(False)),
    may=may_clarify,
    control=control,
    advance=advance,
    keep=("begun",),
)
QUESTION = Mechanism(
    "question",
    init=lambda: jnp.int32(0),
    control=end_question,
    active=lambda settings: False,  # only with `clarify`, see `Sampler.parts`
    advance=count_question,
)
