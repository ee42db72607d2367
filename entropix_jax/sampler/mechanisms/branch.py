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

from entropix_jax.sampler.context import Context, Proposal, draw, either
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
from entropix_jax.sampler.state import Observation, Rows, SamplerState, Step
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


def may_branch(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether neither budget of the row is spent: its forks, and what they cost so far."""
    own: BranchSettings = settings.own["branch"]
    row: BranchState = state.tally.own["branch"]
    affordable = own.max_share * rows.generated.astype(jnp.float32)
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
    return either(ctx.may["branch"], branches, explore(ctx))


def follow(ctx: Context) -> Proposal:
    """How one branch goes on: the likeliest token, or one drawn at the rollout temperature."""
    return draw("branch", ctx, temperature=ctx.settings.own["branch"].rollout_temperature)


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Forks the row, and counts that."""
    row: BranchState = step.tally.own["branch"]
    begun = replace(row, begun=row.begun + acts.astype(jnp.int32))
    candidates, width = lax.cond(
        jnp.any(acts),
        lambda: find_candidates(step, settings),
        lambda: (step.candidates, step.width),
    )
    return replace(
        step,
        tally=replace(step.tally, own={**step.tally.own, "branch": begun}),
        forks=step.forks | acts,
        candidates=jnp.where(acts[:, None], candidates, step.candidates),
        width=jnp.where(acts, width, step.width),
    )


def find_candidates(step: Step, settings: SamplerSettings) -> tuple[jax.Array, jax.Array]:
    """The tokens that the branches begin with, likeliest first, int32 [B, W], and how many count.

    Of the distribution warmed by temperature and Gumbel noise (scaled, on its logits): those that
    min-p admits, of these the shortest prefix that reaches top-p, at most `width`.
    """
    own: BranchSettings = settings.own["branch"]
    rows = step.rows
    logits = jax.vmap(penalise)(step.logits, step.context)

    def noised() -> jax.Array:
        zero = jnp.zeros_like(rows.length)
        numbers = uniforms(rows.keys, rows.length, zero, zero + STREAM_NOISE, logits.shape[-1])
        # Else XLA's reshape mover moves a reshape through all that follows, one operation in each
        # round of its passes over the whole program: a tenth of the time to compile it.
        numbers = lax.optimization_barrier(numbers)
        # Finite always: times a row's zero noise, too, it must add nothing.
        gumbel = -jnp.log(-jnp.log(jnp.maximum(numbers, 2.0**-25)))
        return logits + own.noise[:, None] * gumbel

    logits = lax.cond(jnp.any(own.noise > 0), noised, lambda: logits)
    mass = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / own.temperature[:, None])
    mass = jnp.where((mass >= own.min_p[:, None]) & (logits > -jnp.inf), mass, 0.0)
    most = min(MAX_WIDTH, logits.shape[-1])
    _, ids = top(logits, most)
    shares = jnp.take_along_axis(mass, ids, axis=1)
    before = cumulate(shares) - shares
    # At 1 it is off: rounding must not cut the tail.
    reached = jnp.where(own.top_p < 1, own.top_p * jnp.sum(mass, axis=-1), jnp.inf)
    admitted = (before < reached[:, None]) & (shares > 0)
    admitted = admitted.at[:, 0].set(True)
    ids = jnp.pad(ids, ((0, 0), (0, MAX_WIDTH - most)))
    width = jnp.sum(admitted, axis=-1, dtype=jnp.int32)
    return ids, jnp.minimum(width, own.width)


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
    apply=apply,
    keep=("begun", "forwards"),
    follows_regimes=True,
)
