"""Output on a terminal: text coloured by regime, a legend, a summary."""

import contextlib
import os
import re
import select
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

from entropix_jax.cli.status import StatusLine, is_terminal, plural
from entropix_jax.errors import printable
from entropix_jax.host.interrupts import leave_on_interrupt
from entropix_jax.names import MEANINGS, REGIMES
from entropix_jax.report.reading import ENDS

if TYPE_CHECKING:
    from entropix_jax.engine.request import Ask
    from entropix_jax.engine.results import Row
    from entropix_jax.engine.score import ScoredToken
    from entropix_jax.engine.trace import TokenRecord

# Colours of terminals with 256, near Okabe and Ito's for colour-blind readers. On usual backgrounds
# their contrast is at least 4.5. No colour has that on dark and light ones. Certain tokens keep the
# terminal's own colour.
DARK = {"lelv": "", "helv": "#5fafd7 bold", "lehv": "#d787af", "hehv": "#ff875f", "mid": "#00af87"}
LIGHT = {"lelv": "", "helv": "#005faf bold", "lehv": "#af0087", "hehv": "#af5f00", "mid": "#00875f"}
# Colours of terminals with 16, of which dark backgrounds have the bright ones.
BASIC = {"lelv": "", "helv": "blue bold", "lehv": "magenta", "hehv": "red", "mid": "cyan"}
# Actions that mark tokens: the style, the regime whose colour they have where only actions are
# coloured, and their name in the legend.
_MARKS = {
    "branch": ("italic", "lehv", "from a fork"),
    "inject": ("underline", "helv", "thought"),
    "clarify": ("underline", "hehv", "question to you"),
    "backspace": ("reverse", "hehv", "after a step back"),
    "lookup": ("underline", "mid", "looked up"),
}
# Actions of arms in the legend, which shows the name of any other arm.
_DOES = {
    "argmax": "top token",
    "sample": "one draw",
    "explore": "warmer draw",
    "inject": "warmer draw",
    "lookup": "look something up",
    "resample": "hot draw",
    "branch": "fork, keep the best",
    "clarify": "question to you",
    "backspace": "step back",
    "adaptive": "one draw",
}
_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_ANSWER = re.compile(rb"\x1b\]11;rgb:(\w{2})\w*/(\w{2})\w*/(\w{2})")
_PATIENCE = 0.5  # seconds for an answer of the terminal


@cache
def palette() -> Mapping[str, str]:
    """Returns the style of each regime for the terminal's background: as COLORFGBG says, else as
    the terminal answers, else dark."""
    code = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    is_light = code in ("7", "15")
    if not code.isdecimal() and (found := _ANSWER.search(_ask_background())):
        red, green, blue = (int(part, 16) for part in found.groups())
        is_light = 0.3 * red + 0.6 * green + 0.1 * blue > 128
    if Console(force_terminal=True).color_system == "standard":
        return BASIC if is_light else {r: f"bright_{c}" if c else "" for r, c in BASIC.items()}
    return LIGHT if is_light else DARK


def _ask_background() -> bytes:
    """Asks the terminal for its background colour. Returns its answer, empty without one.

    Asks for its type next, which every terminal answers, so that there is something to wait for.
    """
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return b""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return b""
    answer, number = b"", sys.stdin.fileno()
    with contextlib.suppress(OSError):  # not this process's own terminal
        if os.tcgetpgrp(number) != os.getpgrp():  # in the background
            return b""
    if select.select([number], [], [], 0)[0]:  # lines typed ahead would be lost
        return b""
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number, termios.TCSANOW)
        print("\x1b]11;?\x1b\\\x1b[c", end="", file=sys.stderr, flush=True)
        end = time.monotonic() + _PATIENCE
        while not answer.endswith(b"c") and (left := end - time.monotonic()) > 0:
            if select.select([number], [], [], left)[0]:
                answer += os.read(number, 64)
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
    return answer


class TextScreen:
    """Writes the text of a run to standard output while it is generated, and nothing else there.

    On a terminal, lines break at spaces: a word that does not fit is moved to the next line.
    """

    def __init__(self, status: StatusLine | None = None, *, actions: bool = False) -> None:
        """`status` is the line that makes room for the text. With `actions` only forks and steps
        back are coloured."""
        self._status = status or StatusLine()
        console = Console(file=sys.stdout)
        self._on_terminal = console.is_terminal
        self._wraps = console.is_terminal and not console.is_dumb_terminal
        name = None if console.no_color else console.color_system
        self._colours = COLOR_SYSTEMS[name] if name else None
        self._actions = actions
        self._forked = False  # whether the last branch had a rival
        self._last = "\n"
        self._column = 0
        self._word: list[str] = []  # the painted parts of a word that may continue
        self._cells = 0  # its width

    @property
    def coloured(self) -> bool:
        """Whether text has colours: on a terminal that has some, unless NO_COLOR is set."""
        return self._colours is not None

    def show(self, text: str, token: "TokenRecord | ScoredToken") -> None:
        """Prints a piece of text in the colour of its token's regime."""
        style = self._style(token)
        text = printable(text) if self._on_terminal else text
        self._write((self._wrap if self._wraps else self._paint)(text, style))
        self._last = text[-1:] or self._last

    def paint(self, text: str, token: "TokenRecord | ScoredToken") -> str:
        """Text in the colour of a token's regime, where there are colours."""
        return self._paint(text, self._style(token))

    def end_text(self) -> None:
        """Ends a row's text with a line break, where it has none."""
        ends, self._last = self._last != "\n", "\n"
        self._column, self._word, self._cells = 0, [], 0
        if ends:
            self._write("\n")

    def _style(self, token: "TokenRecord | ScoredToken") -> str:
        """Returns the rich style of a token: its regime's colour and its action's mark."""
        if self._colours is None:
            return ""
        action = getattr(token, "action", "")  # a scored token has none
        mark, regime, _ = _MARKS.get(action, ("", "", ""))
        if not self._actions:
            return f"{palette()[token.regime]} {mark}".strip()
        if action == "branch":
            branches = getattr(token, "branches", None)
            self._forked = self._forked if branches is None else len(branches) > 1
            mark = mark if self._forked else ""
        return f"{palette()[regime]} {mark}" if mark else ""

    def _paint(self, text: str, style: str) -> str:
        # Not through the console, which would change tabs and take brackets for markup.
        return Style.parse(style).render(text, color_system=self._colours)

    def _wrap(self, text: str, style: str) -> str:
        """Returns the painted text, with line breaks in place of spaces at the end of a line. Where
        its first word continues one that then does not fit, it moves all of it."""
        width = shutil.get_terminal_size().columns - 1  # in the last column the cursor is not moved
        done, run = "", ""
        for part in _PARTS.findall(text):
            cells = 8 * part.count("\t") + cell_len(part.replace("\t", ""))
            over = self._column + cells > width
            if part.isspace():
                ends = over or part == "\n"
                run += "\n" if ends else part
                self._column = 0 if ends else self._column + cells
                self._word, self._cells = [], 0
                continue
            if over and self._column > self._cells and self._cells + cells <= width:
                erase = f"\x1b[{self._cells}D\x1b[K" if self._cells else ""
                done += self._paint(run, style) + erase + "\n" + "".join(self._word)
                run, self._column = "", self._cells
            run += part
            self._word.append(self._paint(part, style))
            self._cells += cells
            self._column += cells
            if self._column > width:  # a word longer than a line breaks anywhere
                self._column, self._word, self._cells = self._column % (width + 1), [], 0
        return done + self._paint(run, style)

    def _write(self, text: str) -> None:
        with self._status.hidden():
            sys.stdout.write(text)
            sys.stdout.flush()
            self._status.in_text = self._column > 0


def print_legend(values: Mapping[str, Any] | None = None, *, actions: bool = False) -> None:
    """Prints the meaning of colours and marks to standard error, on a terminal.

    `values` are the sampler's, to say what it does in each regime. With `actions`, see
    `TextScreen`, only marks are listed.
    """
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        return
    arms: dict[str, str] = {}
    does = dict(_DOES)
    if values:
        arms = {regime: str(values[f"arms.{regime}"]) for regime in REGIMES}
        does |= {"inject": "thought"} if values["inject.thought"] else {}
        draws = values["adaptive.draws"]
        does |= {"adaptive": f"best of {draws} draws"} if draws > 1 else {}
    done = {regime: f": {does.get(arm, arm)}" for regime, arm in arms.items()}
    done = done if len({*done.values()}) > 1 else {}  # else the regimes do not differ
    entries = [Text.assemble((MEANINGS[r], palette()[r]), done.get(r, "")) for r in REGIMES]
    entries = [] if actions else entries
    for arm, (mark, regime, name) in _MARKS.items():
        if arm in arms.values() and (arm != "inject" or does["inject"] == name):
            entries.append(Text(name, f"{palette()[regime]} {mark}" if actions else mark))
    err.print(fit(entries, "  ", err.width), soft_wrap=True)


def fit(parts: Iterable[Text], between: str, width: float) -> Text:
    """Joins parts to lines of at most `width` columns, in which `between` separates them."""
    text, column = Text(), 0
    for part in parts:
        if text and column + len(between) + part.cell_len > width:
            text.append("\n")
            column = 0
        elif text:
            text.append(between)
            column += len(between)
        text.append(part)
        column += part.cell_len
    return text


def can_ask() -> bool:
    """Returns whether a person is at the terminal. Prints a note if there is none."""
    found = all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr)))
    if not found:
        print("note: --ask has no effect without a terminal", file=sys.stderr)
    return found


def asker(status: StatusLine) -> "Ask":
    """Returns `ask_person` as a function that hides the status line."""

    def ask(row: int, texts: Sequence[str]) -> int | None:
        with status.hidden():
            return ask_person(row, texts)

    return ask


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


def summary(rows: "Sequence[Row]", speed: float, *more: str) -> str:
    """Returns tokens, speed (tokens per second, 0 if unknown), the counts of `_count`, the finish
    reasons, the share of each regime, and `more`. On a terminal lines fit its width."""
    tokens = [token for row in rows for token in row.tokens]
    regimes = Counter(token.regime for token in tokens)
    reasons = dict.fromkeys(row.finish_reason or "running" for row in rows)
    shares = [Text(f"{MEANINGS[r]} {regimes[r] / len(tokens):.0%}") for r in REGIMES if tokens]
    err = Console(stderr=True)
    width = err.width if err.is_terminal else float("inf")
    parts = [
        plural(len(tokens), "token") + (f" ({speed:.0f} tok/s)" if speed else ""),
        ", ".join(ENDS.get(reason, reason) for reason in reasons),
        ", ".join(plural(number, noun) for noun, number in _count(rows).items()),
        fit(shares, " ", width).plain,
        *more,
    ]
    return fit(map(Text, filter(None, parts)), " | ", width).plain


def _count(rows: "Sequence[Row]") -> Counter[str]:
    """Returns the number of forks, thoughts, lookups, questions and steps back. Several tokens of
    one thought, lookup or question count once."""
    counts: Counter[str] = Counter()
    for row in rows:
        actions = [token.action for token in row.tokens]
        counts["fork"] += sum(len(token.branches or ()) > 1 for token in row.tokens)
        for action, noun in (("inject", "thought"), ("clarify", "question")):
            counts[noun] += sum(a == action != b for b, a in pairwise(["", *actions]))
        counts["lookup"] += row.lookups
        counts["step back"] += actions.count("backspace")
    return +counts


def means(rows: "Sequence[Row]") -> str:
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
