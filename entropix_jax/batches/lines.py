"""The results of an output, line by line, and what each is known by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from entropix_jax.batches.index import hash_of
from entropix_jax.batches.places import reaching
from entropix_jax.errors import UserError


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an output, with its line break. `key` is None of what is no result."""

    number: int
    raw: bytes
    key: int | None
    digest: int


def lines_of(file: BinaryIO, address: str, *, whole: bool) -> Iterator[Line]:
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
        yield Line(number, raw if ended else raw + b"\n", *_key_and_digest(value))
        raw = following


def _key_and_digest(value: object) -> tuple[int | None, int]:
    match value:
        case {"id": str() | None as own, "line": int(line), "digest": str(text)} if re.fullmatch(
            "[0-9a-f]{15}", text
        ):
            digest = int(text, 16)
            return key_of(own, line, digest), digest
    return None, 0


def key_of(own: str | None, line: int, digest: int) -> int:
    """What a record is known by: its id, or else where it stands and what it says. 60 bits."""
    name = f"line {line} {digest:x}" if own is None else f"id {own}"
    return hash_of(name.encode("utf-8", "surrogatepass"))
