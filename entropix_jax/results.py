"""What goes into a run and what comes out of it: requests, rows, and the events between."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.sampler.params import REGIMES
from entropix_jax.trace import TokenRecord


@dataclass(frozen=True)
class Request:
    """One row: its prompt's tokens, how many may follow, and the id that names its randomness."""

    prompt: Sequence[int]
    row_id: str
    max_new_tokens: int


@dataclass
class Row:
    """What came of a request.

    `finish_reason` is "eos", "length" (the budget is spent), "context" (the model's last position
    is reached), "stop" (a stop string), "error", "interrupt", or None while the row runs.
    `retracted` counts the tokens that were taken back.
    """

    request: Request
    tokens: list[TokenRecord] = field(default_factory=list)
    text: str = ""
    retracted: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Text and finish reason, tokens in all, per regime and per action, and forward passes."""
        regimes = Counter(token.regime for token in self.tokens)
        actions = Counter(token.action for token in self.tokens)
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            **({} if self.error is None else {"error": self.error}),
            "tokens": len(self.tokens),
            "regimes": {regime: regimes[regime] for regime in REGIMES},
            "actions": {action: actions[action] for action in ACTIONS if actions[action]},
            "retracted": self.retracted,
            "forwards": self.tokens[-1].forwards if self.tokens else 0,
        }


@dataclass(frozen=True)
class Piece:
    """A stretch of a row's text that is final, and the token that it came with."""

    text: str
    token: TokenRecord


@dataclass(frozen=True)
class Event:
    """What became known of a row: a token, and the text that may be shown now that it is here.

    `token` is None where the row ended without one: by an error, or interrupted. With `retracted`
    it is one that was taken back, and the row's next event holds its replacement, or says that that
    one was taken back too.
    """

    row: int
    token: TokenRecord | None
    pieces: tuple[Piece, ...]
    retracted: bool = False
