"""What a mechanism sees of its row, and what its parts return: three protocols, one argument.

A step builds one `Context` of each row, and adds to it as it goes on. `Arm`, `Filter` and `Control`
are functions of it for one row; a step maps them over the rows of the batch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import custom_batching, lax

from entropix_jax.platforms import for_platform
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import Proposal, Rows, SamplerState, Trail, Tree


@struct.dataclass
class Context:
    """One row in one step. With a leading axis on every field, each row of a batch."""

    # The row.
    settings: SamplerSettings
    parts: Parts = struct.field(pytree_node=False)
    vocab_size: int = struct.field(pytree_node=False)
    own: dict[str, Any]  # each mechanism's part of the row's state, by its name
    queued: jax.Array  # int32, forced tokens that are still to come
    queue_action: jax.Array  # int32, the action that they are forced for
    trail: Trail  # its last positions
    history: jax.Array  # int32 [S], the tokens so far, prompt included, then anything
    length: jax.Array  # int32, how many so far
    generated: jax.Array  # int32, how many of them were generated
    remaining: jax.Array  # int32, how many may still be committed, at least 1
    eos_ids: jax.Array  # int32 [E], the tokens that end the row; -1 matches none
    asks: jax.Array  # bool: the host is asked for thoughts
    key: jax.Array  # uint32 [2], see `sampler.keys`
    branch: jax.Array  # int32, which branch of a fork the row is; -1: none
    attempt: jax.Array  # int32, how many tokens were retracted at the next position
    bans: jax.Array  # int32 [MAX_ATTEMPTS], those tokens; -1: none
    # What the step measured; None before it did.
    logits: jax.Array = None  # type: ignore[assignment]  # float32 [V], as the model gave them
    log_probs: jax.Array = None  # type: ignore[assignment]  # float32 [V], nats, of those
    metrics: Metrics = None  # type: ignore[assignment]  # see `as_configured`
    regime: jax.Array = None  # type: ignore[assignment]  # int32, index into REGIMES
    # int32, see `regimes.count_rounds`; 0: the row does not loop
    rounds: jax.Array = None  # type: ignore[assignment]
    # float32 [4], h1, h2 (bits), u1, u2 (bits^2) in this step
    thresholds: jax.Array = None  # type: ignore[assignment]
    # What the row may do: by action, a bool; and how many of its last tokens it may take back.
    may: dict[str, jax.Array] = None  # type: ignore[assignment]
    reach: jax.Array = None  # type: ignore[assignment]  # int32
    proposal: Proposal = None  # type: ignore[assignment]  # in effect; None while arms run


# What a row does in a step.
COMMIT, FORCE, REWIND, FORK, WAIT, END = range(6)


@struct.dataclass
class Verdict:
    """What a row does instead of just committing its token. The functions below make one."""

    kind: jax.Array  # int32, COMMIT to END
    # int32 [n], padded with -1: the tokens that are forced, or that branches begin with.
    tokens: jax.Array
    back: jax.Array  # int32, how many tokens are taken back, at most `Context.reach`
    own: Any = None  # the mechanism's part of the state where it acts; None: as it is


# Returns the proposal of one row.
Arm = Callable[[Context], Proposal]
# Returns one row's logits, float32 [V], -inf for a token that is not to be drawn, from its logits.
Filter = Callable[[jax.Array, Context], jax.Array]
# Returns what one row does, given the token drawn, int32, which stands in `history[length]`.
Control = Callable[[Context, jax.Array], Verdict]

_NO_TOKENS = (-1,)


def force(tokens: jax.Array) -> Verdict:
    """The row commits these tokens, int32 [n] padded with -1, one a step from this one on, as far
    as its budget reaches. Without any it commits the drawn token."""
    return _verdict(FORCE, tokens)


def rewind(back: jax.Array) -> Verdict:
    """The row goes back by `back` tokens, int32, at most `Context.reach`, and draws the position
    again, without the token that was there; with 0 it is the drawn one."""
    return _verdict(REWIND, back=back)


def fork(candidates: jax.Array) -> Verdict:
    """The row goes on as several branches, which begin with these tokens, int32 [n] padded with
    -1, and then as the best of them."""
    return _verdict(FORK, candidates)


def wait() -> Verdict:
    """The row waits for the host's tokens, as `inject` does: only where `Context.asks`."""
    return _verdict(WAIT)


def end() -> Verdict:
    """The row ends with the drawn token, as with an end token."""
    return _verdict(END)


def when(condition: jax.Array, verdict: Verdict, own: Any = None) -> Verdict:
    """The verdict where the condition, a bool, holds; elsewhere the row commits its token. `own` is
    the mechanism's part of the state where it acts."""
    return replace(verdict, kind=jnp.where(condition, verdict.kind, COMMIT), own=own)


def _verdict(kind: int, tokens: Any = _NO_TOKENS, back: Any = 0) -> Verdict:
    return Verdict(jnp.int32(kind), jnp.asarray(tokens, jnp.int32), jnp.asarray(back, jnp.int32))


def context_of(settings: SamplerSettings, state: SamplerState, row: Rows, parts: Parts) -> Context:
    """Returns the context of one row before anything is measured."""
    tally, trail = state.tally, state.trail
    there, again = trail.at(row.length), trail.again
    return Context(
        settings=settings,
        parts=parts,
        vocab_size=row.vocab_size,
        own=tally.own,
        queued=tally.queued,
        queue_action=tally.queue_action,
        trail=trail,
        history=row.history,
        length=row.length,
        generated=row.generated,
        remaining=row.remaining,
        eos_ids=row.eos_ids,
        asks=row.asks,
        key=row.keys,
        branch=row.branch,
        attempt=jnp.where(again, there.attempts, 0),
        bans=jnp.where(again, there.bans, -1),
    )


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
        action=jnp.int32(ctx.parts.action(action)),
        temperature=jnp.maximum(base.temperature if temperature is None else temperature, 0.0),
        top_k=base.top_k if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=base.top_p if top_p is None else jnp.asarray(top_p, jnp.float32),
        min_p=base.min_p if min_p is None else jnp.asarray(min_p, jnp.float32),
        draws=jnp.asarray(draws, jnp.int32),
        rule=settings.rule,
    )


def scaled_top_k(ctx: Context, top_k: jax.Array) -> jax.Array:
    """Returns `top_k`, or 0 where the base top-k is off."""
    return jnp.where(ctx.settings.base.top_k == 0, 0, top_k)


def to_int(x: jax.Array) -> jax.Array:
    """Returns a float32 as int32, clipped to 0 to 2^30."""
    return jnp.clip(x, 0.0, 2.0**30).astype(jnp.int32)


def where(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` where the condition, a bool, holds, else `other`."""
    chosen: Tree = jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
    return chosen


def where_rows(condition: jax.Array, one: Tree, other: Tree) -> Tree:
    """`one` in the rows where the condition [B] holds, else `other`; leaves [B, ...]."""
    chosen: Tree = jax.vmap(where)(condition, one, other)
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
