"""Output on a terminal: text coloured by regime, a legend, a line of summary."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

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


class TextScreen:
    """Writes the text of a run to standard output while it is generated, and nothing else there."""

    def __init__(self, status: StatusLine | None = None) -> None:
        """`status` is the line that makes room for the text."""
        self._status = status or StatusLine()
        console = Console(file=sys.stdout)
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
        self._write(self.paint(printable(text) if self._on_terminal else text, token))
        self._last = text[-1:] or self._last

    def paint(self, text: str, token: TokenRecord | ScoredToken) -> str:
        """Text in the colour of a token's regime, where there are colours."""
        # Not through the console, which would change tabs and take brackets for markup.
        return Style.parse(style_of(token)).render(text, color_system=self._colours)

    def end_text(self) -> None:
        """Ends a row's text with a line break, where it has none."""
        if self._last != "\n":
            self._write("\n")
        self._last = "\n"

    def _write(self, text: str) -> None:
        self._status.make_room()
        sys.stdout.write(text)
        sys.stdout.flush()


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


def summary(rows: Sequence[Row], speed: float) -> str:
    """Returns one line: tokens, speed (tokens per second, 0 if unknown), share of each regime,
    forks, thoughts and steps back, and the finish reasons."""
    tokens = [token for row in rows for token in row.tokens]
    regimes = Counter(token.regime for token in tokens)
    shares = " ".join(f"{MEANINGS[r]} {regimes[r] / max(len(tokens), 1):.0%}" for r in REGIMES)
    actions = ", ".join(_plural(number, noun) for noun, number in _count(rows).items())
    reasons = ", ".join(dict.fromkeys(row.finish_reason or "running" for row in rows))
    count = _plural(len(tokens), "token")
    per_second = f" ({speed:.0f} tok/s)" if speed else ""
    return " | ".join(filter(None, (f"{count}{per_second}", shares, actions, reasons)))


def _count(rows: Sequence[Row]) -> Counter[str]:
    """Returns the number of forks, thoughts and steps back. A thought of several tokens is one."""
    counts: Counter[str] = Counter()
    for row in rows:
        actions = [token.action for token in row.tokens]
        counts["fork"] += sum(len(token.branches or ()) > 1 for token in row.tokens)
        counts["thought"] += sum(a == "inject" != before for before, a in pairwise(["", *actions]))
        counts["step back"] += actions.count("backspace")
    return +counts


def _plural(number: int, noun: str) -> str:
    many = "steps back" if noun == "step back" else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def means(rows: Sequence[Row]) -> str:
    """Returns the means of the metrics over all tokens, and the number of tokens by action: two
    lines, or no text without tokens."""
    tokens = [token for row in rows for token in row.tokens]
    if not tokens:
        return ""
    line = "mean entropy {:.2f} bits, varentropy {:.2f} bits², agreement {:.2f}, attention {:.2f}"
    names = ("entropy", "varentropy", "agreement", "attn_entropy_norm")
    values = (sum(getattr(token, name) for token in tokens) / len(tokens) for name in names)
    actions = Counter(token.action for token in tokens).most_common()
    return f"{line.format(*values)}\n{' '.join(f'{name} {n}' for name, n in actions)}\n"
