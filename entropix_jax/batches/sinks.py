"""Where results lie: in a file of this machine, or in an object store, part by part."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from entropix_jax.batches.identity import json_document, parse_sidecar
from entropix_jax.batches.index import Index
from entropix_jax.batches.lines import Line, lines_of
from entropix_jax.batches.places import is_compressed, is_local, located, opened, reaching
from entropix_jax.errors import UserError
from entropix_jax.files import check_writable, is_standard_output, replacing

if sys.platform != "win32":
    import fcntl

PART_RECORDS = 1000
PART_SECONDS = 60.0
_STANDARD_OUTPUT = "the output cannot be standard output: a run is resumed from its file"


class Sink(Protocol):
    """An output, line by line, and beside it a sidecar, which says whose results they are.

    A run reads the lines that are there with `resume`, then appends its own.

    Raises:
        UserError: by each method but the last two: what is there cannot be read or written, is not
            what it should be, or another run is writing to it.
    """

    def read_sidecar(self) -> dict[str, Any] | None:
        """What the sidecar says; None where there is none."""
        ...

    def write_sidecar(self, content: Mapping[str, Any]) -> None:
        """Puts a sidecar, in JSON's types, in the place of the old one."""
        ...

    def is_empty(self) -> bool:
        """Whether nothing is there yet, the sidecar aside."""
        ...

    def resume(self, *, whole: bool) -> Iterator[Line]:
        """The lines that are there; a torn last one is dropped, or refused where `whole`."""
        ...

    def append(self, data: bytes) -> None:
        """Adds a line, its line break included; not all of them lie there before `flush`."""
        ...

    def flush(self) -> None:
        """Makes sure that all lines lie there."""
        ...

    def finish(self) -> None:
        """Makes the output whole, under its address alone, once no more lines will come."""
        ...

    def replace(self, write: Callable[[BinaryIO], None]) -> None:
        """Puts what `write` writes in the place of the output, at once or not at all."""
        ...

    def close(self) -> None:
        """Ends the use of the output."""
        ...

    def abandon(self) -> None:
        """The same after an error: of an output that is new, and still empty, nothing stays."""
        ...


class LocalFile:
    """An output on this machine. It is locked while it is open; death releases it."""

    def __init__(self, address: str, path: Path) -> None:
        check_file(address, path)
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
                return parse_sidecar(self._sidecar.read_bytes(), str(self._sidecar))
            except FileNotFoundError:
                return None

    def write_sidecar(self, content: Mapping[str, Any]) -> None:
        with replacing(self._sidecar) as scratch:
            scratch.write_bytes(json_document(content))

    def is_empty(self) -> bool:
        return self._end == 0

    def resume(self, *, whole: bool) -> Iterator[Line]:
        """The lines that are there, after which the file ends."""
        size, end = self._end, 0
        with opened(self._address) as file:
            for line in lines_of(file, self._address, whole=whole):
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
        """Closes the file after an error. One that is new, and still empty, does not stay."""
        if self._is_new and self.is_empty():
            for path in (self._path, self._sidecar):
                with contextlib.suppress(OSError):
                    path.unlink()
        self.close()


class ObjectParts:
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
        self._is_new = False

    def read_sidecar(self) -> dict[str, Any] | None:
        address = f"{self._address}.run.json"
        with reaching(address):
            try:
                return parse_sidecar(self._fs.cat_file(self._sidecar), address)
            except FileNotFoundError:
                self._is_new = self.is_empty()
                return None

    def write_sidecar(self, content: Mapping[str, Any]) -> None:
        with reaching(f"{self._address}.run.json", "written"):
            self._fs.pipe_file(self._sidecar, json_document(content))

    def is_empty(self) -> bool:
        with reaching(self._address):
            return not self._found and not (self._is_joined() and self._fs.size(self._path))

    def resume(self, *, whole: bool) -> Iterator[Line]:
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
        """Of an output that is new, and still empty, nothing stays."""
        if self._is_new and not self._next:
            with contextlib.suppress(Exception):  # the error that led here is to be told
                self._fs.rm(self._sidecar)

    def _is_joined(self) -> bool:
        with reaching(self._address):
            return bool(self._fs.isfile(self._path))

    def parts(self) -> list[str]:
        """What has not been joined and removed yet, in order."""
        with reaching(self._address):
            self._fs.invalidate_cache()
            found = self._fs.find(self._folder)
        return sorted((path for path in found if _number(path) >= 0), key=_number)

    def _read(self, path: str, *, whole: bool) -> Iterator[Line]:
        address = self._fs.unstrip_protocol(path)
        with (
            reaching(address),
            contextlib.closing(io.BufferedReader(self._fs.open(path, "rb"))) as file,
        ):
            yield from lines_of(file, address, whole=whole)


def sink_of(address: str) -> Sink:
    """Where the results of an address lie.

    Raises:
        UserError: it cannot be reached, or another run is writing there.
    """
    fs, path = located(address)
    return LocalFile(address, Path(path)) if is_local(fs) else ObjectParts(address, fs, path)


def _number(path: str) -> int:
    """The number of a part, -1 of other files."""
    match = re.fullmatch(r".*\.parts/(\d{6,})\.jsonl", path)
    return int(match[1]) if match else -1


def check_name(address: str) -> None:
    """Checks an output's address.

    Raises:
        UserError: no output can be called so.
    """
    if address == "-":
        raise UserError(_STANDARD_OUTPUT)
    if "\0" in address:
        raise UserError(f"{address!r}: not a file name")
    if not address or address.endswith("/"):
        raise UserError(f"{address!r}: the output must be a file, not a folder")
    if is_compressed(address):
        raise UserError(f"{address}: a compressed output cannot grow: choose a name in .jsonl")


def check_file(address: str, path: Path) -> None:
    """Checks the place of a local output.

    Raises:
        UserError: no output can be there.
    """
    with reaching(address, "written"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{address}: cannot be written: not a regular file")
        if is_standard_output(path):
            raise UserError(_STANDARD_OUTPUT)
        check_writable(path)
