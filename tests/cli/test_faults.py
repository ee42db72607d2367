"""Failures around a command: full disks, closed or unread pipes, killed runs. Files stay complete,
and errors are one line."""

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from entropix_jax.__main__ import main
from entropix_jax.batch.output import Store
from entropix_jax.cli.options import run_command
from entropix_jax.engine.trace import TraceWriter
from entropix_jax.errors import Note, UserError
from entropix_jax.host.files import replacing
from entropix_jax.report.page import write_report
from tests.support.commands import Command, one_error, short
from tests.support.disks import full_disk
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a Python process that can import the package."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{"stderr": subprocess.PIPE, **options},
    )


# Files that replace others.

KILLED = """
import os, signal, sys
from pathlib import Path
from entropix_jax.host.files import replacing
with replacing(Path(sys.argv[1])) as scratch:
    scratch.write_text("half of")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_keeps_the_previous_file(tmp_path: Path) -> None:
    """A link still points to the written file."""
    (tmp_path / "there").mkdir()
    output, link = tmp_path / "there" / "page[1].html", tmp_path / "latest.html"
    output.write_text("before")
    link.symlink_to("there/page[1].html")
    assert python(KILLED, link).wait(60) == -signal.SIGKILL
    assert output.read_text() == "before"
    with replacing(link) as scratch:
        scratch.write_text("after")
    assert link.is_symlink()
    assert output.read_text() == "after"


# A full disk.


@pytest.mark.parametrize("size", [0, 1, 700])
def test_a_full_disk_keeps_the_previous_file(tmp_path: Path, small_trace: Path, size: int) -> None:
    """The error is one line, and there are no partial or temporary files."""
    path = tmp_path / "page.html"
    path.write_text("before")
    for write in (
        lambda: write_report(small_trace, path),
        lambda: Store(str(tmp_path / "out.jsonl"), {"model": "m" * 1000}),
    ):
        with full_disk(size), pytest.raises(UserError, match="cannot be written: "):
            write()
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_text() == "before"


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory, folder: str) -> Path:
    """A trace of a short run."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    assert main(["generate", *map(str, recorded("--trace", path)), "--model", folder]) == 0
    return path


def recorded(*arguments: object) -> list[object]:
    """Returns arguments of a short run that records all data of a page. Runs share a program."""
    return short(*arguments, "--sampler", "temperature", "--trace-top", 5, "--trace-layers")


# Standard streams.

SAYS = """
import sys
from entropix_jax.__main__ import main
from entropix_jax.cli.options import run_command
from entropix_jax.errors import UserError

def command():
    print("line\\n" * int(sys.argv[1]))
    if sys.argv[2:]:
        raise UserError(sys.argv[2])
    return 0

sys.exit(run_command(command))
"""


def test_errors_of_the_system_and_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Each error has its own message, and does not refer to an unrelated output."""
    for error, told in (
        (ConnectionError("Couldn't reach the hub"), "Couldn't reach the hub"),
        (FileNotFoundError(2, "No such file or directory", "a"), "a: No such file or directory"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (OSError(), "OSError"),
        (SystemExit("too few tokens"), "too few tokens"),
    ):
        assert run_command(Mock(side_effect=error)) == 2
        assert capsys.readouterr().err == f"error: {told}\n"


def test_a_note_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A note may quote a file, so control characters are replaced."""

    def command() -> int:
        for text in ("one", "\x1b[2J", "one"):
            warnings.warn(text, Note, stacklevel=2)
        return 0

    assert run_command(command) == 0
    assert capsys.readouterr().err == "note: one\nnote: \ufffd[2J\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_full_and_closed_streams(lines: int) -> None:
    """A full disk is reported. A closed pipe gives no message, and neither does Python's own final
    flush."""
    with open("/dev/full", "wb") as full:
        to_full = python(SAYS, lines, stdout=full)
        silent = python(SAYS, lines, "wrong", stdout=subprocess.DEVNULL, stderr=full)
        _, err = to_full.communicate(timeout=PATIENCE)
        silent.wait(60)
    assert (to_full.returncode, err) == (
        2,
        b"error: the output cannot be written: No space left on device\n",
    )
    assert silent.returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    gone = python(SAYS, lines, stdout=writer)
    os.close(writer)
    assert (gone.communicate(timeout=PATIENCE)[1], gone.returncode) == (b"", 0)
    for closing in ("0<&- >/dev/null", "1>&-", "2>&-"):
        closed = subprocess.run(
            ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", SAYS, str(lines)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=False,
            timeout=PATIENCE,
        )
        assert (closed.returncode, closed.stderr) == (0, b"")


# Traces.


def test_a_pipe_waits_for_its_reader_until_ctrl_c(command: Command, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    special = "not a regular file: --report reads the trace again"
    one_error(command(*short("--trace", pipe, "--report", tmp_path / "page.html")), special)
    one_error(command(*short("--trace", os.devnull, "--report", tmp_path / "a.html")), special)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert command(*recorded("--trace", pipe)).status == 0
    reader.join()
    kinds = [json.loads(line)["type"] for line in read[0].splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("token")) == ("header", "footer", 12)

    begin = TraceWriter.__init__

    def pressed(self: TraceWriter, path: Path) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "__init__", pressed)
        result = command(*recorded("--trace", pipe))
    note = f"note: {pipe}: a pipe, which waits for its reader\n"
    assert (result.status, result.out, result.err) == (130, "", note)
