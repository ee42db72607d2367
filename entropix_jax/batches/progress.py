"""How far a batch is: a bar on a terminal, else a line a minute, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 60.0
_BAR_SECONDS = 0.2


@dataclass(frozen=True)
class Standing:
    """What is told of a run."""

    done: int  # records that have a result
    tokens: int
    used: float  # the share of slots that had a row, of the steps so far


class ProgressView:
    """Shows a run's standing as often as it makes sense. A context manager."""

    def __init__(self, standing: Callable[[], Standing], total: int | None) -> None:
        """`total` is how many records there are, where that is known."""
        self._standing = standing
        self._total = total
        self._first = standing().done
        self._started = self._shown = time.monotonic()
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "") + " done"),
                BarColumn(),
                TextColumn("{task.fields[speed]:.0f} tok/s, {task.fields[used]:.0%} of slots used"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                auto_refresh=False,
            )

    def __enter__(self) -> ProgressView:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=self._total, completed=self._first, speed=0.0, used=0.0
            )
        return self

    def looked(self) -> None:
        """Shows the standing, if it is time for it."""
        now = time.monotonic()
        if now - self._shown < (_LINE_SECONDS if self._bar is None else _BAR_SECONDS):
            return
        self._shown = now
        standing = self._standing()
        speed = standing.tokens / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=standing.done, speed=speed, used=standing.used, refresh=True
            )
            return
        of = "" if self._total is None else f" of {self._total}"
        line = (
            f"{standing.done}{of} done | {standing.tokens} tokens, {speed:.0f} tok/s"
            f" | {standing.used:.0%} of slots used"
        )
        gained = standing.done - self._first
        if self._total is not None and gained:
            left = (self._total - standing.done) * (now - self._started) / gained
            line += f" | {_duration(left)} left"
        print(line, file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds as people read them."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
