"""The status line on standard error, and the metrics that --verbose shows on it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.cli.status import StatusLine
from entropix_jax.cli.terminal import Meter, TextScreen
from entropix_jax.engine.results import Event, Piece, Row
from entropix_jax.engine.trace import TokenRecord
from tests.support.runs import unrun
from tests.support.terminals import ESCAPE
from tests.support.traces import token

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Makes both standard streams one terminal, and gives what is written to it."""

    def make(**environment: str) -> io.StringIO:
        terminal = {"TERM": "xterm-256color", "TTY_COMPATIBLE": "1", "COLUMNS": "80"}
        for name, value in {**terminal, **environment}.items():
            monkeypatch.setenv(name, value)
        written = io.StringIO()
        monkeypatch.setattr(sys, "stdout", written)
        monkeypatch.setattr(sys, "stderr", written)
        return written

    return make


def take(written: io.StringIO) -> str:
    text = written.getvalue()
    written.seek(0)
    written.truncate()
    return text


def test_the_line_is_gone_before_the_text_and_does_not_come_back(
    screen: Callable[..., io.StringIO],
) -> None:
    """In the middle of a line of text there is no room for it."""
    written = screen(NO_COLOR="1")
    status = StatusLine()
    status.show("loading")
    assert take(written) == "loading"
    status.show("compiling " * 20)
    assert take(written) == "\r\x1b[2K" + ("compiling " * 20)[:79] + "…", "one line, whatever fits"
    out = TextScreen(status)
    out.show("text", token("mid"))
    assert take(written).endswith("\x1b[1A\x1b[2Ktext"), "it was erased"
    assert "\x1b[?25" not in written.getvalue(), "Ctrl-C leaves the cursor visible"
    status.show("stopping")
    out.show(" more\n", token("mid"))
    status.clear()
    assert take(written) == " more\n"


def test_no_line_where_none_can_be_seen(screen: Callable[..., io.StringIO]) -> None:
    for environment in ({"TERM": "dumb"}, {"TTY_COMPATIBLE": "0"}):
        written = screen(**environment)
        status = StatusLine()
        status.show("compiling")
        TextScreen(status).show("text", token("lelv"))
        status.show("stopping")
        status.clear()
        assert written.getvalue() == "text"


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_text_that_goes_elsewhere(
    screen: Callable[..., io.StringIO], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Text in a file leaves the line; text in a pipe may come out on the terminal (`| cat`)."""
    written = screen(NO_COLOR="1")
    reader, writer = os.pipe() if kind == "pipe" else (None, tmp_path / "out")
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        status = StatusLine()
        status.show("compiling")
        TextScreen(status).show("text", token("mid"))
        take(written)
        status.show("metrics")
        assert take(written) == ("\r\x1b[2Kmetrics" if kind == "file" else "")
        status.clear()
    if reader is not None:
        os.close(reader)


# What --verbose shows.


MEASURED = {
    "position": 97,
    "entropy": 3.214,
    "varentropy": 10.52,
    "agreement": 0.834,
    "attn_entropy_norm": 0.705,
    "temperature": 0.666,
}


def measured(**changes: Any) -> TokenRecord:
    return replace(token("hehv", "backspace"), **{**MEASURED, **changes})


def event(one: TokenRecord, *, retracted: bool = False) -> Event:
    return Event(Row(unrun(), number=one.row), one, (Piece(one.text, one),), retracted)


def rows(number: int) -> list[Row]:
    return [Row(unrun([1], str(i), 9)) for i in range(number)]


def test_the_metrics_of_the_latest_token(screen: Callable[..., io.StringIO]) -> None:
    written = screen(NO_COLOR="1")
    times = iter([2.0, 2.0, 2.5, 3.0])
    meter = Meter(StatusLine(), rows(1), lambda: next(times))
    meter.take(event(measured()), 0)
    line = "hehv backspace h 3.21 bits  u 10.52 bits²  agree 0.83  T 0.67"
    shown = ESCAPE.sub("", take(written))
    assert shown == f"  97 {line}", "no speed: the first token waited for the compiler"
    meter.take(event(measured(position=99), retracted=True), 0)
    assert take(written) == ""
    meter.take(event(measured(position=98)), 0)
    shown = ESCAPE.sub("", take(written))
    assert shown == f"\r\x1b[2K  98 {line}  2 tok/s"


def test_the_metrics_are_of_the_sample_that_is_printed(screen: Callable[..., io.StringIO]) -> None:
    written = screen()
    meter = Meter(StatusLine(), rows(3), lambda: 2.0)
    for row, printed, start in ((1, 0, ""), (0, 0, "1/3   97 hehv"), (2, 1, "2/3   97 hehv")):
        meter.take(event(measured(row=row)), printed)
        shown = ESCAPE.sub("", take(written)).removeprefix("\r\x1b[2K")
        assert shown.startswith(start)
        assert bool(shown) == bool(start)


@pytest.mark.parametrize("shared", [False, True])
def test_a_log_has_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: bool
) -> None:
    """None where both streams go to one file (`2>&1`): not in the middle of the text."""
    paths = tmp_path / "out", tmp_path / ("out" if shared else "err")
    with paths[0].open("a") as out, paths[1].open("a") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        meter = Meter(StatusLine(), rows(1), lambda: 2.0)
        for position in range(150):
            meter.take(event(measured(position=position)), 0)
    lines = [line.split()[:3] for line in paths[1].read_text().splitlines()]
    assert lines == [] if shared else [[n, "hehv", "backspace"] for n in ("63", "127")]


def test_the_metrics_at_the_end() -> None:
    (row,) = rows(1)
    meter = Meter(StatusLine(), [row], lambda: 2.0)
    assert meter.summary() == ""
    row.tokens += [measured(), measured(entropy=0.0, action="argmax"), measured(entropy=0.0)]
    assert meter.summary() == (
        "mean entropy 1.07 bits, varentropy 10.52 bits², agreement 0.83, attention 0.70\n"
        "backspace 2 argmax 1\n"
    )
