"""What Ctrl-C does to a command: before there is anything to lose, and after.

A KeyboardInterrupt may strike between any two instructions. In the middle of importing JAX it
surfaces as another error or aborts the process, in a callback it is lost, and in the middle of
writing a token it leaves half of one. So a command never lets it strike.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_INTERRUPT = 130


def exit_at_once() -> None:
    """From here on Ctrl-C ends the process, quietly. For a program's start, never for a library."""
    if _arrive():
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(EXIT_INTERRUPT))


@contextlib.contextmanager
def deferred_interrupts(
    stop: Callable[[], None], signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> Iterator[list[int]]:
    """Within, a first Ctrl-C only calls `stop`; a second one raises KeyboardInterrupt. So do the
    other `signals`. Gives the list of those that came."""
    pressed: list[int] = []
    if not _arrive():
        yield pressed
        return

    def press(signum: int, frame: FrameType | None) -> None:
        pressed.append(signum)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        stop()

    before = {number: signal.signal(number, press) for number in signals}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def undeferred_interrupts() -> Iterator[None]:
    """Within `deferred_interrupts`, for a wait that a person may want to leave: Ctrl-C ends it with
    an EOFError, and counts as pressed."""
    if not _arrive():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def press(signum: int, frame: FrameType | None) -> None:
        if callable(before):
            before(signum, frame)
        raise EOFError

    try:
        signal.signal(signal.SIGINT, press)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _arrive() -> bool:
    """Whether interrupts reach this thread: the main one, unless the shell has them ignored."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)
