"""What a run shows in a terminal: text coloured by regime, a legend, a line of summary."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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
_INJECTED = "underline"


class TextScreen:
    """Writes the text of a run to standard output while it is generated, and nothing else there."""

    def __init__(self, status: StatusLine | None = None) -> None:
        """`status` is the line that makes room for the text."""
        self._out = sys.stdout
        self._status = status or StatusLine()
        console = Console(file=self._out)
        self._on_terminal = console.is_terminal
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
        self._write(self.paint(text, token), text)

    def paint(self, text: str, token: TokenRecord | ScoredToken) -> str:
        """Text in the colour of a token's regime, where there are colours."""
        # Not through the console, which would change tabs and take brackets for markup.
        return Style.parse(style_of(token)).render(text, color_system=self._colours)

    def end_text(self) -> None:
        """Ends a row's text with a line break, where it has none."""
        if self._last != "\n":
            self._write("\n", "\n")

    def _write(self, painted: str, text: str) -> None:
        self._status.make_room()
        self._out.write(painted)
        self._out.flush()
        self._last = text[-1:] or self._last


def style_of(token: TokenRecord | ScoredToken) -> str:
    """The rich style of a token: its regime's colour, underlined where it was injected."""
    style = _STYLES[token.regime]
    injected = isinstance(token, TokenRecord) and token.action == "inject"
    return f"{style} {_INJECTED}".strip() if injected else style


def print_legend() -> None:
    """Prints what the colours mean, on one line of standard error, where that is a terminal."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    if not err.is_terminal:
        return
    legend = Text()
    for regime in REGIMES:
        legend.append(regime, style=_STYLES[regime])
        legend.append(f" {MEANINGS[regime]}  ")
    legend.append("injected", style=_INJECTED)
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
    """Tokens, speed, the share of each regime and why the rows ended, on one line.

    The speed leaves out the first step, which includes the prompt and the compiler.
    """
    tokens = [token for row in rows for token in row.tokens]
    first = sum(1 for row in rows if row.tokens)
    seconds = timings["total"] - timings.get("first_token", 0.0)
    speed = f" ({(len(tokens) - first) / seconds:.0f} tok/s)" if len(tokens) > first else ""
    count = max(len(tokens), 1)
    shares = " ".join(f"{r} {sum(t.regime == r for t in tokens) / count:.0%}" for r in REGIMES)
    reasons = ", ".join(dict.fromkeys(row.finish_reason or "running" for row in rows))
    noun = "token" if len(tokens) == 1 else "tokens"
    return f"{len(tokens)} {noun}{speed} | {shares} | {reasons}"


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
