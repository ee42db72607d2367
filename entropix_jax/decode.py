"""Generation, compiled: the one place where the model and the sampler meet.

A `DecodeState` goes in and comes out of every function here, and is donated: nothing is copied. One
step function serves the on-device loop and streaming, which only differ in how many steps run
before the host looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.cache import KVCache, init_cache
from entropix_jax.config import ModelConfig
from entropix_jax.model import forward, unembed
from entropix_jax.params import Params
from entropix_jax.sampler.params import SamplerParams
from entropix_jax.sampler.sample import Choice, Rows, SamplerState, choose, init_sampler_state

# A row's `finish`; FINISHED_STOP is set by the host, which alone sees the text.
RUNNING, FINISHED_EOS, FINISHED_LENGTH, FINISHED_ERROR, FINISHED_STOP = range(5)


@struct.dataclass
class DecodeState:
    """Rows in the middle of their texts.

    `history` is the text; the cache holds all of it but the last token, which the next step reads.
    """

    cache: KVCache
    history: jax.Array  # int32 [B, S], each row's tokens, prompt included; junk past them
    prompt_length: jax.Array  # int32 [B], at least 1
    budget: jax.Array  # int32 [B], tokens that may be generated
    keys: jax.Array  # uint32 [B, 2], see `sampler.keys`
    sampler: SamplerState
    forwards: jax.Array  # int32 [B], token positions evaluated beyond the prompt
    finish: jax.Array  # int32 [B], RUNNING or why the row ended


@dataclass(frozen=True)
class Recording:
    """Static: what a step records besides the choice."""

    top: int = 0  # how many of the most likely tokens, with their probabilities
    layers: bool = False  # the attention entropy of each layer and head


@struct.dataclass
class StepRecord:
    """What one step did to each row; [B] fields, or [steps, B] from a loop."""

    live: jax.Array  # bool: the row was running, so the other fields mean something
    position: jax.Array  # int32, of the token
    forwards: jax.Array  # int32, when the token was chosen
    finish: jax.Array  # int32, after it
    choice: Choice
    top_ids: jax.Array  # int32 [B, recording.top]
    top_probs: jax.Array  # float32 [B, recording.top]
    layers: jax.Array  # float32 [B, L, N] bits, or [B, 0, 0] where not recorded


def decode_step(
    params: Params,
    config: ModelConfig,
    sampler: SamplerParams,
    eos_ids: jax.Array,
    state: DecodeState,
    *,
    window: int,
    recording: Recording,
) -> tuple[DecodeState, StepRecord]:
    """One token for every running row: forward, metrics, regime, proposal, draw, commit, record."""
    running = state.finish == RUNNING
    position = state.cache.length + 1
    generated = position - state.prompt_length
    pending = jnp.take_along_axis(state.history, state.cache.length[:, None], axis=1)
    hidden, stats, cache = forward(
        params, config, pending, running.astype(jnp.int32), state.cache, window=window
    )
    logits = unembed(params, hidden[:, 0])

    rows = Rows(
        keys=state.keys,
        history=state.history,
        length=position,
        generated=generated,
        remaining=state.budget - generated,
    )
    choice, sampler_state = choose(logits, stats, sampler, state.sampler, rows)

    ended = jnp.any(choice.token[:, None] == eos_ids[None, :], axis=-1)
    finish = jnp.where(generated + 1 >= state.budget, FINISHED_LENGTH, RUNNING)
    finish = jnp.where(ended, FINISHED_EOS, finish)
    finish = jnp.where(choice.finite, finish, FINISHED_ERROR)
    finish = jnp.where(running, finish, state.finish)
    commits = running & choice.finite
    target = jnp.where(commits, position, state.history.shape[1])
    row = jnp.arange(target.shape[0], dtype=jnp.int32)
    record = StepRecord(
        live=running,
        position=position,
        forwards=state.forwards + (generated > 0).astype(jnp.int32),
        finish=finish,
        choice=choice,
        **_extras(logits, stats.entropy, recording),
    )
    return replace(
        state,
        cache=cache,
        history=state.history.at[row, target].set(choice.token, mode="drop"),
        sampler=sampler_state,
        forwards=jnp.where(running, record.forwards, state.forwards),
        finish=finish,
    ), record


@partial(
    jax.jit,
    static_argnames=("config", "window", "max_steps", "recording"),
    donate_argnames="state",
)
def decode(
    params: Params,
    sampler: SamplerParams,
    eos_ids: jax.Array,
    state: DecodeState,
    steps: jax.Array,
    *,
    config: ModelConfig,
    window: int,
    max_steps: int,
    recording: Recording,
) -> tuple[DecodeState, StepRecord]:
    """Runs up to `steps` decode steps on the device, fewer once no row is running.

    Args:
        sampler: traced, each leaf with a leading row axis.
        eos_ids: int32 [E], the tokens that end a row; -1 matches none.
        state: donated.
        steps: int32, traced.
        window: static. No row may grow past it: `max(length) + steps <= window`.
        max_steps: static, room for records: no more steps than this are run.

    Returns:
        The state, and records with a leading [max_steps] axis; those of steps that did not run have
        `live` False.
    """
    step = partial(
        decode_step, params, config, sampler, eos_ids, window=window, recording=recording
    )
    shapes = jax.eval_shape(step, state)[1]
    records = jax.tree.map(lambda s: jnp.zeros((max_steps, *s.shape), s.dtype), shapes)

    def unfinished(carry: tuple[jax.Array, DecodeState, StepRecord]) -> jax.Array:
        done, state, _ = carry
        return (done < jnp.minimum(steps, max_steps)) & jnp.any(state.finish == RUNNING)

    def body(
        carry: tuple[jax.Array, DecodeState, StepRecord],
    ) -> tuple[jax.Array, DecodeState, StepRecord]:
        done, state, records = carry
        state, record = step(state)
        records = jax.tree.map(lambda all_, one: all_.at[done].set(one), records, record)
        return done + 1, state, records

    _, state, records = lax.while_loop(unfinished, body, (jnp.int32(0), state, records))
    return state, records


@partial(jax.jit, static_argnames=("config", "window"), donate_argnames="state")
def prefill(
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    window: int,
) -> DecodeState:
    """Caches `count[B]` more prompt tokens of each row, of `tokens[B, T]`. Donates the state."""
    _, _, cache = forward(params, config, tokens, count, state.cache, window=window)
    return replace(state, cache=cache)


def init_state(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    keys: np.ndarray,
    *,
    capacity: int,
    dtype: jnp.dtype,
) -> DecodeState:
    """Rows whose prompts are known and not yet cached.

    Args:
        prompts: each of 1 to `capacity` token ids; with its budget it must fit into `capacity`.
        budgets: tokens that each row may generate, at least 1.
        keys: uint32 [B, 2], one row key each.
        capacity: cache slots of a row.
        dtype: of the cache, that is, of the activations.
    """
    batch = len(prompts)
    history = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        history[row, : len(prompt)] = prompt
    return DecodeState(
        cache=init_cache(config, batch, capacity, dtype),
        history=jnp.asarray(history),
        prompt_length=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        budget=jnp.asarray(budgets, jnp.int32),
        keys=jnp.asarray(keys),
        sampler=init_sampler_state(batch),
        forwards=jnp.zeros(batch, jnp.int32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
    )


def _extras(
    logits: jax.Array, attn_entropy: jax.Array, recording: Recording
) -> dict[str, jax.Array]:
    batch = logits.shape[0]
    if recording.top:
        probs = jax.nn.softmax(logits, axis=-1)
        top_probs, top_ids = lax.top_k(probs, recording.top)
    else:
        top_probs, top_ids = jnp.zeros((batch, 0), jnp.float32), jnp.zeros((batch, 0), jnp.int32)
    layers = attn_entropy if recording.layers else jnp.zeros((batch, 0, 0), jnp.float32)
    return {"top_ids": top_ids, "top_probs": top_probs, "layers": layers}
