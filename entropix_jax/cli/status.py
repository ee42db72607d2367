"""One line of progress on standard error. Imports no JAX, which takes a while itself."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

if TYPE_CHECKING:
    from entropix_jax.batch.output import Store
    from entropix_jax.engine.loop import Engine

_ERASE = "\r\x1b[2K"  # the cursor's line
_COMPILATION = "/jax/core/compile/backend_compile_duration"  # event of each compiled program


class StatusLine:
    """A line on standard error, where that is a terminal; elsewhere it shows nothing."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.enabled = console.is_terminal and not console.is_dumb_terminal
        self._is_shown = False

    def show(self, line: str) -> None:
        """Shows a line in place of the one before."""
        if self.enabled:
            room = shutil.get_terminal_size().columns - 1
            shown = line if len(line) <= room else f"{line[: room - 1]}…"
            print(_ERASE * self._is_shown + shown, end="", file=sys.stderr, flush=True)
            self._is_shown = True

    def clear(self) -> None:
        """Removes the line."""
        if self._is_shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)
        self._is_shown = False

    def make_room(self) -> None:
        """Removes the line for good, before text that may stop in the middle of a line."""
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


@cache
def _compilations() -> list[float]:
    """The seconds of each compilation from the first call on."""
    from jax import monitoring

    found: list[float] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == _COMPILATION:
            found.append(duration_secs)

    monitoring.register_event_duration_secs_listener(listen)
    return found


class Speed:
    """Tokens per second, without the first step and others that waited for the compiler."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last = clock, clock()
        self._programs = len(_compilations()) - 1  # as of the last step
        self._tokens, self._seconds = 0, 0.0

    def add(self, tokens: int) -> None:
        """Counts tokens as they come."""
        now, programs = self._clock(), len(_compilations())
        if programs == self._programs:
            self._tokens += tokens
            self._seconds += now - self._last
        elif tokens:
            self._programs = programs
        self._last = now

    @property
    def value(self) -> float:
        """The speed; 0 before the second step."""
        return self._tokens / max(self._seconds, 1e-9)


class Run(Protocol):
    """A run in an engine. `tokens` counts its committed tokens."""

    tokens: int
    engine: "Engine"


class ProgressView:
    """Progress of a run of records: a status line on a terminal, else a line a minute on standard
    error. A context manager."""

    def __init__(self, store: "Store", run: Run, total: int | None) -> None:
        """`total` is the number of records, if known."""
        self._store, self._run = store, run
        self._of = "" if total is None else f" of {total}"
        self._total, self._done = total, store.done
        self._begun = self._shown = time.monotonic()
        self._tokens = run.tokens
        self._speed = Speed(time.monotonic)
        self._status = StatusLine()

    def __enter__(self) -> "ProgressView":
        return self

    def __exit__(self, *error: object) -> None:
        self._status.clear()

    def looked(self) -> None:
        """Updates the display if it is due."""
        now, run, done = time.monotonic(), self._run, self._store.done
        if run.engine.steps > 1:
            self._speed.add(run.tokens - self._tokens)
        else:  # the first step waits for the compiler
            self._begun, self._done = now, done
        self._tokens = run.tokens
        if now - self._shown < (0.2 if self._status.enabled else 60.0):
            return
        self._shown = now
        line = f"{done}{self._of} done | {run.tokens} tokens, {self.speed:.0f} tok/s"
        line += f" | {run.engine.used:.0%} of slots used"
        if self._total is not None and done > self._done:
            left = (self._total - done) * (now - self._begun) / (done - self._done)
            line += f" | {timedelta(seconds=round(left))} left"
        if self._status.enabled:
            self._status.show(line)
        else:
            print(line, file=sys.stderr, flush=True)

    @property
    def speed(self) -> float:
        """Tokens per second once compiled; 0 before the second step."""
        return self._speed.value


def is_terminal(stream: Any) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
