"""The compiled calls of generation, the only place where the model and the sampler meet.

Every function takes a `DecodeState`, donated, and returns the next. The on-device loop and
streaming share one step; they differ in the number of steps before the host reads the results.
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.engine.fork import free_lanes, grow, is_forked, join_forks, start_forks, want_fork
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FORKS,
    RUNNING,
    STOPPED,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
    DecodeState,
    Program,
    StepRecord,
    extras_of,
    status_after_step,
    view_rows,
    with_lanes,
    without_lanes,
)
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.mesh import ONCE, ROWS, STEPS, any_shard, split_rows, sum_shards
from entropix_jax.model.params import Params
from entropix_jax.packed import Packed, pack
from entropix_jax.sampler.context import where_rows
from entropix_jax.sampler.step import choose

Carry = tuple[jax.Array, DecodeState, Packed[StepRecord]]  # steps done, state, records so far


def decode_step(
    params: Params, state: DecodeState, *, config: ModelConfig, program: Program
) -> tuple[DecodeState, StepRecord]:
    """Runs one step of every running row: forward, sample, commit, fork, record.

    A row commits one token, goes back to an earlier position, waits for the host or forks. A branch
    grows or ends. The record's fields are [P]. The arguments are those of `decode`.
    """
    # Settings are unpacked in the step. XLA would hoist that out of the loop, as a hundred copies.
    words, _ = lax.optimization_barrier((state.settings.words, state.status))
    state = replace(state, settings=replace(state.settings, words=words))

    # Forks of earlier steps begin if there are free lanes.
    if state.lanes:
        state = start_forks(state)
    places = state.status.shape[0]
    chex.assert_shape((state.eos_ids, state.history), (places, None))
    chex.assert_tree_shape_prefix((state.settings, state.sampler, state.fork), (places,))

    # The model reads each row's last token, and the sampler chooses the next one.
    before, running = state, state.running
    last = jnp.take_along_axis(state.history, state.cache.length[:, None], axis=1)
    window, looks = program.window, program.recording.attention
    hidden, stats, cache = forward(
        params, config, last, running.astype(jnp.int32), state.cache, window=window, looks=looks
    )
    logits = unembed(params, hidden[:, 0])
    view = view_rows(state, config.vocab_size)
    choice, step, sampler = choose(
        logits, stats, state.settings.unpack(), state.sampler, view, program.parts
    )
    rows = step.rows

    # A branch that ends has no further token.
    state, ends = grow(state, choice, step, last[:, 0], program.parts)
    tally = where_rows(ends, state.sampler.tally, sampler.tally)
    status = status_after_step(state, choice, step, ends)

    # The first step reads a token of the prompt, which is no forward of the answer.
    evaluates = running & (state.cache.length >= state.prompt_length)
    forwards = state.forwards + evaluates.astype(jnp.int32)

    # A row that waits or went back reads its last token again.
    cached = rows.length - (step.rewinds | step.waits).astype(jnp.int32)
    state = replace(
        state,
        cache=replace(cache, length=jnp.where(running, cached, state.cache.length)),
        history=rows.history,
        confidences=rows.confidences,
        sampler=replace(sampler, tally=tally),
        forwards=forwards,
        status=status,
    )

    # Forks begin and end.
    state = want_fork(state, step, program.parts)
    state, joined = join_forks(state, program.parts)
    record = StepRecord(
        live=running,
        position=rows.length,
        forwards=jnp.where(joined.joins, state.forwards, forwards),
        choice=choice,
        tally=state.sampler.tally if program.recording.state else None,
        extras=extras_of(logits, stats, program.recording, before.history),
        rewinds=step.rewinds,
        settled=jnp.where(joined.joins, state.cache.length + 1, step.settled),
        status=jnp.where(joined.joins, state.status, status),
        parent=before.fork.parent,
        branch=before.fork.branch,
        width=step.width,
        candidates=step.candidates,
        logprobs=jnp.take_along_axis(step.log_probs, step.candidates, axis=1),
        joined=joined,
    )
    return state, record


def waits(state: DecodeState) -> jax.Array:
    """Whether each row waits for the host: bool [P]."""
    return (state.status == WAITS_FOR_TEXT) | (state.status == WAITS_FOR_CHOICE)


jit_decode = partial(
    jax.jit, static_argnames=("config", "max_steps", "program"), donate_argnames="state"
)


@jit_decode
@split_rows((ROWS, STEPS, ONCE))
def decode(
    params: Params,
    state: DecodeState,
    steps: jax.Array,
    fewest: jax.Array | int = 1,
    leaves: jax.Array | bool = True,
    *,
    config: ModelConfig,
    max_steps: int,
    program: Program,
) -> tuple[DecodeState, Packed[StepRecord], jax.Array]:
    """Runs up to `steps` decode steps on the device, and returns once fewer than `fewest` rows are
    running.

    It returns earlier if a row begins to wait for the host, a row has grown as long as the window,
    or lanes become needed or, where it `leaves` then, unneeded: there is a program with lanes and
    one without, so they cost nothing while no row branches. (Rows ended by a stop string do not
    count, because their length depends on when the host read the results.)

    Args:
        params: the weights.
        state: donated.
        steps, fewest: int32, traced.
        leaves: bool, traced, whether it returns once no row is forked. Only used with lanes.
        config: static.
        max_steps: static, room for records: no more steps than this are run.
        program: static.

    Returns:
        The state, a packed `StepRecord` with a leading [max_steps] axis (in steps that did not run
        `live` and `joins` are False), and whether the next steps need the lanes, bool [].
    """
    whole = free_lanes(state)
    lanes, window = program.lanes, program.window
    state = whole if lanes else without_lanes(whole)
    batch = state.status.shape[0] - state.lanes
    waited = waits(state)

    # Jitted so that it is traced once for both its shapes and the loop; XLA inlines it.
    @jax.jit
    def step(state: DecodeState) -> tuple[DecodeState, Packed[StepRecord]]:
        state, record = decode_step(params, state, config=config, program=program)
        return state, pack(record, 1)

    shape = jax.eval_shape(step, state)[1]
    records = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shape)

    def unfinished(carry: Carry) -> jax.Array:
        done, state, _ = carry
        status, length = state.status, state.cache.length
        counts = (status != STOPPED) & (status != BRANCH_ENDED)
        going = jnp.isin(status, jnp.array([RUNNING, FORKS, BRANCH_ENDED]))
        forked = any_shard(jnp.any(is_forked(state)))
        full = jnp.max(jnp.where(counts, length, 0)) >= window
        return (
            (done < jnp.minimum(steps, max_steps))
            & (sum_shards(jnp.sum(going[:batch])) >= jnp.maximum(fewest, 1))
            & ~any_shard(jnp.any(waits(state) & ~waited) | full)
            & ((forked | jnp.logical_not(leaves)) if lanes else ~forked)
        )

    def body(carry: Carry) -> Carry:
        done, state, records = carry
        state, record = step(state)
        put = partial(lax.dynamic_update_index_in_dim, index=done, axis=0)
        return done + 1, state, jax.tree.map(put, records, record)

    start = jnp.int32(0), state, records
    _, state, records = lax.while_loop(unfinished, body, start)
    state = state if lanes else with_lanes(state, whole)
    return state, records, any_shard(jnp.any(is_forked(state)))
