"""Ctrl-C and SIGTERM in a command.

A KeyboardInterrupt may be raised between any two instructions. In the middle of importing JAX it
surfaces as another error or aborts the process, in a callback it is lost, and in the middle of
writing a token it leaves half of one. So commands end at once while there is nothing to lose, and
defer interrupts afterwards.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_INTERRUPT = 130

_received: list[int] = []  # signals of the innermost block that defers them


def exit_at_once() -> None:
    """From here on Ctrl-C and SIGTERM end the process, quietly. For a program's start, never for a
    library."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if _is_delivered(number):
            signal.signal(number, lambda signum, frame: os._exit(128 + signum))


def is_stopping() -> bool:
    """Returns whether the innermost block of `deferred_interrupts` has received a signal."""
    return bool(_received)


@contextlib.contextmanager
def deferred_interrupts(
    stop: Callable[[], None], signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> Iterator[list[int]]:
    """Within the block the first of the `signals` only calls `stop`; a second one raises
    KeyboardInterrupt, or SystemExit with its status where it is not Ctrl-C. Yields the list of the
    signals received."""
    global _received
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            stop()
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + signum)

    before = {number: signal.signal(number, handle) for number in signals if _is_delivered(number)}
    outer, _received = _received, received
    try:
        yield received
    finally:
        _received = outer
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """Within `deferred_interrupts`, for a wait that a person may leave: Ctrl-C ends it with an
    EOFError, and counts as received."""
    if not _is_delivered(signal.SIGINT):
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(signum: int, frame: FrameType | None) -> None:
        if callable(before):
            before(signum, frame)
        raise EOFError

    try:
        signal.signal(signal.SIGINT, handle)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_delivered(number: signal.Signals) -> bool:
    """Whether a signal reaches this thread: the main one, unless the signal is ignored, as shells
    do with Ctrl-C for background jobs of a script."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(number) not in (signal.SIG_IGN, None)
