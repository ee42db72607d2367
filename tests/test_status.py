"""The status line: read on a terminal in small, which must show the text as if there were none."""

from __future__ import annotations

import fcntl
import io
import os
import random
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from entropix_jax.batches.progress import ProgressView, Standing
from entropix_jax.names import REGIMES
from entropix_jax.results import Event, Piece, Request, Row
from entropix_jax.status import StatusLine
from entropix_jax.terminal import Meter, TextScreen
from entropix_jax.trace import TokenRecord
from tests.glass import Glass
from tests.test_terminal import Screen, own_environment, token  # noqa: F401 (a fixture)


class Window(Screen):
    """A terminal with a size, and what is on it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, width: int, height: int, **terminal: str
    ) -> None:
        super().__init__(monkeypatch, **terminal)
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self.file.fileno(), termios.TIOCSWINSZ, size)
        self._glass = Glass(width, height)

    def look(self) -> str:
        return self.shown(self.read())

    def shown(self, written: str) -> str:
        """What is on the screen after this, too."""
        self._glass.feed(written.replace("\n", "\r\n"))
        return self._glass.text


Open = Callable[..., Window]


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened = []

    def make(width: int = 80, height: int = 24, **terminal: str) -> Window:
        opened.append(Window(monkeypatch, width, height, **terminal))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def shown_alone(text: str, width: int, height: int) -> str:
    glass = Glass(width, height)
    glass.feed(text.replace("\n", "\r\n"))
    return glass.text


@pytest.mark.parametrize("width", [80, 21, 20])
@pytest.mark.parametrize("height", [24, 3])
def test_the_text_is_as_if_there_were_no_line(window: Open, width: int, height: int) -> None:
    """Whatever the text does: wraps, scrolls, ends in the last column, has wide letters, tabs."""
    screen, status = window(width, height), StatusLine()
    out = TextScreen(status)
    rng = random.Random(width)
    text, looks = "", []
    for number in range(300):
        piece = rng.choice(
            ["a", " bc", " d\n", "\n", "日本", " déjà", "x" * width, "", " lo\nng", "\t", " ef gh"]
        )
        out.show(piece, token(rng.choice(REGIMES)))
        text += piece
        status.show((f"<{number}> ", "bold"), ("status " * 20, ""))
        if number % 20 == 19:
            looks.append(f"<{number}> status" in screen.look())
    assert sum(looks) > 10, "the line is there while the text comes"
    status.clear()
    out.end_text()
    assert screen.look() == shown_alone(text, width, height)


def test_a_line_before_the_text_and_one_that_is_left(window: Open) -> None:
    screen, status = window(40, 5), StatusLine()
    status.show(("loading", ""))
    assert screen.look() == "loading\n"
    status.show(("compiling " * 9, ""))
    assert screen.look() == ("compiling " * 9)[:39] + "\n"
    TextScreen(status).show("text", token("mid"))
    assert screen.look() == "text\n"
    status.show(("stopping", ""))
    assert screen.look() == "text\nstopping\n"
    status.clear()
    status.clear()
    assert screen.look() == "text\n"


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_no_line_on_a_terminal_that_cannot(window: Open, environment: dict[str, str]) -> None:
    screen, status = window(**environment), StatusLine()
    status.show(("compiling", ""))
    TextScreen(status).show("text", token("mid"))
    status.show(("stopping", ""))
    assert screen.read() == "text"


def test_a_line_without_colours(window: Open) -> None:
    screen, status = window(NO_COLOR="1"), StatusLine()
    status.show(("helv", "#0072B2 bold"))
    assert screen.read() == "helv\n"


def test_text_in_a_pipe_may_come_out_on_the_terminal(
    window: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `| cat`. So the line is there until the text begins, and not again."""
    screen = window()
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        status = StatusLine()
        status.show(("compiling", ""))
        assert screen.look() == "compiling\n"
        TextScreen(status).show("text", token("mid"))
        status.show(("metrics", ""))
        assert screen.look() == "\n"


def test_text_in_a_file_leaves_the_line(
    window: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    screen = window()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        status = StatusLine()
        for number in range(3):
            TextScreen(status).show("text", token("mid"))
            status.show((f"metrics {number}", ""))
            assert screen.look() == f"metrics {number}\n"
        status.clear()
        assert screen.look() == "\n"
    assert (tmp_path / "out").read_text() == "text" * 3


# What --verbose tells.


def measured(row: int = 0, position: int = 97, **changes: object) -> TokenRecord:
    values = {
        "row": row,
        "position": position,
        "entropy": 3.214,
        "varentropy": 10.52,
        "agreement": 0.834,
        "attn_entropy_norm": 0.705,
        "temperature": 0.666,
        **changes,
    }
    return replace(token("hehv", "backspace"), **values)  # type: ignore[arg-type]


def event(one: TokenRecord, *, retracted: bool = False) -> Event:
    return Event(one.row, one, (Piece(one.text, one),), retracted)


def rows(number: int) -> list[Row]:
    return [Row(Request([1], str(i), 9)) for i in range(number)]


class Clock:
    def __init__(self) -> None:
        self.now = 2.0

    def __call__(self) -> float:
        return self.now


SHORT = "  98 hehv backspace h 3.21b u 10.52b² agree 0.83 attn 0.70 T 0.67 2 tok/s\n"
LONG = (
    "  98 hehv backspace  entropy  3.21 bits  varentropy 10.52 bits²  agreement 0.83"
    "  attention 0.70  temperature 0.67  2 tok/s\n"
)


@pytest.mark.parametrize(("width", "line"), [(80, SHORT), (140, LONG), (20, SHORT[:19] + "\n")])
def test_the_metrics_of_the_last_token(window: Open, width: int, line: str) -> None:
    screen, clock = window(width), Clock()
    meter = Meter(StatusLine(), rows(1), clock)
    meter.take(event(measured()), 0)
    assert screen.look().startswith("  97 hehv backspace"[: width - 1])
    assert "tok/s" not in screen.look(), "the first token waited for the compiler"
    clock.now += 0.5
    meter.take(event(measured(position=99), retracted=True), 0)
    meter.take(event(measured(position=98)), 0)
    assert screen.look() == line


def test_the_line_is_of_the_sample_that_is_on_the_screen(window: Open) -> None:
    screen = window()
    meter = Meter(StatusLine(), rows(3), Clock())
    meter.take(event(measured(row=1)), 0)
    assert screen.look() == "\n"
    meter.take(event(measured(row=0)), 0)
    assert screen.look().startswith("1/3   97 hehv")
    meter.take(event(measured(row=2)), 1)
    assert screen.look().startswith("2/3   97 hehv")


def test_the_longest_line_that_is_usual_fits_80_columns(window: Open) -> None:
    screen, clock = window(), Clock()
    meter = Meter(StatusLine(), rows(1), clock)
    for position in (1000, 1001):
        meter.take(event(measured(position=position, entropy=12.34, varentropy=34.56)), 0)
        clock.now += 1 / 999
    meter.take(event(measured(position=1002, entropy=12.34, varentropy=34.56)), 0)
    assert screen.look().rstrip().endswith(" tok/s")


def test_a_log_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    meter = Meter(StatusLine(), rows(1), Clock())
    for position in range(150):
        meter.take(event(measured(position=position)), 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:3] for line in lines] == [[n, "hehv", "backspace"] for n in ("63", "127")]
    assert "entropy  3.21 bits  varentropy 10.52 bits²" in lines[0]


def test_no_lines_in_the_middle_of_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where both streams go to one file (`2>&1`)."""
    path = tmp_path / "both"
    with path.open("a") as out, path.open("a") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        meter = Meter(StatusLine(), rows(1), Clock())
        for position in range(150):
            meter.take(event(measured(position=position)), 0)
    assert path.read_text() == ""


def test_the_metrics_at_the_end() -> None:
    (row,) = rows(1)
    meter = Meter(StatusLine(), [row], Clock())
    assert meter.summary() == ""
    row.tokens += [measured(), measured(entropy=0.0, action="argmax"), measured(entropy=0.0)]
    assert meter.summary() == (
        "mean entropy 1.07 bits, varentropy 10.52 bits², agreement 0.83, attention 0.70\n"
        "backspace 2 argmax 1\n"
    )
    assert max(map(len, meter.summary().splitlines())) <= 80


# A batch's progress.


def test_a_batch_s_speed_is_that_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waited for the compiler: 20 s here, and after it 30 tokens in 3 s."""
    clock = Clock()
    monkeypatch.setattr("entropix_jax.batches.progress.time.monotonic", clock)
    standing = Standing(0, 0, 0, 0.0)
    view = ProgressView(lambda: standing, 9)
    view.looked()
    assert view.speed(standing) == 0.0
    clock.now += 20
    for tokens in (1, 2, 3):  # of one step
        standing = Standing(0, tokens, 1, 1.0)
        view.looked()
        assert view.speed(standing) == 0.0
    for _ in range(3):
        clock.now += 1
        standing = Standing(0, standing.tokens + 10, standing.steps + 1, 1.0)
        view.looked()
        assert view.speed(standing) == pytest.approx(10.0)


def test_the_lines_of_a_batch_s_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("entropix_jax.batches.progress.time.monotonic", clock)
    standing = Standing(0, 0, 0, 0.0)
    with ProgressView(lambda: standing, 9) as view:
        clock.now += 20
        standing = Standing(0, 5, 1, 1.0)
        view.looked()
        clock.now += 50
        standing = Standing(3, 505, 101, 1.0)
        view.looked()
    line = "3 of 9 done | 505 tokens, 10 tok/s | 100% of slots used | 1 min 40 s left\n"
    assert capsys.readouterr().err == line
