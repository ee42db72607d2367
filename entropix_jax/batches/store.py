"""The output of a batch: results as JSON Lines, kept record by record, whatever end a run comes to.

A local output is one file, which is appended to. Object stores cannot append: there the output
grows in numbered parts beside its address, `out.jsonl.parts/000000.jsonl` and so on, which are
joined at the end. In either case `out.jsonl.run.json` says which run the results are of.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO

from entropix_jax.batches.source import (
    BadRecord,
    Index,
    Record,
    hash_of,
    is_compressed,
    is_local,
    located,
    opened,
    reaching,
    read_records,
)
from entropix_jax.errors import UserError
from entropix_jax.files import check_writable, replacing

if sys.platform != "win32":
    import fcntl

FORMAT_VERSION = 1
PART_RECORDS = 1000
PART_SECONDS = 60.0


class Store:
    """The results of one run, in a file or in an object store. A context manager.

    A result is an object with the record's `id` (null where the record has none of its own), its
    `line`, its `digest` (15 hexadecimal digits) and what the run adds. Nothing is written twice:
    a record is known by its id, or by line and digest where it has none. Whatever has a result is
    done, errors included.
    """

    def __init__(self, address: str, sink: _File | _Objects, index: Index, mix: bool) -> None:
        """As `open` makes it."""
        self.address = address
        self._sink = sink
        self._index = index
        self._mix = mix

    @classmethod
    def open(cls, address: str, identity: Mapping[str, Any], *, mix: bool = False) -> Store:
        """Begins a run's output, or goes on with it.

        A last line that a killed run left torn is dropped; what is done is read and indexed, in
        about 20 bytes a record.

        Args:
            address: a path, or a URL that fsspec knows.
            identity: what makes the run what it is (model, sampler, input, ...), in JSON's types,
                and the same in all processes that share one run.
            mix: take an output whatever it holds: results of another run, or other JSON Lines. An
                id that is done then counts as done, whatever its input was.

        Raises:
            UserError: the output cannot be read or written, is in use, holds what is not JSON
                Lines, or is not this run's.
        """
        _check_name(address)
        own = json.loads(json.dumps(dict(identity), allow_nan=False))
        sink = _sink(address)
        try:
            old = sink.read_sidecar()
            # Torn lines are dropped from what a run wrote only.
            new = _agreed(address, old, own, empty=sink.is_empty(), mix=mix)
            index = Index()
            for line in sink.resume(whole=old is None):
                if line.key is not None:
                    index.add(line.key, line.digest)
            if new != old:
                sink.write_sidecar(new)
        except BaseException:
            sink.abandon()
            raise
        return cls(address, sink, index, mix)

    @property
    def done(self) -> int:
        """How many results there are."""
        return len(self._index)

    def is_done(self, record: Record | BadRecord) -> bool:
        """Whether a record has its result.

        Raises:
            UserError: its id has one, of a record that was written otherwise.
        """
        digest = self._index.find(_key(record.id, record.line, record.digest))
        if digest is not None and digest != record.digest and not self._mix:
            raise UserError(
                f"{self.address}: {_named(record)} has a result of another record: another input"
                " under the same output; choose another output"
            )
        return digest is not None

    def write(self, record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        """Adds the result of a record that is not done.

        On this machine it is in the file when this returns. In an object store it is when its part
        is full, or old as the next one is added, and on closing.

        Args:
            record: what the result is of.
            result: more for its object, in JSON's types; `id`, `line` and `digest` in it are
                replaced.

        Raises:
            UserError: it cannot be written (a full disk, say). The file is as it was before.
            ValueError: a number in the result is NaN or infinite.
        """
        own = {"id": record.id, "line": record.line, "digest": f"{record.digest:015x}"}
        text = json.dumps({**own, **result, **own}, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair becomes a JSON escape.
        self._sink.append(text.encode("utf-8", "backslashreplace") + b"\n")
        self._index.add(_key(record.id, record.line, record.digest), record.digest)

    def finish(self) -> None:
        """Leaves the output whole at its address: joins the parts, if there are any.

        Raises:
            UserError: it cannot be written. Nothing is lost: the next run goes on from there.
        """
        self._sink.finish()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._sink.flush()
        except UserError:
            if error is None:  # else that one is to be told
                raise
        finally:
            self._sink.close()


def check_output(address: str, *, input: str | None = None) -> None:
    """Looks whether an output could be written, without leaving anything.

    In an object store it tries, with an object that it removes.

    Args:
        address: the output.
        input: the address that is read, which the output must not be.

    Raises:
        UserError: it could not.
    """
    _check_name(address)
    fs, path = located(address)
    if input not in (None, "-"):
        input_fs, input_path = located(input)
        if is_local(fs) and is_local(input_fs):
            same = os.path.realpath(path) == os.path.realpath(input_path)
        else:
            same = fs == input_fs and path == input_path
        if same:
            raise UserError(f"{address}: cannot be written: it is the input")
    if is_local(fs):
        _check_file(address, Path(path))
        return
    with reaching(address, "written"):
        if fs.isdir(path):
            raise UserError(f"{address}: cannot be written: it is a folder")
        fs.pipe_file(f"{path}.probe", b"{}\n")
        fs.rm(f"{path}.probe")


def part_address(address: str, index: int, count: int) -> str:
    """Where process `index` of `count` writes: `out.part-00001-of-00004.jsonl`.

    Raises:
        ValueError: no such process.
    """
    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count}")
    suffix = PurePosixPath(address).suffix
    return f"{address.removesuffix(suffix)}.part-{index:05}-of-{count:05}{suffix}"


def merge(address: str, count: int, *, input: str) -> None:
    """Joins the outputs of `count` processes into one, which appears at once or not at all.

    The parts, at `part_address`, are kept. An output that is there already is replaced if it is the
    same run's.

    Args:
        address: the output.
        count: how many processes there were.
        input: the address of the input, which is read again.

    Raises:
        UserError: a part is missing, unfinished, torn, of another run or not the run's own; two
            results have one id; a record of the input has no result, or a result no record; the
            output cannot be written.
    """
    if input == "-":
        raise UserError("standard input cannot be read again: merging needs the input as a file")
    check_output(address, input=input)
    parts = [part_address(address, index, count) for index in range(count)]
    sidecar = _common_sidecar(parts)
    index = Index()
    for part in parts:
        with opened(part) as file:
            for line in _lines(file, part, whole=True):
                if line.key is None:
                    raise UserError(f"{part}: line {line.number} is not a result")
                if not index.add(line.key, line.digest):
                    raise UserError(f"{part}: line {line.number} is a second result of its record")
    _check_complete(index, input, count)

    sink = _sink(address)
    try:
        # What is there must be the same run's, or nothing.
        _agreed(address, sink.read_sidecar(), sidecar["identity"], empty=sink.is_empty(), mix=False)

        def write(out: BinaryIO) -> None:
            for part in parts:
                with opened(part) as file:
                    shutil.copyfileobj(file, out, 2**20)
            sink.write_sidecar(sidecar)

        sink.replace(write)
    except BaseException:
        sink.abandon()
        raise
    sink.close()


# Where results lie


class _File:
    """An output on this machine. It is locked while it is open; death releases it."""

    def __init__(self, address: str, path: Path) -> None:
        _check_file(address, path)
        self._address = address
        self._path = path
        self._sidecar = path.with_name(f"{path.name}.run.json")
        with reaching(address, "written"):
            self._is_new = not path.exists()
            self._file = io.FileIO(path, "a+")
        if sys.platform != "win32":
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise UserError(f"{address}: another run is writing to it") from None
            except OSError:  # a file system without locks
                pass
        self._end = os.fstat(self._file.fileno()).st_size  # nobody's but ours from here on

    def read_sidecar(self) -> dict[str, Any] | None:
        with reaching(str(self._sidecar)):
            try:
                return _sidecar(self._sidecar.read_bytes(), str(self._sidecar))
            except FileNotFoundError:
                return None

    def write_sidecar(self, content: Mapping[str, Any]) -> None:
        with replacing(self._sidecar) as scratch:
            scratch.write_bytes(_json_document(content))

    def is_empty(self) -> bool:
        return self._end == 0

    def resume(self, *, whole: bool) -> Iterator[_Line]:
        """The lines that are there, after which the file ends."""
        size, end = self._end, 0
        with opened(self._address) as file:
            for line in _lines(file, self._address, whole=whole):
                end += len(line.raw)
                yield line
        if end > size:  # only the line break was lost
            self.append(b"\n")
        elif end < size:
            with reaching(self._address, "written"):
                self._file.truncate(end)
            self._end = end

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            with reaching(self._address, "written"):
                while rest:
                    rest = rest[self._file.write(rest) :]
        except BaseException:  # an interrupt, too
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(data)

    def flush(self) -> None:
        """Learns now of what a network's file system would tell later."""
        with reaching(self._address, "written"):
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        pass

    def replace(self, write: Callable[[BinaryIO], None]) -> None:
        """Puts a file that `write` writes in the place of this one."""
        with replacing(self._path) as scratch, scratch.open("wb") as out:
            write(out)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """Closes a file that was not to be used."""
        if self._is_new:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.close()


class _Objects:
    """An output in an object store. Nothing there can be locked."""

    def __init__(self, address: str, fs: Any, path: str) -> None:
        self._address = address
        self._fs = fs
        self._path = path
        self._sidecar = f"{path}.run.json"
        self._folder = f"{path}.parts"
        self._gathered: list[bytes] = []
        self._since = 0.0
        self._found = self.parts()
        self._next = _number(self._found[-1]) + 1 if self._found else 0

    def read_sidecar(self) -> dict[str, Any] | None:
        address = f"{self._address}.run.json"
        with reaching(address):
            try:
                return _sidecar(self._fs.cat_file(self._sidecar), address)
            except FileNotFoundError:
                return None

    def write_sidecar(self, content: Mapping[str, Any]) -> None:
        with reaching(f"{self._address}.run.json", "written"):
            self._fs.pipe_file(self._sidecar, _json_document(content))

    def is_empty(self) -> bool:
        with reaching(self._address):
            return not self._found and not (self._is_joined() and self._fs.size(self._path))

    def resume(self, *, whole: bool) -> Iterator[_Line]:
        """The lines that are there. Where joining was cut short, some come twice."""
        for path in [*([self._path] if self._is_joined() else []), *self._found]:
            yield from self._read(path, whole=whole)

    def append(self, data: bytes) -> None:
        if not self._gathered:
            self._since = time.monotonic()
        self._gathered.append(data)
        old = time.monotonic() - self._since >= PART_SECONDS
        if len(self._gathered) >= PART_RECORDS or old:
            self.flush()

    def flush(self) -> None:
        """Uploads what has gathered, as the next part."""
        if not self._gathered:
            return
        part = f"{self._folder}/{self._next:06}.jsonl"
        with reaching(self._address, "written"):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(self._folder, create_parents=False)
            self._fs.invalidate_cache()
            if self._fs.exists(part):
                raise UserError(f"{self._address}: another run is writing to it: {part} is there")
            self._fs.pipe_file(part, b"".join(self._gathered))
        self._gathered = []
        self._next += 1

    def finish(self) -> None:
        """Joins the parts, then removes them.

        Should it end in between, the parts hold what is joined already: the next joining leaves
        that out.
        """
        self.flush()
        parts = self.parts()
        joined = self._is_joined()
        if joined and not parts:
            return

        def write(out: BinaryIO) -> None:
            index = Index()
            if joined:
                for line in self._read(self._path, whole=False):
                    out.write(line.raw)
                    if line.key is not None:
                        index.add(line.key, line.digest)
            for part in parts:
                for line in self._read(part, whole=False):
                    if line.key is None or index.add(line.key, line.digest):
                        out.write(line.raw)

        self.replace(write)
        if parts:
            with reaching(self._address, "written"):
                self._fs.rm(parts)
                with contextlib.suppress(OSError, NotImplementedError):  # object stores have none
                    self._fs.rmdir(self._folder)

    def replace(self, write: Callable[[BinaryIO], None]) -> None:
        """Puts an object that `write` writes at the address, once it is whole."""
        with (
            reaching(self._address, "written"),
            self._fs.transaction,
            self._fs.open(self._path, "wb") as out,
        ):
            write(out)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _is_joined(self) -> bool:
        with reaching(self._address):
            return bool(self._fs.isfile(self._path))

    def parts(self) -> list[str]:
        """What has not been joined and removed yet, in order."""
        with reaching(self._address):
            self._fs.invalidate_cache()
            found = self._fs.find(self._folder)
        return sorted((path for path in found if _number(path) >= 0), key=_number)

    def _read(self, path: str, *, whole: bool) -> Iterator[_Line]:
        address = self._fs.unstrip_protocol(path)
        with (
            reaching(address),
            contextlib.closing(io.BufferedReader(self._fs.open(path, "rb"))) as file,
        ):
            yield from _lines(file, address, whole=whole)


def _sink(address: str) -> _File | _Objects:
    fs, path = located(address)
    return _File(address, Path(path)) if is_local(fs) else _Objects(address, fs, path)


def _number(path: str) -> int:
    """The number of a part, -1 of other files."""
    match = re.fullmatch(r".*\.parts/(\d{6,})\.jsonl", path)
    return int(match[1]) if match else -1


def _check_name(address: str) -> None:
    """Refuses what no output can be called."""
    if address == "-":
        raise UserError("the output cannot be standard output: a run is resumed from its file")
    if "\0" in address:
        raise UserError(f"{address!r}: not a file name")
    if not address or address.endswith("/"):
        raise UserError(f"{address!r}: the output must be a file, not a folder")
    if is_compressed(address):
        raise UserError(f"{address}: a compressed output cannot grow: choose a name in .jsonl")


def _check_file(address: str, path: Path) -> None:
    """Refuses what no local output can be."""
    with reaching(address, "written"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{address}: cannot be written: not a regular file")
        check_writable(path)


# Whose results they are


def _json_document(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _sidecar(data: bytes, address: str) -> dict[str, Any]:
    """What a sidecar says."""
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{address}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("identity"), dict):
        raise UserError(f"{address}: not the description of a run")
    return content


def _agreed(
    address: str,
    old: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    *,
    empty: bool,
    mix: bool,
) -> Mapping[str, Any]:
    """What the sidecar is to say. `earlier` are the identities that it said before, null of none.

    Raises:
        UserError: the output is of another run and is not to be mixed.
    """
    new = {"format_version": FORMAT_VERSION, "identity": dict(identity)}
    if empty:
        return new
    if old is None:
        if not mix:
            raise UserError(
                f"{address}: holds something, but no run's results (there is no"
                f" {address}.run.json): choose another output"
            )
        return {**new, "earlier": [None]}
    difference = _difference(old["identity"], identity)
    if difference is None:
        return old
    if not mix:
        name, theirs, ours = difference
        raise UserError(
            f"{address}: holds another run's results: {name} was {theirs} and is now {ours};"
            " choose another output"
        )
    return {**new, "earlier": [*old.get("earlier", []), old["identity"]]}


def _difference(
    old: Mapping[str, Any], new: Mapping[str, Any], within: str = ""
) -> tuple[str, str, str] | None:
    """The first key whose values differ, and both: None where there is none."""
    for key in [*new, *(key for key in old if key not in new)]:
        here, there = new.get(key), old.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            deeper = _difference(there, here, f"{within}{key}.")
            if deeper is not None:
                return deeper
            continue
        values = [
            json.dumps(side[key], ensure_ascii=False, sort_keys=True) if key in side else "absent"
            for side in (old, new)
        ]
        if values[0] != values[1]:
            shown = [text if len(text) <= 80 else f"{text[:77]}..." for text in values]
            return f"{within}{key}", shown[0], shown[1]
    return None


def _common_sidecar(parts: list[str]) -> dict[str, Any]:
    """What the sidecars of all parts say.

    Raises:
        UserError: one is missing, unfinished, or another run's.
    """
    sidecars = []
    for part in parts:
        fs, path = located(part)
        with reaching(part):
            unjoined = [] if is_local(fs) else _Objects(part, fs, path).parts()
            if unjoined or not fs.isfile(path):
                raise UserError(f"{part}: missing or not finished: run this part to its end")
            try:
                sidecar = _sidecar(fs.cat_file(f"{path}.run.json"), f"{part}.run.json")
            except FileNotFoundError:
                raise UserError(f"{part}: no run's results: no {part}.run.json") from None
        sidecars.append(sidecar)
        if difference := _difference(sidecars[0]["identity"], sidecar["identity"]):
            name, first, this = difference
            raise UserError(f"{part}: another run than {parts[0]}: {name} is {this}, not {first}")
    earlier = []
    for identity in (old for sidecar in sidecars for old in sidecar.get("earlier", [])):
        if identity not in earlier:
            earlier.append(identity)
    return sidecars[0] | ({"earlier": earlier} if earlier else {})


# Which results there are


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of an output, with its line break. `key` is None of what is no result."""

    number: int
    raw: bytes
    key: int | None
    digest: int


def _lines(file: BinaryIO, address: str, *, whole: bool) -> Iterator[_Line]:
    """The lines of an output, from its beginning up to a torn last one.

    Torn is what is not JSON, or has no line break; an object that lacks the line break alone is
    not, and gets it.

    Args:
        file: what to read.
        address: what to call it.
        whole: refuse a torn line, and one without a line break.

    Raises:
        UserError: it cannot be read, or a line is not JSON.
    """
    with reaching(address):
        raw = file.readline()
    number = 0
    while raw:
        number += 1
        with reaching(address):
            following = file.readline()
        ended = raw.endswith(b"\n")
        try:
            value = json.loads(raw.decode()) if raw.strip() else None
        except (ValueError, RecursionError):
            torn = True
        else:
            torn = not ended and (whole or not isinstance(value, dict))
        if torn:
            if not whole and not following:
                return
            what = "torn, or not JSON" if not following else "not JSON"
            raise UserError(f"{address}: line {number} is {what}")
        yield _Line(number, raw if ended else raw + b"\n", *_key_and_digest(value))
        raw = following


def _key_and_digest(value: object) -> tuple[int | None, int]:
    match value:
        case {"id": str() | None as own, "line": int(line), "digest": str(text)} if re.fullmatch(
            "[0-9a-f]{15}", text
        ):
            digest = int(text, 16)
            return _key(own, line, digest), digest
    return None, 0


def _key(own: str | None, line: int, digest: int) -> int:
    """What a record is known by: its id, or else where it stands and what it says. 60 bits."""
    name = f"line {line} {digest:x}" if own is None else f"id {own}"
    return hash_of(name.encode("utf-8", "surrogatepass"))


def _named(record: Record | BadRecord) -> str:
    return f"line {record.line}" + ("" if record.id is None else f" (id {record.id!r})")


def _check_complete(index: Index, input: str, count: int) -> None:
    """Looks whether each record of an input has its result, and each result its record.

    Raises:
        UserError: not so.
    """
    records = missing = 0
    first = ""
    for record in read_records(input):
        records += 1
        if index.find(_key(record.id, record.line, record.digest)) != record.digest:
            missing += 1
            first = first or _named(record)
    if missing:
        raise UserError(
            f"{input}: {missing} of {records} records have no result in the {count} parts, the"
            f" first one in {first}: run all parts to their end"
        )
    if len(index) > records:
        raise UserError(
            f"{input}: {len(index) - records} of {len(index)} results in the {count} parts are of"
            " no record of it: is it the input that they were made from?"
        )
