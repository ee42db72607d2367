"""`branch`: rolls several candidates out and commits the best (document 004, "Branching"; document
002, "Branching vs Thinking Tokens").

This page has the settings, the arm and the row's budget. `sampler.rollout` chooses the candidates,
follows and scores them; `branching` gives it the model, and commits what is best:

    score = mean(log p) - entropy_weight * mean(h) - varentropy_weight * mean(u)
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import explore
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView, draw, either
from entropix_jax.sampler.settings import (
    COEFFICIENT,
    COUNT,
    TEMPERATURE,
    SamplerSettings,
    flag,
    number,
)
from entropix_jax.sampler.state import Rows, SamplerState, Step

MAX_WIDTH = 8  # W, branches of one step
MAX_DEPTH = 32  # R, tokens of a branch


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
    per_row: jax.Array = number(*COUNT, integer=True)  # steps of a row that branch


@struct.dataclass
class BranchState:
    """Of one row."""

    begun: jax.Array  # int32, steps that branched


def may_branch(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether the row's budget of branches is not spent."""
    own: BranchSettings = settings.own["branch"]
    row: BranchState = state.tally.own["branch"]
    return row.begun < own.per_row


def propose(metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
    """Branches, or what `explore` does. The proposal holds what the candidates are chosen by:
    temperature, most candidates (as `top_k`), `top_p` and `min_p`."""
    own: BranchSettings = settings.own["branch"]
    branches = draw(
        "branch",
        settings,
        temperature=own.temperature,
        top_k=own.width,
        top_p=own.top_p,
        min_p=own.min_p,
    )
    return either(row.may["branch"], branches, explore(metrics, settings, row))


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Leaves the row to the rollout, and counts it."""
    begun = BranchState(begun=step.tally.own["branch"].begun + acts.astype(jnp.int32))
    tally = replace(step.tally, own={**step.tally.own, "branch": begun})
    return replace(step, tally=tally, rolls_out=step.rolls_out | acts)


BRANCH = Mechanism(
    "branch",
    propose,
    settings=BranchSettings,
    init=lambda: BranchState(begun=jnp.int32(0)),
    may=may_branch,
    apply=apply,
    follows_regimes=True,
)
