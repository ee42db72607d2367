"""One line of progress on standard error. Imports no JAX, which takes a while itself."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console

from entropix_jax.host.interrupts import is_stopping

if TYPE_CHECKING:
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.run import EngineRun
    from entropix_jax.batch.spread import SpreadRun
    from entropix_jax.engine.programs import Programs

_TICK = 0.1  # seconds between two looks at what to show
_PATIENCE = 1.0  # seconds without a token after which a line says why
_ERASE = "\r\x1b[2K"  # the cursor's line
# Makes room below a line of text, saves the cursor in it, and goes below; and back.
_BELOW, _BACK = "\x1bD\x1b[A\x1b7\r\n", "\x1b8"

Wait = tuple[str, float]  # what a command waits for, and since when


def describe_wait(wait: Wait) -> str:
    """Returns what a command waits for, with the seconds so far before the details. With tenths it
    moves as long as Python runs: some work of JAX holds the interpreter for over half a second."""
    what, colon, details = wait[0].partition(": ")
    return f"{what}, {time.monotonic() - wait[1]:.1f} s{colon}{details}"


class StatusLine:
    """A line on standard error, where that is a terminal. A thread keeps it up to date, below the
    line of text that a command writes. After Ctrl-C it says so, without a terminal once."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.enabled = console.is_terminal and not console.is_dumb_terminal
        self.in_text = False  # whether the cursor is within a line of text
        self.line: Wait | None = None  # of `show`
        self.doing: Wait = "starting", time.monotonic()  # where a run waits for nothing
        self._lock = threading.RLock()
        self._stopped: float | None = None
        self._shown = self._erases = ""

    def show(self, line: str) -> None:
        """Shows a line in place of the one before, and the seconds since its first call."""
        with self._lock:
            if self.line is None or self.line[0] != line:
                self.line = line, time.monotonic()
            self._draw(describe_wait(self.line))

    def clear(self) -> None:
        """Removes the line."""
        with self._lock:
            self.line = None
            self._draw("")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Removes the line for the duration of the block, which writes text."""
        with self._lock:
            self._draw("")
            yield
            self.doing = "generating", time.monotonic()

    @contextmanager
    def follow(self, describe: Callable[[], str] | None = None) -> Iterator[None]:
        """Shows the result of `describe`, by default the line of `show`, for the duration of the
        block."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_TICK):
                with self._lock:
                    line = describe_wait(self.line) if self.line else ""
                    self._draw(self._stopping(describe() if describe else line))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.clear()

    def _stopping(self, line: str) -> str:
        """Returns the line, or after Ctrl-C one that says so."""
        if not is_stopping():
            self._stopped = None
            return line
        is_new, self._stopped = self._stopped is None, self._stopped or time.monotonic()
        after = " after this compilation" if "compiling" in line else ""
        line = f"{describe_wait((f'stopping{after}', self._stopped))}; Ctrl-C again ends at once"
        if is_new and not self.enabled:
            print(line, file=sys.stderr, flush=True)
        return line

    def _draw(self, line: str) -> None:
        if not self.enabled or line == self._shown:
            return
        room = shutil.get_terminal_size().columns - 3  # the terminal appends ^C
        begins = _ERASE if line else self._erases
        if not self._shown:
            begins, self._erases = (_BELOW, _ERASE + _BACK) if self.in_text else ("", _ERASE)
        shown = line if len(line) <= room else f"{line[: room - 1]}…"
        print(begins + shown, end="", file=sys.stderr, flush=True)
        self._shown = line


@contextmanager
def show_status(line: str) -> Iterator[StatusLine]:
    """Shows a line, with the seconds so far, for the duration of the block."""
    status = StatusLine()
    status.show(line)
    with status.follow():
        yield status


def show_waits(
    status: StatusLine, programs: Callable[[], "Programs | None"]
) -> AbstractContextManager[None]:
    """Shows what a run waits for, where no text has come for a second, else the line of `show`."""

    def describe() -> str:
        found, doing = programs(), status.line or status.doing
        since = time.monotonic() - _PATIENCE
        waits = [wait for wait in (found and found.waits, doing) if wait and wait[1] <= since]
        shown = waits[0] if waits and status.doing[1] <= since else status.line
        return describe_wait(shown) if shown else ""

    return status.follow(describe)


class Speed:
    """Tokens per second since the first ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, without those in which programs were compiled."""
        self._clock, self._began, self._tokens = clock, 0.0, -1

    def add(self, tokens: int) -> None:
        """Counts tokens as they come."""
        if self._tokens < 0 < tokens:
            self._began, self._tokens = self._clock(), 0
        elif tokens:
            self._tokens += tokens

    @property
    def value(self) -> float:
        """The speed; 0 before the second step."""
        return max(self._tokens, 0) / max(self._clock() - self._began, 1e-9)


class ProgressView:
    """Progress of a run of records: a status line on a terminal, else a line a minute on standard
    error."""

    def __init__(self, store: "Store", run: "EngineRun | SpreadRun", total: int | None) -> None:
        """`total` is the number of records, if known."""
        self._store, self._run, self._total = store, run, total
        self._done, self._tokens = store.done, run.tokens
        self._began = self._printed = time.monotonic()
        self._status = StatusLine()
        self.speed = Speed(lambda: time.monotonic() - run.programs.waited)

    def follow(self) -> AbstractContextManager[None]:
        """Shows the progress for the duration of the block."""
        return self._status.follow(self.describe)

    def describe(self) -> str:
        """Returns the line. Rates are left out while the run waits."""
        now, run, done = time.monotonic(), self._run, self._store.done
        self.speed.add(run.tokens - self._tokens)
        self._tokens, rate, seconds = run.tokens, self.speed.value, now - self._began
        of = "" if self._total is None else f" of {self._total}"
        parts = [f"{done}{of} done in {timedelta(seconds=int(seconds))}", f"{run.tokens} tokens"]
        if (wait := run.programs.waits) is not None and now - wait[1] >= _PATIENCE / 2:
            parts.append(describe_wait(wait))
        else:
            parts[1] += f", {rate:.0f} tok/s" if rate else ""
            if self._total is not None and done > self._done:
                left = (seconds - run.programs.waited) / (done - self._done) * (self._total - done)
                parts.append(f"{timedelta(seconds=round(left))} left")
            parts.append(run.usage if run.tokens else "starting")
        line = " | ".join(parts)
        if not self._status.enabled and now - self._printed >= 60.0:
            self._printed = now
            print(line, file=sys.stderr, flush=True)
        return line


def plural(number: int, noun: str) -> str:
    """Returns a number with its noun."""
    many = "steps back" if noun == "step back" else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal."""
    return stream is not None and not stream.closed and stream.isatty()
