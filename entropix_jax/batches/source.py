"""The input of a batch: records of JSON Lines or CSV, one after another, from wherever they lie."""

from __future__ import annotations

import csv
import difflib
import functools
import io
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from entropix_jax.batches.index import Index, hash_of
from entropix_jax.batches.places import guarded, is_compressed, is_local, located, opened
from entropix_jax.errors import UserError
from entropix_jax.files import allow_long_cells

FIELDS = ("prompt", "messages", "id", "sampler", "max_new_tokens", "seed")
COLUMNS = tuple(name for name in FIELDS if name != "messages")


@dataclass(frozen=True, slots=True)
class Record:
    """One record that can be run.

    `line` is where it begins, counted from 1; `id` is unique in the input. `digest` is a 60-bit
    hash of how the record is written: of the line (of CSV also of the header). Of `prompt` and
    `messages` one is None; a message has at least the texts `role` and `content`. What else is None
    was not given.
    """

    line: int
    id: str
    digest: int
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampler: str | None = None
    max_new_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record that cannot be run, and why: one line that names neither file nor line.

    `line` and `digest` are as in `Record`. `id` is None where the record has none of its own: it
    could not be read, or an earlier record has it.
    """

    line: int
    id: str | None
    digest: int
    error: str


def named(record: Record | BadRecord) -> str:
    """A record as a line of an error calls it."""
    return f"line {record.line}" + ("" if record.id is None else f" (id {record.id!r})")


class _Refused(Exception):
    """What is wrong with a record."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A record as it stands in the file: its fields, or why it has none."""

    line: int
    digest: int
    fields: Mapping[str, Any] | str


def read_records(address: str, *, share: tuple[int, int] = (0, 1)) -> Iterator[Record | BadRecord]:
    """The records of a file in their order, read as they are asked for.

    A file is JSON Lines, or CSV with a header where its name ends in `.csv`, each compressed where
    a further suffix says so (`.gz`, ...). Fields: `prompt` (text) or, not in CSV, `messages`
    (objects with the texts `role` and `content`), and at will `id` (text or integer; else the
    line's number), `sampler` (text), `max_new_tokens` (from 1) and `seed` (from 0). null and an
    empty cell are nothing. Other fields are ignored, unless their name is nearly one of these.
    Blank lines, and CSV rows of blank cells, are no records.

    Memory: some longest lines, and about 20 bytes for the id of each line.

    Args:
        address: a path, a URL that fsspec knows (`s3://bucket/key`), or `-`: JSON Lines from
            standard input.
        share: (i, n): of all records those whose number, from 0, is i modulo n. The others are read
            for their ids alone.

    Raises:
        UserError: the file cannot be read, or its CSV header is wrong. While iterating.
        ValueError: no such share.
    """
    index, count = share
    if not 0 <= index < count:
        raise ValueError(f"share {index} of {count}")
    return _records(address, index, count)


def check_input(address: str) -> None:
    """Looks whether an input can be read, as far as its first record. A pipe is left alone: it
    opens once.

    Raises:
        UserError: it cannot, or its CSV header is wrong.
    """
    if address == "-":
        return
    fs, path = located(address)
    if is_local(fs) and Path(path).is_fifo():
        return
    with closing(_records(address, 0, 1)) as records:
        next(records, None)


def _records(address: str, index: int, count: int) -> Generator[Record | BadRecord, None, None]:
    suffixes = [suffix.lower() for suffix in PurePath(address).suffixes]
    if is_compressed(address):
        suffixes.pop()
    seen = Index()  # of ids: one half of a hash of 120 bits to the other
    with opened(address) as file:
        rows = _csv_rows(file, address) if suffixes[-1:] == [".csv"] else _json_rows(file, address)
        for number, row in enumerate(rows):
            # Ids are looked at in every share, so that all agree on which came first.
            own: str | None = None
            refused: str | None = None
            try:
                own = _id_of(row)
                key, value = divmod(hash_of(own.encode(), 120), 2**60)
                if not seen.add(key, value) and seen.find(key) == value:
                    refused, own = f"the id {_shown(own)} came before", None
            except _Refused as error:
                refused = str(error)
            if number % count != index:
                continue
            try:
                if own is None:
                    raise _Refused(refused)
                yield _record(row, own)
            except _Refused as error:
                yield BadRecord(row.line, own, row.digest, str(error))


def _json_rows(file: BinaryIO, address: str) -> Iterator[_Row]:
    for line, raw in enumerate(guarded(address, file), start=1):
        text = raw.removeprefix(b"\xef\xbb\xbf").strip() if line == 1 else raw.strip()
        if text:
            yield _Row(line, hash_of(text), _json_fields(text))


def _json_fields(text: bytes) -> Mapping[str, Any] | str:
    try:
        fields = json.loads(text.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:  # an integer or a nesting beyond all bounds
        return f"not valid JSON: {error}"
    return fields if isinstance(fields, dict) else f"not a JSON object: {_shown(fields)}"


def _csv_rows(file: BinaryIO, address: str) -> Iterator[_Row]:
    allow_long_cells()
    lines: list[str] = []  # of the record that is being read

    def kept() -> Iterator[str]:
        # What is not UTF-8 comes as surrogates, which nothing else does.
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        try:
            for line in guarded(address, text):
                lines.append(line)
                yield line
        finally:
            if not file.closed:
                text.detach()  # who opened the file closes it

    # Strict: a quote that is out of place ends with its line, rather than taking in what follows.
    reader = csv.reader(kept(), strict=True)
    header: list[str] | None = None
    start = b""
    while True:
        line = reader.line_num + 1
        lines.clear()
        cells: list[str] = []
        problem = ""
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            problem = f"not valid CSV: {error}"
        if not problem and not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _header(address, cells, problem)
            start = json.dumps(header).encode()
            continue
        written = "".join(lines).strip("\r\n").encode("utf-8", "surrogateescape")
        fields = problem or _csv_fields(header, cells)
        yield _Row(line, hash_of(start + written), fields)
    if header is None:
        raise UserError(f"{address}: empty: CSV begins with a row of column names")


def _header(address: str, cells: Sequence[str], problem: str) -> list[str]:
    """The names of the columns.

    Raises:
        UserError: they are no CSV, or not what a batch needs.
    """
    names = [cell.strip() for cell in cells]
    if problem := problem or _header_problem(names):
        raise UserError(f"{address}: header of the CSV: {problem}")
    return names


def _header_problem(names: Sequence[str]) -> str:
    if _lone_surrogate("".join(names)):
        return "not UTF-8"
    for name in names:
        if nearest := _misspelled(name, COLUMNS):
            return f"unknown column {_shown(name)}: did you mean '{nearest}'?"
        if name in COLUMNS and names.count(name) > 1:
            return f"two columns '{name}'"
    if "messages" in names:
        return "'messages' is no column of CSV: give conversations as JSON Lines"
    if "prompt" not in names:
        return f"no column 'prompt', only {_shown(', '.join(names))}"
    return ""


def _csv_fields(header: Sequence[str], cells: Sequence[str]) -> Mapping[str, Any] | str:
    if _lone_surrogate("".join(cells)):
        return "not UTF-8"
    if len(cells) != len(header):
        return f"{len(cells)} cells under a header of {len(header)}"
    # Other columns are none of ours; what is wrong with their names the header has told.
    fields: dict[str, Any] = {
        name: cell for name, cell in zip(header, cells, strict=True) if cell and name in COLUMNS
    }
    for name in ("max_new_tokens", "seed"):
        digits = fields.get(name, "").strip()
        if digits.isascii() and digits.isdigit() and len(digits) <= 100:
            fields[name] = int(digits)
    return fields


def _id_of(row: _Row) -> str:
    """The id of a record, given or not.

    Raises:
        _Refused: no record, or none that can be an id.
    """
    if isinstance(row.fields, str):
        raise _Refused(row.fields)
    own = row.fields.get("id")
    if own is None:
        return str(row.line)
    if isinstance(own, bool) or not isinstance(own, str | int):
        raise _Refused(f"'id' must be text or an integer, not {_shown(own)}")
    return _text("'id'", str(own))


def _record(row: _Row, own: str) -> Record:
    """The record of a row, whose id is known.

    Raises:
        _Refused: a field is wrong, missing or misspelled.
    """
    assert not isinstance(row.fields, str)
    given = {name: value for name, value in row.fields.items() if value is not None}
    for name in given:
        if nearest := _misspelled(name, FIELDS):
            raise _Refused(f"unknown field {_shown(name)}: did you mean '{nearest}'?")
    prompt, messages = given.get("prompt"), given.get("messages")
    if prompt is not None and messages is not None:
        raise _Refused("both 'prompt' and 'messages': give one")
    if prompt is None and messages is None:
        raise _Refused("neither 'prompt' nor 'messages'")
    return Record(
        line=row.line,
        id=own,
        digest=row.digest,
        prompt=None if prompt is None else _text("'prompt'", prompt),
        messages=None if messages is None else _conversation(messages),
        sampler=_text("'sampler'", given["sampler"]) if "sampler" in given else None,
        max_new_tokens=_whole("max_new_tokens", given, 1),
        seed=_whole("seed", given, 0),
    )


def _text(what: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Refused(f"{what} must be text, not {_shown(value)}")
    if not value and not may_be_empty:
        raise _Refused(f"{what} is empty")
    if _lone_surrogate(value):
        raise _Refused(f"{what} has half a surrogate pair, which is no character")
    return value


def _whole(name: str, given: Mapping[str, Any], least: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _Refused(f"'{name}' must be an integer of at least {least}, not {_shown(value)}")
    return value


def _conversation(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise _Refused("'messages' must be a non-empty list of objects with 'role' and 'content'")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _Refused(f"message {number} must be an object with 'role' and 'content'")
        _text(f"'role' of message {number}", message["role"])
        _text(f"'content' of message {number}", message["content"], may_be_empty=True)
    return tuple(value)


@functools.lru_cache(256)
def _misspelled(name: str, known: tuple[str, ...]) -> str | None:
    """The field that a name which is none was meant to be, if it is close to one."""
    if name in known:
        return None
    folded = name.strip().lower().replace("-", "_").replace(" ", "_")
    if folded in known:
        return folded
    if len(folded) > 32:  # comparing takes the square of it
        return None
    # Of `id` the close ones are columns in their own right: `idx`, `uid`, `pid`. The cutoff takes
    # in `max_tokens` and leaves out `prompt_id`.
    close = difflib.get_close_matches(folded, [field for field in known if field != "id"], 1, 0.82)
    return close[0] if close else None


def _lone_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(value: object) -> str:
    """A value in a message: on one line and not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
