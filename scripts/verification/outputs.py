"""What a command left in its folder, as records that can be held against another run's."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.report.page import run_page
from entropix_jax.report.reading import TraceReader

_TIMES = ("timings", "seconds")  # what differs from run to run
_PAGE_END = "</html>"


@dataclass
class Left:
    """What a folder holds. A record is known by its file and its id, or its line in it."""

    records: dict[tuple[str, str], Any] = field(default_factory=dict)
    duplicated: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)  # whose last line is not whole
    broken: list[str] = field(default_factory=list)  # that are no files of their kind
    scratch: list[str] = field(default_factory=list)  # temporary files and folders

    def of(self, name: str) -> dict[tuple[str, str], Any]:
        """The records of one file."""
        return {key: value for key, value in self.records.items() if key[0] == name}

    @property
    def files(self) -> list[str]:
        """The files that there are under their final names."""
        return list(dict.fromkeys(name for name, _ in self.records))


def left_in(folder: Path, apart: tuple[str, ...] = ()) -> Left:
    """Reads what lies in a folder; `apart` are files that are inputs."""
    left = Left()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if any(part.startswith(".") for part in Path(name).parts):
            left.scratch.append(name)
        elif path.is_file() and name not in apart:
            try:
                _read(path, name, left)
            except (ValueError, KeyError, OSError, UserError) as error:
                left.broken.append(f"{name}: {type(error).__name__}: {error}")
    return left


def _read(path: Path, name: str, left: Left) -> None:
    if path.suffix == ".jsonl":
        # The parts of an object are its records on their way.
        _add_lines(path, name.partition(".parts/")[0], left)
    elif path.suffix in (".csv", ".parquet"):
        for number, row in enumerate(_rows(path)):
            left.records[name, f"row {number}"] = _timeless(row)
    elif path.suffix == ".json":
        left.records[name, ""] = _timeless(json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".html":
        text = path.read_text(encoding="utf-8")
        if not text.rstrip().endswith(_PAGE_END):
            raise ValueError("the page has no end")
        tokens = _tokens_of_page(text)
        # A run's page holds its timings, too: it is known by its tokens.
        left.records[name, ""] = _digest(text.encode() if tokens is None else tokens)
    else:
        left.records[name, ""] = _digest(path.read_bytes())


def page_is_of_its_trace(page: Path) -> bool:
    """Whether a page is what its trace makes."""
    return page.read_text(encoding="utf-8") == run_page(page.with_suffix(".jsonl"))


def trace_tokens(path: Path) -> list[Any]:
    """The tokens of a trace, whole or cut short.

    Raises:
        UserError: it is damaged.
    """
    lines = [line.record for line in TraceReader(path)]
    return [line for line in lines if line["type"] in ("token", "retracted")]


def _add_lines(path: Path, name: str, left: Left) -> None:
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            left.torn.append(name)
            return
        record = json.loads(raw)
        own = record.get("id") if "digest" in record else None
        key = (name, f"line {number}" if own is None else f"id {own}")
        if key in left.records:
            left.duplicated.append(f"{name}: {key[1]}")
        left.records[key] = _timeless(record)


def _tokens_of_page(text: str) -> bytes | None:
    """The lines of the trace that a run's page carries, but for the footer; None of other pages."""
    carried = re.search(r'<script type="text/plain" id="trace-0">([^<]*)</script>', text)
    if carried is None:
        return None
    return zlib.decompress(base64.b64decode(carried[1])).rpartition(b'{"type": "footer"')[0]


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
        return
    from pyarrow import parquet

    yield from parquet.read_table(path).to_pylist()


def _timeless(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: one for key, one in value.items() if key not in _TIMES}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
