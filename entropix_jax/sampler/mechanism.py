"""A mechanism: a part of a sampler, with its settings, state and effect on the row.

It has up to four kinds of functions of one row's `Context` (`sampler.context`): an observer, which
replaces the measured metrics; an arm, which can serve a regime; filters of the logits; and a
control, which may act instead of committing the drawn token. Arms are branches of a `lax.switch`.
Under `vmap` every branch runs for every row, so an arm should compute only a few scalars.
`docs/adding-an-arm.md` walks through an example.

A mechanism that no row uses is not compiled (`Parts.used`). Filters run only in steps in which a
row uses them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from entropix_jax.sampler.context import Arm, Context, Filter
from entropix_jax.sampler.control import Control
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import DrawnToken
from entropix_jax.sampler.user_functions import UserFunction

# Returns the mechanism's part of one row's state after a token that was drawn.
Learn = Callable[[DrawnToken, Context], Any]


@dataclass(frozen=True, repr=False)
class Mechanism:
    """An arm, a filter or a control, and everything that belongs to it. All parts but the name are
    optional.

    Its settings are in `SamplerSettings.own[name]`, its part of the row's state in
    `Context.states[name]`. Immutable and hashable: it is a static part of the compiled step.
    """

    name: str  # in `arms.<regime>`, of its section of a sampler's file, and of its action
    propose: Arm | None = None
    # A flax dataclass whose fields are `number`, `flag` or `texts` of `sampler.settings`.
    settings: type | None = None
    # Its part of a new row's state: a scalar, or a flax dataclass of scalars.
    init: Callable[[], Any] | None = None
    # Whether the row may take the action now: a bool. None: always.
    may: Callable[[Context], jax.Array] | None = None
    # A confidence score to record with each token: float32.
    confidence: Callable[[Context], jax.Array] | None = None
    # The probability that the answer is wrong, for conditions on `p_wrong`: float32, or NaN.
    p_wrong: Callable[[Context], jax.Array] | None = None
    # The metrics that regimes, arms and branch scores see, from those in `Context.metrics`. A trace
    # records the measured ones.
    observe: Callable[[Context], Metrics] | None = None
    # The control, given the row's drawn token. That of an arm runs only in rows with its action;
    # if it returns COMMIT, the action becomes `sample`.
    control: Control | None = None
    # How many of the row's last tokens it may still take back: int32.
    holds: Callable[[Context], jax.Array] | None = None
    # Its part of the state after one more committed token, from that before it.
    advance: Callable[[Context], Any] | None = None
    # Fields of its state that a row keeps when it goes back: what counts towards budgets.
    keep: tuple[str, ...] = ()
    # Filters of a row's logits, see `sampler.filters`: before the temperature, the truncation rule
    # that `truncation.rule` may name, and after the rule.
    logits: Filter | None = None
    rule: Filter | None = None
    reweigh: Filter | None = None
    # Whether it does anything under one row's settings: a bool. None: always.
    active: Callable[[SamplerSettings], Any] | None = None
    # Its state after a token was drawn.
    learn: Learn | None = None

    def __repr__(self) -> str:
        return f"<Mechanism {self.name}>"

    def guarded(self) -> "Mechanism":
        """Returns the mechanism with each user-supplied function wrapped in `UserFunction`. The
        package's own functions are unchanged, because an error in one is a defect."""
        parts: dict[str, Any] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            package = str(getattr(part, "__module__", None)).partition(".")[0]
            if callable(part) and not isinstance(part, type) and package != _HERE:
                parts[field.name] = UserFunction(part, self.name, field.name)
        return replace(self, **parts)


_HERE = __name__.partition(".")[0]
