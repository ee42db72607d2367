"""Waiting for processes with a time limit."""

import subprocess
import time
from pathlib import Path

PATIENCE = 240.0  # seconds until a test fails: the compiler of a busy machine takes a minute


def wait_for(path: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a file has `lines` lines, or the process has ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            return
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path}: still not {lines} lines")
