"""The state of a batch while it decodes, and what is recorded of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.finite import NOWHERE
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import SamplerState, Tally, init_sampler_state
from entropix_jax.sampler.step import Choice
from entropix_jax.sampler.top import top
from entropix_jax.stats import AttnStats

# A row's `finish`. FINISHED_STOP is set by the host, which alone sees the text; a lane without a
# branch has it, too. A row that waits for the host continues once that has answered.
RUNNING, FINISHED_EOS, FINISHED_LENGTH, FINISHED_ERROR, FINISHED_STOP = range(5)
WAITS_FOR_TEXT, WAITS_FOR_CHOICE = 5, 6
FORKS = 7  # the row is to be forked, as soon as there are lanes for its branches
BRANCH_ENDED = 8  # a branch that waits for the others of its fork
FINISHED_CONFIDENCE = 9
PARKED = 16  # added to the status of a row that is longer than the window of the next steps


@struct.dataclass
class Fork:
    """What a row knows of its fork. All branches of a fork have a copy; the first one runs in the
    row's own slot, the others in lanes."""

    parent: jax.Array  # int32 [P], the row that was forked; of any other row itself
    branch: jax.Array  # int32 [P], which of the branches this is; -1: none
    width: jax.Array  # int32 [P], how many branches there are
    waited: jax.Array  # int32 [P], steps that the row has been waiting for lanes
    candidates: jax.Array  # int32 [P, W], the branches' first tokens
    logprobs: jax.Array  # float32 [P, W], of those, nats
    start: jax.Array  # int32 [P], the position of the first tokens
    forwards: jax.Array  # int32 [P], `DecodeState.forwards` when the row was forked
    tally: Tally  # of the row before the fork
    # Of the branch itself:
    logprob: jax.Array  # float32 [P], of its last token, nats
    sums: jax.Array  # float32 [P, 3], over its tokens: ln p (nats), h (bits), u (bits^2)
    failed: jax.Array  # bool [P], its logits became NaN or infinite


@struct.dataclass
class DecodeState:
    """A batch while it decodes: the rows in its slots, then its lanes, P in all.

    A row's entire state lives in its slot, its sampler settings and end tokens included, so rows
    are independent. `history` is each row's text; the cache holds all of it but the last token,
    which the next step reads.
    """

    cache: KVCache
    history: jax.Array  # int32 [P, S], each row's tokens, prompt included; past them forced ones
    confidences: jax.Array  # float32 [P, S], of generated tokens, nats, while a row may end by them
    prompt_length: jax.Array  # int32 [P], at least 1
    budget: jax.Array  # int32 [P], most tokens to generate
    keys: jax.Array  # uint32 [P, 2], see `sampler.keys`
    asks_for_text: jax.Array  # bool [P], the host is asked for each thought's text
    asks_for_choice: jax.Array  # bool [P], the host is asked which branch of an ambiguous fork
    settings: SamplerSettings  # each leaf [P, ...]; its mechanisms are static
    eos_ids: jax.Array  # int32 [P, E], the tokens that end a row; -1 matches none
    sampler: SamplerState
    fork: Fork
    forwards: jax.Array  # int32 [P], token positions evaluated beyond the prompt
    finish: jax.Array  # int32 [P], RUNNING, why the row ended, or what it waits for
    unsound: jax.Array  # int32 [P, 2], see `finite.first_unsound`, of the prompt as far as checked
    # Static: rows at the end of each data shard that are lanes.
    lanes: int = struct.field(pytree_node=False)


@dataclass(frozen=True)
class Recording:
    """What a step records besides the choice; static."""

    top: int = 0  # how many of the most likely tokens, with their probabilities
    layers: bool = False  # the attention entropy of each layer and head
    check: bool = False  # where an activation is NaN or infinite; such a row fails there
    # The sampler's state after each token, from which `Engine.fork` and `rewind` go on.
    state: bool = False
    # Layers stay arrays, which `TokenRecord.to_json` makes plain: that takes longer than a step's
    # other records, and nobody may ever look.
    raw_layers: bool = False


@struct.dataclass
class Extras:
    """What is recorded where it is asked for; empty axes where it is not."""

    top_ids: jax.Array  # int32 [B, recording.top]
    top_probs: jax.Array  # float32 [B, recording.top]
    layers: jax.Array  # float32 [B, L, N] bits


@struct.dataclass
class StepRecord:
    """What one step did to each row; [P] fields, or [steps, P] from a loop. [B] without lanes."""

    live: jax.Array  # bool: the row was running; else the fields up to `unsound` mean nothing
    position: jax.Array  # int32, of the token
    forwards: jax.Array  # int32, when the token was chosen
    choice: Choice
    tally: Tally | None  # after it, of a row or branch; None where it is not recorded
    extras: Extras  # of the distribution that the step evaluated
    rewinds: jax.Array  # bool: the row goes back to the position, and has no token
    settled: jax.Array  # int32, the position that the next steps cannot go back beyond
    unsound: jax.Array  # int32 [P, 2], see `finite.first_unsound`; NOWHERE where nothing is checked
    finish: jax.Array  # int32, after it; a row that waits, forks or failed has no token
    parent: jax.Array  # int32, see `Fork`
    branch: jax.Array  # int32, see `Fork`; a branch that has ended has no token
    width: jax.Array  # int32: so many branches of the row begin; 0: it did not fork
    candidates: jax.Array  # int32 [P, W], with the first of these tokens
    logprobs: jax.Array  # float32 [P, W], of those, nats
    joins: jax.Array  # bool: the best branch of the row took its place
    best: jax.Array  # int32, that branch
    committed: jax.Array  # int32, so many of its tokens; 0 where the row waits, or forces the first
    scores: jax.Array  # float32 [P, W], of all branches, -inf where there is none
    ambiguous: jax.Array  # bool: the two best scores are within the margin


def init_state(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    keys: np.ndarray,
    settings: SamplerSettings,
    eos_ids: np.ndarray,
    *,
    capacity: int,
    dtype: jnp.dtype,
    lanes: int = 0,
    shards: int = 1,
) -> DecodeState:
    """Rows whose prompts are known and not yet cached, and which ask the host for nothing.

    Args:
        prompts: each of 1 to `capacity` token ids; with its budget it must fit into `capacity`. A
            row that is not to run may have an empty one.
        budgets: tokens that each row may generate, at least 1; 0 for a row that is not to run.
        keys: uint32 [B, 2], one row key each.
        settings: of each row.
        eos_ids: int32 [B, E], or [E] for all rows.
        capacity: cache positions of a row.
        dtype: of the activations, see `cache_dtype`.
        lanes: rows of each shard beside those, for branches.
        shards: of the rows over devices. Each shard has its slots first, then its lanes.
    """
    batch = len(prompts)
    history = np.zeros((batch, capacity), np.int32)
    for row, prompt in enumerate(prompts):
        history[row, : len(prompt)] = prompt

    def spread(rows: Any) -> Any:
        """[B, ...] as [P, ...]: each shard's lanes are copies of its first row."""
        parts = np.split(np.asarray(rows), shards)
        return np.concatenate([x for part in parts for x in (part, *[part[:1]] * lanes)])

    # NumPy, sent to the device at once: there, each array would be a program to load.
    def full(value: Any, *axes: int, dtype: Any = np.int32) -> Any:
        return np.full((places, *axes), value, dtype)

    places, budget = batch + shards * lanes, spread(np.array(budgets, np.int32))
    sampler = init_sampler_state(places, settings.mechanisms)
    number: Any = np.arange(places, dtype=np.int32)
    is_lane = number % (places // shards) >= batch // shards
    finish: Any = np.where(is_lane | (budget == 0), FINISHED_STOP, RUNNING).astype(np.int32)
    state = DecodeState(
        cache=init_cache(config, places, capacity, dtype),
        history=spread(history),
        confidences=full(0, capacity, dtype=np.float32),
        prompt_length=spread(np.array([len(prompt) for prompt in prompts], np.int32)),
        budget=budget,
        keys=spread(keys),
        asks_for_text=full(False, dtype=bool),
        asks_for_choice=full(False, dtype=bool),
        settings=jax.tree.map(spread, settings),
        eos_ids=spread(np.broadcast_to(eos_ids, (batch, np.shape(eos_ids)[-1]))),
        sampler=sampler,
        fork=Fork(
            parent=number,
            branch=full(-1),
            width=full(0),
            waited=full(0),
            candidates=full(0, MAX_WIDTH, dtype=np.int32),
            logprobs=full(0, MAX_WIDTH, dtype=np.float32),
            start=full(0),
            forwards=full(0),
            tally=jax.tree.map(np.array, sampler.tally),  # donated: no leaf twice
            logprob=full(0, dtype=np.float32),
            sums=full(0, 3, dtype=np.float32),
            failed=full(False, dtype=bool),
        ),
        forwards=full(0),
        finish=finish,
        unsound=full(NOWHERE, 2),
        lanes=lanes,
    )
    placed: DecodeState = jax.device_put(state)
    return placed


def extras_of(logits: jax.Array, stats: AttnStats, recording: Recording) -> Extras:
    """What is recorded of `logits[B, V]`, float32, and the attention besides the choice; the
    likeliest tokens in falling order. `recording` is static."""
    batch = logits.shape[0]
    top_probs, top_ids = jnp.zeros((batch, 0), jnp.float32), jnp.zeros((batch, 0), jnp.int32)
    if recording.top:
        top_probs, top_ids = top(jax.nn.softmax(logits, axis=-1), recording.top)
    layers = stats.entropy if recording.layers else jnp.zeros((batch, 0, 0), jnp.float32)
    return Extras(top_ids=top_ids, top_probs=top_probs, layers=layers)


def finish_of(left: jax.Array, token: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """The `finish` of rows that end in `token[B]` and have `left[B]` tokens of their budget left:
    int32 [B]. The arguments are int32; `eos_ids[B, E]` has -1 where it has no more. Where both
    hold it is FINISHED_EOS."""
    ended = jnp.any(token[:, None] == eos_ids, axis=-1)
    return jnp.where(ended, FINISHED_EOS, jnp.where(left <= 0, FINISHED_LENGTH, RUNNING))


def without_lanes(state: DecodeState) -> DecodeState:
    """The rows in slots. Keys and values stay whole, since a part of them would be a copy."""
    batch = state.finish.shape[0] - state.lanes
    slots: DecodeState = jax.tree.map(lambda x: x[:batch], _without_cache(state))
    return replace(slots, cache=replace(state.cache, length=slots.cache.length), lanes=0)


def with_lanes(state: DecodeState, whole: DecodeState) -> DecodeState:
    """The inverse, with the lanes of `whole`."""
    batch = state.finish.shape[0]
    both: DecodeState = jax.tree.map(
        lambda slots, all_: jnp.concatenate([slots, all_[batch:]]),
        replace(_without_cache(state), lanes=whole.lanes),
        _without_cache(whole),
    )
    return replace(both, cache=replace(state.cache, length=both.cache.length))


def _without_cache(state: DecodeState) -> DecodeState:
    return replace(state, cache=replace(state.cache, keys=(), values=()))
