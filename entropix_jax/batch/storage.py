"""Files of a batch, on this machine or in an object store, through fsspec."""

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec.core
import fsspec.utils
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from entropix_jax.errors import UserError
from entropix_jax.host.files import replacing

# Suffixes that fsspec recognises only once their package is installed.
_COMPRESSION_PACKAGES = {".zst": "zstandard", ".lz4": "lz4", ".snappy": "python-snappy"}

_Line = TypeVar("_Line", bytes, str)


def resolve(address: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it. UserError if its protocol is
    unknown, or its driver is not installed."""
    with storage_errors(address):
        fs, path = fsspec.core.url_to_fs(address)
        fs.invalidate_cache()  # other processes write there, too
    return fs, cast(str, path)


def is_local(fs: Any) -> bool:
    """Whether a file system is this machine's."""
    return isinstance(fs, LocalFileSystem)


def local_path(address: str) -> Path | None:
    """The path of an address on this machine (`~` and `file://` are understood); None for any
    other address, whose driver is not loaded."""
    scheme = address.partition("://")[0] if "://" in address else "file"
    if scheme not in ("file", "local") or "::" in address:
        return None
    fs, path = resolve(address)
    return Path(path) if is_local(fs) else None


def is_compressed(address: str) -> bool:
    """Whether the suffix of a file names a compression."""
    suffix = PurePath(address).suffix.lower()
    return bool(fsspec.utils.infer_compression(address)) or suffix in _COMPRESSION_PACKAGES


@contextmanager
def storage_errors(address: str, doing: str = "read") -> Iterator[None]:
    """Turns any exception of a storage driver, within the block, into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            reason = "no such file or folder"
        elif isinstance(error, OSError | ImportError):
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{address}: cannot be {doing}: {reason}") from error


@contextmanager
def open_file(address: str) -> Iterator[BinaryIO]:
    """Opens a file for reading, decompressed according to its suffix; - is standard input.
    UserError if it cannot be opened."""
    if address == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed")
        yield sys.stdin.buffer
        return
    fs, path = resolve(address)
    with storage_errors(address):
        compression = fsspec.utils.infer_compression(path)
        package = _COMPRESSION_PACKAGES.get(PurePath(path).suffix.lower())
        if package and not compression:
            raise UserError(f"{address}: cannot be decompressed: pip install {package}")
        if not is_local(fs) and fs.isdir(path):  # some drivers open a folder as an empty file
            raise IsADirectoryError(21, "Is a directory")
        # fsspec seeks in local files, which pipes do not support.
        raw: Any = io.FileIO(path) if is_local(fs) else fs.open(path, "rb")
    with closing(io.BufferedReader(raw)) as file:
        with storage_errors(address):
            plain = compr[compression](file, mode="rb")
        yield plain


@contextmanager
def open_replacement(address: str) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces the one at an address, atomically, if the block
    succeeds. UserError if it cannot be written."""
    fs, path = resolve(address)
    with storage_errors(address, "written"):
        if is_local(fs):
            with replacing(Path(path)) as scratch, scratch.open("wb") as file:
                yield file
        else:
            with fs.transaction, fs.open(path, "wb") as file:
                yield file


def read_lines(address: str, file: Iterable[_Line]) -> Iterator[_Line]:
    """The lines of an open file; errors of its driver are `UserError`s."""
    with storage_errors(address):
        yield from file
