"""One line of progress on standard error, by rich. Imports no JAX, which takes a while itself."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor visible: a process that Ctrl-C ends at once could not restore it."""
        return False


class StatusLine:
    """A line on standard error, where that is a terminal; elsewhere it shows nothing.

    Call `make_room` before text goes to standard output. Where the text may appear on the same
    terminal the line is then gone for good: a live display owns whole lines, and text may stop in
    the middle of one.
    """

    def __init__(self) -> None:
        self._console = _Console(stderr=True)
        self._live: Live | None = None
        # Whether text may come out on the same terminal: also through `| cat`.
        try:
            mode = os.fstat(sys.stdout.fileno()).st_mode
            piped = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        except (AttributeError, OSError, ValueError):  # no file behind it
            piped = True
        self._shared = piped or is_terminal(sys.stdout)
        self.enabled = self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, line: str | Text) -> None:
        """Shows a line in place of the one before."""
        if not self.enabled:
            return
        text = Text(line) if isinstance(line, str) else line
        text.no_wrap, text.overflow = True, "ellipsis"
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,  # text goes there as it is
            )
            self._live.start()
        self._live.update(text, refresh=True)

    def clear(self) -> None:
        """Removes the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def make_room(self) -> None:
        """Removes the line for good where standard output may appear on the same terminal."""
        if self._shared:
            self.clear()
            self.enabled = False


@contextmanager
def show_status(line: str) -> Iterator[None]:
    """Shows a line for the duration of the block."""
    status = StatusLine()
    status.show(line)
    try:
        yield
    finally:
        status.clear()


def is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
