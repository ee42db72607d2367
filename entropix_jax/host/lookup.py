"""Sources of lookups: tables, web addresses and executables."""

import contextlib
import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any
from urllib.parse import urlsplit

from entropix_jax.errors import UserError
from entropix_jax.host.files import check_regular, decode_json, decode_text, read_bytes

SECONDS = 10.0  # after which a web address or an executable has no result
MAX_BYTES = 1 << 16  # of a result
_FORMS = "a table FILE.csv or FILE.jsonl, a URL, or exec:PATH"
_EXEC = "exec:"
_LATE = f"no result within {SECONDS:g} s"


@dataclass(frozen=True)
class Lookup:
    """A source of results, called with the text of a row so far. `identity` changes with the table
    of a file."""

    identity: str
    find: Callable[[str], str | Future[str | None] | None]

    def __call__(self, text: str) -> str | Future[str | None] | None:
        return self.find(text)


def open_lookup(source: str) -> Lookup:
    """Returns the lookup of a source: a table in a .csv or .jsonl file, an http or https address,
    or exec: and the path of an executable. UserError if it is invalid."""
    if source.startswith(("http://", "https://")):
        try:
            address = urlsplit(source)
            is_valid = bool(address.hostname) and address.port != 0 and source.isprintable()
        except ValueError:
            is_valid = False
        if not is_valid or " " in source:
            raise UserError(f"lookup {source!r}: not a valid URL")
        # Without the query, which may hold a token: identities are stored.
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        identity = f"{address.hostname}{address.path} {digest}"
        return Lookup(identity, lambda text: _in_thread(lambda: _post(source, text)))
    if source.startswith(_EXEC):
        path = Path(source.removeprefix(_EXEC)).absolute()
        if not path.is_file() or not os.access(path, os.X_OK):
            problem = "not executable: run chmod +x" if path.is_file() else "no such file"
            raise UserError(f"lookup {source}: {problem}")
        return Lookup(source, lambda text: _in_thread(lambda: _execute(path, text)))
    path = Path(source)
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise UserError(f"lookup {source!r}: must be {_FORMS}")
    check_regular(path)
    data = read_bytes(path)
    table = _read_table(path, decode_text(data, source))
    digest = hashlib.sha256(data).hexdigest()[:16]
    lengths = sorted({len(key) for key in table}, reverse=True)
    return Lookup(f"{path.name} {digest}", lambda text: _find(table, lengths, text))


def _find(table: dict[str, str], lengths: list[int], text: str) -> str | None:
    """Returns the value of the key, between the borders of words, that ends last in a text; of
    several the longest. None without a key."""

    def splits_word(at: int) -> bool:
        return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()

    for end in range(len(text), 0, -1):
        if splits_word(end):
            continue
        for length in lengths:
            start = end - length
            if start >= 0 and text[start:end] in table and not splits_word(start):
                return table[text[start:end]]
    return None


def _read_table(path: Path, text: str) -> dict[str, str]:
    """Returns the values of a table by key. UserError for an invalid line or a repeated key."""
    read = _read_csv if path.suffix.lower() == ".csv" else _read_jsonl
    table, lines = dict[str, str](), dict[str, int]()
    for line, key, value in read(path, text):
        where = f"{path}: line {line}"
        if not isinstance(key, str) or not isinstance(value, str):
            raise UserError(f"{where}: needs a text as 'key' and as 'value'")
        if not (key := key.strip()):
            raise UserError(f"{where}: the key is empty")
        if key in table:
            raise UserError(
                f"{where}: the key {key!r} is repeated: it is also in line {lines[key]}"
            )
        table[key], lines[key] = value, line
    if not table:
        raise UserError(f"{path}: has no keys")
    return table


def _read_csv(path: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    """Yields the line, key and value of each record."""
    records = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if not {"key", "value"} <= {*(records.fieldnames or ())}:
            raise UserError(f"{path}: line 1: needs the columns 'key' and 'value'")
        for record in records:
            yield records.line_num, record["key"], record["value"]
    except csv.Error as error:
        raise UserError(f"{path}: line {records.reader.line_num}: {error}") from None


def _read_jsonl(path: Path, text: str) -> Iterator[tuple[int, Any, Any]]:
    """Yields the line, key and value of each object."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            record = decode_json(line, f"{path}: line {number}: ")
            record = record if isinstance(record, dict) else {}
            yield number, record.get("key"), record.get("value")


def _in_thread(find: Callable[[], str]) -> Future[str | None]:
    """Runs a lookup in a thread that does not keep the process alive."""
    future: Future[str | None] = Future()

    def run() -> None:
        try:
            future.set_result(find())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: results come only from the address that the user gave."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _post(url: str, text: str) -> str:
    """Posts a text as JSON and returns the result, text or JSON {"text": ...}."""
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline, data = time.monotonic() + SECONDS, b""
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=SECONDS) as answer:
        while (part := answer.read1(MAX_BYTES + 1)) and len(data) <= MAX_BYTES:
            data += part
            if time.monotonic() > deadline:
                raise TimeoutError(_LATE)
        kind = answer.headers.get_content_type()
    found = _decode(data)
    if kind != "application/json":
        return found
    record = decode_json(found, "the answer is ")
    result = record.get("text") if isinstance(record, dict) else record
    if not isinstance(result, str | None):
        raise ValueError("the answer's 'text' is not a text")
    return result or ""


def _execute(path: Path, text: str) -> str:
    """Runs an executable with a text on standard input, and returns its standard output."""
    with tempfile.TemporaryFile() as given:
        given.write(text.encode())
        given.seek(0)
        process = subprocess.Popen(
            [path], stdin=given, stdout=PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
    timer = threading.Timer(SECONDS, _kill, [process])
    timer.daemon = True
    timer.start()
    with process:
        assert process.stdout is not None
        data = process.stdout.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            _kill(process)
    is_late = not timer.is_alive()
    timer.cancel()
    if is_late:
        raise TimeoutError(_LATE)
    found = _decode(data)
    if process.returncode:
        raise ValueError(f"{path.name} ended with status {process.returncode}")
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and the processes that it started."""
    if sys.platform == "win32":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _decode(data: bytes) -> str:
    """Decodes a result. ValueError if it is too long or not UTF-8."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"the result has more than {MAX_BYTES} bytes")
    return data.decode()
