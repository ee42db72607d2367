"""The sampler's view of a row, its state between steps, and what a step decides.

Fields are those of one row. With a leading axis on each, they are those of a batch.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.sampler.metrics import Metrics

Tree = TypeVar("Tree")

MAX_REACH = 8  # R, positions that a row can go back at once
MAX_ATTEMPTS = 8  # tokens that may be banned at one position
_RING = ("logprob", "proposal", "tally", "attempts", "bans")  # fields of a `Trail` that are [R]


@struct.dataclass
class Observation:
    """Measurements of one distribution."""

    metrics: Metrics
    sequence_varentropy: jax.Array  # float32, bits^2, of the row's entropies, this one included
    regime: jax.Array  # int32, index into REGIMES
    rounds: jax.Array  # int32, see `regimes.count_rounds`; 0: the row does not loop
    confidence: jax.Array  # float32, of the documents' formula; reported, nothing more
    # Float32, nats, of the model's own distribution, see `metrics.measure_confidence`.
    token_confidence: jax.Array
    self_certainty: jax.Array


@struct.dataclass
class Proposal:
    """Sampling parameters of a row's next token; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into `Parts.mechanisms`
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off
    draws: jax.Array  # int32, candidates
    rule: jax.Array  # int32, index into the mechanisms; top_k, top_p and min_p are for `nucleus`


@struct.dataclass
class Tally:
    """Counters and running values of one row."""

    queued: jax.Array  # int32, forced tokens, in the history from the row's length on
    queue_action: jax.Array  # int32, the action that they are forced for
    entropy_mean: jax.Array  # float32, of the committed tokens' entropies, bits
    entropy_squares: jax.Array  # float32, their summed squared deviation from it (Welford)
    drift: jax.Array  # float32 [4], see `regimes.current_thresholds`
    own: dict[str, Any]  # of each mechanism that keeps a state, by its name


@struct.dataclass
class Trail:
    """The last positions of one row, as it takes to go back to one: its distribution is read again.
    Fields [R] are those of position p at index p modulo R."""

    drawn: jax.Array  # int32, how many tokens from the last one back were drawn, R at most
    again: jax.Array  # bool, the next position is drawn again
    logprob: jax.Array  # float32 [R], nats, of the token
    proposal: Proposal  # [R], what the token was drawn by
    tally: Tally  # [R], as it was before the token
    attempts: jax.Array  # int32 [R], tokens that were retracted there
    bans: jax.Array  # int32 [R, MAX_ATTEMPTS], those tokens; -1: none

    def at(self, position: jax.Array) -> "Trail":
        """The entry of a position, int32: the fields [R, ...] become [...]."""
        index = jnp.mod(position, MAX_REACH)
        ring = {name: getattr(self, name) for name in _RING}
        entry: Trail = replace(self, **jax.tree.map(lambda x: x[index], ring))
        return entry

    def put(self, position: jax.Array, where: jax.Array, **entry: Any) -> "Trail":
        """With an entry's fields at a position, where a bool holds."""
        index = jnp.arange(MAX_REACH, dtype=jnp.int32)
        here = where & (index == jnp.mod(position, MAX_REACH))

        def put(all_: jax.Array, one: jax.Array) -> jax.Array:
            return jnp.where(here.reshape(-1, *[1] * (all_.ndim - 1)), one[None], all_)

        ring = {name: jax.tree.map(put, getattr(self, name), one) for name, one in entry.items()}
        return replace(self, **ring)


@struct.dataclass
class SamplerState:
    """The sampler's state of a row between steps."""

    tally: Tally
    trail: Trail


@struct.dataclass
class Rows:
    """The sampler's view of a row."""

    running: jax.Array  # bool; the choice for other rows is meaningless
    keys: jax.Array  # uint32 [2], see `sampler.keys`
    history: jax.Array  # int32 [S], the tokens so far, prompt included, then forced ones
    length: jax.Array  # int32, how many so far: also the position of the token to be chosen
    generated: jax.Array  # int32, how many of them were generated
    remaining: jax.Array  # int32, how many may still be committed, at least 1
    eos_ids: jax.Array  # int32 [E], the tokens that end the row; -1 matches none
    asks: jax.Array  # bool, a thought's text is asked for, not taken from the settings
    branch: jax.Array  # int32, which branch of a fork the row is; -1: none
    vocab_size: int = struct.field(pytree_node=False)


@struct.dataclass
class DrawnToken:
    """What one row's token was drawn from."""

    logits: jax.Array  # float32 [V], with penalties and bans, before truncation
    token: jax.Array  # int32
    # float32 [V], what each `reweigh` filter was given, by its name.
    given: dict[str, jax.Array] = field(default_factory=dict)


@struct.dataclass
class Step:
    """What a step decided about each row beside its token; fields [B, ...].

    `rewinds`, `forks`, `waits` and `ends` are False where a row just commits its token, and at most
    one of them is True.
    """

    rows: Rows  # as the step left them, forced tokens in their histories
    log_probs: jax.Array  # float32 [B, V], nats, of the model's own distribution
    tally: Tally  # before the token
    rewinds: jax.Array  # bool: the row goes back to `rows.length`, and commits nothing
    forks: jax.Array  # bool: the row goes on as several, and then as the best of them
    candidates: jax.Array  # int32 [B, W], the first tokens of a row that forks
    width: jax.Array  # int32, how many of them there are
    waits: jax.Array  # bool: the row commits nothing, and waits for the host's tokens
    ends: jax.Array  # bool: the row ends with this token, as with an end token


def init_sampler_state(batch: int, mechanisms: Sequence[Any]) -> SamplerState:
    """The state of rows that have committed nothing yet, NumPy: on a device each array would be a
    program to load. `mechanisms` are `Mechanism`s."""
    zeros: Any = np.zeros(batch, np.int32)
    zeros_f: Any = np.zeros(batch, np.float32)
    bans: Any = np.full((batch, MAX_ATTEMPTS), -1, np.int32)
    again: Any = np.zeros(batch, bool)
    drift: Any = np.zeros((batch, 4), np.float32)
    with jax.ensure_compile_time_eval():
        own = {m.name: jax.tree.map(np.asarray, m.init()) for m in mechanisms if m.init is not None}
    tally = Tally(
        queued=zeros,
        queue_action=zeros,
        entropy_mean=zeros_f,
        entropy_squares=zeros_f,
        drift=drift,
        own=jax.tree.map(lambda x: np.broadcast_to(x, (batch, *x.shape)), own),
    )
    proposal = Proposal(
        action=zeros,
        temperature=zeros_f,
        top_k=zeros,
        top_p=zeros_f,
        min_p=zeros_f,
        draws=zeros,
        rule=zeros,
    )

    def ring(tree: Tree) -> Tree:
        rings: Tree = jax.tree.map(lambda x: np.stack([x] * MAX_REACH, axis=1), tree)
        return rings

    state = SamplerState(
        tally=tally,
        trail=Trail(
            drawn=zeros,
            again=again,
            logprob=ring(zeros_f),
            proposal=ring(proposal),
            tally=ring(tally),
            attempts=ring(zeros),
            bans=ring(bans),
        ),
    )
    # Copies: a state is donated, each leaf once.
    copies: SamplerState = jax.tree.map(np.array, state)
    return copies
