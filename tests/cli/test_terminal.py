"""How text looks: on a terminal of its own (a pseudo-terminal), and where there is none."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.color import ColorSystem
from rich.style import Style

from entropix_jax.cli.status import StatusLine
from entropix_jax.cli.terminal import (
    Meter,
    TextScreen,
    ask_person,
    print_legend,
    style_of,
    summary,
)
from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.host.interrupts import deferred_interrupts
from entropix_jax.names import REGIMES
from tests.support.browser import contrast
from tests.support.runs import unrun
from tests.support.terminals import ESCAPE, Screen
from tests.support.traces import record, token

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Screen]]:
    screens = []

    def make(**environment: str) -> Screen:
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


def test_colours_on_a_terminal(terminal: Callable[..., Screen]) -> None:
    screen = terminal(COLORTERM="truecolor")
    assert show_all().coloured
    shown = screen.read()
    assert ESCAPE.sub("", shown) == PLAIN
    assert shown.startswith("Once\x1b["), "what is certain has the terminal's own colour"
    assert "\x1b[38;2;0;144;104m upon\n\x1b[0m" in shown
    assert "\x1b[1;4;38;2;0;114;178m Wait...\x1b[0m" in shown


def test_tokens_of_actions_have_marks(terminal: Callable[..., Screen]) -> None:
    """Italic for a fork, underlined for a thought, reversed for a step back."""
    screen = terminal(COLORTERM="truecolor")
    for action, code in (("branch", "3;"), ("inject", "4;"), ("backspace", "7;"), ("sample", "")):
        TextScreen().show("x", token("mid", action))
        assert screen.read() == f"\x1b[{code}38;2;0;144;104mx\x1b[0m"


def test_the_legend(terminal: Callable[..., Screen]) -> None:
    terminal(TERM="xterm-256color")
    print_legend()
    screen = terminal(COLORTERM="truecolor", COLUMNS="120")
    print_legend()
    shown = screen.read()
    assert ESCAPE.sub("", shown) == (
        "certain (LELV)  undecided (HELV)  forked (LEHV)  scattered (HEHV)  between (MID)  "
        "branch  thought  step back\n"
    )
    assert "\x1b[1;38;2;0;114;178mundecided\x1b[0m" in shown
    assert "\x1b[7mstep back\x1b[0m" in shown
    screen = terminal(COLUMNS="80")
    print_legend()
    first, second = ESCAPE.sub("", screen.read()).splitlines()
    assert first.rstrip().endswith("between (MID)")
    assert second == "branch  thought  step back"


@pytest.mark.parametrize("term", ["xterm-256color", "xterm-16color", "linux"])
def test_fewer_colours_still_tell_the_regimes_apart(
    terminal: Callable[..., Screen], term: str
) -> None:
    screen = terminal(TERM=term)
    for regime in REGIMES:
        TextScreen().show("x", token(regime))
    shown = screen.read()
    assert ESCAPE.sub("", shown) == "x" * len(REGIMES)
    colours = [code for code in ESCAPE.findall(shown) if code != "0"]
    assert len(set(colours)) == len(REGIMES) - 1


def test_plain_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert not show_all().coloured
    TextScreen().show("\x1b[2J\r", token("mid"))
    assert out.getvalue() == PLAIN + "\x1b[2J\r", "a file holds what the model wrote"


@pytest.mark.parametrize("regime", ["lelv", "mid"])
def test_text_is_shown_as_it_is(terminal: Callable[..., Screen], regime: str) -> None:
    """No markup, no emoji names, no space lost; but nothing that steers a terminal."""
    screen = terminal(COLUMNS="30")
    for text in ("[bold]x[/bold] :smile:", "x " * 200, "  \n\n ", "a\tb", "日本"):
        TextScreen().show(text, token(regime))
        assert ESCAPE.sub("", screen.read()) == text
    TextScreen().show("a\x1b[2Jb\x07\r\x9bc\x7f\x00é\u200d\n", token(regime))
    shown = ESCAPE.sub("", screen.read())
    assert shown == "a\ufffd[2Jb\ufffd\ufffd\ufffdc\ufffd\ufffdé\u200d\n"


def displayed(shown: str, width: int) -> list[str]:
    """The lines of a terminal of this width: it wraps at its edge, and obeys "left" and "erase"."""
    lines, column = [""], 0
    for code, number, character in re.findall(r"\x1b\[(?:(K)|(\d+)D|[0-9;]*m)|(.|\n)", shown):
        if number:
            column -= int(number)
            assert column >= 0
        elif code == "K":
            lines[-1] = lines[-1][:column]
        elif character == "\n":
            lines.append("")
            column = 0
        elif character:
            if column == width:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
    return lines


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([" the", " human", " that"], [" the human", "that"]),
        (["the hum", "an", "kind is"], ["the", "humankind", "is"]),
        (["one two three"], ["one two", "three"]),
        (["a", " incomprehensibly", " b"], ["a incompreh", "ensibly b"]),
        (["incomprehens", "ible b", " cd"], ["incomprehen", "sible b cd"]),
        (["1234567890", " 12 45 7890 2"], ["1234567890", "12 45 7890", "2"]),
        (["one\n\ntwo three"], ["one", "", "two three"]),
        (["one two ", "日本 three four"], ["one two 日本 ", "three four"]),
    ],
)
@pytest.mark.parametrize("regime", ["lelv", "mid"])
def test_words_are_wrapped_on_a_terminal(
    terminal: Callable[..., Screen], regime: str, pieces: list[str], lines: list[str]
) -> None:
    """Whatever tokens they consist of. Words longer than a line are left to the terminal, as are
    lines with characters whose width is not sure."""
    screen = terminal(COLUMNS="11", COLORTERM="truecolor")
    out = TextScreen()
    for piece in pieces:
        out.show(piece, token(regime))
    shown = screen.read()
    if "日" not in shown:
        assert [line.rstrip() for line in displayed(shown, 11)] == lines
    else:
        assert "\x1b[K" not in shown
        assert ESCAPE.sub("", shown) == "".join(pieces)


def test_words_are_not_wrapped_in_a_pipe_or_on_a_dumb_terminal(
    terminal: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal(COLUMNS="5", TERM="dumb")
    TextScreen().show("one two three", token("lelv"))
    assert screen.read() == "one two three"
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    TextScreen().show("one two three", token("lelv"))
    assert out.getvalue() == "one two three"


@pytest.mark.parametrize(
    ("typed", "answer", "questions"),
    [
        ("1\n", 0, 1),
        (" 2 \n", 1, 1),
        ("\n", None, 1),
        ("", None, 1),  # the end of standard input
        ("3\nyes\n12\n2\n", 1, 4),
        ("no\n\n2\n", None, 2),
    ],
)
def test_a_person_is_asked_until_the_answer_is_one(
    typed: str,
    answer: int | None,
    questions: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing of it goes to standard output, where the text is."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert ask_person(3, [" a [bold]\x1b[2J", "\nb"]) == answer
    out, err = capsys.readouterr()
    assert out == ""
    assert "\x1b" not in err
    assert "' a [bold]\ufffd[2J'" in err
    assert "'\\nb'" in err
    assert err.count("Enter for the model's choice") == questions


def test_ctrl_c_at_a_question_ends_the_run_and_leaves_the_choice_to_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        with pytest.raises(KeyboardInterrupt):  # the second one strikes, there as everywhere
            ask_person(0, ["a", "b"])


def test_the_summary() -> None:
    def row(regimes: list[str], reason: str) -> Row:
        tokens = [token(r) for r in regimes]
        return Row(unrun([1], "0", 9), tokens, finish_reason=reason)

    rows = [row(["lelv", "lelv", "mid"], "length"), row(["hehv"], "eos"), row([], "length")]
    assert summary(rows, {"first_token": 2.0, "total": 2.5}) == (
        "4 tokens (4 tok/s) | certain 50% undecided 0% forked 0% scattered 25% between 25% | "
        "length, eos"
    )
    # The first step's tokens waited for the compiler: alone they say nothing of the speed.
    assert summary([row(["mid"], "eos")], {"first_token": 2.0, "total": 2.0}) == (
        "1 token | certain 0% undecided 0% forked 0% scattered 0% between 100% | eos"
    )


def test_the_summary_counts_forks_thoughts_and_steps_back() -> None:
    """A fork once, whatever the length of its branch, and only one of several branches; a thought
    once, whatever its length."""
    several: Any = [{}, {}]

    def row(*actions: str) -> Row:
        tokens = [token("mid", action) for action in actions]
        for before, one in zip(["", *actions], tokens, strict=False):
            if one.action == "branch":
                one.branches = several if before != "branch" else several[:1]
        return Row(unrun(), tokens, finish_reason="eos")

    def counted(*rows: Row) -> str:
        return summary(rows, {"total": 1.0}).split(" | ")[2]

    one = row("branch", "branch", "sample", "inject", "inject", "sample", "backspace", "inject")
    assert counted(one) == "1 fork, 2 thoughts, 1 step back"
    two = row("inject", "branch", "argmax", "branch", "backspace", "backspace")
    assert counted(one, two) == "3 forks, 3 thoughts, 3 steps back"
    assert counted(row("sample"), row("inject")) == "1 thought"
    assert counted(row("sample", "argmax")) == "eos"


@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT])
@pytest.mark.parametrize("background", [0.0, 255.0])
def test_colours_stand_out(background: float, system: ColorSystem) -> None:
    """By WCAG, 3 for large or bold text."""
    for regime in REGIMES:
        colour = Style.parse(style_of(token(regime))).color
        if colour is None:
            continue
        parts = [*map(float, colour.downgrade(system).get_truecolor())]
        assert contrast(parts, [background] * 3) >= 3.0, regime


# The status line, and the metrics that --verbose shows on it.


def test_the_line_is_gone_before_the_text_and_does_not_come_back(
    terminal: Callable[..., Screen],
) -> None:
    """In the middle of a line of text there is no room for it."""
    screen = terminal(NO_COLOR="1", COLUMNS="80")
    status = StatusLine()
    status.show("loading")
    assert screen.read() == "loading"
    status.show("compiling " * 20)
    assert screen.read() == "\r\x1b[2K" + ("compiling " * 20)[:79] + "…", "one line, whatever fits"
    out = TextScreen(status)
    out.show("text", token("mid"))
    shown = screen.read()
    assert shown.endswith("\x1b[1A\x1b[2Ktext"), "it was erased"
    assert "\x1b[?25" not in shown, "Ctrl-C leaves the cursor visible"
    status.show("stopping")
    out.show(" more\n", token("mid"))
    status.clear()
    assert screen.read() == " more\n"


# What --verbose shows.


def measured(position: int) -> TokenRecord:
    numbers = {"entropy": 3.214, "varentropy": 10.52, "agreement": 0.834, "temperature": 0.666}
    return record(regime="hehv", action="backspace", position=position, **numbers)


def test_the_metrics_of_the_latest_token(terminal: Callable[..., Screen]) -> None:
    screen = terminal(NO_COLOR="1", COLUMNS="80")
    times = iter([2.0, 2.0, 2.5, 3.0])
    row = Row(unrun())
    meter = Meter(StatusLine(), [row], lambda: next(times))
    row.tokens.append(measured(97))
    meter.update(row)
    line = "hehv backspace h 3.21 bits  u 10.52 bits²  agree 0.83  T 0.67"
    shown = ESCAPE.sub("", screen.read())
    assert shown == f"  97 {line}", "no speed: the first token waited for the compiler"
    meter.update(row)  # after a token that was taken back
    assert screen.read() == ""
    row.tokens.append(measured(98))
    meter.update(row)
    shown = ESCAPE.sub("", screen.read())
    assert shown == f"\r\x1b[2K  98 {line}  2 tok/s"
