"""Forks: a row goes on as several branches, side by side with all other rows, and then as the best.

The first branch runs in the row's own slot, the others in lanes, rows of the batch beside its
slots. A row that wants to fork waits until there is a lane for each: rows that have waited longest
come first, so none starves, and none forks narrower than alone. A branch that has ended keeps its
lane until the last one has; a fork needs no further lanes once it has begun, so all forks end.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FINISHED_STOP,
    FORKS,
    RUNNING,
    WAITS_FOR_CHOICE,
    DecodeState,
    finish_of,
)
from entropix_jax.model.mesh import local_index
from entropix_jax.model.write import copy_runs
from entropix_jax.sampler.context import where_rows
from entropix_jax.sampler.history import with_token
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH, goes_on, score
from entropix_jax.sampler.state import Rows, Step
from entropix_jax.sampler.step import Choice

_BLOCK = MAX_DEPTH  # positions that are copied at once; larger blocks take long to compile

# What a branch needs of its row besides cache and tally. It asks the host nothing and goes back
# nowhere.
_COPIED = "history confidences prompt_length budget keys settings eos_ids fork unsound".split()


@struct.dataclass
class Joined:
    """The forks that ended in a step; see `StepRecord` for the fields, all [B]."""

    joins: jax.Array
    best: jax.Array
    committed: jax.Array
    scores: jax.Array
    ambiguous: jax.Array


def is_forked(state: DecodeState) -> jax.Array:
    """Whether each row waits for lanes, or is a branch with others beside it: bool [P]."""
    alive = (state.finish == RUNNING) | (state.finish == BRANCH_ENDED)
    return (state.finish == FORKS) | (alive & (state.fork.branch >= 0) & (state.fork.width > 1))


def free_lanes(state: DecodeState) -> DecodeState:
    """Frees the lanes of rows that the host has ended."""
    parent = local_index(state.fork.parent, state.finish.shape[0])
    stopped = jnp.take(state.finish, parent, mode="clip") == FINISHED_STOP
    return _leave(state, stopped & (state.fork.branch >= 0))


def want_fork(state: DecodeState, step: Step) -> DecodeState:
    """Notes the forks that a step of the sampler wants. One with a single branch begins at once."""
    wants, log_probs = step.forks, step.context.log_probs
    new = replace(
        state.fork,
        width=step.width,
        waited=jnp.zeros_like(step.width),
        candidates=step.candidates,
        logprobs=jnp.take_along_axis(log_probs, step.candidates, axis=1),
        start=step.rows.length,
        forwards=state.forwards,
        tally=step.tally,
    )
    state = replace(
        state,
        fork=where_rows(wants, new, state.fork),
        finish=jnp.where(wants, FORKS, state.finish),
    )
    return _begin(state, wants & (step.width == 1), jnp.zeros_like(step.width))


def start_forks(state: DecodeState) -> DecodeState:
    """Forks the rows that wait, as far as there are free lanes."""
    batch = state.finish.shape[0] - state.lanes
    waits = state.finish[:batch] == FORKS
    free = state.finish[batch:] == FINISHED_STOP

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

    # What they are given: a copy of all that the row is. The cache is copied in a loop, which
    # changes it in place; a condition would copy all of it.
    used = jnp.where(lane < number, target, state.finish.shape[0])
    place = jnp.arange(state.finish.shape[0], dtype=jnp.int32)
    origin = place.at[used].set(source, mode="drop")
    tally, rest = jax.tree.map(
        lambda x: jnp.take(x, origin, axis=0),
        (state.sampler.tally, {name: getattr(state, name) for name in _COPIED}),
    )
    cache = state.cache
    cache = replace(cache, length=jnp.take(cache.length, origin))

    start, end = jnp.zeros_like(target), cache.length[target]
    cache = copy_runs(cache, number, source, target, start, end, block=_BLOCK)
    sampler = replace(state.sampler, tally=tally)
    state = replace(state, **rest, cache=cache, sampler=sampler)

    # The branches begin.
    own = jnp.zeros(state.lanes, bool)
    new = jnp.concatenate([begins, own]).at[used].set(True, mode="drop")
    branches = jnp.zeros_like(state.fork.branch).at[used].set(branch, mode="drop")
    return _begin(state, new, branches)


def grow(
    state: DecodeState, choice: Choice, rows: Rows, last: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Adds the evaluated token of each branch, `last[P]`, to its score. Returns also which branches
    end there, bool [P]."""
    fork, metrics = state.fork, choice.observation.metrics
    grows = rows.running & (rows.branch >= 0)
    depth = rows.length - fork.start
    ends = (
        ~choice.finite
        | jnp.any(last[:, None] == state.eos_ids, axis=-1)
        | (rows.remaining <= 0)
        | ~goes_on(choice.observation, depth, state.settings)
    )
    terms = jnp.stack([fork.logprob, metrics.entropy, metrics.varentropy], axis=-1)
    fork = replace(
        fork,
        logprob=jnp.where(grows, choice.logprob, fork.logprob),
        sums=jnp.where(grows[:, None], fork.sums + terms, fork.sums),
        failed=fork.failed | (grows & ~choice.finite),
    )
    return replace(state, fork=fork), grows & ends


def join_forks(state: DecodeState) -> tuple[DecodeState, Joined]:
    """Puts the best branch of each fork whose branches have all ended into the row's place.

    A row whose choice is ambiguous, and that asks, goes back to where it was forked and waits for
    the host instead; one that commits the first token alone goes back and is forced to take it.
    """
    places = state.finish.shape[0]
    batch, fork = places - state.lanes, state.fork
    slots = jnp.arange(batch, dtype=jnp.int32)
    is_branch = fork.branch >= 0
    # A slot has its own row's first branch. Without lanes a row's number is not its index.
    parent = local_index(fork.parent, places).at[:batch].set(slots)
    mine = is_branch[None] & (parent[None] == slots[:, None])  # [B, P]
    open_ = mine & (state.finish != BRANCH_ENDED)[None]
    joins = jnp.any(mine, axis=1) & ~jnp.any(open_, axis=1)

    # Scores, by row and branch.
    depth = state.cache.length - fork.start
    scored = jnp.where(fork.failed, -jnp.inf, score(fork.sums, depth, state.settings))
    number = jnp.arange(MAX_WIDTH, dtype=jnp.int32)[None, :]
    at = mine[:, None] & (fork.branch[None] == number.T)[None]  # [B, W, P]
    scores = jnp.max(jnp.where(at, scored[None, None], -jnp.inf), axis=-1)
    place = jnp.arange(places, dtype=jnp.int32)[None, None]
    rows = jnp.max(jnp.where(at, place, 0), axis=-1)
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    winner = jnp.take_along_axis(rows, best[:, None], axis=1)[:, 0]
    first = jnp.max(scores, axis=-1)
    second = jnp.max(jnp.where(number == best[:, None], -jnp.inf, scores), axis=-1)
    own = jax.tree.map(lambda x: x[:batch], state.settings.own["branch"])
    ambiguous = (second > -jnp.inf) & (first - second < own.margin)
    evaluated = jnp.sum(jnp.where(mine, depth[None], 0), axis=1)
    depth = depth[winner]

    # What becomes of the row.
    waits = joins & ambiguous & state.asks_for_choice[:batch]
    whole = joins & ~waits & (own.commit_all | (depth == 1))
    forced = joins & ~waits & ~whole
    state = _take_winners(state, whole & (winner != slots), winner)

    fork = state.fork
    tally = where_rows(whole, *jax.tree.map(lambda x: x[:batch], (state.sampler.tally, fork.tally)))
    branch = tally.own["branch"]
    tally = replace(
        tally,
        queued=jnp.where(forced, 1, tally.queued),
        queue_action=jnp.where(forced, state.settings.action("branch"), tally.queue_action),
        own={**tally.own, "branch": replace(branch, forwards=branch.forwards + evaluated)},
    )
    start, history = fork.start[:batch], state.history[:batch]
    chosen = jnp.take_along_axis(fork.candidates[:batch], best[:, None], axis=1)[:, 0]
    target = jnp.where(forced, start, history.shape[1])
    end = start + jnp.where(whole, depth, 0)
    last = jnp.take_along_axis(history, jnp.maximum(end - 1, 0)[:, None], axis=1)[:, 0]
    left = state.budget[:batch] - (end - state.prompt_length[:batch])
    finish = finish_of(left, last, state.eos_ids[:batch])
    finish = jnp.where(waits, WAITS_FOR_CHOICE, jnp.where(forced, RUNNING, finish))

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        return all_.at[:batch].set(where_rows(joins, new, all_[:batch]))

    state = replace(
        state,
        # The last token is not cached: the next step reads it.
        cache=replace(state.cache, length=put(state.cache.length, end - 1)),
        history=put(state.history, with_token(state.history[:batch], target, chosen)),
        sampler=replace(state.sampler, tally=jax.tree.map(put, state.sampler.tally, tally)),
        fork=replace(fork, branch=put(fork.branch, jnp.full_like(best, -1))),
        forwards=put(state.forwards, fork.forwards[:batch] + evaluated),
        finish=put(state.finish, finish),
    )
    over = is_branch & jnp.take(joins, parent, mode="clip")
    state = _leave(state, over & (jnp.arange(places, dtype=jnp.int32) >= batch))
    committed = jnp.where(whole, depth, 0)
    return state, Joined(joins, best, committed, scores, ambiguous)


def _begin(state: DecodeState, begins: jax.Array, branch: jax.Array) -> DecodeState:
    """Starts branches, `branch[P]` of their forks, with their candidates."""
    fork = state.fork
    token, logprob = (
        jnp.take_along_axis(x, branch[:, None], axis=1)[:, 0]
        for x in (fork.candidates, fork.logprobs)
    )
    target = jnp.where(begins, fork.start, state.history.shape[1])
    return replace(
        state,
        history=with_token(state.history, target, token),
        fork=replace(
            fork,
            branch=jnp.where(begins, branch, fork.branch),
            logprob=jnp.where(begins, logprob, fork.logprob),
            sums=jnp.where(begins[:, None], 0.0, fork.sums),
            failed=fork.failed & ~begins,
        ),
        finish=jnp.where(begins, RUNNING, state.finish),
    )


def _leave(state: DecodeState, lanes: jax.Array) -> DecodeState:
    """Empties lanes, bool [P]."""
    return replace(
        state,
        fork=replace(state.fork, branch=jnp.where(lanes, -1, state.fork.branch)),
        finish=jnp.where(lanes, FINISHED_STOP, state.finish),
    )


def _take_winners(state: DecodeState, takes: jax.Array, winner: jax.Array) -> DecodeState:
    """Copies what is the branch's own from the lane `winner[B]` to the rows of `takes[B]`."""
    if not state.lanes:
        return state
    batch = takes.shape[0]
    place = jnp.arange(state.finish.shape[0], dtype=jnp.int32)
    origin = place.at[:batch].set(jnp.where(takes, winner, place[:batch]))
    own = (state.history, state.confidences, state.sampler.tally, state.unsound)
    history, confidences, tally, unsound = jax.tree.map(lambda x: jnp.take(x, origin, axis=0), own)
    rows = jnp.nonzero(takes, size=state.lanes, fill_value=0)[0].astype(jnp.int32)

    lanes, start = winner[rows], state.fork.start[rows]
    # What a branch has is at most one block.
    cache = copy_runs(state.cache, jnp.sum(takes), lanes, rows, start, start + _BLOCK, block=_BLOCK)
    sampler = replace(state.sampler, tally=tally)
    state = replace(state, history=history, confidences=confidences, unsound=unsound)
    return replace(state, cache=cache, sampler=sampler)
