"""`backspace`: retracts the row's last token, bans it at its position, and draws that again
(document 004).

The position is drawn from the distribution, and under the proposal, that the token came from, as
one candidate. The row's other state stays as it was after the first token.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.plain import resample
from entropix_jax.sampler.metrics import Metrics, apply_noise_floor
from entropix_jax.sampler.proposal import Proposal, RowView, draw, either
from entropix_jax.sampler.settings import COUNT, SamplerSettings, number
from entropix_jax.sampler.state import MAX_ATTEMPTS, Rows, SamplerState, Step, where_rows


@struct.dataclass
class BackspaceSettings:
    """How many tokens may be retracted."""

    per_position: jax.Array = number(0, MAX_ATTEMPTS, integer=True)
    per_row: jax.Array = number(*COUNT, integer=True)


@struct.dataclass
class BackspaceState:
    """Of one row. Attempts and bans of the last position are in `SamplerState.last`."""

    backspaced: jax.Array  # int32, tokens of the row so far


def may_backspace(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """Whether the last token was drawn, the budgets are not spent, and a token is left to draw."""
    own: BackspaceSettings = settings.own["backspace"]
    row: BackspaceState = state.tally.own["backspace"]
    last = state.last
    bans = last.attempts + 1 + jnp.sum(settings.bans >= 0, axis=-1, dtype=jnp.int32)
    return (
        last.drawn
        & (last.attempts < own.per_position)
        & (row.backspaced < own.per_row)
        & (bans < last.logits.shape[-1])
    )


def propose(metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
    """Backspaces, or what `resample` does."""
    return either(
        row.may["backspace"], draw("backspace", settings), resample(metrics, settings, row)
    )


def apply(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Moves the row one position back, to what its last token was chosen from."""
    rows, last, now = step.rows, step.last, step.origin

    # The token joins the bans.
    row = jnp.arange(rows.length.shape[0], dtype=jnp.int32)
    before = jnp.maximum(rows.length - 1, 0)[:, None]
    token = jnp.take_along_axis(rows.history, before, axis=1)[:, 0]
    bans = last.bans.at[row, last.attempts].set(token, mode="drop")

    # The arrays over the vocabulary are selected only where some row backspaces.
    def earlier() -> tuple[jax.Array, jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(last.logits, axis=-1)
        floored = apply_noise_floor(log_probs, settings.noise_epsilon)
        again = (last.logits, log_probs, floored)
        return where_rows(acts, again, (now.logits, step.log_probs, step.floored))

    logits, log_probs, floored = lax.cond(
        jnp.any(acts), earlier, lambda: (now.logits, step.log_probs, step.floored)
    )
    origin = where_rows(
        acts,
        replace(last, logits=logits, attempts=last.attempts + 1, bans=bans),
        replace(now, logits=logits),
    )
    again = where_rows(acts, _draw_again(origin.proposal, settings), step.proposal)

    back = acts.astype(jnp.int32)
    own = BackspaceState(backspaced=step.tally.own["backspace"].backspaced + back)
    return replace(
        step,
        rows=replace(
            rows,
            length=rows.length - back,
            generated=rows.generated - back,
            remaining=rows.remaining + back,
        ),
        origin=origin,
        log_probs=log_probs,
        floored=floored,
        proposal=again,
        tally=replace(step.tally, own={**step.tally.own, "backspace": own}),
        backspaces=step.backspaces | acts,
    )


def _draw_again(proposal: Proposal, settings: SamplerSettings) -> Proposal:
    """The proposal that a position was drawn by, as one candidate; after an argmax, the base's."""
    base = jax.vmap(lambda settings: draw("sample", settings))(settings)
    proposal = where_rows(proposal.action == settings.action("argmax"), base, proposal)
    return replace(
        proposal,
        action=jnp.full_like(proposal.action, settings.action("backspace")),
        draws=jnp.ones_like(proposal.draws),
    )


BACKSPACE = Mechanism(
    "backspace",
    propose,
    settings=BackspaceSettings,
    init=lambda: BackspaceState(backspaced=jnp.int32(0)),
    may=may_backspace,
    apply=apply,
)
