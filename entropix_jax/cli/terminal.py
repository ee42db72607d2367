"""What a run shows in a terminal: text coloured by regime, a legend, a line of summary."""

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

from entropix_jax.cli.status import StatusLine
from entropix_jax.engine.results import Row
from entropix_jax.engine.score import ScoredToken
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import printable
from entropix_jax.host.interrupts import leave_on_interrupt
from entropix_jax.names import MEANINGS, REGIMES

# Okabe and Ito's colours for colour-blind readers: those with a contrast of 3 or more on dark and
# light backgrounds, two of them darkened so that the nearest of 256 colours has it too. Certain
# tokens keep the terminal's own colour.
_STYLES = {
    "lelv": "",
    "helv": "#0072B2 bold",
    "lehv": "#B8488A",
    "hehv": "#D55E00 bold",
    "mid": "#009068",
}
# The style of tokens that a mechanism wrote, and their name in the legend.
_MARKS = {
    "branch": ("italic", "branch"),
    "inject": ("underline", "thought"),
    "backspace": ("reverse", "step back"),
}


_PIECE = re.compile(r"\S+|\s")
_TAB = 8
# Categories of characters whose width terminals disagree about, or which end no words by spaces.
_UNSURE = {"Mn", "Me", "Cf", "Lo"}


class WordWrap:
    """Wraps streamed text at word boundaries. A word that passes the edge of the terminal is erased
    and written again on the next line.

    The last column stays free: at the edge, terminals differ in where the cursor is. Words longer
    than a line are left to the terminal, and so are lines with characters of uncertain width.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word: list[str] = []  # the painted pieces of the current word
        self._cells = 0  # their width
        self._sure = True

    def feed(self, text: str, paint: Callable[[str], str], width: int) -> str:
        """Returns what to write for the next piece of text, in colours by `paint`, on a terminal of
        this width."""
        out, start = "", 0
        for found in _PIECE.finditer(text):
            piece = found[0]
            if piece.isspace():
                self._add_space(piece, width)
                continue
            self._sure &= not any(unicodedata.category(c) in _UNSURE for c in piece)
            cells = cell_len(piece)
            if self._is_moved(cells, width):
                erase = f"\x1b[{self._cells}D\x1b[K" if self._cells else ""
                out += paint(text[start : found.start()]) + erase + "\n" + "".join(self._word)
                start, self._column = found.start(), self._cells
            self._word.append(paint(piece))
            self._cells += cells
            self._column = (self._column + cells) % width
        return out + paint(text[start:])

    def _is_moved(self, cells: int, width: int) -> bool:
        """Whether the word goes to the next line before a piece of this width is added to it."""
        passes = self._column + cells >= width > self._cells + cells
        return self._sure and passes and self._column > self._cells

    def _add_space(self, space: str, width: int) -> None:
        self._word, self._cells = [], 0
        if space == "\n":
            self._column, self._sure = 0, True
        elif space == "\t":
            self._column = min(self._column - self._column % _TAB + _TAB, width - 1)
        else:
            self._column = (self._column + 1) % width


class TextScreen:
    """Writes the text of a run to standard output while it is generated, and nothing else there.
    On a terminal words are wrapped."""

    def __init__(self, status: StatusLine | None = None) -> None:
        """`status` is the line that makes room for the text."""
        self._out = sys.stdout
        self._status = status or StatusLine()
        self._console = console = Console(file=self._out)
        self._on_terminal = console.is_terminal
        self._wrap = WordWrap() if console.is_terminal and not console.is_dumb_terminal else None
        name = None if console.no_color else console.color_system
        self._colours = COLOR_SYSTEMS[name] if name else None
        self._last = "\n"

    @property
    def coloured(self) -> bool:
        """Whether text has colours: on a terminal that has some, unless NO_COLOR is set."""
        return self._colours is not None

    def show(self, text: str, token: TokenRecord | ScoredToken) -> None:
        """Prints a piece of text in the colour of its token's regime."""
        if self._on_terminal:
            text = printable(text)

        def paint(part: str) -> str:
            return self.paint(part, token)

        wrap, width = self._wrap, self._console.width
        self._write(wrap.feed(text, paint, width) if wrap else paint(text), text)

    def paint(self, text: str, token: TokenRecord | ScoredToken) -> str:
        """Text in the colour of a token's regime, where there are colours."""
        # Not through the console, which would change tabs and take brackets for markup.
        return Style.parse(style_of(token)).render(text, color_system=self._colours)

    def end_text(self) -> None:
        """Ends a row's text with a line break, where it has none."""
        if self._last != "\n":
            self._write("\n", "\n")
        if self._wrap is not None:
            self._wrap = WordWrap()

    def _write(self, painted: str, text: str) -> None:
        self._status.make_room()
        self._out.write(painted)
        self._out.flush()
        self._last = text[-1:] or self._last


def style_of(token: TokenRecord | ScoredToken) -> str:
    """Returns the rich style of a token: its regime's colour and its action's mark."""
    action = token.action if isinstance(token, TokenRecord) else ""
    mark, _ = _MARKS.get(action, ("", ""))
    return f"{_STYLES[token.regime]} {mark}".strip()


def print_legend() -> None:
    """Prints the meaning of colours and marks to standard error, on a terminal."""
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        return
    legend = Text()
    for regime in REGIMES:
        legend.append(MEANINGS[regime], style=_STYLES[regime])
        legend.append(f" ({regime.upper()})  ")
    for mark, name in _MARKS.values():
        legend.append(name, style=mark)
        legend.append("  ")
    legend.rstrip()
    err.print(legend)


def ask_person(row: int, texts: Sequence[str]) -> int | None:
    """Shows two continuations on standard error and reads which one to take from standard input;
    None where the person leaves the choice to the model."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    err.print("\n[bold]Two ways to continue, too close to call:[/bold]")
    for number, text in enumerate(texts, 1):
        err.print(f"  {number}", end="  ", style="bold")
        err.print(repr(printable(text)), markup=False)
    while True:
        err.print("1, 2, or Enter for the model's choice (1): ", end="")
        try:
            with leave_on_interrupt():
                line = sys.stdin.readline()
        except EOFError:
            line = ""
        except UnicodeDecodeError:
            continue
        if line.strip() in ("1", "2"):
            return int(line) - 1
        if not line.strip():
            return None


def summary(rows: Sequence[Row], timings: Mapping[str, float]) -> str:
    """Returns one line: tokens, speed, share of each regime, forks, thoughts and steps back, and
    the finish reasons.

    The speed leaves out the first step, which includes the prompt and the compiler.
    """
    tokens = [token for row in rows for token in row.tokens]
    first = sum(1 for row in rows if row.tokens)
    seconds = timings["total"] - timings.get("first_token", 0.0)
    speed = f" ({(len(tokens) - first) / seconds:.0f} tok/s)" if len(tokens) > first else ""
    count = max(len(tokens), 1)
    shares = " ".join(
        f"{MEANINGS[r]} {sum(t.regime == r for t in tokens) / count:.0%}" for r in REGIMES
    )
    actions = ", ".join(
        f"{number} {name if number == 1 else plural}"
        for (name, plural), number in _count_actions(rows).items()
        if number
    )
    reasons = ", ".join(dict.fromkeys(row.finish_reason or "running" for row in rows))
    noun = "token" if len(tokens) == 1 else "tokens"
    return " | ".join(filter(None, (f"{len(tokens)} {noun}{speed}", shares, actions, reasons)))


def _count_actions(rows: Sequence[Row]) -> dict[tuple[str, str], int]:
    """Returns the number of forks, thoughts and steps back, by singular and plural."""
    forks = thoughts = steps_back = 0
    for row in rows:
        before = ""
        for token in row.tokens:
            forks += len(token.branches or ()) > 1
            thoughts += token.action == "inject" != before
            steps_back += token.action == "backspace"
            before = token.action
    return {
        ("fork", "forks"): forks,
        ("thought", "thoughts"): thoughts,
        ("step back", "steps back"): steps_back,
    }


class Meter:
    """The metrics that `--verbose` shows: on the status line those of the latest token of the row
    whose text is being printed, and the means at the end."""

    def __init__(
        self, status: StatusLine, rows: Sequence[Row], seconds: Callable[[], float]
    ) -> None:
        """`seconds` is the run's clock."""
        self._status = status
        self._rows = rows
        self._seconds = seconds
        self._first = 0.0  # when the first token came
        self._shown: TokenRecord | None = None

    def update(self, row: Row) -> None:
        """Shows the row's latest token, unless it is shown already."""
        if not row.tokens or row.tokens[-1] is self._shown:
            return
        if self._shown is None:
            self._first = self._seconds()
        self._shown = row.tokens[-1]
        self._status.show(self._line(self._shown))

    def summary(self) -> str:
        """Means over all tokens, and the number of tokens by action: two lines, or none."""
        tokens = [token for row in self._rows for token in row.tokens]
        if not tokens:
            return ""
        means = [
            sum(getattr(token, name) for token in tokens) / len(tokens)
            for name in ("entropy", "varentropy", "agreement", "attn_entropy_norm")
        ]
        actions = Counter(token.action for token in tokens).most_common()
        line = (
            "mean entropy {:.2f} bits, varentropy {:.2f} bits², agreement {:.2f}, attention {:.2f}"
        )
        counts = " ".join(f"{name} {count}" for name, count in actions)
        return f"{line.format(*means)}\n{counts}\n"

    def _line(self, token: TokenRecord) -> Text:
        tokens = sum(max(len(row.tokens) - 1, 0) for row in self._rows)
        seconds = self._seconds() - self._first
        sample = f"{token.row + 1}/{len(self._rows)} " if len(self._rows) > 1 else ""
        speed = f"  {tokens / seconds:.0f} tok/s" if tokens and seconds > 0 else ""
        return Text.assemble(
            f"{sample}{token.position:>4} ",
            (f"{token.regime:4}", _STYLES[token.regime]),
            f" {token.action:9} h {token.entropy:.2f} bits  u {token.varentropy:.2f} bits²"
            f"  agree {token.agreement:.2f}  T {token.temperature:.2f}{speed}",
        )
