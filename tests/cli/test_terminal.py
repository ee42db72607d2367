"""Text output on a pseudo-terminal, and without a terminal."""

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from rich.color import Color, ColorSystem
from rich.style import Style

from entropix_jax.cli.plane import draw_plane
from entropix_jax.cli.status import StatusLine, show_waits
from entropix_jax.cli.terminal import (
    DARK,
    LIGHT,
    TextScreen,
    ask_person,
    means,
    palette,
    print_legend,
    summary,
)
from entropix_jax.engine.programs import Programs
from entropix_jax.engine.results import Row
from entropix_jax.engine.state import Recording
from entropix_jax.host.interrupts import deferred_interrupts
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import load_sampler
from tests.support.browser import contrast
from tests.support.runs import unrun
from tests.support.samplers import CALIBRATION
from tests.support.terminals import ESCAPE, Screen
from tests.support.traces import record, token

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Screen]]:
    screens = []

    def make(**environment: str) -> Screen:
        monkeypatch.delenv("COLORFGBG", raising=False)
        palette.cache_clear()
        screens.append(Screen(monkeypatch, **environment))
        return screens[-1]

    yield make
    for screen in screens:
        screen.close()


def show_all() -> TextScreen:
    screen = TextScreen()
    for text, one in (
        ("Once", token("lelv")),
        (" upon\n", token("mid")),
        (" Wait...", token("helv", "inject")),
        (" a", token("lehv")),
        (" time ", token("hehv")),
    ):
        screen.show(text, one)
    screen.end_text()
    return screen


PLAIN = "Once upon\n Wait... a time \n"


def test_colours_and_marks_on_a_terminal(terminal: Callable[..., Screen]) -> None:
    screen = terminal(COLORTERM="truecolor")
    assert show_all().coloured
    shown = screen.read()
    assert ESCAPE.sub("", shown) == PLAIN
    assert shown.startswith("Once\x1b["), "what is certain has the terminal's own colour"
    assert "\x1b[38;2;0;175;135m upon\n\x1b[0m" in shown
    assert "\x1b[1;4;38;2;95;175;215m Wait...\x1b[0m" in shown
    for action, code in (("branch", "3;"), ("inject", "4;"), ("backspace", "7;"), ("sample", "")):
        TextScreen().show("x", token("mid", action))
        assert screen.read() == f"\x1b[{code}38;2;0;175;135mx\x1b[0m"


def test_only_forks_and_steps_back_are_coloured(terminal: Callable[..., Screen]) -> None:
    """A branch without a rival is no fork, and neither are the tokens that follow in it."""
    screen = terminal(TERM="xterm-256color")
    out = TextScreen(actions=True)
    for number in (2, 1):
        branches: Any = [{}] * number
        for one in (branches, None):
            out.show(str(number), record(regime="mid", action="branch", branches=one))
    out.show("a", token("hehv"))
    out.show("b", token("mid", "backspace"))
    fork = "\x1b[3;38;5;175m2\x1b[0m"
    assert screen.read() == f"{fork}{fork}11a\x1b[7;38;5;209mb\x1b[0m"


def test_legend(terminal: Callable[..., Screen]) -> None:
    """It says what the sampler does, on lines of at most 80 columns, and what it marks."""
    screen = terminal(COLORTERM="truecolor", COLUMNS="80")
    values = load_sampler("entropix").values
    print_legend(values)
    shown = screen.read()
    assert ESCAPE.sub("", shown) == (
        "certain: top token  undecided: warmer draw  forked: fork, keep the best\n"
        "scattered: step back  between: best of 16 draws  from a fork  after a step back\n"
    )
    assert "\x1b[1;38;2;95;175;215mundecided\x1b[0m: warmer draw" in shown
    assert "\x1b[7mafter a step back\x1b[0m" in shown
    thinks = load_sampler("entropix").with_values({"inject.thought": " Wait"}).values
    one_arm = load_sampler("greedy").values
    for given, actions, expected in (
        (thinks, True, "from a fork  thought  after a step back\n"),
        (one_arm, False, "certain  undecided  forked  scattered  between\n"),
        (None, False, "certain  undecided  forked  scattered  between\n"),
    ):
        print_legend(given, actions=actions)
        assert ESCAPE.sub("", screen.read()) == expected


@pytest.mark.parametrize("term", ["xterm-256color", "xterm-16color", "linux"])
def test_regimes_differ_with_fewer_colours(terminal: Callable[..., Screen], term: str) -> None:
    screen = terminal(TERM=term)
    for regime in REGIMES:
        TextScreen().show("x", token(regime))
    shown = screen.read()
    assert ESCAPE.sub("", shown) == "x" * len(REGIMES)
    assert len({*ESCAPE.findall(shown)} - {"0"}) == len(REGIMES) - 1
    assert "37m" not in shown, "white"


def test_plain_text_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert not show_all().coloured
    TextScreen().show("\x1b[2J\r", token("mid"))
    assert out.getvalue() == PLAIN + "\x1b[2J\r", "a file holds what the model wrote"


@pytest.mark.parametrize("regime", ["lelv", "mid"])
def test_text_is_shown_unchanged(terminal: Callable[..., Screen], regime: str) -> None:
    """Markup, emoji names and spaces are kept, but control characters are replaced."""
    screen = terminal(COLUMNS="1000")
    for text in ("[bold]x[/bold] :smile:", "x " * 200, "  \n\n ", "a\tb", "日本"):
        TextScreen().show(text, token(regime))
        assert ESCAPE.sub("", screen.read()) == text
    TextScreen().show("a\x1b[2Jb\x07\r\x9bc\x7f\x00é\u200d\n", token(regime))
    shown = ESCAPE.sub("", screen.read())
    assert shown == "a\ufffd[2Jb\ufffd\ufffd\ufffdc\ufffd\ufffdé\u200d\n"


@pytest.mark.parametrize(
    ("typed", "answer", "questions"),
    [(" 2 \n", 1, 1), ("", None, 1), ("3\nyes\n12\n1\n", 0, 4), ("no\n\n2\n", None, 2)],
)
def test_the_question_repeats_until_a_valid_answer(
    typed: str,
    answer: int | None,
    questions: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The end of input ends the question, too. Standard output contains only the text."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert ask_person(3, [" a [bold]\x1b[2J", "\nb"]) == answer
    out, err = capsys.readouterr()
    assert (out, "\x1b" in err) == ("", False)
    assert "' a [bold]\ufffd[2J'" in err
    assert "'\\nb'" in err
    assert err.count("Enter for the model's choice") == questions


def test_ctrl_c_at_a_question_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []

    class Keyboard:
        def readline(self) -> str:
            os.kill(os.getpid(), signal.SIGINT)
            return "2\n"

    monkeypatch.setattr(sys, "stdin", Keyboard())
    with deferred_interrupts(lambda: stops.append(1)):
        before = signal.getsignal(signal.SIGINT)
        assert ask_person(0, ["a", "b"]) is None
        assert stops == [1]
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):  # the second one raises, as elsewhere
            ask_person(0, ["a", "b"])


def test_summary(terminal: Callable[..., Screen]) -> None:
    """A fork with several branches counts once, for any length of its branch. A thought counts
    once, for any length."""
    several: Any = [{}, {}]

    def row(regimes: str, actions: str, reason: str) -> Row:
        pairs = zip(regimes.split(), actions.split(), strict=True)
        tokens = [token(regime, action) for regime, action in pairs]
        for before, one in zip([None, *tokens], tokens, strict=False):
            if one.action == "branch":
                new = before is None or before.action != "branch"
                one.branches = several if new else several[:1]
        return Row(unrun([1], "0", 9), tokens, finish_reason=reason)

    rows = [row("lelv lelv mid", "sample argmax sample", "length"), row("hehv", "sample", "eos")]
    assert summary([*rows, row("", "", "length")], 4.4, "context 4/8") == (
        "4 tokens (4 tok/s) | token limit, end of text | "
        "certain 50% undecided 0% forked 0% scattered 25% between 25% | context 4/8"
    )
    assert summary([row("", "", "interrupt")], 0) == "0 tokens | stopped"
    one = "branch branch sample inject inject sample backspace inject"
    two = "inject branch argmax branch backspace backspace"
    rows = [row("mid " * len(actions.split()), actions, "eos") for actions in (one, two)]
    shares = "certain 0% undecided 0% forked 0% scattered 0% between 100%"
    parts = ("end of text", "1 fork, 2 thoughts, 1 step back", shares)
    assert summary(rows[:1], 0) == " | ".join(["8 tokens", *parts])
    assert summary(rows, 0).startswith(
        "14 tokens | end of text | 3 forks, 3 thoughts, 3 steps back"
    )
    asked = row("mid " * 5, "lookup lookup sample clarify clarify", "question")
    asked.lookups = 2
    assert " | question to the user | 1 question, 2 lookups | " in summary([asked], 0)
    for width, starts in ((40, "8 1 certain scattered context"), (80, "8 certain seed")):
        terminal(COLUMNS=str(width))
        lines = summary(rows[:1], 100.0, "context 4096/4096", "seed 12").splitlines()
        assert [line.partition(" ")[0] for line in lines] == starts.split()
        assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("styles", "background"),
    [(DARK, "#000000"), (DARK, "#1e1e1e"), (DARK, "#282c34"), (LIGHT, "#ffffff")],
)
def test_colours_have_enough_contrast(styles: Mapping[str, str], background: str) -> None:
    """The contrast that WCAG requires for text, on backgrounds of usual terminals. The colours are
    those of 256, so that terminals with fewer than all have them, too."""
    behind = Color.parse(background).get_truecolor()
    for regime in REGIMES:
        if (colour := Style.parse(styles[regime]).color) is not None:
            shown = colour.downgrade(ColorSystem.EIGHT_BIT).get_truecolor()
            assert shown == colour.get_truecolor()
            assert contrast(shown, behind) >= 4.5, regime


@pytest.mark.parametrize(
    ("told", "answer", "expected"),
    [
        ("0;15", b"", LIGHT),
        ("15;default;0", b"", DARK),
        ("", b"\x1b]11;rgb:ffff/fafa/e0e0\x1b\\\x1b[?64c", LIGHT),
        ("", b"\x1b]11;rgb:1e1e/1e1e/1e1e\x07\x1b[?1;2c", DARK),
        ("", b"\x1b[?1;2c", DARK),
    ],
)
def test_the_palette_follows_the_background(
    terminal: Callable[..., Screen],
    monkeypatch: pytest.MonkeyPatch,
    told: str,
    answer: bytes,
    expected: Mapping[str, str],
) -> None:
    screen = terminal()
    monkeypatch.setenv("COLORFGBG", told)
    keyboard = os.fdopen(os.dup(screen.file.fileno()))
    monkeypatch.setattr(sys, "stdin", keyboard)
    replies = threading.Thread(target=screen.reply, args=(b"\x1b[c", answer))
    if answer:
        replies.start()
    assert palette() == expected
    if answer:
        replies.join()
    keyboard.close()


def shown_lines(text: str) -> list[str]:
    """Returns the lines of a terminal after a text with line breaks, and erasures at a cursor."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[(\d+)D\x1b\[K|(\n)|([^\n\x1b])", ESCAPE.sub("", text)):
        back, ends, letter = part
        if ends:
            lines, column = [*lines, ""], 0
        column -= int(back or 0)
        lines[-1] = lines[-1][:column] + letter
        column += len(letter)
    return lines


@pytest.mark.parametrize("width", [6, 11, 30])
def test_lines_break_at_spaces(terminal: Callable[..., Screen], width: int) -> None:
    """Pieces are parts of words. A word longer than a line breaks."""
    screen = terminal(COLUMNS=str(width))
    out = TextScreen()
    text = "The grizzled fisherman was not seen again.\n  He left, of course, alone"
    for at in range(0, len(text), 3):
        out.show(text[at : at + 3], token("mid" if at % 2 else "lelv"))
    out.end_text()
    lines = shown_lines(screen.read())
    assert "".join("".join(lines).split()) == "".join(text.split())
    words = {*text.split()}
    for line in lines:
        if width > 10:
            assert len(line) < width
            assert {*line.split()} <= words


def test_means() -> None:
    numbers = {"varentropy": 10.52, "agreement": 0.834, "attn_entropy_norm": 0.25}
    tokens = [
        record(entropy=3.0, action="backspace", **numbers),
        record(entropy=3.5, action="sample", **numbers),
        record(entropy=3.25, action="sample", **numbers),
    ]
    assert means([Row(unrun(), tokens), Row(unrun())]) == (
        "mean entropy 3.25 bits, varentropy 10.52 bits², agreement 0.83, attention 0.25\n"
        "sample 2 backspace 1\n"
    )
    assert means([Row(unrun())]) == ""


def test_the_status_line_is_erased_before_the_text(terminal: Callable[..., Screen]) -> None:
    """In the middle of a line of text it is shown below, and the cursor comes back."""
    screen = terminal(NO_COLOR="1", COLUMNS="80")
    status = StatusLine()
    status.show("loading: much")
    assert screen.read() == "loading, 0.0 s: much"
    status.show("compiling " * 20)
    assert screen.read() == "\r\x1b[2K" + ("compiling " * 20)[:76] + "…", "one line, whatever fits"
    out = TextScreen(status)
    out.show("text", token("mid"))
    assert screen.read() == "\r\x1b[2Ktext", "it was erased"
    status.show("forking")
    assert screen.read() == "\x1bD\x1b[A\x1b7\r\nforking, 0.0 s"
    out.show(" more\n", token("mid"))
    status.clear()
    assert screen.read() == "\r\x1b[2K\x1b8 more\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_wait_counts_its_seconds_and_acknowledges_ctrl_c(
    terminal: Callable[..., Screen],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    on_terminal: bool,
) -> None:
    """Ctrl-C is handled while a program compiles, here one whose tracing takes 0.6 s."""
    screen = terminal(NO_COLOR="1", COLUMNS="80") if on_terminal else None
    monkeypatch.setattr("entropix_jax.cli.status._PATIENCE", 0.1)
    programs, status = Programs(Mock(mesh=None), Recording()), StatusLine()
    slow = jax.jit(lambda x: x + (time.sleep(0.6) or 1))  # type: ignore[func-returns-value]
    times: list[float] = []

    def press() -> None:
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.3, press).start()
    with (
        deferred_interrupts(lambda: times.append(time.monotonic())),
        show_waits(status, lambda: programs),
    ):
        programs.call("slow", slow, (1.0,))
        assert (times[1] - times[0] < 0.3, programs.waits) == (True, None)
    assert programs.waited >= 0.5
    shown = screen.read() if screen else capsys.readouterr().err
    assert bool(re.search(r"compiling or loading program 1, 0\.\d s: slow", shown)) == on_terminal
    assert re.search(r"stopping after this compilation, 0\.\d s; Ctrl-C again ends at once", shown)


@pytest.mark.parametrize("columns", [20, 100])
def test_plane_in_characters(columns: int) -> None:
    """Cells are percentiles of the model's answers, and have the sign of most of their tokens."""
    sampler = load_sampler("entropix").resolve(CALIBRATION)
    points = {"lelv": (0, 0), "helv": (10, 1.2), "hehv": (10, 25), "mid": (1.45, 1.2)}
    tokens = [record(regime=r, entropy=x, varentropy=y) for r, (x, y) in points.items()]
    many = [record(regime="lehv", entropy=0.0, varentropy=25.0)] * 2
    tokens += [*many, record(regime="hehv", entropy=0.0, varentropy=25.0)]
    plane = draw_plane(tokens, sampler.values, CALIBRATION, columns).plain.splitlines()
    heads, cells, axis = plane[0], [line.partition("│") for line in plane[1:17]], plane[17]
    width = len(axis) - 8
    assert (width, axis[7]) == (min(columns - 8, 72), "└")
    signs = {r: [(x, 15 - y) for y, (_, _, line) in enumerate(cells) for x, one in enumerate(line)
                 if one == sign] for r, sign in zip(REGIMES, "●■◆×▲", strict=True)}  # fmt: skip
    edge, middle = width - 1, width // 2
    assert signs == {
        "lelv": [(0, 0)], "helv": [(edge, 6)], "lehv": [(0, 15)], "hehv": [(edge, 15)],
        "mid": [(middle, 6)],
    }  # fmt: skip
    assert [*heads.split()] == ["h1", "h2"]
    for name in ("h1", "h2"):
        at = int(CALIBRATION.rank("entropy", sampler.values[f"thresholds.{name}"]) / 100 * width)
        assert heads.index(name) - 8 == at
        assert cells[1][2][at] == "┊"
