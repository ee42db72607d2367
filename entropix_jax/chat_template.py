"""Chat templates: a conversation rendered by the Jinja template that comes with a checkpoint.

The template is a stranger's program. Jinja's immutable sandbox keeps it from reaching out, but
bounds neither time nor memory: `'a' * 10**9`, `2 ** 2**30`, `'{:>999999999}'.format(1)` and loops
within loops are single instructions or run for ever, each by a way of its own, and nothing in this
process could interrupt them all. So it runs in a child process (`entropix_jax.chat_worker`), to
which the system grants only so much of processor time and memory. The child is started for the
first conversation and takes all others; starting it takes about as long as importing Jinja.

The environment is the one that templates are written for:
`transformers.PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from entropix_jax.errors import UserError

# For one conversation. A real template takes milliseconds and a few MiB.
SECONDS = 5.0  # of processor time
MEMORY = 512 * 2**20  # bytes of address space
LONGEST_TEXT = 2**24  # characters


def render_chat(
    template: str,
    messages: object,
    *,
    origin: str,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Renders a conversation.

    Args:
        template: Jinja source.
        messages: a list of objects with at least the texts `role` and `content`; checked here,
          because it may come from a user's file.
        origin: where the template is from, for messages.
        special_tokens: `bos_token`, `eos_token` and the like, variables of the template.
        add_generation_prompt: end with the start of the assistant's answer.

    Raises:
        UserError: messages of another shape, or a template that is wrong, refuses them, or takes
          more time, memory or text than any would need.
    """
    variables = {
        "messages": _checked(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    limits = {"seconds": SECONDS, "bytes": MEMORY, "characters": LONGEST_TEXT}
    try:
        request = json.dumps({"template": template, "variables": variables, **limits}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"messages must hold nothing but what JSON can: {error}") from None
    answer = _asked(request)
    if isinstance(answer, int):
        if sys.platform != "win32" and answer == -signal.SIGPROF:
            raise UserError(f"{origin}: the chat template fails: it takes more than {SECONDS:g} s")
        raise UserError(
            f"{origin}: the chat template fails: it ends the process that renders it ({answer})"
        )
    if "error" in answer:
        raise UserError(f"{origin}: {answer['error']}")
    return answer["text"]


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a non-empty list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f"message {number} must be an object with 'role' and 'content'")
        for key in ("role", "content"):
            if key not in message:
                raise UserError(f"message {number} has no '{key}'")
            if not isinstance(message[key], str):
                raise UserError(f"message {number}: '{key}' must be text, not {message[key]!r}")
    return messages


class _Worker:
    """The child process."""

    def __init__(self) -> None:
        # Isolated, but for the packages of this process; in a session of its own, where no Ctrl-C
        # of the terminal's reaches it.
        path = [entry for entry in sys.path if isinstance(entry, str)]
        start = f"import sys; sys.path[:] = {path!r}; from entropix_jax import chat_worker"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"{start}; chat_worker.serve()"],
            stdin=subprocess.PIPE,  # it ends with this process, whatever ends that
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._owner = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether it is there, and this process's own: a fork must not read another's answers."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> bytes:
        """The answer; empty where there is none to come."""
        try:
            self._requests.write(request + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            return b""
        return self._answers.readline()

    def close(self) -> int:
        """Ends it, unless it has ended; its exit status."""
        if self._owner != os.getpid():
            return 0
        with suppress(BrokenPipeError):  # of what it never read
            self._requests.close()
        try:
            return self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._answers.close()


_worker: _Worker | None = None
_turn = threading.Lock()


def _asked(request: bytes) -> dict[str, str] | int:
    """What the child answers, or the status with which it ended."""
    global _worker
    with _turn:
        if _worker is None or not _worker.usable:
            _worker = _Worker()
        try:
            answer = _worker.ask(request)
            if answer.endswith(b"\n"):
                told: dict[str, str] = json.loads(answer)
                return told
        except BaseException:  # an answer may be left in the pipe
            _close()
            raise
        status = _worker.close()
        _worker = None
        return status


@atexit.register
def _close() -> None:
    global _worker
    if _worker is not None:
        _worker.close()
        _worker = None
