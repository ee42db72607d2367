"""What arms and filters see of their row, and what an arm returns.

A step builds one `Context` of each row. The parts `propose`, `logits`, `rule`, `reweigh` and
`learn` of a mechanism get that of one row.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import custom_batching, lax

from entropix_jax.platforms import for_platform
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import SamplerSettings

Tree = TypeVar("Tree")


@struct.dataclass
class Proposal:
    """Sampling parameters of a row's next token; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into `SamplerSettings.mechanisms`
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off
    draws: jax.Array  # int32, candidates
    rule: jax.Array  # int32, index into the mechanisms; top_k, top_p and min_p are for `nucleus`


@struct.dataclass
class Context:
    """One row in one step. With a leading axis on every field, each row of a batch."""

    log_probs: jax.Array  # float32 [V], nats, of the model's own distribution
    metrics: Metrics  # see `as_configured`
    regime: jax.Array  # int32, index into REGIMES
    rounds: jax.Array  # int32, see `regimes.count_rounds`; 0: the row does not loop
    settings: SamplerSettings
    thresholds: jax.Array  # float32 [4], h1, h2 (bits), u1, u2 (bits^2) in this step
    own: dict[str, Any]  # each mechanism's part of the row's state, by its name
    may: dict[str, jax.Array]  # bool, by action: whether the row may take it now
    history: jax.Array  # int32 [S], the tokens so far, prompt included, then anything
    length: jax.Array  # int32, how many so far
    generated: jax.Array  # int32, how many of them were generated
    key: jax.Array  # uint32 [2], see `sampler.keys`
    attempt: jax.Array  # int32, how many tokens were retracted at the next position
    bans: jax.Array  # int32 [MAX_ATTEMPTS], those tokens; -1: none
    branch: jax.Array  # int32, which branch of a fork the row is; -1: none
    # The proposal in effect; None while arms run.
    proposal: Proposal = None  # type: ignore[assignment]


# Returns the proposal of one row.
Arm = Callable[[Context], Proposal]
# Returns one row's logits, float32 [V], -inf for a token that is not to be drawn, from its logits.
Filter = Callable[[jax.Array, Context], jax.Array]


def as_configured(metrics: Metrics, settings: SamplerSettings) -> Metrics:
    """Returns one row's metrics with `attn_entropy_norm` and `agreement_published` under the plain
    names where the settings say so."""
    return replace(
        metrics,
        attn_entropy=jnp.where(
            settings.attn_entropy_normalised, metrics.attn_entropy_norm, metrics.attn_entropy
        ),
        agreement=jnp.where(
            settings.agreement_published, metrics.agreement_published, metrics.agreement
        ),
    )


def draw(
    action: str,
    ctx: Context,
    *,
    temperature: float | jax.Array | None = None,
    top_k: int | jax.Array | None = None,
    top_p: float | jax.Array | None = None,
    min_p: float | jax.Array | None = None,
    draws: int | jax.Array = 1,
) -> Proposal:
    """Returns a proposal under the name of an action, with the base values for what is omitted."""
    settings, base = ctx.settings, ctx.settings.base
    return Proposal(
        action=jnp.int32(settings.action(action)),
        temperature=jnp.maximum(base.temperature if temperature is None else temperature, 0.0),
        top_k=base.top_k if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=base.top_p if top_p is None else jnp.asarray(top_p, jnp.float32),
        min_p=base.min_p if min_p is None else jnp.asarray(min_p, jnp.float32),
        draws=jnp.asarray(draws, jnp.int32),
        rule=settings.rule,
    )


def either(condition: jax.Array, one: Proposal, other: Proposal) -> Proposal:
    """Returns `one` where the condition, a bool, holds, else `other`."""
    chosen: Proposal = jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
    return chosen


def scaled_top_k(ctx: Context, top_k: jax.Array) -> jax.Array:
    """Returns `top_k`, or 0 where the base top-k is off."""
    return jnp.where(ctx.settings.base.top_k == 0, 0, top_k)


def to_int(x: jax.Array) -> jax.Array:
    """Returns a float32 as int32, clipped to 0 to 2^30."""
    return jnp.clip(x, 0.0, 2.0**30).astype(jnp.int32)


def where_rows(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` in the rows where the condition [B] holds, else `other`; leaves [B, ...]."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    chosen: Tree = jax.tree.map(choose, one, other)
    return chosen


@custom_batching.custom_vmap
def any_row(condition: jax.Array) -> jax.Array:
    """Returns whether a bool of one row holds in any row that the function is mapped over. A
    `lax.cond` on it stays a condition, so what no row needs is not computed."""
    return condition


@any_row.def_vmap
def _(size: int, mapped: Any, condition: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.any(condition), False


def if_needed(needs: jax.Array, work: Callable[..., Tree], fallback: Tree, *args: Any) -> Tree:
    """Returns `work(*args)` of one row where `needs`, a bool, holds, else `fallback`.

    For work that few rows need and that takes many passes over the vocabulary. Under `vmap` a CPU
    runs it only for the rows that need it, one after another; other devices run it for all rows if
    any needs it. Traced values are passed as `args`, not in closures.
    """

    def alone(row: tuple[jax.Array, Tree, Any]) -> Tree:
        needs, fallback, args = row
        made: Tree = lax.cond(needs, lambda: work(*args), lambda: fallback)
        return made

    def one_by_one(rows: Any) -> Tree:
        made: Tree = lax.cond(jnp.any(rows[0]), lambda: lax.map(alone, rows), lambda: rows[1])
        return made

    def side_by_side(rows: Any) -> Tree:
        needs, fallback, args = rows

        def all_rows() -> Tree:
            made: Tree = jax.vmap(work)(*args)
            chosen: Tree = where_rows(needs, made, fallback)
            return chosen

        made: Tree = lax.cond(jnp.any(needs), all_rows, lambda: fallback)
        return made

    of_row = custom_batching.custom_vmap(alone)

    @of_row.def_vmap
    def of_rows(size: int, mapped: Any, row: Any) -> tuple[Tree, Any]:
        rows = jax.tree.map(
            lambda x, is_mapped: x if is_mapped else jnp.broadcast_to(x, (size, *jnp.shape(x))),
            row,
            mapped[0],
        )
        made = for_platform(rows, cpu=one_by_one, otherwise=side_by_side)
        return made, jax.tree.map(lambda _: True, made)

    found: Tree = of_row((needs, fallback, args))
    return found
