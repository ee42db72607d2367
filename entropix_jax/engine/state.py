"""The state of a batch while it decodes, and the record of each step."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.model.cache import KVCache
from entropix_jax.packed import Packed
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import Choice, RowView, SamplerState, Step, Tally
from entropix_jax.stats import AttnLooks, AttnStats, top

# Status of a row. All but RUNNING say why it does not run.
RUNNING = 0
EOS, LENGTH, ERROR = 1, 2, 3  # ended by an end token, by its budget, by NaN or infinite logits
STOPPED = 4  # ended by the host, or its text is not read yet; or a lane without a branch
WAITS_FOR_TEXT, WAITS_FOR_CHOICE = 5, 6  # until the host has answered
FORKS = 7  # waits for lanes for its branches
BRANCH_ENDED = 8  # a branch that waits for the others of its fork
ENDED_BY = 16  # plus the index of the mechanism that ended the row

# Fields of `DecodeState` that no step changes in slots.
_FIXED = "prompt_length budget keys looks_up asks_for_choice clarifies settings eos_ids".split()


@struct.dataclass
class Fork:
    """A row's fork. All branches of a fork have a copy. The first one runs in the row's own slot,
    the others in lanes."""

    parent: jax.Array  # int32 [P], of a branch the slot of the row that was forked
    branch: jax.Array  # int32 [P], which of the branches this is; -1: none
    width: jax.Array  # int32 [P], how many branches there are
    waited: jax.Array  # int32 [P], steps that the row has been waiting for lanes
    candidates: jax.Array  # int32 [P, W], the branches' first tokens
    scores: jax.Array  # float32 [P, W], ln p of those, nats, as branches are judged
    start: jax.Array  # int32 [P], the position of the first tokens
    forwards: jax.Array  # int32 [P], `DecodeState.forwards` when the row was forked
    tally: Packed[Tally]  # of the row before the fork
    # Of the branch itself:
    logprob: jax.Array  # float32 [P], of its last token, nats, as branches are judged
    sums: jax.Array  # float32 [P, 3], over its tokens: ln p (nats), h (bits), u (bits^2)
    failed: jax.Array  # bool [P], its logits became NaN or infinite


@struct.dataclass
class DecodeState:
    """State of a batch while it decodes: rows in slots, then lanes, P in all.

    A row's entire state lives in its slot, its sampler settings and end tokens included, so rows
    are independent. `history` is each row's text. The cache has all of it except the last token,
    which the next step reads, and all of it if the row waits to fork or has failed.
    """

    cache: KVCache
    history: jax.Array  # int32 [P, S], each row's tokens, prompt included; past them forced ones
    confidences: jax.Array  # float32 [P, S], token confidences of generated tokens, nats
    prompt_length: jax.Array  # int32 [P], at least 1
    budget: jax.Array  # int32 [P], most tokens to generate
    keys: jax.Array  # uint32 [P, 2], see `sampler.draw`
    looks_up: jax.Array  # bool [P], the row has a lookup function
    asks_for_choice: jax.Array  # bool [P], the host is asked which branch of an ambiguous fork
    clarifies: jax.Array  # bool [P], the row may end with a question to the user
    settings: Packed[SamplerSettings]  # each leaf [P, ...]
    eos_ids: jax.Array  # int32 [P, E], the tokens that end a row; -1 matches none
    sampler: SamplerState
    fork: Fork
    forwards: jax.Array  # int32 [P], token positions evaluated beyond the prompt
    status: jax.Array  # int32 [P], see RUNNING
    # Static: rows at the end of each data shard that are lanes.
    lanes: int = struct.field(pytree_node=False)

    @property
    def running(self) -> jax.Array:
        """Which rows take part in a step: bool [P]."""
        return self.status == RUNNING


@dataclass(frozen=True)
class Recording:
    """The optional parts of a step's record; static."""

    top: int = 0  # how many of the most likely tokens, with their probabilities
    layers: bool = False  # the attention entropy and varentropy of each layer and head
    # The tally after each token, from which `Engine.fork` and `rewind` continue, without the trail.
    state: bool = False
    # Layers stay arrays, which `TokenRecord.to_json` makes plain: that takes longer than a step's
    # other records, and may never be needed.
    raw_layers: bool = False
    # The positions that three heads attend to, of generated tokens only.
    attention: bool = False


@dataclass(frozen=True)
class Program:
    """The static part of a compiled step, in addition to `ModelConfig`. The rest is traced."""

    parts: Parts  # of the sampler
    window: int  # cache positions that are read
    recording: Recording = Recording()
    lanes: bool = False  # whether the lanes take part


@struct.dataclass
class Extras:
    """Optional parts of a record, with empty axes where they are not recorded."""

    top_ids: jax.Array  # int32 [B, recording.top]
    top_probs: jax.Array  # float32 [B, recording.top]
    layers: jax.Array  # float32 [B, L, N] bits
    # None where they are not recorded:
    layers_varentropy: jax.Array | None = None  # float32 [B, L, N] bits^2
    looks: AttnLooks | None = None
    looked: jax.Array | None = None  # int32 [B, 3, 5], the tokens at the positions of `looks`


@struct.dataclass
class ForkEnd:
    """The ends of forks; [P] fields."""

    joins: jax.Array  # bool: the row's fork ended. Where False, the other fields are undefined.
    best: jax.Array  # int32, the branch with the highest score
    # int32, number of the branch's tokens that are committed. 0 if the row waits, or its first
    # token is forced.
    committed: jax.Array
    scores: jax.Array  # float32 [P, W], of all branches, -inf where there is none
    ambiguous: jax.Array  # bool: the two best scores are within the margin


@struct.dataclass
class StepRecord:
    """A step's effect on each row; [P] fields, or [steps, P] from a loop. [B] without lanes."""

    live: jax.Array  # bool: the row ran; else, unless it joins, undefined up to `settled`
    position: jax.Array  # int32, of the token
    forwards: jax.Array  # int32, when the token was chosen
    choice: Choice
    tally: Tally | None  # after it, of a row or branch; None where it is not recorded
    extras: Extras  # of the distribution that the step evaluated
    rewinds: jax.Array  # bool: the row goes back to the position, and has no token
    settled: jax.Array  # int32, the position that the next steps cannot go back beyond
    status: jax.Array  # int32, after it; a row that waits, forks or failed has no token
    parent: jax.Array  # int32, see `Fork`
    branch: jax.Array  # int32, see `Fork`; a branch that has ended has no token
    width: jax.Array  # int32, number of branches that begin; 0: it did not fork
    candidates: jax.Array  # int32 [P, W], with the first of these tokens
    logprobs: jax.Array  # float32 [P, W], of those, nats
    joined: ForkEnd


def extras_of(
    logits: jax.Array, stats: AttnStats, recording: Recording, history: jax.Array | None = None
) -> Extras:
    """Returns the optional records of `logits[B, V]`, float32, and the attention; the most likely
    tokens in falling order. `recording` is static, `history[B, S]` the tokens that were read."""
    batch = logits.shape[0]
    top_probs, top_ids = jnp.zeros((batch, 0), jnp.float32), jnp.zeros((batch, 0), jnp.int32)
    if recording.top:
        top_probs, top_ids = top(jax.nn.softmax(logits, axis=-1), recording.top)
    layers = stats.entropy if recording.layers else jnp.zeros((batch, 0, 0), jnp.float32)
    extras = Extras(top_ids=top_ids, top_probs=top_probs, layers=layers)
    if recording.layers:
        extras = replace(extras, layers_varentropy=stats.varentropy)
    if stats.looks is not None and history is not None:
        at = stats.looks.positions.reshape(batch, -1)
        looked = jnp.take_along_axis(history, at, axis=1).reshape(stats.looks.positions.shape)
        extras = replace(extras, looks=stats.looks, looked=looked)
    return extras


def status_after(remaining: jax.Array, token: jax.Array, eos_ids: jax.Array) -> jax.Array:
    """Returns the status of rows after a token, int32 [B]: EOS, LENGTH or RUNNING.

    Args:
        remaining: int32 [B], tokens that remain of the budget after it.
        token: int32 [B].
        eos_ids: int32 [B, E], the end tokens; -1 matches none.
    """
    ended = jnp.any(token[:, None] == eos_ids, axis=-1)
    return jnp.where(ended, EOS, jnp.where(remaining <= 0, LENGTH, RUNNING))


def status_after_step(state: DecodeState, choice: Choice, step: Step, ends: jax.Array) -> jax.Array:
    """Returns each row's status after the step, int32 [P]; `ends[P]` are branches that end."""
    is_branch, remaining = step.rows.branch >= 0, step.rows.remaining - 1
    after_token = status_after(remaining, choice.token, state.eos_ids)
    table = (  # the first condition that holds decides
        (~step.rows.running, state.status),
        (ends, BRANCH_ENDED),
        (is_branch, RUNNING),
        (~choice.finite, ERROR),
        (step.waits, WAITS_FOR_TEXT),
        (step.forks, FORKS),
        (step.rewinds, RUNNING),
        (after_token != RUNNING, after_token),
        (step.ended_by >= 0, ENDED_BY + step.ended_by),
    )
    conditions, statuses = zip(*table, strict=True)
    status: jax.Array = jnp.select(conditions, statuses, RUNNING)
    return status


def view_rows(state: DecodeState, vocab_size: int) -> RowView:
    """Returns the sampler's view of each row whose last token is being read."""
    length = state.cache.length + 1
    generated = length - state.prompt_length
    return RowView(
        running=state.running,
        key=state.keys,
        history=state.history,
        confidences=state.confidences,
        length=length,
        generated=generated,
        remaining=state.budget - generated,
        eos_ids=state.eos_ids,
        looks_up=state.looks_up,
        clarifies=state.clarifies,
        branch=state.fork.branch,
        vocab_size=vocab_size,
    )


def without_lanes(state: DecodeState) -> DecodeState:
    """The rows in slots. Keys and values stay whole, since a part of them would be a copy."""
    if not state.lanes:
        return state
    batch = state.status.shape[0] - state.lanes
    slots: DecodeState = jax.tree.map(lambda x: x[:batch], without_keys(state))
    return replace(slots, cache=replace(state.cache, length=slots.cache.length), lanes=0)


def with_lanes(state: DecodeState, whole: DecodeState) -> DecodeState:
    """Adds the lanes and the constant fields of `whole` to a state without lanes."""
    if not whole.lanes:
        return state
    batch = state.status.shape[0]
    fixed: dict[str, Any] = {name: getattr(whole, name) for name in _FIXED}
    without: dict[str, Any] = dict.fromkeys(fixed, ())
    both: DecodeState = jax.tree.map(
        lambda slots, all_: jnp.concatenate([slots, all_[batch:]]),
        replace(without_keys(state), lanes=whole.lanes, **without),
        replace(without_keys(whole), **without),
    )
    return replace(both, cache=replace(state.cache, length=both.cache.length), **fixed)


def without_keys(state: DecodeState) -> DecodeState:
    """The state without the cache's keys and values."""
    return replace(state, cache=replace(state.cache, keys=(), values=()))
