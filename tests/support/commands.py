"""Runs commands in this process, and checks how they refuse bad input."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from entropix_jax.__main__ import main
from entropix_jax.cli.options import EXIT_USAGE


class Result(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Result]  # runs a command in this process
Start = Callable[..., subprocess.Popen[bytes]]  # starts one in a process of its own


def run_command(*arguments: object) -> Result:
    """The command line, from a subcommand's name on."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    assert "Traceback" not in err.getvalue()
    return Result(status, out.getvalue(), err.getvalue())


def refusal(result: Result) -> str:
    """The one line of an error, after any notes."""
    assert (result.status, result.out) == (EXIT_USAGE, "")
    *notes, line = result.err.splitlines()
    assert line.startswith("error: ")
    assert not [note for note in notes if note.startswith("error")]
    return line


def one_error(result: Result, message: str) -> None:
    """The error's line is all that the command says."""
    assert message in refusal(result)
    assert len(result.err.splitlines()) == 1


PROMPT = "Once upon a time"


def short(*arguments: object, tokens: int = 12) -> list[object]:
    """A plain prompt and a few tokens, whatever they are."""
    return ["--prompt", PROMPT, "--no-chat", "--ignore-eos", "--max-new-tokens", tokens, *arguments]
