"""Reading small files and writing whole ones, with errors that a user can act on."""

import json
import os
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from entropix_jax.errors import UserError

if sys.platform != "win32":
    import fcntl


@contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading bytes. UserError if that fails, or reading within the block, or the
    file is a Git LFS pointer."""
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: not a file name")
    try:
        with path.open("rb") as file:
            if file.peek(32).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: a Git LFS pointer to the file: run `git lfs pull`")
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; UserError if it cannot be read."""
    with opening(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Returns the text of a file without its byte order mark. UserError if the file cannot be read
    or is not UTF-8."""
    return decode_text(read_bytes(path), str(path))


def decode_text(data: bytes, name: str) -> str:
    """Decodes the bytes of a file or stream of that name, see `read_text`."""
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        raise UserError(f"{name}: {'UTF-16, ' * is_wide}not UTF-8 at byte {error.start}") from error


def decode_json(text: str, where: str = "", **options: Any) -> Any:
    """Decodes JSON. UserError, which begins with `where`, if it is invalid or an object repeats a
    key. `options` are those of `json.loads`."""
    try:
        return json.loads(text, **{"object_pairs_hook": _unique, **options})
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, column {error.colno}"
        problem = f"{error.msg} at {line if error.lineno > 1 else f'character {error.pos}'}"
    except (ValueError, RecursionError) as error:  # a huge integer, or too deep
        problem = str(error)
    raise UserError(f"{where}not valid JSON: {problem}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"'{Counter(key for key, _ in pairs).most_common(1)[0][0]}' is repeated")
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; UserError if it cannot be read or holds none."""
    check_regular(path)
    raw = decode_json(read_text(path), f"{path}: ", object_pairs_hook=None)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return raw


def check_regular(path: Path, hint: str = "") -> None:
    """Raises UserError for a path of something other than a file: a read would wait for a pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: not a regular file{hint}")


def check_own_code(raw: Mapping[str, Any], path: Path) -> None:
    """Refuses (UserError) the file `path`, with this content, if it names Python code to run."""
    if raw.get("auto_map"):
        hint = "remove it if the model needs none of that code"
        raise UserError(f"{path}: 'auto_map' names code in the folder, which is never run: {hint}")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file; UserError if it cannot be read or is not TOML."""
    try:
        return parse_toml(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the content of a TOML document. ValueError if it is not TOML or a number is too long;
    RecursionError if it is nested too deeply."""
    raw = tomllib.loads(text)
    # An integer in hexadecimal may be too long to be written, in an error message for instance.
    repr(raw)
    return raw


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path`, or the target of that link, if the block succeeds.
    Missing parents are made. UserError if it cannot be written."""
    try:
        place = Path(os.path.realpath(path))
        with scratch_beside(place) as scratch:
            yield scratch / place.name
            os.replace(scratch / place.name, place)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """An empty folder beside `path`, removed when the block ends; a killed run leaves it. Missing
    parents are made. UserError if it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".part", dir=path.parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    with scratch as folder:
        yield Path(folder)


def lock_alone(descriptor: int) -> None:
    """Locks an open file until it is closed, where the file system has locks. OSError if another
    process has locked it."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another run is writing to it") from None
    except OSError:  # a file system without locks
        pass


def check_writable(path: Path) -> None:
    """Refuses (UserError) a file that could not be written, without creating it."""
    if os.path.isdir(path):  # no error for an impossible name
        raise UserError(f"{path}: cannot be written: it is a folder")
    if not os.path.isdir(path.parent):
        raise UserError(f"{path}: cannot be written: no folder {path.parent}")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise UserError(f"{path}: cannot be written: no permission")


def check_apart(output: Path, *sources: Path | str | None) -> None:
    """Refuses (UserError) an output that would replace one of its own sources."""
    for source in sources:
        if source is not None and os.path.realpath(output) == os.path.realpath(source):
            raise UserError(f"{output}: would overwrite its own input: give another name")
