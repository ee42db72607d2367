"""A pseudo-terminal whose output tests read."""

from __future__ import annotations

import os
import pty
import re
import sys

import pytest
from rich.style import Style

ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


class Screen:
    """A pseudo-terminal that replaces standard output and standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
        for name, value in {"TERM": "xterm-256color", "LINES": "24", **environment}.items():
            monkeypatch.setenv(name, value)
        for cached in (Style.parse, Style._add):  # a style keeps its first terminal's codes
            cached.cache_clear()
        self._far, near = pty.openpty()
        self.file = os.fdopen(near, "w", encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", self.file)
        monkeypatch.setattr(sys, "stderr", self.file)

    def read(self) -> str:
        """Returns the new output, with line ends as they were written."""
        end = b"\x1d"  # output arrives with a delay
        self.file.write(end.decode())
        self.file.flush()
        shown = b""
        while not shown.endswith(end):
            shown += os.read(self._far, 1 << 16)
        return shown.removesuffix(end).decode().replace("\r\n", "\n")

    def reply(self, request: bytes, answer: bytes) -> None:
        """Waits for a request of the program and types the terminal's answer."""
        asked = b""
        while request not in asked:
            asked += os.read(self._far, 1 << 16)
        os.write(self._far, answer)

    def close(self) -> None:
        self.file.close()
        os.close(self._far)
