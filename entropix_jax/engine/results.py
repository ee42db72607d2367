"""Results of a run: rows and events."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.engine.request import Request
from entropix_jax.engine.trace import TokenRecord, TraceWriter, footer
from entropix_jax.errors import UserError
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS

_REPR_TEXT = 50  # characters of a text
_REPR_ROWS = 10


@dataclass(frozen=True)
class Move:
    """A move of a row by the caller, after `lines` tokens of its log. The row keeps its first
    `kept` tokens, has been rewound `rewinds` times, and commits the `forced` tokens next."""

    lines: int
    kept: int
    rewinds: int
    forced: Sequence[int]
    action: str  # of the forced tokens


@dataclass(eq=False)
class KeptCache:
    """The cache of a row that may be forked after its end. Its forks copy it, because prefilling
    the text again would give other last digits. `layers` are the keys and values of the tokens
    `ids`, [K, T, H], padded at the end; None until another row takes the row's slot."""

    ids: Sequence[int] = ()
    layers: list[Any] | None = None


@dataclass(repr=False)
class Row:
    """The result of a request. A notebook shows its text, coloured by regime.

    `finish_reason` is "eos", "length" (the budget is spent), "context" (the model's or the engine's
    last position is reached), "stop" (a stop string), the name of the mechanism that ended the row,
    such as "confidence", "error", "interrupt", "cancelled" (by `Engine.end` or a search), or None
    while the row runs. `log` has all tokens, each with a bool for retracted ones, in the order of
    their events, of which `Engine.rewind` has none. `number` is `Request.number`, or else the row's
    place in the order of arrival in its engine, forks included. `budget` is the maximum number of
    tokens, set when the row begins to run. `source` is the number of the row that it was forked
    from, with the length of that row's log; -1 stands for a row of another run. `moves` are those
    of the caller. `forks` and `rewinds` count calls of `Engine.fork` and `rewind` for the row.
    `kept` and `parent` are its cache and that of the row that it was forked from, or None.
    """

    request: Request
    tokens: list[TokenRecord] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    retracted_tokens: list[TokenRecord] = field(default_factory=list)
    log: list[tuple[TokenRecord, bool]] = field(default_factory=list)
    number: int = 0
    budget: int = field(default=0, compare=False)
    source: tuple[int, int] | None = field(default=None, compare=False)
    moves: list[Move] = field(default_factory=list, compare=False)
    forks: int = 0
    rewinds: int = 0
    lookups: int = 0  # calls of `Request.lookup`
    kept: KeptCache | None = field(default=None, compare=False)
    parent: KeptCache | None = field(default=None, compare=False)
    started: float | None = field(default=None, compare=False)  # by `time.perf_counter`
    first_token: float | None = field(default=None, compare=False)  # by the same clock
    waited: float = field(default=0.0, compare=False)  # seconds spent in `Request.ask`

    @property
    def retracted(self) -> int:
        """Number of retracted tokens."""
        return len(self.retracted_tokens)

    def group_confidences(self) -> np.ndarray:
        """Mean token confidence of each run of `confidence.window` tokens, float64 [groups], nats;
        of all tokens if there are fewer. Empty without tokens."""
        window = self.request.sampler.values["confidence.window"]
        total = np.cumsum([0.0, *(token.token_confidence for token in self.tokens)])
        window = min(window, len(self.tokens))
        return (total[window:] - total[:-window]) / window if window else total[1:]

    def _confidence(self) -> dict[str, float]:
        """The means over all tokens, the lowest group, and the last one; empty without tokens."""
        groups, tokens = self.group_confidences(), self.tokens
        if not tokens:
            return {}
        return {
            "mean_confidence": float(np.mean([token.token_confidence for token in tokens])),
            "lowest_group_confidence": float(groups.min()),
            "tail_confidence": float(groups[-1]),
            "mean_self_certainty": float(np.mean([token.self_certainty for token in tokens])),
        }

    def footer(self) -> dict[str, Any]:
        """Returns the row's object in the footer of a trace."""
        request = {**self.request.to_json(), "budget": self.budget, "source": self.source}
        request["moves"] = [asdict(move) for move in self.moves]
        return {"row": self.number, **self.to_json(), "request": request}

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _REPR_TEXT else f"{self.text[:_REPR_TEXT]}..."
        noun = "token" if len(self.tokens) == 1 else "tokens"
        end = self.error or self.finish_reason or "running"
        return f"<Row {self.request.row_id}: {len(self.tokens)} {noun}, {end}: {text!r}>"

    def _repr_html_(self) -> str:
        from entropix_jax.report.notebook import html

        return html([self])

    def to_json(self) -> dict[str, Any]:
        """Text and finish reason, tokens in all, per regime and per action, the entropies over
        intents, forward passes, and confidence."""
        regimes = Counter(token.regime for token in self.tokens)
        actions = Counter(token.action for token in self.tokens)
        names = dict.fromkeys((*ACTIONS, *sorted(actions)))
        intents = [token.intents for token in self.tokens if token.intents is not None]
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            **({} if self.error is None else {"error": self.error}),
            "tokens": len(self.tokens),
            "regimes": {regime: regimes[regime] for regime in REGIMES},
            "actions": {action: actions[action] for action in names if actions[action]},
            **({"intents": intents} if intents else {}),
            "retracted": self.retracted,
            **({"lookups": self.lookups} if self.lookups else {}),
            "forwards": self.tokens[-1].forwards if self.tokens else 0,
            **self._confidence(),
        }


class Rows(list[Row]):
    """The rows of a run, a list. A notebook shows all texts, coloured by regime.

    `header` is the header of the run's trace, `timings` are in seconds.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        header: Mapping[str, Any] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(rows)
        self.header = header
        self.timings = timings if timings is not None else {}

    def footer(self) -> dict[str, Any]:
        """The footer of the run's trace."""
        return footer([row.footer() for row in self], self.timings)

    def save_trace(self, path: str | Path) -> None:
        """Writes the run's trace, row by row, with the tokens so far. It has `top` and `layers` if
        the run recorded them.
        UserError if the file cannot be written, or the rows are not of one run with one prompt."""
        if self.header is None or len({tuple(row.request.prompt) for row in self}) != 1:
            raise UserError("a trace needs rows of one run with one prompt")
        with TraceWriter(Path(path)) as writer:
            writer.write(self.header)
            for row in self:
                for token, retracted in row.log:
                    writer.write(token.to_json(retracted=retracted))
            writer.write(self.footer())

    def save_report(self, path: str | Path) -> None:
        """Writes the run as a page, one HTML file to open in a browser.
        UserError as `save_trace`."""
        from entropix_jax.report.page import check_report, write_report

        path = Path(path)
        check_report(path)
        with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
            trace = Path(folder) / f"{path.stem}.jsonl"
            self.save_trace(trace)
            write_report(trace, path)

    def __repr__(self) -> str:
        shown = [*map(repr, self[:_REPR_ROWS])]
        if len(self) > _REPR_ROWS:
            shown.append(f"... and {len(self) - _REPR_ROWS} more")
        return "[" + ",\n ".join(shown) + "]"

    def _repr_html_(self) -> str:
        from entropix_jax.report.notebook import html

        return html(self, None if self.header is None else self.header["prompt"])


@dataclass(frozen=True)
class Piece:
    """A stretch of a row's final text, and the token that made it final."""

    text: str
    token: TokenRecord


@dataclass(frozen=True)
class Event:
    """One token of a row was committed or retracted, or the row ended without one.

    Attributes:
        row: the row, with the event applied; `row.finish_reason` is set by its last event.
        token: None if the row ended by an error or an interrupt, or was cancelled.
        pieces: the text that became final.
        retracted: whether the token was retracted. The row's next events then retract the tokens
            after it, too, and have the replacements.
    """

    row: Row
    token: TokenRecord | None
    pieces: tuple[Piece, ...]
    retracted: bool = False
