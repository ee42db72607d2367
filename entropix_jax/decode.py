"""Generation, compiled: the one place where the model and the sampler meet.

A `DecodeState` goes in and comes out of every function here, and is donated: nothing is copied. One
step function serves the on-device loop and streaming, which only differ in how many steps run
before the host looks.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.branching import Step, commit_branches
from entropix_jax.cache import KVCache, Suffixes
from entropix_jax.config import ModelConfig
from entropix_jax.decode_state import (
    FINISHED_ERROR,
    FINISHED_STOP,
    LOG_STEPS,
    RUNNING,
    WAITS_FOR_TEXT,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    extras_of,
    finish_of,
    init_log,
)
from entropix_jax.health import NOWHERE, earlier, first_unsound
from entropix_jax.information import AttnStats
from entropix_jax.model import forward, forward_branches, unembed
from entropix_jax.params import Params
from entropix_jax.sampler.arms import ARMS, BACKSPACE, BRANCH, INJECT, Arm
from entropix_jax.sampler.params import SamplerParams
from entropix_jax.sampler.sample import begin_thoughts, choose, may_return, where_rows
from entropix_jax.sampler.state import Rows
from entropix_jax.sharding import (
    ONCE,
    ROWS,
    STEPS,
    any_shard,
    apply_if_any,
    global_index,
    local_index,
    local_rows,
    split_rows,
    sum_shards,
)

_ARMS = tuple(ARMS.values())
_LOG = BranchLog(count=ONCE, branches=ROWS, committed=ROWS, sequence_varentropy=ROWS)


def decode_step(
    params: Params,
    sampler: SamplerParams,
    eos_ids: jax.Array,
    state: DecodeState,
    log: BranchLog,
    *,
    config: ModelConfig,
    window: int,
    recording: Recording,
    arms: tuple[Arm, ...],
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """Every running row one step on: forward, metrics, regime, proposal, draw, commit, record.

    A row commits one token, or takes its last one back and draws its place again, or commits a
    branch, or begins to wait for the host. `eos_ids` is int32 [B, E]; the record's fields are [B];
    the log must have room for B more. The other arguments are those of `decode`.
    """
    running = state.finish == RUNNING
    rows = _rows(state)
    pending = jnp.take_along_axis(state.history, state.cache.length[:, None], axis=1)
    hidden, stats, cache = forward(
        params,
        config,
        pending,
        running.astype(jnp.int32),
        state.cache,
        window=window,
        check=recording.check,
    )
    logits, unsound = unembed(params, hidden[:, 0]), state.unsound
    if stats.sound is not None:
        unsound = earlier(unsound, first_unsound(stats.sound, state.cache.length))
        logits = jnp.where(unsound[:, :1] == NOWHERE, logits, jnp.nan)
    choice, sampler_state = choose(logits, stats, sampler, state.sampler, rows, arms)

    goes_on = running & choice.finite
    retracts = goes_on & (choice.proposal.action == BACKSPACE)
    injects = goes_on & choice.begins & (choice.proposal.action == INJECT)
    branches = goes_on & choice.begins & (choice.proposal.action == BRANCH)
    waits = injects & state.asks_for_text
    commits = goes_on & ~branches & ~waits

    position = rows.length - retracts.astype(jnp.int32)
    left = rows.remaining - 1 + retracts.astype(jnp.int32)
    finish = finish_of(left, choice.token, eos_ids)
    finish = jnp.where(waits, WAITS_FOR_TEXT, jnp.where(branches, RUNNING, finish))
    finish = jnp.where(running, jnp.where(choice.finite, finish, FINISHED_ERROR), state.finish)
    evaluated = (running & (rows.generated > 0)).astype(jnp.int32)
    record = StepRecord(
        live=running,
        position=position,
        forwards=state.forwards + evaluated,
        finish=finish,
        choice=choice,
        extras=extras_of(logits, stats, recording),
        may_return=commits & (finish == RUNNING) & may_return(sampler_state, sampler),
        branch=jnp.full_like(position, -1),
        unsound=unsound,
    )
    before = state.sampler.tally
    history = begin_thoughts(
        state.history, rows.length, injects & ~waits, sampler.inject, before.injections
    )
    held = replace(before, injections=before.injections + 1)
    target = jnp.where(commits, position, history.shape[1])
    row = jnp.arange(target.shape[0], dtype=jnp.int32)
    state = replace(
        state,
        cache=replace(cache, length=jnp.where(retracts | waits, state.cache.length, cache.length)),
        history=history.at[row, target].set(choice.token, mode="drop"),
        sampler=replace(sampler_state, tally=where_rows(waits, held, sampler_state.tally)),
        forwards=record.forwards,
        finish=finish,
    )
    read = partial(_forward_branches, params, config=config, window=window, check=recording.check)
    carry: tuple[DecodeState, StepRecord, BranchLog] = lax.cond(
        jnp.any(branches),
        lambda carry: commit_branches(
            branches, Step(logits, before, rows, sampler, eos_ids), read, recording, window, carry
        ),
        lambda carry: carry,
        (state, record, log),
    )
    return carry


@partial(
    jax.jit,
    static_argnames=("config", "window", "max_steps", "recording", "arms"),
    donate_argnames="state",
)
@split_rows(rows={"sampler": 1, "eos_ids": 2, "state": 1}, returns=(ROWS, STEPS, _LOG))
def decode(
    params: Params,
    sampler: SamplerParams,
    eos_ids: jax.Array,
    state: DecodeState,
    steps: jax.Array,
    fewest: jax.Array | int = 1,
    *,
    config: ModelConfig,
    window: int,
    max_steps: int,
    recording: Recording,
    arms: tuple[Arm, ...] = _ARMS,
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """Runs up to `steps` decode steps on the device, and comes back once fewer than `fewest` rows
    are running.

    It comes back earlier where a row waits for the host, where the log is full, and where a row has
    grown as long as the window (one that a stop string has ended does not count: how far it went on
    depends on when the host looked).

    Args:
        params: the weights.
        sampler: traced, each leaf with a leading row axis.
        eos_ids: int32 [B, E], the tokens that end each row, or [E] for all; -1 matches none.
        state: donated.
        steps, fewest: int32, traced.
        config: static.
        window: static, the cache slots that are read.
        max_steps: static, room for records: no more steps than this are run.
        recording: static, what is recorded of each step besides the choice.
        arms: static, what `sampler.arms` chooses from.

    Returns:
        The state, records with a leading [max_steps] axis (those of steps that did not run have
        `live` False), and the log of what branched.
    """
    batch = state.finish.shape[0]
    eos_ids = jnp.broadcast_to(eos_ids, (batch, eos_ids.shape[-1]))
    # Jitted to be traced once, for its shapes and for the loop: XLA inlines it.
    step = jax.jit(
        partial(
            decode_step,
            params,
            sampler,
            eos_ids,
            config=config,
            window=window,
            recording=recording,
            arms=arms,
        )
    )
    log = init_log(config, batch + LOG_STEPS * max_steps, recording)
    shapes = jax.eval_shape(step, state, log)[1]
    records = jax.tree.map(lambda s: jnp.zeros((max_steps, *s.shape), s.dtype), shapes)

    def unfinished(carry: tuple[jax.Array, DecodeState, StepRecord, BranchLog]) -> jax.Array:
        done, state, _, log = carry
        running, stopped = state.finish == RUNNING, state.finish == FINISHED_STOP
        return (
            (done < jnp.minimum(steps, max_steps))
            & (sum_shards(jnp.sum(running)) >= jnp.maximum(fewest, 1))
            & ~any_shard(
                jnp.any(state.finish >= WAITS_FOR_TEXT)
                | (jnp.max(jnp.where(stopped, 0, state.cache.length)) >= window)
                | (log.count + batch > log.committed.shape[0])
            )
        )

    def body(
        carry: tuple[jax.Array, DecodeState, StepRecord, BranchLog],
    ) -> tuple[jax.Array, DecodeState, StepRecord, BranchLog]:
        done, state, records, log = carry
        state, record, log = step(state, log)
        records = jax.tree.map(lambda all_, one: all_.at[done].set(one), records, record)
        return done + 1, state, records, log

    _, state, records, log = lax.while_loop(unfinished, body, (jnp.int32(0), state, records, log))
    records = replace(records, branch=global_index(records.branch, log.committed.shape[0]))
    return state, records, replace(log, count=sum_shards(log.count))


@partial(jax.jit, static_argnames=("config", "window", "check"), donate_argnames="state")
@split_rows(rows={"state": 1}, returns=ROWS)
def prefill(
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    count: jax.Array,
    slots: jax.Array | None = None,
    *,
    config: ModelConfig,
    window: int,
    check: bool = False,
) -> DecodeState:
    """Caches more prompt tokens of some rows. The others wait, and what is cached does not depend
    on them.

    Args:
        state: donated.
        tokens: int32 [A, T].
        count: int32 [A], how many of a row's T tokens are real, from the first on.
        slots: int32 [A], the rows; all in order where it is None. A number past the last row is
            nobody's.
        config: static.
        window: static, the cache slots that are read: at least as many as any of the rows then has.
        check: static; the state notes where activations are not finite, and the row's first step
            then fails.
    """
    whole = state.cache

    def cached(part: KVCache, unsound: jax.Array) -> tuple[KVCache, jax.Array]:
        _, stats, grown = forward(params, config, tokens, count, part, window=window, check=check)
        if stats.sound is not None:
            unsound = earlier(unsound, first_unsound(stats.sound, part.length))
        return grown, unsound

    if slots is None:
        tokens, count = local_rows((tokens, count), whole.length.shape[0])
        cache, unsound = cached(whole, state.unsound)
        return replace(state, cache=cache, unsound=unsound)
    slots = local_index(slots, whole.length.shape[0])

    def picked(rows: jax.Array) -> jax.Array:
        return jnp.take(lax.slice_in_dim(rows, 0, window, axis=2), slots, axis=0, mode="clip")

    def put(rows: jax.Array, part: jax.Array) -> jax.Array:
        return rows.at[slots, :, :window].set(part, mode="drop")

    def read(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        whole, unsound = carry
        part = KVCache(
            keys=tuple(map(picked, whole.keys)),
            values=tuple(map(picked, whole.values)),
            length=jnp.take(whole.length, slots, mode="clip"),
        )
        part, found = cached(part, jnp.take(unsound, slots, axis=0, mode="clip"))
        grown = KVCache(
            keys=tuple(map(put, whole.keys, part.keys)),
            values=tuple(map(put, whole.values, part.values)),
            length=whole.length.at[slots].set(part.length, mode="drop"),
        )
        return grown, unsound.at[slots].set(found, mode="drop")

    ours_here = slots < whole.length.shape[0]
    cache, unsound = apply_if_any(ours_here, read, (whole, state.unsound))
    return replace(state, cache=cache, unsound=unsound)


@partial(jax.jit, donate_argnames="state")
@split_rows(rows={"state": 1}, returns=ROWS)
def answer(
    state: DecodeState,
    row: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    action: jax.Array,
    cooldown: jax.Array,
) -> DecodeState:
    """Lets a row that waits go on, with the host's tokens as its next ones. With none it just
    draws, as it does while a thought cools down.

    Args:
        state: donated.
        row: int32, its number.
        tokens: int32 [S], of which the first `count` (int32) are meant.
        action: int32, index into ACTIONS, which the tokens carry.
        cooldown: int32, tokens until a thought may be injected, for a row without tokens.
    """
    row = local_index(row, state.finish.shape[0])
    steps = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    target = jnp.where(steps < count, state.cache.length[row] + 1 + steps, state.history.shape[1])
    tally = state.sampler.tally
    tally = replace(
        tally,
        queued=tally.queued.at[row].set(count),
        queue_action=tally.queue_action.at[row].set(action),
        cooldown=tally.cooldown.at[row].set(jnp.where(count > 0, tally.cooldown[row], cooldown)),
    )
    return replace(
        state,
        history=state.history.at[row, target].set(tokens, mode="drop"),
        sampler=replace(state.sampler, tally=tally),
        finish=state.finish.at[row].set(RUNNING),
    )


def _rows(state: DecodeState) -> Rows:
    """What the sampler is told of each row whose pending token is being read."""
    length = state.cache.length + 1
    generated = length - state.prompt_length
    return Rows(
        keys=state.keys,
        history=state.history,
        length=length,
        generated=generated,
        remaining=state.budget - generated,
        asks=state.asks_for_text,
    )


def _forward_branches(
    params: Params,
    prefix: KVCache,
    tokens: jax.Array,
    depth: jax.Array,
    suffixes: Suffixes,
    *,
    config: ModelConfig,
    window: int,
    check: bool,
) -> tuple[jax.Array, AttnStats, Suffixes]:
    """Logits [A*W, V] of one more token of each branch, its statistics, and the suffixes."""
    hidden, stats, suffixes = forward_branches(
        params, config, tokens, depth, prefix, suffixes, window=window, check=check
    )
    logits = unembed(params, hidden.reshape(-1, config.width))
    if stats.sound is not None:  # such a branch loses
        logits = jnp.where(jnp.all(stats.sound, axis=(1, 2))[:, None], logits, jnp.nan)
    return logits, replace(stats, sound=None), suffixes
