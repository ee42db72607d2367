"""The compiled calls of generation, the one place where the model and the sampler meet.

Every function takes a `DecodeState`, donated, and returns the next. The on-device loop and
streaming share one step; they differ in how many steps run before the host looks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.engine.fork import (
    free_lanes,
    grow,
    is_forked,
    join_forks,
    start_forks,
    want_fork,
)
from entropix_jax.engine.packed import Packed, pack
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FINISHED_CONFIDENCE,
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_STOP,
    FORKS,
    PARKED,
    RUNNING,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
    DecodeState,
    Recording,
    StepRecord,
    extras_of,
    finish_of,
    with_lanes,
    without_lanes,
)
from entropix_jax.model.cache import KVCache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.finite import NOWHERE, earlier, first_unsound
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.mesh import (
    ONCE,
    ROWS,
    STEPS,
    any_shard,
    apply_if_any,
    local_index,
    local_rows,
    split_rows,
    sum_shards,
)
from entropix_jax.model.params import Params
from entropix_jax.platforms import LOOPS_IN_GRAPHS, puts_loops_in_graphs
from entropix_jax.sampler.context import where_rows
from entropix_jax.sampler.history import with_token
from entropix_jax.sampler.mechanisms.confidence import CONFIDENCE, is_low
from entropix_jax.sampler.mechanisms.inject import InjectState
from entropix_jax.sampler.state import Rows
from entropix_jax.sampler.step import choose, settled
from entropix_jax.stats import AttnStats

# Of a state, what is small and changes in a step; beside it the cache's lengths.
_SMALL = "sampler fork forwards finish unsound".split()


def decode_step(
    params: Params,
    state: DecodeState,
    *,
    config: ModelConfig,
    window: int,
    recording: Recording,
) -> tuple[DecodeState, StepRecord]:
    """One step of every running row: forward, metrics, regime, proposal, draw, commit, record.

    A row commits one token, goes back to an earlier position, waits for the host or is forked; a
    branch grows or ends. The record's fields are [P]. The arguments are those of `decode`.
    """
    # Forks of earlier steps begin where there are lanes.
    if state.lanes:
        state = start_forks(state)
    places = state.finish.shape[0]
    chex.assert_shape((state.eos_ids, state.history), (places, None))
    chex.assert_tree_shape_prefix((state.settings, state.sampler, state.fork), (places,))

    # What the model and the sampler make of each row's last token.
    running, is_branch = state.finish == RUNNING, state.fork.branch >= 0
    last = jnp.take_along_axis(state.history, state.cache.length[:, None], axis=1)
    logits, stats, cache, unsound = _read(params, config, state, last, running, window, recording)
    settings = state.settings
    choice, step, sampler = choose(
        logits, stats, settings, state.sampler, _rows(state, config.vocab_size)
    )
    rows = step.rows

    # A branch that ends has no further token.
    state, ends = grow(state, choice, rows, last[:, 0])
    tally = where_rows(ends, state.sampler.tally, sampler.tally)

    # What becomes of each row. Only running rows with finite logits go back, fork or wait.
    commits = running & choice.finite & ~step.rewinds & ~step.forks & ~step.waits & ~ends
    finish = finish_of(rows.remaining - 1, choice.token, state.eos_ids)
    finish = jnp.where(step.ends, FINISHED_EOS, finish)
    end = rows.history.shape[1]
    confidences = state.confidences
    if CONFIDENCE.name in settings.used:
        position = jnp.where(running & ~step.rewinds & ~step.waits, rows.length, end)
        measured = choice.observation.token_confidence
        confidences = with_token(confidences, position, measured)
        low = (finish == RUNNING) & is_low(confidences, settings, rows)
        finish = jnp.where(low, FINISHED_CONFIDENCE, finish)
    finish = jnp.where(step.waits, WAITS_FOR_TEXT, jnp.where(step.rewinds, RUNNING, finish))
    finish = jnp.where(choice.finite, finish, FINISHED_ERROR)
    finish = jnp.where(is_branch, jnp.where(ends, BRANCH_ENDED, RUNNING), finish)
    finish = jnp.where(running, finish, state.finish)
    # The first step reads a token of the prompt.
    evaluates = running & (state.cache.length >= state.prompt_length)
    forwards = state.forwards + evaluates.astype(jnp.int32)

    # Commit. A row that waits or went back reads its last token again.
    cached = rows.length - (step.rewinds | step.waits).astype(jnp.int32)
    cached = jnp.where(running, cached, state.cache.length)
    target = jnp.where(commits, rows.length, end)
    history = with_token(rows.history, target, choice.token)
    after = replace(rows, history=history, length=rows.length + commits.astype(jnp.int32))
    state = replace(
        state,
        cache=replace(cache, length=cached),
        history=history,
        confidences=confidences,
        sampler=replace(sampler, tally=tally),
        forwards=forwards,
        finish=finish,
    )

    # Forks begin and end.
    fork = state.fork
    state = want_fork(state, step)
    finish = jnp.where(step.forks, FORKS, finish)
    state, joined = join_forks(state)
    joined = jax.tree.map(partial(_fill, places), joined)
    record = StepRecord(
        live=running,
        position=rows.length,
        forwards=jnp.where(joined.joins, state.forwards, forwards),
        choice=choice,
        tally=state.sampler.tally if recording.state else None,
        extras=extras_of(logits, stats, recording),
        rewinds=step.rewinds,
        settled=jnp.where(joined.joins, state.cache.length + 1, settled(settings, sampler, after)),
        unsound=unsound,
        finish=jnp.where(joined.joins, state.finish, finish),
        parent=fork.parent,
        branch=fork.branch,
        width=jnp.where(step.forks, step.width, 0),
        candidates=step.candidates,
        logprobs=state.fork.logprobs,
        joins=joined.joins,
        best=joined.best,
        committed=joined.committed,
        scores=joined.scores,
        ambiguous=joined.ambiguous,
    )
    return state, record


_jit = partial(
    jax.jit,
    static_argnames=("config", "window", "max_steps", "recording", "lanes"),
    donate_argnames="state",
)


@_jit
@split_rows(rows={"state": 1}, returns=(ROWS, STEPS, ONCE))
def decode(
    params: Params,
    state: DecodeState,
    steps: jax.Array,
    fewest: jax.Array | int = 1,
    *,
    config: ModelConfig,
    window: int,
    max_steps: int,
    recording: Recording,
    lanes: bool,
) -> tuple[DecodeState, Packed, jax.Array]:
    """Runs up to `steps` decode steps on the device, and returns once fewer than `fewest` rows are
    running.

    It returns earlier where a row waits for the host, where a row has grown as long as the window,
    and where the lanes are needed or no longer needed: there is a program with them and one
    without, so that they cost nothing while no row branches. (A row that a stop string has ended
    does not count: how far it went on depends on when the host looked.)

    Args:
        params: the weights.
        state: donated.
        steps, fewest: int32, traced.
        config: static.
        window: static, the cache positions that are read.
        max_steps: static, room for records: no more steps than this are run.
        recording: static, what is recorded of each step besides the choice.
        lanes: static, whether the lanes take part.

    Returns:
        The state, a packed `StepRecord` with a leading [max_steps] axis (in steps that did not run
        `live` and `joins` are False), and whether the next steps need the lanes, bool [].
    """
    whole = free_lanes(state)
    state = whole if lanes else without_lanes(whole)
    batch = state.finish.shape[0] - state.lanes

    # Jitted so that it is traced once for both its shapes and the loop; XLA inlines it.
    @jax.jit
    def step(large: DecodeState, small: Packed) -> tuple[DecodeState, Packed, Packed]:
        state, record = decode_step(
            params, _whole(large, small), config=config, window=window, recording=recording
        )
        return *_apart(state), pack(record)

    large, small = _apart(state)
    shape = jax.eval_shape(step, large, small)[2]
    records = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), shape)

    def unfinished(carry: tuple[jax.Array, DecodeState, Packed, Packed]) -> jax.Array:
        done, large, small, _ = carry
        state = _whole(large, small)
        finish, length = state.finish, state.cache.length
        counts = (finish != FINISHED_STOP) & (finish != BRANCH_ENDED) & (finish < PARKED)
        waits = (finish == WAITS_FOR_TEXT) | (finish == WAITS_FOR_CHOICE)
        going = jnp.isin(finish[:batch], jnp.array([RUNNING, FORKS, BRANCH_ENDED]))
        return (
            (done < jnp.minimum(steps, max_steps))
            & (sum_shards(jnp.sum(going)) >= jnp.maximum(fewest, 1))
            & ~any_shard(jnp.any(waits) | (jnp.max(jnp.where(counts, length, 0)) >= window))
            & (any_shard(jnp.any(is_forked(state))) == lanes)
        )

    def body(
        carry: tuple[jax.Array, DecodeState, Packed, Packed],
    ) -> tuple[jax.Array, DecodeState, Packed, Packed]:
        done, large, small, records = carry
        large, small, record = step(large, small)
        bits = lax.dynamic_update_index_in_dim(records.bits, record.bits, done, 0)
        return done + 1, large, small, replace(records, bits=bits)

    start = jnp.int32(0), large, small, records
    _, large, small, records = lax.while_loop(unfinished, body, start)
    state = _whole(large, small)
    state = state if lanes else with_lanes(state, whole)
    return state, records, any_shard(jnp.any(is_forked(state)))


# The same, which a GPU runs as one CUDA graph, the loop of steps included.
decode_in_graph = _jit(decode.__wrapped__, compiler_options=LOOPS_IN_GRAPHS)  # type: ignore[attr-defined]


def decode_here() -> Any:
    """Whichever of the two is for the default device."""
    return decode_in_graph if puts_loops_in_graphs() else decode


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
        slots: int32 [A], the rows; None for all slots in order. Out-of-range row indices are
            ignored.
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

    # All slots in place.
    if slots is None:
        batch = whole.length.shape[0] - state.lanes
        tokens, count = local_rows((tokens, count), batch)
        part = replace(whole, length=whole.length[:batch])
        cache, unsound = cached(part, state.unsound[:batch])
        length = whole.length.at[:batch].set(cache.length)
        unsound = state.unsound.at[:batch].set(unsound)
        return replace(state, cache=replace(cache, length=length), unsound=unsound)

    # Some rows: gathered, read, and scattered back, on the shards that have any of them.
    slots = local_index(slots, whole.length.shape[0])

    def picked(rows: jax.Array) -> jax.Array:
        return jnp.take(lax.slice_in_dim(rows, 0, window, axis=2), slots, axis=0, mode="clip")

    def put(rows: jax.Array, part: jax.Array) -> jax.Array:
        return rows.at[slots, :, :window].set(part, mode="drop")

    def read(carry: tuple[KVCache, jax.Array]) -> tuple[KVCache, jax.Array]:
        whole, unsound = carry
        part = replace(
            whole,
            keys=tuple(map(picked, whole.keys)),
            values=tuple(map(picked, whole.values)),
            length=jnp.take(whole.length, slots, mode="clip"),
        )
        part, found = cached(part, jnp.take(unsound, slots, axis=0, mode="clip"))
        grown = replace(
            whole,
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


def _apart(state: DecodeState) -> tuple[DecodeState, Packed]:
    """The large parts of a state, and those small ones that each step changes, packed: the loop
    carries these as one array."""
    small = {name: getattr(state, name) for name in _SMALL}
    nothing: Any = None
    cache = replace(state.cache, length=nothing)
    large = replace(state, **dict.fromkeys(_SMALL, nothing), cache=cache)
    return large, pack((small, state.cache.length))


def _whole(large: DecodeState, small: Packed) -> DecodeState:
    """The inverse."""
    parts, length = small.unpack()
    return replace(large, **parts, cache=replace(large.cache, length=length))


def _fill(places: int, slots: jax.Array) -> jax.Array:
    """[B, ...] as [P, ...], 0 in the lanes."""
    return jnp.pad(slots, [(0, places - slots.shape[0]), *[(0, 0)] * (slots.ndim - 1)])


def _read(
    params: Params,
    config: ModelConfig,
    state: DecodeState,
    last: jax.Array,
    running: jax.Array,
    window: int,
    recording: Recording,
) -> tuple[jax.Array, AttnStats, KVCache, jax.Array]:
    """The forward pass of each running row's last token, int32 [P, 1]: logits float32 [P, V],
    statistics, the cache with the token in it, and where the row is unsound. There the logits are
    NaN."""
    hidden, stats, cache = forward(
        params,
        config,
        last,
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


def _rows(state: DecodeState, vocab_size: int) -> Rows:
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
        eos_ids=state.eos_ids,
        asks=state.asks_for_text,
        branch=state.fork.branch,
        vocab_size=vocab_size,
    )
