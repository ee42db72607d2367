"""JSON from files, line by line or whole, and whether it has the shape that it must have.

A shape is a type of JSON (`float` stands for any number), a list of one shape, a tuple of the
shapes of a list of that length, or an object's shapes by name, where `"name?"` may be absent; what
else an object has does not matter.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from entropix_jax.errors import UserError
from entropix_jax.files import opening
from entropix_jax.names import REGIMES

# Far more than a token of a model with thousands of heads takes.
LONGEST_LINE = 64 * 2**20

_KINDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
}
_MISSING = object()


@dataclass(frozen=True)
class Maybe:
    """A shape, or null."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object with names of its own, all of one shape."""

    shape: Any


class NotJson(UserError):
    """Damaged, or cut off."""


@dataclass(frozen=True)
class Line:
    """One whole line: its bytes with the line break, and what it says."""

    raw: bytes
    record: dict[str, Any]


@dataclass
class JsonLines:
    """Iterates over the lines of a file, an object each, of which it keeps none.

    `torn` then says that the last line was cut off, as a killed run leaves it.
    """

    path: Path
    torn: bool = False
    _number: int = 0

    def __iter__(self) -> Iterator[Line]:
        """The whole lines, in order.

        Raises:
            UserError: the file is missing, unreadable or damaged: one line that names the file and
                the line in it.
        """
        with opening(self.path) as file:
            while raw := file.readline(LONGEST_LINE):
                self._number += 1
                if len(raw) == LONGEST_LINE:
                    self._refuse("too long for a line")
                try:
                    record = json_object(raw.rstrip(b"\n"), self._where)
                except NotJson:
                    if raw.startswith(b"{") and not raw.endswith(b"\n"):
                        self.torn = True
                        return
                    raise
                yield Line(raw, record)

    @property
    def _where(self) -> str:
        return f"{self.path}: line {self._number}"

    def _check(self, record: dict[str, Any], shape: Mapping[str, Any]) -> None:
        check_shape(record, shape, self._where)

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self._where}: {problem}")


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object that a text of JSON is.

    Raises:
        NotJson: it is not JSON, or not UTF-8.
        UserError: it is no object, or holds a number that is none.
    """

    def no_number(name: str) -> NoReturn:
        raise UserError(f"{where}: {name} is no number")

    try:
        content = json.loads(raw.decode(), parse_constant=no_number)
    except UnicodeDecodeError:
        raise NotJson(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}: " if error.lineno > 1 else ""
        raise NotJson(f"{where}: {line}not JSON") from None
    except (ValueError, RecursionError):  # a number too long, or too many brackets
        raise NotJson(f"{where}: not JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: not a JSON object")
    return content


def check_shape(record: Mapping[str, Any], shape: Mapping[str, Any], where: str) -> None:
    """Refuses an object that has not its shape.

    Raises:
        UserError: the first place at which it is so.
    """
    if found := _misfit(record, shape):
        place, problem = found
        raise UserError(f"{where}: '{place.removeprefix('.')}' {problem}")


def check_regimes(names: Iterable[str], where: str) -> None:
    """Refuses a regime that there is not.

    Raises:
        UserError: there is one.
    """
    if unknown := sorted(set(names) - set(REGIMES)):
        raise UserError(f"{where}: no regime {json.dumps(unknown[0])}")


def _misfit(value: Any, shape: Any) -> tuple[str, str] | None:
    """The first place that has not its shape, and what is wrong there."""
    if isinstance(shape, Maybe):
        return None if value is None else _misfit(value, shape.shape)
    plain = isinstance(shape, type)
    kind = shape if plain else list if isinstance(shape, list | tuple) else dict
    if not _is_kind(value, kind):
        return "", "is missing" if value is _MISSING else f"is not {_KINDS[kind]}"
    if plain:
        return None
    if isinstance(shape, tuple) and len(value) != len(shape):
        return "", f"is not a list of {len(shape)}"
    for key, part, inner in _parts(value, shape):
        if found := _misfit(part, inner):
            return (f"[{key}]" if kind is list else f".{key}") + found[0], found[1]
    return None


def _parts(value: Any, shape: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """What a list or an object is made of: number or name, value, shape."""
    if isinstance(shape, Each):
        yield from ((name, one, shape.shape) for name, one in value.items())
    elif isinstance(shape, list):
        (inner,) = shape
        if not (isinstance(inner, type) and all(_is_kind(one, inner) for one in value)):
            yield from ((number, one, inner) for number, one in enumerate(value))
    elif isinstance(shape, tuple):
        yield from ((number, *pair) for number, pair in enumerate(zip(value, shape, strict=True)))
    else:
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name in value or name == key:
                yield name, value.get(name, _MISSING), inner


def _is_kind(value: Any, kind: type) -> bool:
    """Whether a value of JSON has a type: true is not 1, and what overflowed is no number."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float and isinstance(value, float):
        return not math.isinf(value)
    return isinstance(value, int if kind is float else kind)
