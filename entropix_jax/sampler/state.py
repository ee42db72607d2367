"""The sampler's view of each row, its state between steps, and a step in progress."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.sampler.context import Context, Proposal, Tree
from entropix_jax.sampler.metrics import Metrics

MAX_REACH = 8  # R, positions that a row can go back at once
MAX_ATTEMPTS = 8  # tokens that may be banned at one position
_RING = ("logprob", "proposal", "tally", "attempts", "bans")  # fields of a `Trail` that are [B, R]


@struct.dataclass
class Observation:
    """Measurements of one distribution; every field [B]."""

    metrics: Metrics
    sequence_varentropy: jax.Array  # float32, bits^2, of the row's entropies, this one included
    regime: jax.Array  # int32, index into REGIMES
    rounds: jax.Array  # int32, see `regimes.count_rounds`; 0: the row does not loop
    confidence: jax.Array  # float32, of the documents' formula; reported, nothing more
    # Float32, nats, of the model's own distribution, see `metrics.measure_confidence`.
    token_confidence: jax.Array
    self_certainty: jax.Array


@struct.dataclass
class Tally:
    """Counters and running values of each row."""

    queued: jax.Array  # int32 [B], forced tokens, in the history from the row's length on
    queue_action: jax.Array  # int32 [B], the action that they are forced for
    entropy_mean: jax.Array  # float32 [B], of the committed tokens' entropies, bits
    entropy_squares: jax.Array  # float32 [B], their summed squared deviation from it (Welford)
    drift: jax.Array  # float32 [B, 4], see `regimes.current_thresholds`
    own: dict[str, Any]  # of each mechanism that keeps a state, by its name; leaves [B]


@struct.dataclass
class Trail:
    """The last positions of each row, as it takes to go back to one: its distribution is read
    again. Fields [B, R] are those of position p at index p modulo R."""

    drawn: jax.Array  # int32 [B], how many tokens from the last one back were drawn, R at most
    again: jax.Array  # bool [B], the next position is drawn again
    logprob: jax.Array  # float32 [B, R], nats, of the token
    proposal: Proposal  # [B, R], what the token was drawn by
    tally: Tally  # [B, R], as it was before the token
    attempts: jax.Array  # int32 [B, R], tokens that were retracted there
    bans: jax.Array  # int32 [B, R, MAX_ATTEMPTS], those tokens; -1: none

    def at(self, position: jax.Array) -> "Trail":
        """Each row's entry of a position, int32 [B]: the fields [B, R, ...] become [B, ...]."""

        def take(x: jax.Array) -> jax.Array:
            index = jnp.mod(position, MAX_REACH).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.take_along_axis(x, index, axis=1)[:, 0]

        ring = {name: jax.tree.map(take, getattr(self, name)) for name in _RING}
        return replace(self, **ring)

    def retracted(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many tokens were retracted at each row's next position, int32 [B], and which, int32
        [B, MAX_ATTEMPTS]; -1: none."""
        here = self.at(position)
        attempts = jnp.where(self.again, here.attempts, 0)
        return attempts, jnp.where(self.again[:, None], here.bans, -1)

    def put(self, position: jax.Array, rows: jax.Array, **entry: Any) -> "Trail":
        """With an entry's fields, [B, ...], at a position of the rows of a bool [B]."""
        index = jnp.arange(MAX_REACH, dtype=jnp.int32)[None, :]
        here = rows[:, None] & (index == jnp.mod(position, MAX_REACH)[:, None])

        def put(all_: jax.Array, one: jax.Array) -> jax.Array:
            return jnp.where(here.reshape(*here.shape, *[1] * (all_.ndim - 2)), one[:, None], all_)

        ring = {name: jax.tree.map(put, getattr(self, name), one) for name, one in entry.items()}
        return replace(self, **ring)


@struct.dataclass
class SamplerState:
    """The sampler's state of each row between steps."""

    tally: Tally
    trail: Trail


@struct.dataclass
class Rows:
    """The sampler's view of each row."""

    running: jax.Array  # bool [B]; the choice for other rows is meaningless
    keys: jax.Array  # uint32 [B, 2], see `sampler.keys`
    history: jax.Array  # int32 [B, S], the tokens so far, prompt included, then forced ones
    length: jax.Array  # int32 [B], how many so far: also the position of the token to be chosen
    generated: jax.Array  # int32 [B], how many of them were generated
    remaining: jax.Array  # int32 [B], how many may still be committed, at least 1
    eos_ids: jax.Array  # int32 [B, E], the tokens that end the row; -1 matches none
    asks: jax.Array  # bool [B], a thought's text is asked for, not taken from the settings
    branch: jax.Array  # int32 [B], which branch of a fork the row is; -1: none
    vocab_size: int = struct.field(pytree_node=False)


@struct.dataclass
class DrawnToken:
    """What each row's token was drawn from, fields [B, ...]."""

    logits: jax.Array  # float32 [B, V], with penalties and bans, before truncation
    token: jax.Array  # int32
    # float32 [B, V], what each `reweigh` filter was given, by its name.
    given: dict[str, jax.Array] = field(default_factory=dict)


@struct.dataclass
class Step:
    """One step of all rows between their proposals and the draw; fields [B, ...].

    A mechanism's `apply` changes it in the rows that act. `rewinds`, `forks`, `waits` and `ends`
    are False where nothing acts, and at most one of the first three is True.
    """

    rows: Rows
    logits: jax.Array  # float32 [B, V], as the model gave them
    context: Context  # what mechanisms see of each row, as it was before any action
    observation: Observation
    proposal: Proposal  # what is drawn by; a forced token has the action that it is forced for
    tally: Tally  # before the token
    trail: Trail  # before the token
    reach: jax.Array  # int32, how many of its last tokens the row may go back at most
    rewinds: jax.Array  # bool: the row goes back to `rows.length`, and commits nothing
    forks: jax.Array  # bool: the row goes on as several, and then as the best of them
    candidates: jax.Array  # int32 [B, W], the first tokens of a row that forks
    width: jax.Array  # int32, how many of them there are
    waits: jax.Array  # bool: the row commits nothing, and waits for the host's tokens
    ends: jax.Array  # bool: the row ends with this token, as with an end token

    def force(self, acts: jax.Array, tokens: jax.Array, count: jax.Array) -> "Step":
        """The step with tokens forced: the rows of `acts` commit the first `count` of `tokens`, one
        a step from this one on, as far as their budgets reach.

        Args:
            acts: bool [B].
            tokens: int32 [B, n].
            count: int32 [B], at most n; with 0 the row draws.
        """
        history, tally = self.rows.history, self.tally

        def write() -> jax.Array:
            steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
            inside = acts[:, None] & (steps < count[:, None])
            positions = jnp.where(inside, self.rows.length[:, None] + steps, history.shape[1])
            row = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
            return history.at[row, positions].set(tokens, mode="drop")

        tally = replace(
            tally,
            queued=jnp.where(acts, count, tally.queued),
            queue_action=jnp.where(acts, self.proposal.action, tally.queue_action),
        )
        history = lax.cond(jnp.any(acts), write, lambda: history)
        return replace(self, rows=replace(self.rows, history=history), tally=tally)


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
