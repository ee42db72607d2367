"""A mechanism: a part of a sampler, from its settings to what it does to the row.

Most are arms: a regime is served by one, which turns one row's metrics into a proposal. Arms are
branches of a `lax.switch`, and under `vmap` every branch runs for every row: an arm computes a few
scalars only. What is more than a draw happens in `apply`, once for all rows, under a `lax.cond`
where it is expensive. `docs/adding-an-arm.md` walks through an example.

Others filter the logits, or act in place of a drawn token. They are compiled only where a row uses
them (`SamplerSettings.used`); filters run only in steps in which one does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from entropix_jax.sampler.context import Arm, Context, Filter
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import DrawnToken, Observation, Rows, SamplerState, Step, Tally

# Returns the mechanism's part of one row's state after a token that was drawn.
Lesson = Callable[[DrawnToken, Context], Any]


@dataclass(frozen=True, repr=False)
class Mechanism:
    """An arm, a filter or what replaces drawn tokens, and everything that belongs to it. All parts
    but the name are optional.

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
    # Filters of a row's logits, see `sampler.filters`: before the temperature, the truncation rule
    # that `truncation.rule` may name, and after the rule.
    logits: Filter | None = None
    rule: Filter | None = None
    reweigh: Filter | None = None
    # Whether it does anything under one row's settings: a bool. None: always.
    active: Callable[[SamplerSettings], Any] | None = None
    # Its state after a token was drawn.
    learn: Lesson | None = None

    def __repr__(self) -> str:
        return f"<Mechanism {self.name}>"
