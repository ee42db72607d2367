"""Batch output: one JSON line per record, resumable however the run before it ended.

Results are appended to a local file. Object stores cannot append: there the file is a temporary
copy of the object, which is downloaded at the start and uploaded on a schedule and at the end. A
sidecar, `out.jsonl.run.json`, describes the run that the results are of.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from entropix_jax.batch.records import BadRecord, Record
from entropix_jax.batch.storage import (
    is_compressed,
    is_local,
    open_file,
    open_replacement,
    read_lines,
    resolve,
    storage_errors,
)
from entropix_jax.errors import UserError
from entropix_jax.host.files import check_regular, check_writable, lock_alone

FORMAT_VERSION = 1
UPLOAD_SECONDS = 60.0

Key = str | tuple[int, str]  # of a record: its id, or its line and digest


class Store:
    """The output of one run. A context manager.

    A result is an object with the record's `id` (null where it has none of its own), `line`,
    `digest` and what the run adds. No record is written twice; one that failed counts as done.
    """

    def __init__(self, address: str, identity: Mapping[str, Any]) -> None:
        """Creates an output, or resumes it.

        `identity` is what defines the run (model, sampler, input, ...), as JSON. UserError if the
        output cannot be read or written, is in use, is another run's or no batch output.
        """
        check_output(address)
        self.address = address
        self._done: dict[Key, str] = {}  # to digests
        own: dict[str, Any] = json.loads(json.dumps(dict(identity), allow_nan=False))
        self._fs, self._path = resolve(address)
        self._is_local = is_local(self._fs)
        with storage_errors(address, "written"):
            self._is_new = not self._fs.exists(self._path)
            self._file = self._open()
        self._end = self._uploaded = 0  # sizes, of the file and of the object
        self._due = time.monotonic() + UPLOAD_SECONDS
        try:
            with storage_errors(address):
                self._resume(own)
        except BaseException:
            self._close(failed=True)
            raise

    def _open(self) -> io.FileIO:
        if not self._is_local:
            return tempfile.TemporaryFile("a+b", buffering=0)
        file = io.FileIO(self._path, "a+")
        try:
            lock_alone(file.fileno())
        except BaseException:
            file.close()
            raise
        return file

    def _resume(self, identity: Mapping[str, Any]) -> None:
        old = read_identity(self.address)
        self._version = self._find_version()
        if not self._is_new:
            for key, digest, raw in _read_results(self.address):
                self._done[key] = digest
                self._end += len(raw)
                if not self._is_local:
                    self._append(raw)
            self._uploaded = self._fs.size(self._path)
            if old is None and self._uploaded and not self._done:
                raise UserError(f"{self.address}: holds no results; choose another output")
            if self._done and old is not None and (difference := find_difference(old, identity)):
                raise UserError(
                    f"{self.address}: holds another run's results: {difference}; choose another"
                    f" output, or remove {self.address}.run.json to add this run's results"
                )
            self._file.truncate(self._end)  # drops a torn last line
        if identity != old:
            content = {"format_version": FORMAT_VERSION, "identity": identity}
            with open_replacement(f"{self.address}.run.json") as file:
                file.write(json.dumps(content, indent=2).encode() + b"\n")

    @property
    def done(self) -> int:
        """The number of results."""
        return len(self._done)

    def is_done(self, record: Record | BadRecord) -> bool:
        """Whether a record has its result. UserError if its id has the result of a record with
        another content."""
        digest = self._done.get(_key(record.line, record.id, record.digest))
        if digest not in (None, record.digest):
            own_id = "" if record.id is None else f" (id {record.id!r})"
            raise UserError(
                f"{self.address}: line {record.line}{own_id} has a result of another record, so the"
                " input is another one: choose another output"
            )
        return digest is not None

    def write(self, record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        """Appends the result of a record, unless it has one.

        On this machine it is in the file on return; in an object store after the next upload, at
        most a minute later as long as results come, or on closing. UserError if it cannot be
        written (a local file is then as before); ValueError if a number is NaN or infinite.
        """
        key = _key(record.line, record.id, record.digest)
        if key in self._done:
            return
        own = {"id": record.id, "line": record.line, "digest": record.digest}
        text = json.dumps({**own, **result, **own}, ensure_ascii=False, allow_nan=False)
        # A lone surrogate becomes a JSON escape.
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        with storage_errors(self.address, "written"):
            try:
                self._append(raw)
            except BaseException:
                with suppress(OSError):
                    self._file.truncate(self._end)
                raise
            self._end += len(raw)
            self._done[key] = record.digest
            if not self._is_local and time.monotonic() >= self._due:
                self._upload()

    def _append(self, raw: bytes) -> None:
        rest = memoryview(raw)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _upload(self) -> None:
        """Replaces the object by the file."""
        if self._find_version() != self._version:
            raise UserError(f"{self.address}: another run is writing to it")
        with open_replacement(self.address) as out:
            self._file.seek(0)
            shutil.copyfileobj(self._file, out, 2**20)
        self._version = self._find_version()
        self._uploaded = self._end
        self._due = time.monotonic() + UPLOAD_SECONDS

    def _find_version(self) -> tuple[Any, ...] | None:
        """The checksum of the object, which S3 has, or else its size and time. None without an
        object, or for a local file."""
        if self._is_local:
            return None
        self._fs.invalidate_cache()
        if not self._fs.isfile(self._path):
            return None
        # The default checksum may include the time of the last access.
        if type(self._fs).checksum is not AbstractFileSystem.checksum:
            return (self._fs.checksum(self._path),)
        return self._fs.size(self._path), self._fs.modified(self._path)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            with storage_errors(self.address, "written"):
                if self._is_local:
                    os.fsync(self._file.fileno())  # network file systems report errors late
                elif self._end != self._uploaded or (self._version is None and error is None):
                    self._upload()
        except UserError as failure:
            if error is None:
                raise
            print(failure, file=sys.stderr)
        except BaseException:  # a second signal
            print(f"{self.address}: not written to its end", file=sys.stderr)
            raise
        finally:
            self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        """Closes the file. After a failure a new output that is still empty is removed."""
        self._file.close()
        if failed and self._is_new and not self._done:
            for path in (self._path, f"{self._path}.run.json"):
                with suppress(Exception):  # the error that led here matters more
                    self._fs.rm_file(path)


def check_output(address: str, *, input: str | None = None) -> None:
    """Checks an output without writing anything. UserError if it is no valid output, its folder
    does not exist, or it is the input."""
    if address == "-":
        raise UserError("the output cannot be standard output: a run is resumed from its file")
    if not address or address.endswith("/"):
        raise UserError(f"{address!r}: the output must be a file, not a folder")
    if is_compressed(address):
        raise UserError(f"{address}: a compressed file cannot grow: choose a .jsonl file")
    fs, path = resolve(address)
    if input not in (None, "-"):
        input_fs, input_path = resolve(input)
        if is_local(fs) and is_local(input_fs):
            path, input_path = os.path.realpath(path), os.path.realpath(input_path)
        if (fs, path) == (input_fs, input_path):
            raise UserError(f"{address}: cannot be written: it is the input")
    with storage_errors(address, "written"):
        if fs.isdir(path):
            raise UserError(f"{address}: cannot be written: it is a folder")
        if is_local(fs):
            check_regular(Path(path))
            check_writable(Path(path))


def _key(line: int, record_id: str | None, digest: str) -> Key:
    return (line, digest) if record_id is None else record_id


def _read_results(address: str) -> Iterator[tuple[Key, str, bytes]]:
    """Yields the key, digest and line of each result in an output, without a torn last line.
    UserError if it cannot be read, or another line is not a result."""
    with open_file(address) as file:
        lines = read_lines(address, file)
        for number, raw in enumerate(lines, start=1):
            try:
                value = json.loads(raw.decode()) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                value = None
            match value:
                case {"id": str() | None as own, "line": int(line), "digest": str(digest)}:
                    yield _key(line, own, digest), digest, raw
                case None if next(lines, None) is None:
                    return
                case _:
                    raise UserError(
                        f"{address}: line {number} is not a result; choose another output"
                    )


def read_identity(address: str) -> dict[str, Any] | None:
    """Reads the identity of a run from the sidecar of its output. None if the sidecar is missing.
    UserError if it cannot be read, or is not the description of a run."""
    sidecar = f"{address}.run.json"
    fs, path = resolve(sidecar)
    with storage_errors(sidecar):
        if not fs.exists(path):
            return None
        data = fs.cat_file(path)
    try:
        identity = json.loads(data.decode("utf-8-sig"))["identity"]
    except (ValueError, RecursionError, TypeError, KeyError):
        identity = None
    if not isinstance(identity, dict):
        raise UserError(f"{sidecar}: not the description of a run")
    return identity


def find_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """The first key whose values differ, dotted, with both values; empty where none does."""
    for key in {**new, **old}:
        was, now = (
            json.dumps(run[key], ensure_ascii=False, sort_keys=True) if key in run else "absent"
            for run in (old, new)
        )
        if was == now:
            continue
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            return find_difference(old[key], new[key], f"{prefix}{key}.")
        return f"{prefix}{key} was {was:.80} and is now {now:.80}"
    return ""
