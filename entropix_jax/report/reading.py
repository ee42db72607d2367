"""Reading a trace back, line by line, and telling what is wrong with it and where.

A run that was killed leaves a trace without a footer, and perhaps half of its last line: such a
trace is read as far as it goes. Whatever else is not as `entropix_jax.trace` writes it is refused.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from entropix_jax.errors import UserError

# The trace module's own number; it is not imported because it needs JAX. A test compares them.
FORMAT_VERSION = 1
REGIMES = ("lelv", "helv", "lehv", "hehv", "mid")

# Far more than a token of a model with thousands of heads takes.
LONGEST_LINE = 64 * 2**20

NUMBER = (int, float)
_METRICS = """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
    attn_varentropy agreement agreement_published interaction_strength confidence temperature top_p
    min_p""".split()
_HEADER = {
    "format_version": int,
    "model": str,
    "sampler": str,
    "sampler_parameters": dict,
    "versions": dict,
    "prompt": str,
    "prompt_tokens": list,
}
_TOKEN: dict[str, Any] = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(_METRICS, NUMBER),
    "loop": bool,
}
_FOOTER = {"rows": list, "timings": dict}
_ROW = {"row": int, "text": str, "tokens": int, "forwards": int}
_ENDED = ("finish_reason", "error")  # of a row, where there is something to tell
KINDS = {int: "an integer", str: "text", dict: "an object", list: "a list", bool: "true or false"}


@dataclass(frozen=True)
class Line:
    """One whole line of a trace: its number from 1, its bytes with the line break, and what it
    says."""

    number: int
    raw: bytes
    record: dict[str, Any]


@dataclass
class TraceReader:
    """Iterates over the lines of a trace, of which it keeps none.

    Once it is through, `header` and `footer` are the trace's own, `tokens` and `retracted` the
    numbers of tokens of each row that were committed and taken back, and `torn` says that the last
    line was cut off. `footer` is None where the run was killed.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    footer: dict[str, Any] | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    retracted: dict[int, int] = field(default_factory=dict)
    torn: bool = False
    _number: int = 0
    _due: dict[int, int] = field(default_factory=dict)  # the position of each row's next token

    def __iter__(self) -> Iterator[Line]:
        """The whole lines, in order, each looked at.

        Raises:
            UserError: the file is missing, unreadable, empty, not a trace, or damaged: one line
                that names the file and the line in it.
        """
        try:
            with self.path.open("rb") as file:
                yield from self._lines(file)
        except FileNotFoundError:
            raise UserError(f"{self.path}: no such file") from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        except ValueError:  # a NUL in the path
            raise UserError(f"{str(self.path)!r}: not a file name") from None

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        while raw := file.readline(LONGEST_LINE):
            self._number += 1
            if len(raw) == LONGEST_LINE:
                self._refuse("too long for a line of a trace")
            record = self._parse(raw)
            if record is None:
                self.torn = True
                break
            self._check(record)
            yield Line(self._number, raw, record)
        if not self._number:
            raise UserError(f"{self.path}: empty: not a trace")
        if not self.header:
            self._refuse("cut off within the header: nothing of the run is left")

    def _parse(self, raw: bytes) -> dict[str, Any] | None:
        """What a line says; None where it is the last one and was cut off."""
        try:
            record = json.loads(raw.decode(), parse_constant=self._no_number)
        except (ValueError, RecursionError) as error:
            # What a killed run leaves begins like an object and has no line break.
            if raw.startswith(b'{"type"') and not raw.endswith(b"\n"):
                return None
            what = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            self._refuse(f"not {what}" + ("" if self.header else ": not a trace"))
        if not isinstance(record, dict):
            self._refuse("not a JSON object" + ("" if self.header else ": not a trace"))
        return record

    def _no_number(self, name: str) -> NoReturn:
        self._refuse(f"{name} is no number of a trace")

    def _check(self, record: dict[str, Any]) -> None:
        kind = record.get("type")
        if not self.header:
            if kind != "header":
                self._refuse("not a trace: it does not begin with a header")
            self._check_header(record)
        elif self.footer is not None:
            self._refuse("something follows the footer")
        elif kind in ("token", "retracted"):
            self._check_token(record)
        elif kind == "footer":
            self._check_footer(record)
        else:
            self._refuse(f"no line of a trace has the type {json.dumps(kind)}")

    def _check_header(self, record: dict[str, Any]) -> None:
        version = record.get("format_version")
        if isinstance(version, int) and version != FORMAT_VERSION:
            self._refuse(f"a trace of format {version}, this version reads {FORMAT_VERSION}")
        self._check_fields(record, _HEADER)
        self.header = record

    def _check_token(self, record: dict[str, Any]) -> None:
        if "context" in record and "row" not in record:
            self._refuse("a token of inspect, which generates nothing: a page is made of a run")
        self._check_fields(record, _TOKEN)
        if record["regime"] not in REGIMES:
            self._refuse(f"no regime {json.dumps(record['regime'])}")
        self._check_extras(record)
        row, position = record["row"], record["position"]
        due = self._due.setdefault(row, position)
        if position != due:
            self._refuse(
                f"position {position} of row {row}, where {due} was due: lines are missing"
            )
        counts = self.retracted if record["type"] == "retracted" else self.tokens
        counts[row] = counts.get(row, 0) + 1
        if record["type"] == "token":
            self._due[row] = position + 1

    def _check_extras(self, record: dict[str, Any]) -> None:
        """What a token has only where it was asked for."""
        for item in self._list(record, "top"):
            if not (
                isinstance(item, list)
                and len(item) == 3
                and isinstance(item[1], str)
                and is_kind(item[2], NUMBER)
            ):
                self._refuse("'top' must hold token, text and probability of the likeliest tokens")
        for branch in self._list(record, "branches"):
            if not isinstance(branch, dict):
                self._refuse("'branches' must hold an object for each branch")
            score = branch.get("score")
            self._check_fields(branch, {"tokens": list, "text": str, "chosen": bool})
            if score is not None and not is_kind(score, NUMBER):
                self._refuse("'score' of a branch is not a number")
        for layer in self._list(record, "layers"):
            if not (isinstance(layer, list) and all(is_kind(value, NUMBER) for value in layer)):
                self._refuse("'layers' must hold a list of numbers for each layer")

    def _list(self, record: dict[str, Any], name: str) -> list[Any]:
        value = record.get(name, [])
        if not isinstance(value, list):
            self._refuse(f"'{name}' is not a list")
        return value

    def _check_footer(self, record: dict[str, Any]) -> None:
        self._check_fields(record, _FOOTER)
        for row in record["rows"]:
            if not isinstance(row, dict):
                self._refuse("'rows' must hold an object for each row")
            self._check_fields(row, _ROW)
            told = {name: str for name in _ENDED if row.get(name) is not None}
            self._check_fields(row, told)
            found = self.tokens.get(row["row"], 0)
            if row["tokens"] != found:
                self._refuse(
                    f"the footer counts {row['tokens']} tokens of row {row['row']}, "
                    f"the file holds {found}"
                )
        for name, seconds in record["timings"].items():
            if not is_kind(seconds, NUMBER):
                self._refuse(f"'{name}' of 'timings' is not a number")
        self.footer = record

    def _check_fields(self, record: dict[str, Any], fields: dict[str, Any]) -> None:
        what = f"a {record['type']}" if "type" in record else "an entry"
        for name, kind in fields.items():
            if name not in record:
                self._refuse(f"{what} without '{name}'")
            if not is_kind(record[name], kind):
                self._refuse(f"'{name}' is not {KINDS.get(kind, 'a number')}")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: line {self._number}: {problem}")


def is_kind(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has a type: true is not 1, and what overflowed is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and not (isinstance(value, float) and math.isinf(value))


@dataclass(frozen=True)
class Trace:
    """A whole trace: its header, its tokens in order (those that were taken back have the type
    "retracted"), and its footer, None where the run was killed."""

    header: dict[str, Any]
    tokens: list[dict[str, Any]]
    footer: dict[str, Any] | None
    torn: bool


def read_trace(path: Path, without: tuple[str, ...] = ()) -> Trace:
    """Reads a trace into memory.

    Args:
        without: fields of tokens that are not needed ("layers", "top", "branches"): most of a
            trace's size is theirs.

    Raises:
        UserError: as `TraceReader`.
    """
    reader = TraceReader(path)
    tokens = []
    for line in reader:
        if line.record["type"] in ("token", "retracted"):
            tokens.append({k: v for k, v in line.record.items() if k not in without})
    return Trace(reader.header, tokens, reader.footer, reader.torn)
