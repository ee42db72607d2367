"""The context of one row: the argument of arms, filters and controls.

A step builds one `Context` per row and extends it stage by stage. `Arm`, `Filter` and
`control.Control` are functions of one row's context. The step maps them over the batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import custom_batching, lax

from entropix_jax.packed import Tree
from entropix_jax.platforms import for_platform
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import (
    MAX_ATTEMPTS,
    Observation,
    Proposal,
    RowView,
    Tally,
    Trail,
    TrailEntry,
)

# Actions that every sampler has: the most likely token, and one draw.
ARGMAX, SAMPLE = "argmax", "sample"
_LATER: Any = None


@struct.dataclass
class Context(RowView):
    """One row in one step: its `RowView` and the fields below. With a leading axis on every field,
    a batch."""

    settings: SamplerSettings
    parts: Parts = struct.field(pytree_node=False)
    tally: Tally
    trail: Trail
    logits: jax.Array  # float32 [V], the model's
    log_probs: jax.Array  # float32 [V], nats, of those
    observation: Observation
    # Added by the stages of the step; None before that.
    attempt: jax.Array = _LATER  # int32, number of tokens retracted at the next position
    bans: jax.Array = _LATER  # int32 [MAX_ATTEMPTS], those tokens, padded with -1
    metrics: Metrics = _LATER  # after observers, see `as_configured`
    entropies: jax.Array = _LATER  # float32 [2], `Tally.entropies` with this step's
    thresholds: jax.Array = _LATER  # float32 [4], h1, h2 (bits), u1, u2 (bits^2) in this step
    may: dict[str, jax.Array] = _LATER  # bools, whether the row may take mechanisms' actions
    reach: jax.Array = _LATER  # int32, how many of its last tokens the row may retract
    proposal: Proposal = _LATER  # None while arms run
    # float32 [V], the logits with biases, bans, penalties and the noise floor
    penalised: jax.Array = _LATER
    # float32 [V], after temperature and truncation: the token is drawn from their softmax
    truncated: jax.Array = _LATER

    @property
    def regime(self) -> jax.Array:
        """Index into REGIMES, int32."""
        return self.observation.regime

    @property
    def states(self) -> dict[str, Any]:
        """Each mechanism's state, by its name."""
        return self.tally.states

    @property
    def queued(self) -> jax.Array:
        """Number of queued forced tokens: int32."""
        return self.tally.queued

    @property
    def entry(self) -> TrailEntry:
        """The trail's entry of the token at the next position, `history[length]`."""
        logprob = self.log_probs[self.history[self.length]]
        return TrailEntry(logprob, self.proposal, self.tally, self.attempt, self.bans)


# Returns the proposal of one row.
Arm = Callable[[Context], Proposal]
# Returns one row's logits, float32 [V], -inf for a token that is not to be drawn, from its logits.
Filter = Callable[[jax.Array, Context], jax.Array]


def with_attempts(ctx: Context) -> Context:
    """Adds the attempts at one row's next position, from its trail."""

    def before() -> dict[str, jax.Array]:
        entry = ctx.trail.at(ctx.length)
        return {"attempt": entry.attempts, "bans": entry.bans}

    none = {"attempt": jnp.int32(0), "bans": jnp.full(MAX_ATTEMPTS, -1, jnp.int32)}
    return replace(ctx, **if_any(ctx.trail.again, before, none))


def as_configured(metrics: Metrics, settings: SamplerSettings) -> Metrics:
    """Returns one row's metrics with `attn_entropy_norm` and `agreement_published` under the plain
    names where the settings say so."""
    is_norm, is_published = settings.attn_entropy_normalised, settings.agreement_published
    return replace(
        metrics,
        attn_entropy=jnp.where(is_norm, metrics.attn_entropy_norm, metrics.attn_entropy),
        agreement=jnp.where(is_published, metrics.agreement_published, metrics.agreement),
    )


def draw(
    action: str,
    ctx: Context,
    *,
    temperature: float | jax.Array | None = None,
    top_k: int | jax.Array | None = None,
    top_p: float | jax.Array | None = None,
    min_p: float | jax.Array | None = None,
    num_candidates: int | jax.Array = 1,
) -> Proposal:
    """Returns a proposal for an action. Omitted arguments have the base values. Of several
    candidates the most likely one becomes the token."""
    base = ctx.settings.base
    return Proposal(
        action=jnp.int32(ctx.parts.action(action)),
        temperature=jnp.maximum(base.temperature if temperature is None else temperature, 0.0),
        top_k=base.top_k if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=base.top_p if top_p is None else jnp.asarray(top_p, jnp.float32),
        min_p=base.min_p if min_p is None else jnp.asarray(min_p, jnp.float32),
        num_candidates=jnp.asarray(num_candidates, jnp.int32),
    )


def where(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` where the condition, a bool, holds, else `other`."""
    chosen: Tree = jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
    return chosen


def where_rows(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` in the rows where the condition [B] holds, else `other`; leaves [B, ...]."""
    chosen: Tree = jax.vmap(where)(condition, one, other)
    return chosen


def if_any(condition: jax.Array, work: Callable[[], Tree], otherwise: Tree) -> Tree:
    """Returns `work()` of one row where the condition, a bool, holds, else `otherwise`. A step in
    which it holds for no row computes nothing."""

    def some() -> Tree:
        return where(condition, work(), otherwise)

    found: Tree = lax.cond(_any_row(condition), some, lambda: otherwise)
    return found


def if_needed(needs: jax.Array, work: Callable[..., Tree], otherwise: Tree, *args: Any) -> Tree:
    """Returns `work(*args)` of one row where `needs`, a bool, holds, else `otherwise`.

    For expensive work that few rows need. A CPU computes only these rows, one after another; other
    devices compute all rows at once. Pass traced values as `args`, not in closures.
    """

    def alone(needs: jax.Array, otherwise: Tree, args: Any) -> Tree:
        found: Tree = lax.cond(needs, lambda: work(*args), lambda: otherwise)
        return found

    def one_by_one(*args: Any) -> Tree:
        found: Tree = custom_batching.sequential_vmap(alone)(needs, otherwise, args)
        return found

    return if_any(needs, lambda: for_platform(*args, cpu=one_by_one, otherwise=work), otherwise)


@custom_batching.custom_vmap
def _any_row(condition: jax.Array) -> jax.Array:
    """Returns whether a bool holds in any row that the function is mapped over. It has no row axis,
    so under `vmap` a `lax.cond` on it stays a condition."""
    return condition


@_any_row.def_vmap
def _(size: int, mapped: Any, condition: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.any(condition), False
