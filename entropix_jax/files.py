"""Reading small files and writing whole ones, with the errors that a user can act on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        UserError: missing or unreadable.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path
        raise UserError(f"{str(path)!r}: not a file name") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        UserError: missing, unreadable or not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: missing, unreadable, not JSON, or not an object.
    """
    try:
        raw = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return raw


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends without an error.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield scratch / path.name
            os.replace(scratch / path.name, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_writable(path: Path) -> None:
    """Looks whether a file could be written, without leaving a file.

    Raises:
        UserError: it could not.
    """
    if path.is_dir():
        raise UserError(f"{path}: cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written: no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path}: cannot be written: no permission")
