"""A mechanism: a part of a sampler, from its settings to what it does to the row.

Most are arms: a regime is served by one, which turns one row's metrics into a proposal. Arms are
branches of a `lax.switch`, and under `vmap` every branch runs for every row: an arm computes a few
scalars only. What is more than a draw happens in `apply`, once for all rows, under a `lax.cond`
where it is expensive. `docs/adding-an-arm.md` walks through an example.

Others change the logits, say which tokens a draw may take, or act in place of a drawn token. They
are compiled only where a row uses them (`SamplerSettings.used`); the first two run only in steps in
which one does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Arm, Proposal, RowView
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import DrawnToken, Observation, Rows, SamplerState, Step, Tally
from entropix_jax.sampler.truncation import Cut

# One row's logits, float32 [V], -inf for a token that is never drawn; its metrics, settings and
# view: other logits.
Transform = Callable[[jax.Array, Metrics, SamplerSettings, RowView], jax.Array]
# One row's token and what it was drawn from, its metrics, settings and view: the mechanism's part
# of the row's state after it.
Lesson = Callable[[DrawnToken, Metrics, SamplerSettings, RowView], Any]
# One row's logits, the proposal that they are drawn by, its metrics, settings and view: what may be
# drawn.
Rule = Callable[[jax.Array, Proposal, Metrics, SamplerSettings, RowView], Cut]


@dataclass(frozen=True, repr=False)
class Mechanism:
    """An arm, a rule, a transform of the logits or what replaces drawn tokens, and everything that
    belongs to it. All parts but the name are optional.

    Its settings stand in `SamplerSettings.own[name]`, its part of the row's state in
    `Tally.own[name]`. Immutable and hashable: it is a static part of the compiled step.
    """

    name: str  # in `arms.<regime>`, of its section of a sampler's file, and of its action
    propose: Arm | None = None
    # A flax dataclass whose fields are `number`, `flag` or `texts` of `sampler.settings`.
    settings: type | None = None
    # Its part of a new row's state: a flax dataclass of scalars.
    init: Callable[[], Any] | None = None
    # Whether each row may take the action now: bool [B]. None: always.
    may: Callable[[SamplerSettings, SamplerState, Rows], jax.Array] | None = None
    # Whether it acts in place of each row's drawn token, int32 [B]: bool [B]. The token stands in
    # the history, at the row's length. Where it is False, a row whose arm proposed it draws.
    replaces: Callable[[SamplerSettings, Step, jax.Array], jax.Array] | None = None
    # How many of each row's last tokens it may still take back: int32 [B].
    holds: Callable[[SamplerSettings, SamplerState, Rows], jax.Array] | None = None
    # Carries out the action in the rows of a bool [B].
    apply: Callable[[jax.Array, Step, SamplerSettings], Step] | None = None
    # Its state after one more committed token, from the tally before it.
    advance: Callable[[SamplerSettings, Tally, Observation], Any] | None = None
    # Fields of its state that a row keeps when it goes back: what counts towards budgets.
    keep: tuple[str, ...] = ()
    # Whether its arm depends on the regimes even where it serves them all.
    follows_regimes: bool = False
    # A truncation rule, which `truncation.rule` may name.
    cut: Rule | None = None
    # Changes a row's logits before a rule truncates them (`logits`), or what a rule has left of
    # them, divided by the temperature (`reweigh`).
    logits: Transform | None = None
    reweigh: Transform | None = None
    # Whether it does anything under these settings: a bool, or [B]. None: always.
    active: Callable[[SamplerSettings], Any] | None = None
    # The state after a token was drawn: of a rule, of a transform, or of what does no more.
    learn: Lesson | None = None

    def __repr__(self) -> str:
        return f"<Mechanism {self.name}>"
