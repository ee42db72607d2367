"""What goes wrong around a command: full disks, readers that leave, pipes that nobody reads, runs
that are killed. What is left is whole, and what is said is one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from jax._src.lru_cache import LRUCache

from entropix_jax.batch.output import Store, check_output
from entropix_jax.cli.options import run_command
from entropix_jax.engine.trace import TraceWriter
from entropix_jax.errors import Note, UserError
from entropix_jax.host.compile_cache import drop_torn_programs
from entropix_jax.host.files import is_standard_output, replacing
from entropix_jax.lab.tables import write_tables
from entropix_jax.report.page import write_report
from tests.support.commands import Command, one_error, short
from tests.support.disks import full_disk
from tests.support.traces import read_trace
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program of its own that knows the package."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{"stderr": subprocess.PIPE, **options},
    )


# Files that take another's place.

KILLED = """
import os, signal, sys
from pathlib import Path
from entropix_jax.host.files import replacing
with replacing(Path(sys.argv[1])) as scratch:
    scratch.write_text("half of")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "page[1].html"
    output.write_text("before")
    assert python(KILLED, output).wait(60) == -signal.SIGKILL
    assert output.read_text() == "before"
    with replacing(output) as scratch:
        scratch.write_text("after")
    assert output.read_text() == "after"


def test_many_at_once_take_nothing_from_each_other(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def work(number: int) -> None:
        for _ in range(40):
            with replacing(output) as scratch:
                scratch.write_text(str(number) * 1000)
            assert len(set(output.read_text())) == 1

    with ThreadPoolExecutor() as pool:
        assert len(list(pool.map(work, range(4)))) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_still_leads_to_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to("there/page.html")
    with replacing(link) as scratch:
        scratch.write_text("page")
    assert link.is_symlink()
    assert (tmp_path / "there" / "page.html").read_text() == "page"


# A full disk.


def _row(number: int) -> dict[str, Any]:
    empty: dict[str, Any] = {"regimes": {}, "actions": {}, "timings": {"seconds": 0.1}}
    return {**empty, "varied": {}, "item": str(number), "text": "word " * 20}


@pytest.mark.parametrize("size", [0, 1, 700])
@pytest.mark.parametrize("names", ["page.html", "results.csv results.parquet", ""])
def test_what_does_not_fit_on_a_disk_leaves_what_was_there(
    tmp_path: Path, small_trace: Path, names: str, size: int
) -> None:
    """And one line, no half of a file, and nothing temporary."""
    paths = [tmp_path / name for name in names.split()]
    for path in paths:
        path.write_text("before")
    rows: Any = [_row(number) for number in range(50)]
    write = {
        "page.html": lambda: write_report(small_trace, paths[0]),
        "results.csv results.parquet": lambda: write_tables(rows, [], [], tmp_path, "results"),
        "": lambda: Store(str(tmp_path / "out.jsonl"), {"model": "m" * 1000}),
    }[names]
    with full_disk(size), pytest.raises(UserError, match="cannot be written: "):
        write()
    assert sorted(tmp_path.iterdir()) == paths
    assert all(path.read_text() == "before" for path in paths)


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory, folder: str) -> Path:
    """A trace of a short run."""
    from entropix_jax.cli import generate as main

    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    assert main.main([*map(str, recorded("--trace", path)), "--model", folder]) == 0
    return path


def recorded(*arguments: object) -> list[object]:
    """A short run that records what a page shows, so that all of them have one program."""
    return short(*arguments, "--trace-top", 5, "--trace-layers")


# Standard streams.

SAYS = """
import sys
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
    """Each says what it says itself, and blames no output that had no part in it."""
    for error, told in (
        (ConnectionError("Couldn't reach the hub"), "Couldn't reach the hub"),
        (FileNotFoundError(2, "No such file or directory", "a"), "a: No such file or directory"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (OSError(), "OSError"),
        (SystemExit("too few tokens"), "too few tokens"),
    ):
        assert run_command(Mock(side_effect=error)) == 2
        assert capsys.readouterr().err == f"error: {told}\n"


def test_a_note_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        for text in ("one", "two", "one"):
            warnings.warn(text, Note, stacklevel=2)
        return 0

    assert run_command(command) == 0
    assert capsys.readouterr().err == "note: one\nnote: two\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_streams_that_take_nothing(lines: int) -> None:
    """A full disk is told; a reader that has gone is no reason for a word; nor is Python's own
    last attempt to write what is left."""
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


def test_a_trace_is_not_mixed_with_the_text(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with out.open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        for path in (Path("/proc/self/fd") / str(stdout.fileno()), out):
            assert is_standard_output(path)
        assert not is_standard_output(tmp_path / "another.jsonl")
        with pytest.raises(UserError, match="it is where standard output goes"):
            check_output(str(out))
    with open(os.devnull, "w") as null, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", null)
        assert not is_standard_output(Path(os.devnull))
    monkeypatch.setattr("entropix_jax.host.files.is_standard_output", lambda path: True)
    one_error(command(*short("--trace", out)), "it is where standard output goes")


def test_two_runs_with_one_trace(command: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with TraceWriter(trace) as first:
        first.write({"type": "header"})
        result = command(*short("--trace", trace))
        first.write({"type": "footer"})
    assert result.status == 2
    assert result.err == f"error: {trace}: cannot be written: another run is writing to it\n"
    assert [line["type"] for line in read_trace(trace)] == ["header", "footer"]
    with TraceWriter(Path(os.devnull)), TraceWriter(Path(os.devnull)):  # there is room for all
        pass
    with TraceWriter(trace) as last:
        last.write({"type": "header"})
    assert len(read_trace(trace)) == 1


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

    opened = os.open

    def pressed(path: Any, *rest: Any, **options: Any) -> int:
        if Path(path) == pipe:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return opened(path, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", pressed)
        result = command(*recorded("--trace", pipe))
    note = f"note: {pipe}: a pipe, which waits for its reader\n"
    assert (result.status, result.out, result.err) == (130, "", note)


# Compiled programs that are kept.

COMPILES = """
import sys
from entropix_jax.host.compile_cache import use_compilation_cache
use_compilation_cache()
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((4, 4))).sum())
"""


def test_a_program_that_was_half_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX itself complains of it for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE")

    def start() -> None:
        process = python(COMPILES, stdout=subprocess.DEVNULL)
        assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (b"", 0)

    start()
    kept = tmp_path / "entropix_jax" / "xla"
    programs = {path: path.read_bytes() for path in kept.glob("*-cache")}
    assert len(programs) >= 2
    time.sleep(0.02)
    drop_torn_programs(kept, sized=False)
    assert {path: path.read_bytes() for path in kept.glob("*-cache")} == programs
    for number, path in enumerate(programs):
        path.write_bytes(programs[path][: len(programs[path]) - 1 if number else 0])
    start()
    assert set(kept.glob("*-cache")) == set(programs)
    assert all(len(path.read_bytes()) > 100 for path in programs)


def test_a_program_without_its_time_of_use(tmp_path: Path) -> None:
    """Of a cache with a largest size: where a kill came between the two JAX 0.10 keeps no other."""
    kept = tmp_path / "xla"
    cache = LRUCache(str(kept), max_size=2**20)
    cache.put("one", zlib.compress(b"program"))
    (kept / "one-atime").unlink()
    drop_torn_programs(kept, sized=False)
    assert not (kept / "one-atime").exists()
    drop_torn_programs(kept, sized=True)  # older than the last look, too
    assert (kept / "one-atime").exists()
    cache.put("two", zlib.compress(b"program"))
    assert cache.get("one") == cache.get("two") == zlib.compress(b"program")
