"""The state of a batch while it decodes, and what is recorded of each step."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.finite import NOWHERE
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.rollout import Branches
from entropix_jax.sampler.state import SamplerState, blank_observation, init_sampler_state
from entropix_jax.sampler.step import Choice
from entropix_jax.stats import AttnStats

# A row's `finish`. FINISHED_STOP is set by the host, which alone sees the text; a row that waits
# continues once the host has answered.
RUNNING, FINISHED_EOS, FINISHED_LENGTH, FINISHED_ERROR, FINISHED_STOP = range(5)
WAITS_FOR_TEXT, WAITS_FOR_CHOICE = 5, 6

LOG_STEPS = 4  # branches a step that the log has room for, beyond a last step where all rows branch


@struct.dataclass
class DecodeState:
    """A batch while it decodes.

    `history` is each row's text; the cache holds all of it but the last token, which the next step
    reads.
    """

    cache: KVCache
    history: jax.Array  # int32 [B, S], each row's tokens, prompt included; past them forced ones
    prompt_length: jax.Array  # int32 [B], at least 1
    budget: jax.Array  # int32 [B], most tokens to generate
    keys: jax.Array  # uint32 [B, 2], see `sampler.keys`
    asks_for_text: jax.Array  # bool [B], the host is asked for each thought's text
    asks_for_choice: jax.Array  # bool [B], the host is asked which branch of an ambiguous step
    sampler: SamplerState
    forwards: jax.Array  # int32 [B], token positions evaluated beyond the prompt
    finish: jax.Array  # int32 [B], RUNNING, why the row ended, or what it waits for
    unsound: jax.Array  # int32 [B, 2], see `finite.first_unsound`, of the prompt as far as checked


@dataclass(frozen=True)
class Recording:
    """What a step records besides the choice; static."""

    top: int = 0  # how many of the most likely tokens, with their probabilities
    layers: bool = False  # the attention entropy of each layer and head
    check: bool = False  # where an activation is NaN or infinite; such a row fails there


@struct.dataclass
class Extras:
    """What is recorded where it is asked for; empty axes where it is not."""

    top_ids: jax.Array  # int32 [B, recording.top]
    top_probs: jax.Array  # float32 [B, recording.top]
    layers: jax.Array  # float32 [B, L, N] bits


@struct.dataclass
class StepRecord:
    """What one step did to each row; [B] fields, or [steps, B] from a loop."""

    live: jax.Array  # bool: the row was running; else the other fields mean nothing
    position: jax.Array  # int32, of the token
    forwards: jax.Array  # int32, when the token was chosen
    finish: jax.Array  # int32, after it; a row that waits has no token
    choice: Choice  # of a row that branched: the first token of the best branch
    extras: Extras  # of the distribution that the step evaluated
    may_backspace: jax.Array  # bool: the next step may backspace the token
    branch: jax.Array  # int32, which record of the branch log belongs to it; -1: none
    unsound: jax.Array  # int32 [B, 2], see `finite.first_unsound`; NOWHERE where nothing is checked


@struct.dataclass
class BranchLog:
    """An entry for each row and step that branched; fields [M, ...], the first `count` in use."""

    count: jax.Array  # int32
    branches: Branches  # its notes are Extras
    committed: jax.Array  # int32 [M], how many of the best branch's tokens were committed
    sequence_varentropy: jax.Array  # float32 [M, R], after each token of the best branch


def init_state(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    keys: np.ndarray,
    *,
    capacity: int,
    dtype: jnp.dtype,
    mechanisms: tuple[Mechanism, ...] = MECHANISMS,
) -> DecodeState:
    """Rows whose prompts are known and not yet cached, and which ask the host for nothing.

    Args:
        prompts: each of 1 to `capacity` token ids; with its budget it must fit into `capacity`. A
            row that is not to run may have an empty one.
        budgets: tokens that each row may generate, at least 1; 0 for a row that is not to run.
        keys: uint32 [B, 2], one row key each.
        capacity: cache positions of a row.
        dtype: of the cache, that is, of the activations.
        mechanisms: those of the rows' samplers.
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
        asks_for_text=jnp.zeros(batch, bool),
        asks_for_choice=jnp.zeros(batch, bool),
        sampler=init_sampler_state(batch, config.vocab_size, mechanisms),
        forwards=jnp.zeros(batch, jnp.int32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
        unsound=jnp.full((batch, 2), NOWHERE, jnp.int32),
    )


def init_log(config: ModelConfig, number: int, recording: Recording) -> BranchLog:
    """An empty log with room for `number` entries."""
    branches, tokens = (number, MAX_WIDTH), (number, MAX_DEPTH)
    layers = (config.num_layers, config.num_heads) if recording.layers else (0, 0)
    return BranchLog(
        count=jnp.int32(0),
        branches=Branches(
            tokens=jnp.zeros((*branches, MAX_DEPTH), jnp.int32),
            length=jnp.zeros(branches, jnp.int32),
            score=jnp.zeros(branches, jnp.float32),
            best=jnp.zeros(number, jnp.int32),
            ambiguous=jnp.zeros(number, bool),
            logprobs=jnp.zeros(tokens, jnp.float32),
            observation=blank_observation(tokens),
            notes=Extras(
                top_ids=jnp.zeros((*tokens, recording.top), jnp.int32),
                top_probs=jnp.zeros((*tokens, recording.top), jnp.float32),
                layers=jnp.zeros((*tokens, *layers), jnp.float32),
            ),
        ),
        committed=jnp.zeros(number, jnp.int32),
        sequence_varentropy=jnp.zeros(tokens, jnp.float32),
    )


def extras_of(logits: jax.Array, stats: AttnStats, recording: Recording) -> Extras:
    """What is recorded of `logits[B, V]`, float32, and the attention besides the choice; the
    likeliest tokens in falling order. `recording` is static."""
    batch = logits.shape[0]
    top_probs, top_ids = jnp.zeros((batch, 0), jnp.float32), jnp.zeros((batch, 0), jnp.int32)
    if recording.top:
        top_probs, top_ids = lax.top_k(jax.nn.softmax(logits, axis=-1), recording.top)
    layers = stats.entropy if recording.layers else jnp.zeros((batch, 0, 0), jnp.float32)
    return Extras(top_ids=top_ids, top_probs=top_probs, layers=layers)


def finish_of(left: jax.Array, token: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """The `finish` of rows that end in `token[B]` and have `left[B]` tokens of their budget left:
    int32 [B]. The arguments are int32; `eos_ids[B, E]` has -1 where it has no more. Where both
    hold it is FINISHED_EOS."""
    ended = jnp.any(token[:, None] == eos_ids, axis=-1)
    return jnp.where(ended, FINISHED_EOS, jnp.where(left <= 0, FINISHED_LENGTH, RUNNING))
