"""Forks: a row continues as several branches in the same batch, and then as the best of them.

The first branch runs in the row's own slot, the others in lanes, additional rows of the batch. A
row that is to fork waits until there is a lane for each branch. Rows that have waited longest come
first, so none starves, and the width of a fork does not depend on other rows. An ended branch keeps
its lane until the last one has ended. Forks that have begun need no more lanes.

Invariants between steps, where `start` is the position of the branches' first tokens:

- A row that runs has the text `history[:length + 1]`, with `length` its cache's: its last token is
  not cached. A row that waits to fork has the text `history[:start]`, all cached: `length ==
  start`.
- Branch 0 of a fork is in the row's slot. Branch i > 0 is in a lane, whose `parent` is the slot.
- A branch has evaluated the tokens `history[start:length]`. Its score is their mean. The next one
  is `history[length]`.
- A lane is free if its status is STOPPED. Its `branch` is then -1.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FORKS,
    RUNNING,
    STOPPED,
    WAITS_FOR_CHOICE,
    DecodeState,
    ForkEnd,
    status_after,
    without_keys,
)
from entropix_jax.model.mesh import local_index
from entropix_jax.model.write import copy_runs
from entropix_jax.packed import Tree, pack
from entropix_jax.sampler.context import where_rows
from entropix_jax.sampler.regimes import HEHV, LEHV
from entropix_jax.sampler.settings import ENDS_BRANCH, MAX_WIDTH, Parts
from entropix_jax.sampler.state import Choice, Step, with_token

_BLOCK = 32  # positions that are copied at once; larger blocks take long to compile

# The arguments of `copy_runs`: int32 [], and four times int32 [lanes].
Runs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]

# Fields that a branch copies from its row, besides cache and tally. It neither asks the host nor
# rewinds.
_COPIED = "history confidences prompt_length budget keys settings eos_ids fork".split()


def is_forked(state: DecodeState) -> jax.Array:
    """Whether each row waits for lanes, or is one of several branches: bool [P]."""
    alive = (state.status == RUNNING) | (state.status == BRANCH_ENDED)
    branches = alive & (state.fork.branch >= 0) & (state.fork.width > 1)
    return (state.status == FORKS) | branches


def free_lanes(state: DecodeState) -> DecodeState:
    """Ends the branches of rows that the host has ended, and frees their lanes."""
    parent = local_index(state.fork.parent, state.status.shape[0])
    stopped = jnp.take(state.status, parent, mode="clip") == STOPPED
    return _leave(state, stopped & (state.fork.branch >= 0))


def want_fork(state: DecodeState, step: Step, parts: Parts) -> DecodeState:
    """Registers the forks of a sampler step. A fork with a single branch begins at once."""
    if not parts.acts:
        return state
    wants, places = step.forks, state.status.shape[0]
    chex.assert_shape((wants, step.width), (places,))
    chex.assert_shape(step.candidates, (places, MAX_WIDTH))

    def register(state: DecodeState) -> tuple[DecodeState, None]:
        new = replace(
            state.fork,
            width=step.width,
            waited=jnp.zeros_like(step.width),
            candidates=step.candidates,
            scores=jnp.take_along_axis(step.scored, step.candidates, axis=1),
            start=step.rows.length,
            forwards=state.forwards,
            tally=pack(step.tally_before, 1),
        )
        fork = where_rows(wants, new, state.fork)
        state = replace(state, fork=fork, status=jnp.where(wants, FORKS, state.status))
        return _begin(state, wants & (step.width == 1), jnp.zeros_like(step.width)), None

    return _if_any(wants, register, state, None)[0]


def start_forks(state: DecodeState) -> DecodeState:
    """Forks the rows that wait, as far as there are free lanes."""
    chex.assert_tree_shape_prefix(state.fork, state.status.shape)
    waits = state.status[: state.status.shape[0] - state.lanes] == FORKS
    state, runs = _if_any(waits, _start, state, _no_runs(state))
    return _copy(state, runs)


def _start(state: DecodeState) -> tuple[DecodeState, Runs]:
    batch = state.status.shape[0] - state.lanes
    waits = state.status[:batch] == FORKS
    free = state.status[batch:] == STOPPED

    # Which rows: first come, first served.
    order = jnp.argsort(jnp.where(waits, -state.fork.waited[:batch], 1), stable=True)
    needs = jnp.where(waits, state.fork.width[:batch] - 1, 0)[order]
    taken = jnp.cumsum(needs)
    begins_in_order = waits[order] & (taken <= jnp.sum(free))
    begins = jnp.zeros_like(waits).at[order].set(begins_in_order)
    number = jnp.max(jnp.where(begins_in_order, taken, 0))

    # Which lanes, for which branches of them.
    lane = jnp.arange(state.lanes, dtype=jnp.int32)
    at = jnp.minimum(jnp.searchsorted(taken, lane, side="right"), batch - 1)
    target = batch + jnp.nonzero(free, size=state.lanes, fill_value=0)[0].astype(jnp.int32)
    branch = lane - (taken - needs)[at] + 1
    source = order[at].astype(jnp.int32)
    waited = state.fork.waited.at[:batch].add((waits & ~begins).astype(jnp.int32))
    state = replace(state, fork=replace(state.fork, waited=waited))

    # Each branch starts as a copy of the row.
    used = jnp.where(lane < number, target, state.status.shape[0])
    place = jnp.arange(state.status.shape[0], dtype=jnp.int32)
    origin = place.at[used].set(source, mode="drop")
    length, tally, rest = jax.tree.map(
        lambda x: jnp.take(x, origin, axis=0, mode="clip"),
        (
            state.cache.length,
            state.sampler.tally,
            {name: getattr(state, name) for name in _COPIED},
        ),
    )
    cache, sampler = replace(state.cache, length=length), replace(state.sampler, tally=tally)
    state = replace(state, **rest, cache=cache, sampler=sampler)

    # The branches begin.
    own = jnp.zeros(state.lanes, bool)
    new = jnp.concatenate([begins, own]).at[used].set(True, mode="drop")
    branches = jnp.zeros_like(state.fork.branch).at[used].set(branch, mode="drop")
    runs = number, source, target, jnp.zeros_like(target), length[target]
    return _begin(state, new, branches), runs


def grow(
    state: DecodeState, choice: Choice, step: Step, last: jax.Array, parts: Parts
) -> tuple[DecodeState, jax.Array]:
    """Adds the evaluated token of each branch, `last[P]`, to its score. Returns also which branches
    end there, bool [P]."""
    if not parts.acts:
        return state, jnp.zeros(last.shape, bool)
    fork, rows, seen = state.fork, step.rows, choice.observation
    chex.assert_shape((last, choice.token, seen.regime, rows.length), state.status.shape)
    own = state.settings.unpack().own
    branch, clarify = own["branch"], own["clarify"]
    depth, by_regime = branch.depth, branch.until.by_regime
    ends_with = jnp.take_along_axis(branch.until.of_token, last[:, None], axis=1)[:, 0]
    if "clarify" in parts.used:
        measured = _measured(state)
        flags = jnp.take_along_axis(clarify.until, last[:, None], axis=1)[:, 0]
        depth = jnp.where(measured, clarify.tokens, depth)
        by_regime &= ~measured
        ends_with = jnp.where(measured, (flags & ENDS_BRANCH) > 0, ends_with)
    grows = rows.running & (rows.branch >= 0)
    is_certain = (seen.regime != LEHV) & (seen.regime != HEHV)
    ends = (
        ~choice.finite
        | jnp.any(last[:, None] == state.eos_ids, axis=-1)
        | (rows.remaining <= 0)
        | (rows.length - fork.start >= depth)
        | (by_regime & is_certain)
        | ends_with
    )
    logprob = jnp.take_along_axis(step.scored, choice.token[:, None], axis=1)[:, 0]
    terms = jnp.stack([fork.logprob, step.metrics.entropy, step.metrics.varentropy], axis=-1)
    fork = replace(
        fork,
        logprob=jnp.where(grows, logprob, fork.logprob),
        sums=jnp.where(grows[:, None], fork.sums + terms, fork.sums),
        failed=fork.failed | (grows & ~choice.finite),
    )
    return replace(state, fork=fork), grows & ends


def join_forks(state: DecodeState, parts: Parts) -> tuple[DecodeState, ForkEnd]:
    """Ends the forks whose branches have all ended, and decides what each of their rows commits.

    - `waits`: nothing. The row goes back to the fork and asks the host: the choice is ambiguous, or
      the fork is one of `clarify`.
    - `whole`: all tokens of the best branch, whose state replaces the row's.
    - `forced`: the first token of the best branch. The row goes back to the fork, and its next step
      takes that token.
    """
    places = state.status.shape[0]
    chex.assert_tree_shape_prefix((state.cache.length, state.fork, state.sampler), (places,))
    no, zero = jnp.zeros(places, bool), jnp.zeros(places, jnp.int32)
    none = ForkEnd(no, zero, zero, jnp.zeros((places, MAX_WIDTH), jnp.float32), no)
    if not parts.acts:
        return state, none
    batch = places - state.lanes
    slots = jnp.arange(batch, dtype=jnp.int32)
    # A slot holds its own row's first branch. Without lanes `parent` is not a local index.
    parent = local_index(state.fork.parent, places).at[:batch].set(slots)
    mine = (state.fork.branch >= 0)[None] & (parent[None] == slots[:, None])  # [B, P]
    open_ = mine & (state.status != BRANCH_ENDED)[None]
    joins = jnp.any(mine, axis=1) & ~jnp.any(open_, axis=1)
    join = partial(_join, mine=mine, joins=joins, parts=parts)
    state, (runs, end) = _if_any(joins, join, state, (_no_runs(state), none))
    return _copy(state, runs), end


def _join(
    state: DecodeState, mine: jax.Array, joins: jax.Array, parts: Parts
) -> tuple[DecodeState, tuple[Runs, ForkEnd]]:
    """Ends the forks of the rows that `joins[B]`, whose branches are `mine[B, P]`."""
    batch, places = mine.shape
    slots, fork = jnp.arange(batch, dtype=jnp.int32), state.fork

    # The best branch of each row.
    depth = state.cache.length - fork.start
    scores, best, winner = _rank(state, mine, depth)
    is_best = jnp.arange(MAX_WIDTH, dtype=jnp.int32)[None, :] == best[:, None]
    first = jnp.max(scores, axis=-1)
    second = jnp.max(jnp.where(is_best, -jnp.inf, scores), axis=-1)
    own = jax.tree.map(lambda x: x[:batch], state.settings).unpack().own["branch"]
    ambiguous = (second > -jnp.inf) & (first - second < own.margin)
    evaluated = counted = jnp.sum(jnp.where(mine, depth[None], 0), axis=1)
    depth = depth[winner]

    # What each row commits.
    asks = ambiguous & state.asks_for_choice[:batch]
    if "clarify" in parts.used:
        measured = _measured(state)[:batch]
        asks, ambiguous = asks | measured, ambiguous & ~measured
        counted = jnp.where(measured, 0, evaluated)
    waits = joins & asks
    whole = joins & ~waits & (own.commit_all | (depth == 1))
    forced = joins & ~waits & ~whole
    committed = jnp.where(whole, depth, 0)

    # The row's new state.
    state, runs = _take_winners(state, whole & (winner != slots), winner)
    tallies = jax.tree.map(lambda x: x[:batch], (state.sampler.tally, fork.tally.unpack()))
    tally = where_rows(whole, *tallies)
    branch = tally.states["branch"]
    tally = replace(
        tally,
        queued=jnp.where(forced, 1, tally.queued),
        queue_action=jnp.where(forced, parts.action("branch"), tally.queue_action),
        states={**tally.states, "branch": replace(branch, forwards=branch.forwards + counted)},
    )
    start, history = fork.start[:batch], state.history[:batch]
    chosen = jnp.take_along_axis(fork.candidates[:batch], best[:, None], axis=1)[:, 0]
    target = jnp.where(forced, start, history.shape[1])
    end = start + committed
    last = jnp.take_along_axis(history, jnp.maximum(end - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.budget[:batch] - (end - state.prompt_length[:batch])
    status = status_after(remaining, last, state.eos_ids[:batch])
    status = jnp.where(waits, WAITS_FOR_CHOICE, jnp.where(forced, RUNNING, status))

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        return all_.at[:batch].set(where_rows(joins, new, all_[:batch]))

    state = replace(
        state,
        # The last token is not cached: the next step reads it.
        cache=replace(state.cache, length=put(state.cache.length, end - 1)),
        history=put(state.history, jax.vmap(with_token)(state.history[:batch], target, chosen)),
        sampler=replace(state.sampler, tally=jax.tree.map(put, state.sampler.tally, tally)),
        fork=replace(fork, branch=put(fork.branch, jnp.full_like(best, -1))),
        forwards=put(state.forwards, fork.forwards[:batch] + evaluated),
        status=put(state.status, status),
    )
    over = jnp.any(mine & joins[:, None], axis=0)
    state = _leave(state, over & (jnp.arange(places, dtype=jnp.int32) >= batch))

    def fill(rows: jax.Array) -> jax.Array:
        """[B, ...] as [P, ...], 0 in the lanes."""
        return jnp.pad(rows, [(0, places - batch), *[(0, 0)] * (rows.ndim - 1)])

    end_ = ForkEnd(joins, best, committed, scores, ambiguous)
    return state, (runs, jax.tree.map(fill, end_))


def _measured(state: DecodeState) -> jax.Array:
    """Whether the fork of each row or branch is one of `clarify`: bool [P]."""
    measured: jax.Array = state.sampler.tally.states["clarify"].measured
    return measured


def _rank(
    state: DecodeState, mine: jax.Array, depth: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores the branches of each row, `mine[B, P]`, with `depth[P]` tokens each.

    Returns their scores, float32 [B, W] nats, -inf for a missing or failed branch; the index of the
    best one, int32 [B]; and its place in the state, int32 [B].
    """
    fork, own = state.fork, state.settings.unpack().own["branch"]
    means = fork.sums / jnp.maximum(depth, 1)[:, None].astype(jnp.float32)
    logprob, entropy, varentropy = means.T
    score = logprob - own.entropy_weight * entropy - own.varentropy_weight * varentropy
    score = jnp.where(fork.failed, -jnp.inf, score)
    number = jnp.arange(MAX_WIDTH, dtype=jnp.int32)[:, None]
    at = mine[:, None] & (fork.branch[None] == number)[None]  # [B, W, P]
    scores = jnp.max(jnp.where(at, score[None, None], -jnp.inf), axis=-1)
    place = jnp.arange(len(score), dtype=jnp.int32)[None, None]
    places = jnp.max(jnp.where(at, place, 0), axis=-1)
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return scores, best, jnp.take_along_axis(places, best[:, None], axis=1)[:, 0]


def _begin(state: DecodeState, begins: jax.Array, branch: jax.Array) -> DecodeState:
    """Starts branches, `branch[P]` of their forks, with their candidates."""
    fork = state.fork
    token, logprob = (
        jnp.take_along_axis(x, branch[:, None], axis=1)[:, 0]
        for x in (fork.candidates, fork.scores)
    )
    target = jnp.where(begins, fork.start, state.history.shape[1])
    return replace(
        state,
        history=jax.vmap(with_token)(state.history, target, token),
        fork=replace(
            fork,
            branch=jnp.where(begins, branch, fork.branch),
            logprob=jnp.where(begins, logprob, fork.logprob),
            sums=jnp.where(begins[:, None], 0.0, fork.sums),
            failed=fork.failed & ~begins,
        ),
        status=jnp.where(begins, RUNNING, state.status),
    )


def _leave(state: DecodeState, lanes: jax.Array) -> DecodeState:
    """Empties lanes, bool [P]."""
    return replace(
        state,
        fork=replace(state.fork, branch=jnp.where(lanes, -1, state.fork.branch)),
        status=jnp.where(lanes, STOPPED, state.status),
    )


def _take_winners(
    state: DecodeState, takes: jax.Array, winner: jax.Array
) -> tuple[DecodeState, Runs]:
    """Copies the branch's own state from the lane `winner[B]` to the rows of `takes[B]`, except for
    the cache's runs."""
    if not state.lanes:
        return state, _no_runs(state)
    batch = takes.shape[0]
    place = jnp.arange(state.status.shape[0], dtype=jnp.int32)
    origin = place.at[:batch].set(jnp.where(takes, winner, place[:batch]))
    history, confidences, tally = jax.tree.map(
        lambda x: jnp.take(x, origin, axis=0, mode="clip"),
        (state.history, state.confidences, state.sampler.tally),
    )
    rows = jnp.nonzero(takes, size=state.lanes, fill_value=0)[0].astype(jnp.int32)
    lanes = winner[rows]
    runs = jnp.sum(takes), lanes, rows, state.fork.start[rows], state.cache.length[lanes]
    sampler = replace(state.sampler, tally=tally)
    return replace(state, history=history, confidences=confidences, sampler=sampler), runs


def _if_any(
    condition: jax.Array,
    work: Callable[[DecodeState], tuple[DecodeState, Tree]],
    state: DecodeState,
    otherwise: Tree,
) -> tuple[DecodeState, Tree]:
    """Returns `work(state)` if the condition holds for any row, else the state and `otherwise`.

    The work does not see keys and values: a condition would copy all of them. `_copy` copies them
    in a loop afterwards, in place.
    """
    small, rest = lax.cond(
        jnp.any(condition), work, lambda small: (small, otherwise), without_keys(state)
    )
    cache = replace(state.cache, length=small.cache.length)
    return replace(small, cache=cache), rest


def _no_runs(state: DecodeState) -> Runs:
    none = jnp.zeros(state.lanes, jnp.int32)
    return jnp.int32(0), none, none, none, none


def _copy(state: DecodeState, runs: Runs) -> DecodeState:
    """Copies runs of keys and values."""
    if not state.lanes:
        return state
    return replace(state, cache=copy_runs(state.cache, *runs, block=_BLOCK))
