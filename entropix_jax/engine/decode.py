"""The compiled calls of generation, the one place where the model and the sampler meet.

Every function takes a `DecodeState`, donated, and returns the next. The on-device loop and
streaming share one step; they differ in how many steps run before the host looks.
"""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.engine.branching import Carry, Inputs, commit_branches
from entropix_jax.engine.state import (
    FINISHED_EOS,
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
from entropix_jax.model.cache import KVCache, Suffixes
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.finite import NOWHERE, earlier, first_unsound
from entropix_jax.model.llama import forward, forward_branches, unembed
from entropix_jax.model.mesh import (
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
from entropix_jax.model.params import Params
from entropix_jax.sampler.mechanisms.inject import InjectState
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows
from entropix_jax.sampler.step import choose, may_backspace_next
from entropix_jax.stats import AttnStats

_LOG = BranchLog(count=ONCE, branches=ROWS, committed=ROWS, sequence_varentropy=ROWS)


def decode_step(
    params: Params,
    settings: SamplerSettings,
    eos_ids: jax.Array,
    state: DecodeState,
    log: BranchLog,
    *,
    config: ModelConfig,
    window: int,
    recording: Recording,
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """One step of every running row: forward, metrics, regime, proposal, draw, commit, record.

    A row commits one token, or its last token's replacement, or a branch, or it waits for the host.
    `eos_ids` is int32 [B, E]; the record's fields are [B]; the log must have room for B more. The
    other arguments are those of `decode`.
    """
    batch = state.finish.shape[0]
    chex.assert_shape((eos_ids, state.history), (batch, None))
    chex.assert_tree_shape_prefix((settings, state.sampler), (batch,))

    running = state.finish == RUNNING
    logits, stats, cache, unsound = _read_last(params, config, state, running, window, recording)
    choice, step, sampler_state = choose(logits, stats, settings, state.sampler, _rows(state))
    rows = step.rows

    # What becomes of each row. Only running rows with finite logits backspace, roll out or wait.
    commits = running & choice.finite & ~step.rolls_out & ~step.waits
    finish = finish_of(rows.remaining - 1, choice.token, eos_ids)
    finish = jnp.where(step.ends, FINISHED_EOS, finish)
    finish = jnp.where(step.waits, WAITS_FOR_TEXT, jnp.where(step.rolls_out, RUNNING, finish))
    finish = jnp.where(running, jnp.where(choice.finite, finish, FINISHED_ERROR), state.finish)
    # The first step reads a token of the prompt.
    evaluates = running & (state.cache.length >= state.prompt_length)
    forwards = state.forwards + evaluates.astype(jnp.int32)
    may_backspace = may_backspace_next(settings, sampler_state, rows)
    record = StepRecord(
        live=running,
        position=rows.length,
        forwards=forwards,
        finish=finish,
        choice=choice,
        extras=extras_of(logits, stats, recording),
        may_backspace=commits & (finish == RUNNING) & may_backspace,
        branch=jnp.full_like(finish, -1),
        unsound=unsound,
    )

    # Commit. A row that waits reads its last token again; the cache of one that backspaced shrinks.
    cached = jnp.where(running & ~step.waits, rows.length, state.cache.length)
    target = jnp.where(commits, rows.length, rows.history.shape[1])
    row = jnp.arange(batch, dtype=jnp.int32)
    state = replace(
        state,
        cache=replace(cache, length=cached),
        history=rows.history.at[row, target].set(choice.token, mode="drop"),
        sampler=sampler_state,
        forwards=forwards,
        finish=finish,
    )

    # Branches, under a condition: a step without any costs nothing more.
    read = partial(_forward_branches, params, config=config, window=window, check=recording.check)
    inputs = Inputs(logits=logits, rows=rows, settings=settings, eos_ids=eos_ids)
    carry: Carry = lax.cond(
        jnp.any(step.rolls_out),
        lambda carry: commit_branches(step.rolls_out, inputs, read, recording, window, carry),
        lambda carry: carry,
        (state, record, log),
    )
    return carry


@partial(
    jax.jit,
    static_argnames=("config", "window", "max_steps", "recording"),
    donate_argnames="state",
)
@split_rows(rows={"settings": 1, "eos_ids": 2, "state": 1}, returns=(ROWS, STEPS, _LOG))
def decode(
    params: Params,
    settings: SamplerSettings,
    eos_ids: jax.Array,
    state: DecodeState,
    steps: jax.Array,
    fewest: jax.Array | int = 1,
    *,
    config: ModelConfig,
    window: int,
    max_steps: int,
    recording: Recording,
) -> tuple[DecodeState, StepRecord, BranchLog]:
    """Runs up to `steps` decode steps on the device, and returns once fewer than `fewest` rows are
    running.

    It returns earlier where a row waits for the host, where the log is full, and where a row has
    grown as long as the window. (A row that a stop string has ended does not count: how far it went
    on depends on when the host looked.)

    Args:
        params: the weights.
        settings: each leaf with a leading row axis; its mechanisms are static.
        eos_ids: int32 [B, E], the tokens that end each row, or [E] for all; -1 matches none.
        state: donated.
        steps, fewest: int32, traced.
        config: static.
        window: static, the cache positions that are read.
        max_steps: static, room for records: no more steps than this are run.
        recording: static, what is recorded of each step besides the choice.

    Returns:
        The state, records with a leading [max_steps] axis (those of steps that did not run have
        `live` False), and the log of what branched.
    """
    batch = state.finish.shape[0]
    eos_ids = jnp.broadcast_to(eos_ids, (batch, eos_ids.shape[-1]))
    # Jitted so that it is traced once for both its shapes and the loop; XLA inlines it.
    step = jax.jit(
        partial(
            decode_step,
            params,
            settings,
            eos_ids,
            config=config,
            window=window,
            recording=recording,
        )
    )

    # Room for the records and the log.
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

    # The loop; its counts and indices are those of all shards.
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
    """Caches more prompt tokens of some rows, independently of the other rows.

    Args:
        state: donated.
        tokens: int32 [A, T].
        count: int32 [A], how many of a row's T tokens are real, from the first on.
        slots: int32 [A], the rows; None for all in order. Out-of-range row indices are ignored.
        config: static.
        window: static, the cache positions that are read: at least as many as any of the rows has
            afterwards.
        check: static; the state notes where activations are not finite, and the row's first step
            then fails.
    """
    whole = state.cache

    def cached(part: KVCache, unsound: jax.Array) -> tuple[KVCache, jax.Array]:
        _, stats, grown = forward(params, config, tokens, count, part, window=window, check=check)
        if stats.sound is not None:
            unsound = earlier(unsound, first_unsound(stats.sound, part.length))
        return grown, unsound

    # All rows in place.
    if slots is None:
        tokens, count = local_rows((tokens, count), whole.length.shape[0])
        cache, unsound = cached(whole, state.unsound)
        return replace(state, cache=cache, unsound=unsound)

    # Some rows: gathered, read, and scattered back, on the shards that have any of them.
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
    """Resumes a waiting row, forcing the host's tokens next. With no tokens the row samples
    normally and starts its cooldown.

    Args:
        state: donated.
        row: int32, its index.
        tokens: int32 [S], the first `count` (int32) are forced.
        action: int32, index into the sampler's mechanisms, which the tokens carry.
        cooldown: int32, tokens until the next thought is possible, for a row without tokens.
    """
    row = local_index(row, state.finish.shape[0])
    steps = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    target = jnp.where(steps < count, state.cache.length[row] + 1 + steps, state.history.shape[1])
    tally = state.sampler.tally
    inject: InjectState = tally.own["inject"]
    cooldown = jnp.where(count > 0, inject.cooldown[row], cooldown)
    inject = replace(inject, cooldown=inject.cooldown.at[row].set(cooldown))
    tally = replace(
        tally,
        queued=tally.queued.at[row].set(count),
        queue_action=tally.queue_action.at[row].set(action),
        own={**tally.own, "inject": inject},
    )
    return replace(
        state,
        history=state.history.at[row, target].set(tokens, mode="drop"),
        sampler=replace(state.sampler, tally=tally),
        finish=state.finish.at[row].set(RUNNING),
    )


def _read_last(
    params: Params,
    config: ModelConfig,
    state: DecodeState,
    running: jax.Array,
    window: int,
    recording: Recording,
) -> tuple[jax.Array, AttnStats, KVCache, jax.Array]:
    """The forward pass of each running row's last token: logits float32 [B, V], statistics, the
    cache with the token in it, and where the row is unsound. There the logits are NaN."""
    token = jnp.take_along_axis(state.history, state.cache.length[:, None], axis=1)
    hidden, stats, cache = forward(
        params,
        config,
        token,
        running.astype(jnp.int32),
        state.cache,
        window=window,
        check=recording.check,
    )
    logits, unsound = unembed(params, hidden[:, 0]), state.unsound
    if stats.sound is not None:
        unsound = earlier(unsound, first_unsound(stats.sound, state.cache.length))
        logits = jnp.where(unsound[:, :1] == NOWHERE, logits, jnp.nan)
    return logits, stats, cache, unsound


def _rows(state: DecodeState) -> Rows:
    """The sampler's view of each row whose last token is being read."""
    length = state.cache.length + 1
    generated = length - state.prompt_length
    return Rows(
        running=state.finish == RUNNING,
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
