"""How a run looks in a terminal: text coloured by regime, a legend, a line of summary."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

from entropix_jax.commandline import printable
from entropix_jax.inspection import InspectedToken
from entropix_jax.interrupts import undeferred_interrupts
from entropix_jax.results import Row
from entropix_jax.sampler.params import REGIMES
from entropix_jax.trace import TokenRecord

# Okabe and Ito's colours, which colour-blind people tell apart: those that stand out on dark and on
# light alike (contrast 3 or more). What is certain keeps the terminal's own colour.
_STYLES = {
    "lelv": "",
    "helv": "#0072B2 bold",
    "lehv": "#CC79A7",
    "hehv": "#D55E00 bold",
    "mid": "#009E73",
}
_MEANINGS = {
    "lelv": "certain",
    "helv": "undecided",
    "lehv": "forked",
    "hehv": "scattered",
    "mid": "between",
}
_INJECTED = "underline"


class TextScreen:
    """Writes the text of a run to standard output as it comes, and nothing else there."""

    def __init__(self) -> None:
        self._out = sys.stdout
        console = Console(file=self._out)
        self._on_terminal = console.is_terminal
        name = None if console.no_color else console.color_system
        self._colours = COLOR_SYSTEMS[name] if name else None
        self._last = "\n"

    @property
    def coloured(self) -> bool:
        """Whether text has colours: on a terminal that has some, unless NO_COLOR is set."""
        return self._colours is not None

    def show(self, text: str, token: TokenRecord | InspectedToken) -> None:
        """Prints a piece of text in the colour of its token's regime."""
        if self._on_terminal:
            text = printable(text)
        self._out.write(self.paint(text, token))
        self._out.flush()
        self._last = text[-1:] or self._last

    def paint(self, text: str, token: TokenRecord | InspectedToken) -> str:
        """Text in the colour of a token's regime, where there are colours."""
        # Not through the console, which would change tabs and take brackets for markup.
        return Style.parse(style_of(token)).render(text, color_system=self._colours)

    def end_text(self) -> None:
        """Ends a row's text with a line break, where it has none."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()
        self._last = "\n"


def style_of(token: TokenRecord | InspectedToken) -> str:
    """The rich style of a token: its regime's colour, underlined where it was injected."""
    style = _STYLES[token.regime]
    injected = isinstance(token, TokenRecord) and token.action == "inject"
    return f"{style} {_INJECTED}".strip() if injected else style


def print_legend() -> None:
    """What the colours mean, on one line of standard error, where that is a terminal."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    if not err.is_terminal:
        return
    legend = Text()
    for regime in REGIMES:
        legend.append(regime, style=_STYLES[regime])
        legend.append(f" {_MEANINGS[regime]}  ")
    legend.append("injected", style=_INJECTED)
    err.print(legend)


def ask_person(row: int, texts: Sequence[str]) -> int | None:
    """Shows two ways in which a text may go on, on standard error, and reads which it shall be from
    standard input; None where the person leaves it to the model."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    err.print("\n[bold]Two ways to go on, too close to call:[/bold]")
    for number, text in enumerate(texts, 1):
        err.print(f"  {number}", end="  ", style="bold")
        err.print(repr(printable(text)), markup=False)
    while True:
        err.print("1, 2, or Enter for the model's choice (1): ", end="")
        try:
            with undeferred_interrupts():
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

    The speed is that after the first step, which waits for the prompt and for the compiler.
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
