"""A mechanism: a part of a sampler, from its settings to what it does to the row.

It has up to three kinds of functions, of one row's `Context` each (`sampler.context`): an arm,
which a regime may be served by, filters of the logits, and a control, which may act in place of the
drawn token. Arms are branches of a `lax.switch`, and under `vmap` every branch runs for every row:
an arm computes a few scalars only. `docs/adding-an-arm.md` walks through an example.

What is no arm's is compiled only where a row uses it (`Parts.used`); filters run only in steps in
which one does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from entropix_jax.sampler.context import Arm, Context, Control, Filter
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import DrawnToken

# Returns the mechanism's part of one row's state after a token that was drawn.
Lesson = Callable[[DrawnToken, Context], Any]


@dataclass(frozen=True, repr=False)
class Mechanism:
    """An arm, a filter or a control, and everything that belongs to it. All parts but the name are
    optional.

    Its settings stand in `SamplerSettings.own[name]`, its part of the row's state in
    `Context.own[name]`. Immutable and hashable: it is a static part of the compiled step.
    """

    name: str  # in `arms.<regime>`, of its section of a sampler's file, and of its action
    propose: Arm | None = None
    # A flax dataclass whose fields are `number`, `flag` or `texts` of `sampler.settings`.
    settings: type | None = None
    # Its part of a new row's state: a flax dataclass of scalars.
    init: Callable[[], Any] | None = None
    # Whether the row may take the action now: a bool. None: always.
    may: Callable[[Context], jax.Array] | None = None
    # What the row does, given its drawn token. That of an arm is asked in rows with its action
    # only; one that it lets commit has just drawn.
    control: Control | None = None
    # How many of the row's last tokens it may still take back: int32.
    holds: Callable[[Context], jax.Array] | None = None
    # Its part of the state after one more committed token, from that before it.
    advance: Callable[[Context], Any] | None = None
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
