"""The sampler's view of a row, its state between steps, and what a step decides.

Fields are those of one row. With a leading axis on each, they are those of a batch.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.packed import Packed, pack
from entropix_jax.sampler.metrics import Metrics

_LATER: Any = None

MAX_REACH = 8  # R, positions that a row can go back at once; a power of two
MAX_ATTEMPTS = 8  # tokens that may be banned at one position


@struct.dataclass
class Observation:
    """Measurements of one distribution, and of the row."""

    metrics: Metrics
    # Float32, of the model's own distribution, see `metrics.measure_confidence`.
    token_confidence: jax.Array  # nats
    self_certainty: jax.Array  # nats
    max_prob: jax.Array  # p1, of the most likely token
    # None until `step` has classified the row.
    sequence_varentropy: jax.Array = _LATER  # float32, bits^2, of its entropies, this one included
    regime: jax.Array = _LATER  # int32, index into REGIMES
    rounds: jax.Array = _LATER  # int32, see `regimes.count_rounds`; 0: the row does not loop
    confidence: jax.Array = _LATER  # float32, of the documents' formula; only reported
    p_wrong: jax.Array = _LATER  # float32, see `mechanisms.wrong`; NaN without a table


@struct.dataclass
class Proposal:
    """Sampling parameters of a row's next token; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into `Parts.mechanisms`
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off. Like top_k and top_p it is for the rule `nucleus`
    num_candidates: jax.Array  # int32


@struct.dataclass
class Tally:
    """Counters and running values of one row."""

    queued: jax.Array  # int32, forced tokens, in the history from the row's length on
    queue_action: jax.Array  # int32, the action that they are forced for
    entropies: jax.Array  # float32 [2], of the committed tokens, see `metrics.spread`
    drift: jax.Array  # float32 [4], see `regimes.thresholds_of`
    states: dict[str, Any]  # of each mechanism that keeps a state, by its name
    # Static, because JAX takes two classes of one name and form, as of a reloaded plugin, for one.
    kinds: tuple[type, ...] = struct.field(pytree_node=False)


@struct.dataclass
class TrailEntry:
    """The data to draw a position again."""

    logprob: jax.Array  # float32, nats, of the token
    proposal: Proposal  # what the token was drawn by
    tally: Tally  # as it was before the token
    attempts: jax.Array  # int32, how many tokens were retracted there
    bans: jax.Array  # int32 [MAX_ATTEMPTS], those tokens; -1: none


@struct.dataclass
class Trail:
    """Ring buffer of a row's last R positions. Position p is at index p modulo R."""

    # int32, R at most: how many of the last tokens may be retracted. Forced ones may not, nor any
    # before them.
    rewindable: jax.Array
    again: jax.Array  # bool, the next position is drawn again
    entries: Packed[TrailEntry]  # [R]

    def put(self, position: jax.Array, here: jax.Array, entry: TrailEntry) -> "Trail":
        """Returns the trail with an entry at a position, where `here`, a bool, holds."""
        here &= jnp.arange(MAX_REACH, dtype=jnp.int32) == position & (MAX_REACH - 1)

        def put(all_: jax.Array, one: jax.Array) -> jax.Array:
            return jnp.where(here.reshape(-1, *[1] * one.ndim), one, all_)

        return replace(self, entries=jax.tree.map(put, self.entries, pack(entry)))

    def at(self, position: jax.Array) -> TrailEntry:
        """Returns the entry of a position, int32, or of several."""
        index = (position & (MAX_REACH - 1)).astype(jnp.uint32)
        get = partial(jnp.take, indices=index, axis=0, mode="clip")
        entry: Packed[TrailEntry] = jax.tree.map(get, self.entries)
        return entry.unpack()


@struct.dataclass
class SamplerState:
    """The sampler's state of a row between steps."""

    tally: Tally
    trail: Trail


@struct.dataclass
class RowView:
    """The sampler's view of one row."""

    running: jax.Array  # bool; the choice for other rows is meaningless
    key: jax.Array  # uint32 [2], see `sampler.draw`
    history: jax.Array  # int32 [S], the tokens so far, prompt included, then forced ones
    confidences: jax.Array  # float32 [S], nats, token confidences of the generated ones
    length: jax.Array  # int32, how many so far: also the position of the token to be chosen
    generated: jax.Array  # int32, how many of them were generated
    remaining: jax.Array  # int32, how many may still be committed; 0 only in a branch
    eos_ids: jax.Array  # int32 [E], the tokens that end the row; -1 matches none
    looks_up: jax.Array  # bool, the row has a lookup function
    clarifies: jax.Array  # bool, the row may end with a question to the user
    branch: jax.Array  # int32, which branch of a fork the row is; -1: none
    vocab_size: int = struct.field(pytree_node=False)


@struct.dataclass
class DrawnToken:
    """The inputs of one row's draw."""

    logits: jax.Array  # float32 [V], with penalties and bans, before truncation
    token: jax.Array  # int32
    # float32 [V], the input of each `reweigh` filter, by its name.
    inputs: dict[str, jax.Array] = field(default_factory=dict)


@struct.dataclass
class Choice:
    """Each row's token and how it was chosen; every field [B]."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    observation: Observation
    proposal: Proposal  # a forced token has the action that it is forced for
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


@struct.dataclass
class Step:
    """A step's decisions about each row, besides the token; fields [B, ...].

    At most one of `rewinds`, `forks`, `waits` and `ended_by` is set. A running row that does not
    rewind, fork or wait commits its token.
    """

    # As the step left them: `length` is the position of the token, or of the one to draw again.
    rows: RowView
    log_probs: jax.Array  # float32 [B, V], nats, of the model's own distribution
    scored: jax.Array  # float32 [B, V], nats, the log-probabilities that branches are judged by
    metrics: Metrics  # as the regimes and arms see them
    tally_before: Tally  # before the token
    rewinds: jax.Array  # bool: the row goes back to `rows.length`, and commits nothing
    forks: jax.Array  # bool: the row continues as several branches, and then as the best
    candidates: jax.Array  # int32 [B, W], the first tokens of a row that forks
    width: jax.Array  # int32, how many of them there are
    waits: jax.Array  # bool: the row commits nothing, and waits for the host's tokens
    settled: jax.Array  # int32, the position that the next steps cannot go back beyond
    ended_by: jax.Array  # int32, index of the mechanism that ends the row with this token; -1: none


def init_sampler_state(batch: int, mechanisms: Sequence[Any]) -> SamplerState:
    """Returns the state of rows that have committed nothing yet, NumPy: on a device each array
    would be a program to load. `mechanisms` are `Mechanism`s."""
    zeros: Any = np.zeros
    zero, zero_f = zeros((), np.int32), zeros((), np.float32)
    with jax.ensure_compile_time_eval():
        states = {m.name: jax.tree.map(np.asarray, m.init()) for m in mechanisms if m.init}
    kinds = tuple(map(type, states.values()))
    tally = Tally(zero, zero, zeros(2, np.float32), zeros(4, np.float32), states, kinds)
    proposal = Proposal(zero, zero_f, zero, zero_f, zero_f, zero)
    entry = TrailEntry(zero_f, proposal, tally, zero, zeros(MAX_ATTEMPTS, np.int32) - 1)
    entries = jax.tree.map(lambda x: np.stack([x] * MAX_REACH), pack(entry))
    state = SamplerState(tally, Trail(rewindable=zero, again=zeros((), bool), entries=entries))
    # Copies: a state is donated, each leaf once.
    rows: SamplerState = jax.tree.map(lambda x: np.repeat(x[None], batch, axis=0), state)
    return rows


def with_token(
    values: jax.Array, position: jax.Array, new: jax.Array, here: jax.Array | bool = True
) -> jax.Array:
    """Returns one row's `values[S]` with `new` at a position, int32, where `here`, a bool, holds.

    A comparison fuses with the operations around it. On a GPU a scatter is two kernels.
    """
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.where(here & (place == position), new, values)
