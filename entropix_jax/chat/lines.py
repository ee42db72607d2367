"""What a person types, or a script says: a line at a time."""

import atexit
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from entropix_jax.cli.status import is_terminal
from entropix_jax.errors import UserError

_PROMPT, _GOES_ON = "> ", "... "


class Lines:
    """Reads lines from standard input, on a terminal with a prompt, editing and history.

    A line that ends with a backslash goes on in the next one.
    """

    def __init__(self) -> None:
        self.typed = is_terminal(sys.stdin)
        if self.typed:
            with contextlib.suppress(ImportError):  # not on every system
                import readline

                # What is pasted is one message, however many lines it has. Python switches it off.
                readline.parse_and_bind("set enable-bracketed-paste on")
                _keep_typed_text()

    def read(self) -> str | None:
        """The next line, None at the end. On a terminal Ctrl-C gives an empty one. UserError if it
        is not UTF-8."""
        parts: list[str] = []
        while True:
            try:
                line = self._typed(_GOES_ON if parts else _PROMPT) if self.typed else self._piped()
            except KeyboardInterrupt:
                with contextlib.suppress(ImportError):
                    import readline

                    if line := readline.get_line_buffer():
                        readline.add_history(line)  # the up key brings it back
                print(file=sys.stderr)
                return ""
            except UnicodeDecodeError as error:
                raise UserError(f"standard input: not UTF-8 at byte {error.start}") from None
            if line is None:
                return "\n".join(parts) if parts else None
            if not line.endswith("\\"):
                return "\n".join([*parts, line])
            parts.append(line[:-1])

    def _typed(self, prompt: str) -> str | None:
        if not is_terminal(sys.stdout):  # which is for answers alone
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        with ctrl_c(signal.default_int_handler):
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None

    def _piped(self) -> str | None:
        if sys.stdin is None:
            raise UserError("standard input is closed: it has the questions")
        line = sys.stdin.buffer.readline()
        return line.decode().rstrip("\r\n") if line else None


def _keep_typed_text() -> None:
    """Keeps text that is typed during an answer when Ctrl-C ends the answer. By default a terminal
    drops it. Undone at exit."""
    import termios

    attributes = termios.tcgetattr(sys.stdin)
    atexit.register(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, attributes)
    flags = attributes[3] | termios.NOFLSH
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, [*attributes[:3], flags, *attributes[4:]])


@contextlib.contextmanager
def ctrl_c(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block Ctrl-C calls a handler."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
