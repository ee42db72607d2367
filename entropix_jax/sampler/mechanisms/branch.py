"""`branch`: follows several candidates for a few tokens and commits the best (document 004,
"Branching"; document 002, "Branching vs Thinking Tokens").

The row is forked: each candidate goes on as a row of its own, in the same steps as all others
(`engine.fork`). A branch is a candidate and what follows it, greedily unless a rollout temperature
is set. It ends with an end token, at the maximum depth, with the row's budget, or where the
distribution after its last token is neither LEHV nor HEHV. The best takes the row's place:

    score = mean(log p) - entropy_weight * mean(h) - varentropy_weight * mean(u)

over its tokens: p of each under the unmodified logits (nats), h (bits) and u (bits^2) of the
distribution after it. Of branches with equal scores the likelier candidate's wins.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.context import Context, Verdict, any_row, draw, fork, where
from entropix_jax.sampler.filters import penalise
from entropix_jax.sampler.keys import STREAM_NOISE, uniforms
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import explore
from entropix_jax.sampler.prefix import cumulate
from entropix_jax.sampler.regimes import HEHV, LEHV
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    TEMPERATURE,
    SamplerSettings,
    flag,
    number,
)
from entropix_jax.sampler.state import Observation, Proposal
from entropix_jax.sampler.top import top

MAX_WIDTH = 8  # W, branches of a fork
MAX_DEPTH = 32  # tokens of a branch


@struct.dataclass
class BranchSettings:
    """Which candidates there are, how far they are followed, and what they are judged by."""

    width: jax.Array = number(1, MAX_WIDTH, integer=True)  # most candidates
    depth: jax.Array = number(1, MAX_DEPTH, integer=True)  # most tokens, the candidate included
    temperature: jax.Array = number(0.01, 100.0)  # of the distribution of the candidates
    noise: jax.Array = number(0.0, 100.0)  # Gumbel noise on its logits, times this; 0: off
    min_p: jax.Array = number(0.0, 1.0)  # candidates at least so likely, next to the likeliest
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
    """Whether neither budget of the row is spent: its forks, and what they cost so far."""
    own: BranchSettings = ctx.settings.own["branch"]
    row: BranchState = ctx.own["branch"]
    affordable = own.max_share * ctx.generated.astype(jnp.float32)
    return (row.begun < own.per_row) & (row.forwards.astype(jnp.float32) <= affordable)


def propose(ctx: Context) -> Proposal:
    """Branches, or what `explore` does. The proposal holds what the candidates are chosen by:
    temperature, most candidates (as `top_k`), `top_p` and `min_p`."""
    own: BranchSettings = ctx.settings.own["branch"]
    branches = draw(
        "branch",
        ctx,
        temperature=own.temperature,
        top_k=own.width,
        top_p=own.top_p,
        min_p=own.min_p,
    )
    return where(ctx.may["branch"], branches, explore(ctx))


def follow(ctx: Context) -> Proposal:
    """How one branch goes on: the likeliest token, or one drawn at the rollout temperature."""
    return draw("branch", ctx, temperature=ctx.settings.own["branch"].rollout_temperature)


def control(ctx: Context, token: jax.Array) -> Verdict:
    """Forks the row, and counts that."""
    row: BranchState = ctx.own["branch"]
    return replace(fork(find_candidates(ctx)), own=replace(row, begun=row.begun + 1))


def find_candidates(ctx: Context) -> jax.Array:
    """The tokens that the branches begin with, likeliest first: int32 [W], padded with -1.

    Of the distribution warmed by temperature and Gumbel noise (scaled, on its logits): those that
    min-p admits, of these the shortest prefix that reaches top-p, at most `width`.
    """
    own: BranchSettings = ctx.settings.own["branch"]
    logits = penalise(ctx.logits, ctx)

    def noised(logits: jax.Array) -> jax.Array:
        stream = jnp.int32(STREAM_NOISE)
        numbers = uniforms(ctx.key, ctx.length, jnp.int32(0), stream, logits.shape[0])
        # Else XLA's reshape mover moves a reshape through all that follows, one operation in each
        # round of its passes over the whole program: a tenth of the time to compile it.
        numbers = lax.optimization_barrier(numbers)
        # Finite always: times a row's zero noise, too, it must add nothing.
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, 2.0**-25)))
        return logits + own.noise * gumbel

    logits = lax.cond(any_row(own.noise > 0), noised, lambda logits: logits, logits)
    mass = jnp.exp((logits - jnp.max(logits)) / own.temperature)
    mass = jnp.where((mass >= own.min_p) & (logits > -jnp.inf), mass, 0.0)
    most = min(MAX_WIDTH, logits.shape[0])
    _, ids = top(logits, most)
    shares = mass[ids]
    before = cumulate(shares) - shares
    # At 1 it is off: rounding must not cut the tail.
    reached = jnp.where(own.top_p < 1, own.top_p * jnp.sum(mass), jnp.inf)
    rank = jnp.arange(most, dtype=jnp.int32)
    admitted = ((before < reached) & (shares > 0)) | (rank == 0)
    admitted &= rank < own.width
    return jnp.pad(jnp.where(admitted, ids, -1), (0, MAX_WIDTH - most), constant_values=-1)


def goes_on(observation: Observation, depth: jax.Array, settings: SamplerSettings) -> jax.Array:
    """Whether branches of `depth[B]` tokens (int32) are still in doubt about the next: bool [B]."""
    outside = (observation.regime == LEHV) | (observation.regime == HEHV)
    own: BranchSettings = settings.own["branch"]
    return outside & (depth < own.depth)


def score(sums: jax.Array, depth: jax.Array, settings: SamplerSettings) -> jax.Array:
    """The score of branches of `depth[B]` tokens: float32 [B], nats. `sums[B, 3]` are float32 of
    log p (nats), h (bits) and u (bits^2)."""
    own: BranchSettings = settings.own["branch"]
    logprob, entropy, varentropy = (sums / jnp.maximum(depth, 1)[:, None].astype(jnp.float32)).T
    scores: jax.Array = logprob - own.entropy_weight * entropy - own.varentropy_weight * varentropy
    return scores


BRANCH = Mechanism(
    "branch",
    propose,
    settings=BranchSettings,
    init=lambda: BranchState(begun=jnp.int32(0), forwards=jnp.int32(0)),
    may=may_branch,
    control=control,
    keep=("begun", "forwards"),
    follows_regimes=True,
)
