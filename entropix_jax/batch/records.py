"""Batch input: records of JSON Lines or CSV, from a path, a URL or standard input."""

import csv
import io
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import PurePath
from typing import Any

from entropix_jax.batch.storage import (
    is_compressed,
    local_path,
    open_file,
    read_lines,
    storage_errors,
)
from entropix_jax.errors import UserError
from entropix_jax.host.arguments import abbreviate, as_integer
from entropix_jax.host.files import decode_json

COLUMNS = ("prompt", "id", "sampler", "max_new_tokens", "seed")  # of CSV
_INTEGERS = {"max_new_tokens": " of at least 1", "seed": ""}


@dataclass(frozen=True, slots=True)
class Record:
    """A valid record. Exactly one of `prompt` and `messages` is set; None is a field not given."""

    line: int  # its first line in the input, from 1
    id: str  # unique in the input; the line number where the record has none
    digest: str  # `content_hash` of the record as written
    prompt: str | None = None
    messages: list[Any] | None = None  # whatever they are: the chat's template checks them
    sampler: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be run. `error` is one line, without file and line; `id` is None where
    the record has no usable id of its own, or repeats an earlier one."""

    line: int
    id: str | None
    digest: str
    error: str


# Of each record: its line, its digest, and what parses its fields, or raises UserError.
_Rows = Iterator[tuple[int, str, Callable[[], Mapping[str, Any]]]]
# Beginnings of files of gzip, bzip2, xz, Zstandard, ZIP (spreadsheets) and Parquet.
_BINARY = b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"PAR1"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def content_hash(data: bytes) -> str:
    """A 60-bit hash as 15 hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()[:15]


def read_records(address: str) -> Generator[Record | BadRecord, None, None]:
    """Streams the records of a file in order: of CSV with a header if its name ends in `.csv`, else
    of JSON Lines. A further suffix (`.gz`, ...) names a compression.

    Fields: `prompt` (text) or, in JSON, `messages` (objects with the texts `role` and `content`),
    and optionally `id` (text or integer), `sampler` (text), `max_new_tokens` (from 1) and `seed`.
    null, empty cells, blank lines and other fields are ignored. The address is a path, a URL that
    fsspec knows (`s3://bucket/key`), or - for standard input. UserError if the file cannot be read
    or has no records, another format, or an invalid CSV header.
    """
    line = 0
    suffixes = [suffix.lower() for suffix in PurePath(address).suffixes]
    if is_compressed(address):
        suffixes.pop()
    parse_file, newline = (_csv_rows, "") if suffixes[-1:] == [".csv"] else (_json_rows, "\n")
    ids: set[str] = set()
    with open_file(address) as file, _open_text(file, address, newline) as text:
        for line, digest, parse in parse_file(read_lines(address, text), address):
            record: Record | BadRecord
            record_id = None
            try:
                fields = {name: value for name, value in parse().items() if value is not None}
                own = _parse_id(fields.get("id", line))
                if own in ids:
                    raise UserError(f"the id {abbreviate(own)} came before")
                ids.add(own)
                record_id = own
                record = _parse_record(fields, line, record_id, digest)
            except UserError as error:
                record = BadRecord(line, record_id, digest, str(error))
            yield record
    if line == 0:
        raise UserError(f"{address}: holds no records")


def check_input(address: str) -> None:
    """Reads the first record of an input. Pipes and standard input, which open once, are skipped.
    UserError as `read_records`."""
    path = None if address == "-" else local_path(address)
    if address == "-" or (path is not None and path.is_fifo()):
        return
    with closing(read_records(address)) as records:
        next(records, None)


def _open_text(file: Any, address: str, newline: str) -> io.TextIOWrapper:
    """Returns the text of a file in UTF-8, UTF-16 or UTF-32. UserError for another format."""
    with storage_errors(address):
        file = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)
        head = file.peek(4)[:4]
    if head.startswith(_BINARY):
        hint = "a compressed file needs a suffix such as .gz, others must be converted"
        raise UserError(f"{address}: neither JSON Lines nor CSV: {hint}")
    # Bytes that are not UTF-8 become lone surrogates, so that only their record is refused.
    return io.TextIOWrapper(file, json.detect_encoding(head), "surrogateescape", newline=newline)


def _json_rows(lines: Iterator[str], address: str) -> _Rows:
    for line, text in enumerate(lines, start=1):
        raw = text.encode("utf-8", "surrogateescape").strip()
        if line == 1 and (raw[:1] == b"[" or raw == b"{"):
            raise UserError(f"{address}: one JSON document: `jq -c '.[]'` makes JSON Lines of it")
        if raw:
            yield line, content_hash(raw), partial(_parse_json, raw)


def _parse_json(text: bytes) -> Mapping[str, Any]:
    try:
        fields = decode_json(text.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start} of the line") from None
    if not isinstance(fields, dict):
        raise UserError(f"not a JSON object: {abbreviate(fields)}")
    return fields


def _csv_rows(lines: Iterator[str], address: str) -> _Rows:
    # The module's own limit, 128 KiB, is less than a model's context.
    csv.field_size_limit(max(csv.field_size_limit(), 2**24))
    # Strict: a stray quote is an error of its line, instead of swallowing the lines after it.
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    while True:
        line, problem = reader.line_num + 1, ""
        cells: list[str] = []
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            problem = f"not valid CSV: {error}"
        if not problem and not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            if problem := problem or _find_header_problem(header):
                raise UserError(f"{address}: header of the CSV: {problem}")
            continue
        digest = content_hash(json.dumps([header, cells, problem]).encode())
        yield line, digest, partial(_parse_cells, header, cells, problem)
    if header is None:
        raise UserError(f"{address}: empty: CSV needs a row of column names")


def _find_header_problem(names: Sequence[str]) -> str:
    """Returns the fault of the column names, empty if they are valid."""
    if _LONE_SURROGATE.search("".join(names)):
        return "not UTF-8"
    for name in COLUMNS:
        if names.count(name) > 1:
            return f"two columns '{name}'"
    if "messages" in names:
        return "'messages' is no column of CSV: give conversations as JSON Lines"
    return "" if "prompt" in names else f"no column 'prompt', only {abbreviate(', '.join(names))}"


def _parse_cells(header: Sequence[str], cells: Sequence[str], problem: str) -> Mapping[str, Any]:
    if problem:
        raise UserError(problem)
    if _LONE_SURROGATE.search("".join(cells)):
        raise UserError("not UTF-8")
    if len(cells) != len(header):
        raise UserError(f"{len(cells)} cells under a header of {len(header)}")
    pairs = zip(header, cells, strict=True)
    fields: dict[str, Any] = {name: cell for name, cell in pairs if cell and name in COLUMNS}
    for name in _INTEGERS:
        if found := re.fullmatch(r"\s*(-?[0-9]{1,100})(?:\.0*)?\s*", fields.get(name, "")):
            fields[name] = int(found[1])
    return fields


def _parse_id(value: object) -> str:
    own = value if isinstance(value, str) else as_integer(value)
    if own is None:
        raise UserError(f"'id' must be text or an integer, not {abbreviate(value)}")
    return _parse_text("'id'", str(own))


def _parse_record(fields: Mapping[str, Any], line: int, record_id: str, digest: str) -> Record:
    if "prompt" in fields and "messages" in fields:
        raise UserError("both 'prompt' and 'messages': give one")
    if "prompt" not in fields and "messages" not in fields:
        raise UserError("neither 'prompt' nor 'messages'")
    for name in ("prompt", "sampler"):
        if name in fields:
            _parse_text(f"'{name}'", fields[name])
    numbers = {name: as_integer(fields[name]) for name in _INTEGERS if name in fields}
    for name, number in numbers.items():
        least = _INTEGERS[name]
        if number is None or (least and number < 1):
            problem = f"must be an integer{least}, not {abbreviate(fields[name])}"
            raise UserError(f"'{name}' {problem}")
    messages = fields.get("messages")
    if not isinstance(messages, list | None):
        raise UserError(f"'messages' must be a list, not {abbreviate(messages)}")
    given = {name: fields.get(name) for name in COLUMNS if name != "id"} | numbers
    return Record(line, record_id, digest, messages=messages, **given)


def _parse_text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} must be text, not {abbreviate(value)}")
    if not value:
        raise UserError(f"{what} is empty")
    if _LONE_SURROGATE.search(value):
        raise UserError(f"{what} has half a surrogate pair, which is no character")
    return value
