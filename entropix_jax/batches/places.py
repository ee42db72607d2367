"""Where files lie: on this machine or behind a URL, compressed or not."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

import fsspec.core
import fsspec.utils
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from entropix_jax.errors import UserError

# fsspec can read these once the package is there, and until then does not know the suffix.
_COMPRESSION_PACKAGES = {".zst": "zstandard", ".lz4": "lz4", ".snappy": "python-snappy"}


def located(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it.

    Raises:
        UserError: an unknown protocol, or a driver that is not installed.
    """
    with reaching(address):
        fs, path = fsspec.core.url_to_fs(address)
        fs.invalidate_cache()  # others write there, too
    return fs, cast(str, path)


def local_path(address: str) -> Path | None:
    """The path of an address on this machine (`~` and `file://` are understood), None of any
    other. No driver of another file system is loaded.

    Raises:
        UserError: it can be no address.
    """
    scheme = address.partition("://")[0] if "://" in address else "file"
    if scheme not in ("file", "local") or "::" in address:
        return None
    fs, path = located(address)
    return Path(path) if is_local(fs) else None


def is_compressed(address: str) -> bool:
    """Whether a file's name says that it is compressed."""
    suffix = PurePath(address).suffix.lower()
    return bool(fsspec.utils.infer_compression(address)) or suffix in _COMPRESSION_PACKAGES


def is_local(fs: Any) -> bool:
    """Whether a file system is this machine's."""
    return isinstance(fs, LocalFileSystem)


@contextmanager
def reaching(address: str, doing: str = "read") -> Iterator[None]:
    """Turns the errors of whatever lies behind an address into those that a user can act on.

    Around calls of file systems only: their drivers raise exceptions of all kinds.

    Raises:
        UserError: the block raised an exception.
    """
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        hint = str(error)
        if address.startswith(("s3://", "s3a://")):
            hint = "s3fs is not installed: pip install 'entropix-jax[s3]'"
        raise UserError(f"{address}: cannot be {doing}: {hint}") from error
    except FileNotFoundError as error:
        raise UserError(f"{address}: cannot be {doing}: no such file or folder") from error
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise UserError(f"{address}: cannot be {doing}: {reason}") from error
    except Exception as error:
        raise UserError(f"{address}: cannot be {doing}: {type(error).__name__}: {error}") from error


@contextmanager
def opened(address: str) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed where its name says so, to be read from the start.

    Raises:
        UserError: it cannot be read.
    """
    if address == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed")
        # Through a buffer of its own: Python takes the lock of standard input's as it ends, and
        # would abort where a thread still waits in it for a line.
        raw: Any = sys.stdin.buffer
        lines = io.BufferedReader(getattr(raw, "raw", raw))
        try:
            yield lines
        finally:
            lines.detach()
        return
    fs, path = located(address)
    with reaching(address):
        compression = fsspec.utils.infer_compression(path)
        package = _COMPRESSION_PACKAGES.get(PurePath(path).suffix.lower())
        if package and not compression:
            raise UserError(f"{address}: cannot be decompressed: pip install {package}")
        try:
            # fsspec would seek in local files, which pipes cannot.
            raw = io.FileIO(path) if is_local(fs) else fs.open(path, "rb")
            if getattr(raw, "details", {}).get("type") == "directory":  # "opened" all the same
                raise FileNotFoundError
        except (FileNotFoundError, ValueError):
            if not is_local(fs) and fs.isdir(path):  # in a store of objects: a prefix, a bucket
                raise IsADirectoryError(21, "Is a directory") from None
            raise
    with closing(io.BufferedReader(raw)) as file:
        with reaching(address):
            plain = compr[compression](file, mode="rb")
        yield plain


def guarded(address: str, lines: Any) -> Iterator[Any]:
    """What an iterator gives, with its errors told.

    Raises:
        UserError: the iterator raised an exception.
    """
    with reaching(address):
        yield from lines
