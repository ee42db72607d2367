"""`branch`: follows several candidates for a few tokens and commits the best (document 004,
"Branching"; document 002, "Branching vs Thinking Tokens").

The row is forked: each candidate continues as a row of its own, in the same steps as all others
(`engine.fork`). A branch is a candidate and what follows it, greedily unless a rollout temperature
is set. It ends with an end token, at the maximum depth, with the row's budget, or as `until` says:
at a token, or when the distribution after its last token is neither LEHV nor HEHV. The best one
replaces the row:

    score = mean(log p) - entropy_weight * mean(h) - varentropy_weight * mean(u)

over its tokens: p of each under the unmodified logits, or (`processed`) after temperature and
truncation (nats), h (bits) and u (bits^2) of the distribution after it. Of equal scores the branch
with the more likely candidate wins.

With other rules it is CNTP (arXiv 2507.03038; `sampled`, width by entropy, until punctuation) or
AdaDec (arXiv 2506.08980; a fixed depth, the first token committed).
"""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, draw, if_any, where
from entropix_jax.sampler.control import Verdict, fork, when
from entropix_jax.sampler.draw import STREAM_CANDIDATE, STREAM_NOISE, draw_tokens, uniforms
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import explore
from entropix_jax.sampler.prefix import cumulate
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    MAX_DEPTH,
    MAX_WIDTH,
    TEMPERATURE,
    choice,
    flag,
    number,
)
from entropix_jax.sampler.state import Proposal
from entropix_jax.stats import sum_last, top

# Texts of tokens that end a branch.
PATTERNS = {
    "punctuation": re.compile(r"\s*[.,?!:;)\]}]\s*|.*\n.*", re.DOTALL),
    "sentence": re.compile(r".*[.?!][\s\"')\]\u2019\u201d]*|.*\n.*", re.DOTALL),
    "line": re.compile(r".*\n.*", re.DOTALL),
}
UNTIL = ("regime", *PATTERNS, "depth")


@struct.dataclass
class BranchEnds:
    """Where the branches of one row end, apart from the depth."""

    by_regime: jax.Array  # bool, where the distribution is no longer LEHV or HEHV
    of_token: jax.Array  # bool [V], the tokens that end a branch


def _branch_ends(value: str, host: Any) -> BranchEnds:
    """Returns the ends of branches for `until`, as flags per token."""
    ends: Any = np.zeros(host.vocab_size, bool)
    if value in PATTERNS:
        found = [PATTERNS[value].fullmatch(text) is not None for text in host.token_texts()]
        ends[: len(found)] = found
    return BranchEnds(by_regime=np.asarray(value == "regime"), of_token=ends)  # type: ignore[arg-type]


@struct.dataclass
class BranchSettings:
    """Choice of the candidates, depth of the branches, and their score."""

    width: jax.Array = number(1, MAX_WIDTH, integer=True)  # most candidates
    # Entropies in bits, of what tokens are drawn from, between which the width grows from 1; equal:
    # it does not depend on the entropy.
    narrow: jax.Array = number(0.0, LARGEST, default=0.0)
    wide: jax.Array = number(0.0, LARGEST, default=0.0)
    sampled: jax.Array = flag(False)  # candidates are drawn, with replacement
    until: BranchEnds = choice(UNTIL, _branch_ends, "regime")
    processed: jax.Array = flag(False)  # p is after temperature and truncation
    depth: jax.Array = number(1, MAX_DEPTH, integer=True)  # most tokens, the candidate included
    temperature: jax.Array = number(0.01, 100.0)  # of the distribution of the candidates
    noise: jax.Array = number(0.0, 100.0)  # Gumbel noise on its logits, times this; 0: off
    min_p: jax.Array = number(0.0, 1.0)  # least share of the most likely one
    top_p: jax.Array = number(1e-6, 1.0)  # candidates that make up this mass
    rollout_temperature: jax.Array = number(*TEMPERATURE)  # 0: greedy
    entropy_weight: jax.Array = number(*COEFFICIENT)  # nats per bit
    varentropy_weight: jax.Array = number(*COEFFICIENT)  # nats per bit^2
    commit_all: jax.Array = flag()  # all tokens of the best branch, or its first alone
    margin: jax.Array = number(0.0, 1e6)  # of two scores this close the choice is ambiguous
    per_row: jax.Array = number(*COUNT, integer=True)  # forks of a row
    max_share: jax.Array = number(0.0, 1e6)  # forwards of branches for each token of the row


@struct.dataclass
class BranchState:
    """Of one row."""

    begun: jax.Array  # int32, forks
    forwards: jax.Array  # int32, tokens of branches that were evaluated


def may_branch(ctx: Context) -> jax.Array:
    """Returns whether the row has a budget, both for forks and for their forward passes."""
    own: BranchSettings = ctx.settings.own["branch"]
    row: BranchState = ctx.states["branch"]
    affordable = own.max_share * ctx.generated.astype(jnp.float32)
    return (row.begun < own.per_row) & (row.forwards.astype(jnp.float32) <= affordable)


def propose(ctx: Context) -> Proposal:
    """Proposes a fork, or `explore` without budget. The trace shows the proposal, and `sampled`
    candidates and `processed` scores use it. `find_candidates` reads the settings."""
    own: BranchSettings = ctx.settings.own["branch"]
    branches = draw(
        "branch",
        ctx,
        temperature=own.temperature,
        top_k=jnp.where(own.sampled, ctx.settings.base.top_k, own.width),
        top_p=own.top_p,
        min_p=own.min_p,
    )
    return where(ctx.may["branch"], branches, explore(ctx))


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Forks the row, and counts that. A single branch is rolled out too, unless the width follows
    the entropy: then the row commits its token."""
    own: BranchSettings = ctx.settings.own["branch"]
    row: BranchState = ctx.states["branch"]
    candidates = if_any(own.sampled, lambda: draw_candidates(ctx), find_candidates(ctx))
    rank = jnp.arange(MAX_WIDTH, dtype=jnp.int32)
    grows = own.wide > own.narrow
    width = if_any(grows, lambda: _width(ctx), own.width)
    candidates = jnp.where(rank < width, candidates, -1)
    return when(~grows | (width > 1), fork(candidates), replace(row, begun=row.begun + 1))


def _width(ctx: Context) -> jax.Array:
    """Returns the number of branches for the entropy of the row's draw: int32."""
    own: BranchSettings = ctx.settings.own["branch"]
    log_probs = jax.nn.log_softmax(ctx.truncated)
    entropy = -sum_last(jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0))
    share = (entropy / jnp.log(2.0) - own.narrow) / (own.wide - own.narrow)
    more = (own.width - 1).astype(jnp.float32) * jnp.clip(share, 0.0, 1.0)
    return 1 + more.astype(jnp.int32)


def draw_candidates(ctx: Context) -> jax.Array:
    """Draws `width` tokens as the row does, each with its own random number: int32 [W]."""
    stream = jnp.int32(STREAM_CANDIDATE)
    return draw_tokens(ctx.truncated, uniforms(ctx.key, ctx.length, ctx.attempt, stream, MAX_WIDTH))


def find_candidates(ctx: Context) -> jax.Array:
    """The first tokens of the branches, most likely first: int32 [W], padded with -1.

    From the distribution with temperature and scaled Gumbel noise on its logits: tokens that pass
    min-p, of these the shortest prefix that reaches top-p, at most `width`.
    """
    own: BranchSettings = ctx.settings.own["branch"]

    def noised() -> jax.Array:
        stream, vocab = jnp.int32(STREAM_NOISE), ctx.logits.shape[0]
        numbers = uniforms(ctx.key, ctx.length, jnp.int32(0), stream, vocab)
        # Else XLA's reshape mover moves a reshape through all that follows, one operation in each
        # round of its passes over the whole program: a tenth of the time to compile it.
        numbers = lax.optimization_barrier(numbers)
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, 2.0**-25)))  # always finite
        return ctx.penalised + own.noise * gumbel

    logits = if_any(own.noise > 0, noised, ctx.penalised)
    mass = jnp.exp((logits - jnp.max(logits)) / own.temperature)
    mass = jnp.where((mass >= own.min_p) & (logits > -jnp.inf), mass, 0.0)
    size = min(MAX_WIDTH, logits.shape[0])
    _, ids = top(logits, size)
    shares = mass[ids]
    before = cumulate(shares) - shares
    # At 1 it is off: rounding must not cut the tail.
    reached = jnp.where(own.top_p < 1, own.top_p * jnp.sum(mass), jnp.inf)
    rank = jnp.arange(size, dtype=jnp.int32)
    admitted = ((before < reached) & (shares > 0)) | (rank == 0)
    admitted &= rank < own.width
    return jnp.pad(jnp.where(admitted, ids, -1), (0, MAX_WIDTH - size), constant_values=-1)


BRANCH = Mechanism(
    "branch",
    propose,
    settings=BranchSettings,
    init=lambda: BranchState(begun=jnp.int32(0), forwards=jnp.int32(0)),
    may=may_branch,
    control=control,
    keep=("begun", "forwards"),
)
