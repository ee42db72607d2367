"""A mechanism: one way to go on from a step, from its settings to what it does to the row.

A regime is served by a mechanism's arm, which turns one row's metrics into a proposal. Arms are
branches of a `lax.switch`, and under `vmap` every branch runs for every row: an arm computes a few
scalars only. What is more than a draw happens in `apply`, once for all rows, under a `lax.cond`
where it is expensive. `docs/adding-an-arm.md` walks through an example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from entropix_jax.sampler.proposal import Arm
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Observation, Rows, SamplerState, Step, Tally


@dataclass(frozen=True, repr=False)
class Mechanism:
    """An arm and everything that belongs to it. All parts but the first two are optional.

    Its settings stand in `SamplerSettings.own[name]`, its part of the row's state in
    `Tally.own[name]`. Immutable and hashable: it is a static part of the compiled step.
    """

    name: str  # in `arms.<regime>`, of its section of a sampler's file, and of its action
    propose: Arm
    # A flax dataclass whose fields are `number`, `flag` or `texts` of `sampler.settings`.
    settings: type | None = None
    # Its part of a new row's state: a flax dataclass of scalars.
    init: Callable[[], Any] | None = None
    # Whether each row may take the action now: bool [B]. None: always.
    may: Callable[[SamplerSettings, SamplerState, Rows], jax.Array] | None = None
    # Whether it acts in place of each row's drawn token, int32 [B], whatever the arm proposed: bool
    # [B].
    replaces: Callable[[SamplerSettings, Step, jax.Array], jax.Array] | None = None
    # Carries out the action in the rows of a bool [B].
    apply: Callable[[jax.Array, Step, SamplerSettings], Step] | None = None
    # Its state after one more committed token, from the tally before it.
    advance: Callable[[SamplerSettings, Tally, Observation], Any] | None = None
    # Fields of its state that a row keeps when it goes back: what counts towards budgets.
    keep: tuple[str, ...] = ()
    # Whether its arm depends on the regimes even where it serves them all.
    follows_regimes: bool = False

    def __repr__(self) -> str:
        return f"<Mechanism {self.name}>"
