"""Progress of a batch on standard error: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_SECONDS = 60.0
_BAR_SECONDS = 0.2


@dataclass(frozen=True)
class Standing:
    """A snapshot of a run's progress."""

    done: int  # records that have a result
    tokens: int
    steps: int
    used: float  # the share of slots with a running row, over all steps so far


class ProgressView:
    """Displays snapshots at a sensible rate. A context manager."""

    def __init__(self, standing: Callable[[], Standing], total: int | None) -> None:
        """`total` is the number of records, if known."""
        self._standing = standing
        self._total = total
        self._first = standing().done
        self._shown = time.monotonic()
        # When the first step was done, and the last snapshot of it: the speed leaves out that step,
        # which waits for the compiler.
        self._begun: float | None = None
        self._early = Standing(0, 0, 0, 0.0)
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.completed:.0f}" + (f"/{total}" if total else "") + " done"),
            BarColumn(),
            TextColumn("{task.fields[speed]:.0f} tok/s, {task.fields[used]:.0%} of slots used"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=self._first, speed=0, used=0)

    def __enter__(self) -> ProgressView:
        if not self._bar.disable:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:
            self._bar.stop()

    def looked(self) -> None:
        """Updates the display if it is due."""
        now, standing = time.monotonic(), self._standing()
        if self._begun is None and standing.tokens:
            self._begun, self._early = now, standing
        elif standing.steps == self._early.steps:
            self._early = standing
        if now - self._shown < (_LINE_SECONDS if self._bar.disable else _BAR_SECONDS):
            return
        self._shown = now
        speed = self.speed(standing)
        done, used = standing.done, standing.used
        if not self._bar.disable:
            self._bar.update(self._task, completed=done, speed=speed, used=used, refresh=True)
            return
        of = "" if self._total is None else f" of {self._total}"
        line = f"{done}{of} done | {standing.tokens} tokens, {speed:.0f} tok/s"
        line += f" | {used:.0%} of slots used"
        gained = done - self._first
        if self._total is not None and gained and self._begun is not None:
            left = (self._total - done) * (now - self._begun) / gained
            line += f" | {timedelta(seconds=round(left))} left"
        print(line, file=sys.stderr, flush=True)

    def speed(self, standing: Standing) -> float:
        """Tokens per second after the first step; 0 before the second."""
        tokens = standing.tokens - self._early.tokens
        if self._begun is None or standing.steps == self._early.steps:
            return 0.0
        return tokens / max(time.monotonic() - self._begun, 1e-9)
