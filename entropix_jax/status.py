"""A line on standard error that tells how things stand, and is gone again before anything else is
written. Needs no JAX: there is something to tell before that is imported."""

import io
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style

Parts = Sequence[tuple[str, str]]  # texts, each with its rich style

_DUMB = ("", "dumb", "unknown")
_TAB = 8
# Down a line, scrolling at the bottom, and up again: there is a line below. Then there and back.
_BELOW, _BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"
_ERASE_BELOW, _ERASE_ABOVE = "\x1b[J", "\x1b[A\r\x1b[J"


class StatusLine:
    """Stands below the text, where that goes to the same terminal, and leaves the text as it is.

    No mode of the terminal is changed for it, so whatever ends the process leaves nothing to mend.
    Who writes to standard output meanwhile calls `clear` before and `wrote` after it.
    """

    def __init__(self) -> None:
        self._err = sys.stderr
        console = Console(stderr=True)
        name = None if console.no_color else console.color_system
        self._colours = COLOR_SYSTEMS[name] if name else None
        self._shared = is_terminal(sys.stdout) and is_terminal(sys.stderr)
        self._unseen = not is_terminal(sys.stdout) and _is_pipe(sys.stdout)
        self._column = 0  # of the cursor, where standard output is this terminal
        self._undo = ""
        self._lock = threading.RLock()  # Ctrl-C is told of from a thread of its own
        self.live = is_terminal(self._err) and os.environ.get("TERM", "") not in _DUMB

    @property
    def columns(self) -> int:
        """How wide the line may be."""
        try:
            width = os.get_terminal_size(self._err.fileno()).columns
        except (OSError, ValueError):
            width = 0
        return (width or 80) - 1

    def show(self, *parts: tuple[str, str]) -> None:
        """Shows a line, in the place of the one before. Does nothing where `live` is False."""
        with self._lock:
            if not self.live:
                return
            columns = self.columns
            if self._column >= columns:
                # After the last column of a line it is the terminal's secret where it goes on.
                self.clear()
                return
            line = self._render(parts, columns)
            if self._column:
                self._write(f"{self._undo}{_BELOW}{line}{_BACK}")
                self._undo = _ERASE_BELOW
            else:  # a whole line: what comes after a sudden end does not stick to it
                self._write(f"{self._undo}{line}\n")
                self._undo = _ERASE_ABOVE

    def clear(self) -> None:
        """Takes the line away."""
        with self._lock:
            if self._undo:
                self._write(self._undo)
                self._undo = ""

    def wrote(self, text: str) -> None:
        """Standard output was given this text, without escape sequences."""
        if self._shared:
            self._column = _advance(self._column, text, self.columns + 1)
        elif self._unseen and text:
            # It may come out on this very terminal (`| cat`), nobody knows where and when.
            self.live = False

    def line_ended(self) -> None:
        """Somebody's input has ended the line that the cursor was in."""
        self._column = 0

    def _render(self, parts: Parts, columns: int) -> str:
        line = ""
        for text, style in parts:
            while cell_len(text) > columns:
                text = text[:-1]
            columns -= cell_len(text)
            line += Style.parse(style).render(text, color_system=self._colours)
        return line

    def _write(self, text: str) -> None:
        self._err.write(text)
        self._err.flush()


@contextmanager
def telling(text: str) -> Iterator[None]:
    """Shows a line for as long as something takes."""
    status = StatusLine()
    status.show((text, ""))
    try:
        yield
    finally:
        status.clear()


def is_terminal(stream: Any) -> bool:
    """Whether somebody sees what is written there."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def same_file(one: Any, other: Any) -> bool:
    """Whether two streams end in one file, terminal or pipe."""
    return _identity(one) is not None and _identity(one) == _identity(other)


def _identity(stream: Any) -> tuple[int, int] | None:
    found = _stat(stream)
    return None if found is None else (found.st_dev, found.st_ino)


def _is_pipe(stream: Any) -> bool:
    found = _stat(stream)
    return found is None or stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)


def _stat(stream: Any) -> os.stat_result | None:
    try:
        return os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return None


def _advance(column: int, text: str, width: int) -> int:
    """Where the cursor is after a text; `width` itself where the line is full."""
    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min((column // _TAB + 1) * _TAB, width - 1)
        else:
            size = cell_len(character)
            column = (0 if column + size > width else column) + size
    return column
