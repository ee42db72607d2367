"""What goes into a run and what comes out of it: requests, rows, and the events between."""

import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.trace import TokenRecord, TraceWriter, footer

_REPR_TEXT = 50  # characters of a text
_REPR_ROWS = 10


@dataclass(frozen=True)
class Request:
    """One row: its prompt's tokens, how many may follow, and the id that names its randomness."""

    prompt: Sequence[int]
    row_id: str
    max_new_tokens: int


@dataclass(repr=False)
class Row:
    """What came of a request. In a notebook it shows its text, coloured.

    `finish_reason` is "eos", "length" (the budget is spent), "context" (the model's last position
    is reached), "stop" (a stop string), "error", "interrupt", or None while the row runs.
    `retracted` counts the tokens that were taken back, `taken_back` holds them in order; each has
    the position of the one that took its place.
    """

    request: Request
    tokens: list[TokenRecord] = field(default_factory=list)
    text: str = ""
    retracted: int = 0
    finish_reason: str | None = None
    error: str | None = None
    taken_back: list[TokenRecord] = field(default_factory=list)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _REPR_TEXT else f"{self.text[:_REPR_TEXT]}..."
        noun = "token" if len(self.tokens) == 1 else "tokens"
        end = self.error or self.finish_reason or "running"
        return f"<Row {self.request.row_id}: {len(self.tokens)} {noun}, {end}: {text!r}>"

    def _repr_html_(self) -> str:
        from entropix_jax.notebook.display import html

        return html([self])

    def history(self) -> Iterator[tuple[TokenRecord, bool]]:
        """The tokens as they came, and whether they were taken back: then they stand before the one
        that took their place."""
        taken_back = deque(self.taken_back)
        for token in self.tokens:
            while taken_back and taken_back[0].position <= token.position:
                yield taken_back.popleft(), True
            yield token, False
        for token in taken_back:
            yield token, True

    def to_json(self) -> dict[str, Any]:
        """Text and finish reason, tokens in all, per regime and per action, and forward passes."""
        regimes = Counter(token.regime for token in self.tokens)
        actions = Counter(token.action for token in self.tokens)
        names = dict.fromkeys((*ACTIONS, *sorted(actions)))
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            **({} if self.error is None else {"error": self.error}),
            "tokens": len(self.tokens),
            "regimes": {regime: regimes[regime] for regime in REGIMES},
            "actions": {action: actions[action] for action in names if actions[action]},
            "retracted": self.retracted,
            "forwards": self.tokens[-1].forwards if self.tokens else 0,
        }


class Rows(list[Row]):
    """The rows of a run, a list. In a notebook it shows all texts, coloured.

    `header` is what a trace says of the run besides its tokens, `timings` are in seconds.
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

    def save_trace(self, path: str | Path) -> None:
        """Writes the run's trace, row by row, each as far as it came. `top` and `layers` are there
        if the run recorded them.

        Raises:
            UserError: the file cannot be written, or the rows are not of one run with one prompt.
        """
        if self.header is None or len({tuple(row.request.prompt) for row in self}) != 1:
            raise UserError("a trace is of one run with one prompt")
        with TraceWriter(Path(path)) as writer:
            writer.write(self.header)
            for row in self:
                for token, retracted in row.history():
                    writer.write(token.to_json(retracted=retracted))
            rows = [{"row": i, **row.to_json()} for i, row in enumerate(self)]
            writer.write(footer(rows, self.timings))

    def save_report(self, path: str | Path) -> None:
        """Writes the run as a page, one HTML file to open in a browser.

        Raises:
            UserError: as `save_trace`.
        """
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
        from entropix_jax.notebook.display import html

        return html(self, None if self.header is None else self.header["prompt"])


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
