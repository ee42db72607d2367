"""Batch output: one JSON line per record, resumable however the run before it ended.

A local output is one file that is appended to. Object stores cannot append: there the output grows
in numbered parts, `out.jsonl.parts/000000.jsonl` and so on, which are joined at the end. A sidecar,
`out.jsonl.run.json`, describes the run that the results are of.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from entropix_jax.batch.records import BadRecord, Record, describe_record
from entropix_jax.batch.sidecar import check_same_run, read_sidecar, write_sidecar
from entropix_jax.batch.storage import (
    is_compressed,
    is_local,
    read_lines,
    resolve,
    storage_errors,
)
from entropix_jax.errors import UserError
from entropix_jax.host.files import check_writable, lock_alone, replacing

FORMAT_VERSION = 1
PART_RECORDS = 1000
PART_SECONDS = 60.0

Key = str | tuple[int, str]  # of a record: its id, or its line and digest


def record_key(record: Record | BadRecord) -> Key:
    """What a record is known by in an output."""
    return (record.line, record.digest) if record.id is None else record.id


class Store:
    """The output of one run. A context manager.

    A result is an object with the record's `id` (null where it has none of its own), `line`,
    `digest` and what the run adds. No record is written twice; one that failed counts as done.
    """

    def __init__(self, address: str, identity: Mapping[str, Any], *, mix: bool = False) -> None:
        """Creates an output, or resumes it.

        `identity` is what defines the run (model, sampler, input, ...), as JSON. `mix` accepts
        results of another run, or other JSON Lines: a known id then counts as done even if its
        record has changed. UserError if the output cannot be read or written, is in use, is not
        JSON Lines, or is another run's.
        """
        check_output(address)
        self.address = address
        self._mix = mix
        self._done: dict[Key, str] = {}  # to digests
        own = {"format_version": FORMAT_VERSION, "identity": dict(identity)}
        self._sidecar: dict[str, Any] = json.loads(json.dumps(own, allow_nan=False))
        self._file = open_output(address)
        try:
            with storage_errors(address):
                self._resume()
        except BaseException:
            self._file.close(failed=True)
            raise

    def _resume(self) -> None:
        old = read_sidecar(self.address)
        if not self._file.is_empty():
            same = check_same_run(self.address, old, self._sidecar["identity"], mix=self._mix)
            self._sidecar = old if same and old is not None else self._sidecar
        # Only lines that a run wrote may be dropped as torn.
        for line in self._file.read_lines(strict=old is None):
            if line.key is not None:
                self._done.setdefault(line.key, line.digest)
        if self._sidecar != old:
            write_sidecar(self.address, self._sidecar)

    @property
    def done(self) -> int:
        """The number of results."""
        return len(self._done)

    def is_done(self, record: Record | BadRecord) -> bool:
        """Whether a record has its result. UserError if its id has the result of a record with
        another content."""
        digest = self._done.get(record_key(record))
        if digest not in (None, record.digest) and not self._mix:
            raise UserError(
                f"{self.address}: {describe_record(record)} has a result of another record: another"
                " input under the same output; choose another output"
            )
        return digest is not None

    def write(self, record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        """Appends the result of a record.

        On this machine it is in the file on return; in an object store once its part is full, or
        older than a minute as the next one is added, or on closing. `sampler_digest` of the result
        identifies the values of the sampler that the record names. UserError if it cannot be
        written (the file is then as before), or that sampler has changed since earlier results;
        ValueError if a number is NaN or infinite.
        """
        if isinstance(record, Record) and record.sampler and "sampler_digest" in result:
            self._check_sampler(record, result["sampler_digest"])
        own = {"id": record.id, "line": record.line, "digest": record.digest}
        text = json.dumps({**own, **result, **own}, ensure_ascii=False, allow_nan=False)
        with storage_errors(self.address, "written"):
            # A lone surrogate becomes a JSON escape.
            self._file.append(text.encode("utf-8", "backslashreplace") + b"\n")
        self._done[record_key(record)] = record.digest

    def _check_sampler(self, record: Record, digest: str) -> None:
        known = self._sidecar.get("samplers", {})
        if known.get(record.sampler, digest) != digest and not self._mix:
            raise UserError(
                f"{self.address}: {describe_record(record)}: sampler '{record.sampler}' is not what"
                " it was for earlier results: choose another output"
            )
        if known.get(record.sampler) != digest:
            self._sidecar = {**self._sidecar, "samplers": {**known, record.sampler: digest}}
            write_sidecar(self.address, self._sidecar)

    def finish(self) -> None:
        """Joins the parts, if any, once no more results will come. Where this fails (UserError)
        nothing is lost: the next run resumes."""
        with storage_errors(self.address, "written"):
            self._file.finish()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            with storage_errors(self.address, "written"):
                self._file.flush()
        except UserError:
            if error is None:  # else that one matters more
                raise
        finally:
            self._file.close(failed=error is not None)


def check_output(address: str, *, input: str | None = None) -> None:
    """Checks an output without writing anything. UserError if it is no valid output, its folder
    does not exist, or it is the input."""
    if address == "-":
        raise UserError("the output cannot be standard output: a run is resumed from its file")
    if not address or address.endswith("/"):
        raise UserError(f"{address!r}: the output must be a file, not a folder")
    if is_compressed(address):
        raise UserError(f"{address}: a compressed output cannot grow: choose a name in .jsonl")
    fs, path = resolve(address)
    if input not in (None, "-"):
        input_fs, input_path = resolve(input)
        if is_local(fs) and is_local(input_fs):
            path, input_path = os.path.realpath(path), os.path.realpath(input_path)
        if fs == input_fs and path == input_path:
            raise UserError(f"{address}: cannot be written: it is the input")
    with storage_errors(address, "written"):
        if fs.isdir(path):
            raise UserError(f"{address}: cannot be written: it is a folder")
        if is_local(fs):
            if fs.exists(path) and not fs.isfile(path):
                raise UserError(f"{address}: cannot be written: not a regular file")
            check_writable(Path(path))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an output with its line break. `key` is None where it is no result."""

    number: int
    raw: bytes
    key: Key | None
    digest: str


def read_results(file: BinaryIO, address: str, *, strict: bool) -> Iterator[Line]:
    """The lines of an output; a torn last one is dropped, or refused where `strict`. UserError if
    the file cannot be read, or a line is not JSON."""
    lines = read_lines(address, file)
    for number, raw in enumerate(lines, start=1):
        try:
            value = json.loads(raw.decode()) if raw.strip() else None
            torn = not raw.endswith(b"\n")
        except (ValueError, RecursionError):
            torn = True
        if torn:
            if not strict and next(lines, None) is None:
                return
            raise UserError(f"{address}: line {number} is torn, or not JSON")
        match value:
            case {"id": str() | None as own, "line": int(line), "digest": str(digest)}:
                yield Line(number, raw, (line, digest) if own is None else own, digest)
            case _:
                yield Line(number, raw, None, "")


def open_output(address: str) -> LocalFile | ObjectParts:
    """Opens an output that `check_output` accepts. Errors of its methods are the driver's.
    UserError if it cannot be reached, or another run is writing there."""
    fs, path = resolve(address)
    with storage_errors(address, "written"):
        return LocalFile(address, Path(path)) if is_local(fs) else ObjectParts(address, fs, path)


class LocalFile:
    """An output on this machine, locked while it is open."""

    def __init__(self, address: str, path: Path) -> None:
        self._address = address
        self._path = path
        self._is_new = not path.exists()
        self._file = io.FileIO(path, "a+")
        try:
            lock_alone(self._file.fileno())
        except BaseException:
            self._file.close()
            raise
        self._end = os.fstat(self._file.fileno()).st_size

    def is_empty(self) -> bool:
        """Whether there are no lines yet."""
        return self._end == 0

    def read_lines(self, *, strict: bool) -> Iterator[Line]:
        """The lines that are there; a torn last one is cut off, or refused where `strict`."""
        size, end = self._end, 0
        with self._path.open("rb") as file:
            for line in read_results(file, self._address, strict=strict):
                end += len(line.raw)
                yield line
        if end < size:
            self._file.truncate(end)
            self._end = end

    def append(self, data: bytes) -> None:
        """Appends a line, entirely or, after an error or interrupt, not at all."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(data)

    def flush(self) -> None:
        """Waits for the disk: network file systems report errors late."""
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Nothing to join."""

    def replace(self, write: Callable[[BinaryIO], None]) -> None:
        """Replaces the output by what `write` writes, atomically."""
        with replacing(self._path) as scratch, scratch.open("wb") as out:
            write(out)

    def close(self, *, failed: bool = False) -> None:
        """Closes the output. After a failure a new one that is still empty is removed."""
        if failed and self._is_new and self.is_empty():
            for path in (self._path, self._path.with_name(f"{self._path.name}.run.json")):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._file.close()


class ObjectParts:
    """An output in an object store, without a lock. The methods are those of `LocalFile`."""

    def __init__(self, address: str, fs: Any, path: str) -> None:
        self._address = address
        self._fs = fs
        self._path = path
        self._folder = f"{path}.parts"
        self._pending: list[bytes] = []
        self._since = 0.0
        parts = self.list_parts()
        self._next = _part_number(parts[-1]) + 1 if parts else 0
        self._is_new = self.is_empty() and not fs.exists(f"{path}.run.json")

    def list_parts(self) -> list[str]:
        """The parts that are not joined yet, in order."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._folder)
        return sorted((path for path in found if _part_number(path) >= 0), key=_part_number)

    def is_empty(self) -> bool:
        return self._next == 0 and not (self._is_joined() and self._fs.size(self._path))

    def _is_joined(self) -> bool:
        return bool(self._fs.isfile(self._path))

    def read_lines(self, *, strict: bool) -> Iterator[Line]:
        """The lines that are there; some come twice where joining was cut short."""
        for path in [self._path] * self._is_joined() + self.list_parts():
            address = self._fs.unstrip_protocol(path)
            with storage_errors(address), io.BufferedReader(self._fs.open(path, "rb")) as file:
                yield from read_results(file, address, strict=strict)

    def append(self, data: bytes) -> None:
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(data)
        if len(self._pending) >= PART_RECORDS or time.monotonic() - self._since >= PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Uploads pending lines as the next part."""
        if not self._pending:
            return
        part = f"{self._folder}/{self._next:06}.jsonl"
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(self._folder, create_parents=False)
        self._fs.invalidate_cache()
        if self._fs.exists(part):
            raise UserError(f"{self._address}: another run is writing to it: {part} is there")
        self._fs.pipe_file(part, b"".join(self._pending))
        self._pending = []
        self._next += 1

    def finish(self) -> None:
        """Joins the parts, then removes them. Interrupted in between, the next call skips lines
        that are joined already."""
        self.flush()
        parts = self.list_parts()
        if self._is_joined() and not parts:
            return

        def write(out: BinaryIO) -> None:
            seen: set[Key | None] = set()
            for line in self.read_lines(strict=False):
                if line.key is None or line.key not in seen:
                    out.write(line.raw)
                seen.add(line.key)

        self.replace(write)
        if parts:
            self._fs.rm(parts)
            with contextlib.suppress(OSError, NotImplementedError):  # S3 has no folders
                self._fs.rmdir(self._folder)

    def replace(self, write: Callable[[BinaryIO], None]) -> None:
        with self._fs.transaction, self._fs.open(self._path, "wb") as out:
            write(out)

    def close(self, *, failed: bool = False) -> None:
        if failed and self._is_new and not self._next:
            with contextlib.suppress(Exception):  # the error that led here matters more
                self._fs.rm(f"{self._path}.run.json")


def _part_number(path: str) -> int:
    """The number of a part, -1 of other files."""
    match = re.fullmatch(r".*\.parts/(\d{6,})\.jsonl", path)
    return int(match[1]) if match else -1
