"""What Ctrl-C does to a command: before there is anything to lose, and after.

A KeyboardInterrupt may strike between any two instructions. In the middle of importing JAX it
surfaces as another error or aborts the process, in a callback it is lost, and in the middle of
writing a token it leaves half of one. So a command never lets it strike.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_INTERRUPT = 130


def exit_at_once() -> None:
    """From here on Ctrl-C and SIGTERM end the process, quietly. For a program's start, never for a
    library."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if _arrives(number):
            signal.signal(number, lambda signum, frame: os._exit(exit_status(signum)))


def exit_status(signum: int) -> int:
    """The exit status of a process that a signal has ended."""
    return 128 + signum


@contextlib.contextmanager
def deferred_interrupts(
    stop: Callable[[], None], signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
) -> Iterator[list[int]]:
    """Within, the first of the `signals` only calls `stop`; a second one raises KeyboardInterrupt,
    or SystemExit with its own status where it is not Ctrl-C. Gives the list of those that came."""
    pressed: list[int] = []

    def press(signum: int, frame: FrameType | None) -> None:
        pressed.append(signum)
        if len(pressed) == 1:
            stop()
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(exit_status(signum))

    before = {number: signal.signal(number, press) for number in signals if _arrives(number)}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def noticed_interrupts(notice: Callable[[], None], patience: float = 0.2) -> Iterator[None]:
    """Within, `notice` is called soon after the first signal with a handler of Python's, from a
    thread of its own, where the block has not ended by then: no handler runs while the main thread
    is in the compiler, say, and who pressed Ctrl-C should know that it was heard.

    Args:
        patience: seconds from the signal to the call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        # A signal writes its number here at once, whatever the main thread is at.
        if reader.recv(1) and not end.wait(patience):
            notice()

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        end.set()
        writer.close()
        watcher.join()
        reader.close()


@contextlib.contextmanager
def undeferred_interrupts() -> Iterator[None]:
    """Within `deferred_interrupts`, for a wait that a person may want to leave: Ctrl-C ends it with
    an EOFError, and counts as pressed."""
    if not _arrives(signal.SIGINT):
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


def _arrives(number: signal.Signals) -> bool:
    """Whether a signal reaches this thread: the main one, unless the signal is ignored, as a shell
    has it with Ctrl-C for what it starts in the background of a script."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(number) not in (signal.SIG_IGN, None)
