"""Runs commands in this process, and checks their errors."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from entropix_jax.__main__ import main
from entropix_jax.cli.options import EXIT_USAGE


class Result(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Result]  # runs a command in this process
Start = Callable[..., subprocess.Popen[bytes]]  # starts a command in another process


def run_command(*arguments: object) -> Result:
    """Runs the command line, from a subcommand's name on."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    assert "Traceback" not in err.getvalue()
    return Result(status, out.getvalue(), err.getvalue())


def set_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))


def refusal(result: Result) -> str:
    """Checks that a command failed with one error line, and returns that line."""
    assert (result.status, result.out) == (EXIT_USAGE, "")
    *notes, line = result.err.splitlines()
    assert line.startswith("error: ")
    assert not [note for note in notes if note.startswith("error")]
    return line


def one_error(result: Result, message: str) -> None:
    """Checks that the only output is an error line with this message."""
    assert message in refusal(result)
    assert len(result.err.splitlines()) == 1


PROMPT = "Once upon a time"


def short(*arguments: object, tokens: int = 12) -> list[object]:
    """Returns arguments for a plain prompt and a few tokens, with end tokens ignored."""
    return ["--prompt", PROMPT, "--no-chat", "--ignore-eos", "--max-new-tokens", tokens, *arguments]
