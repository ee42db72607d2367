"""Reads a trace line by line and checks that it is one.

A killed run leaves a trace without a footer, and perhaps a truncated last line. Such a trace is
read up to there; any other deviation from what `entropix_jax.engine.trace` writes is an error.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening
from entropix_jax.names import REGIMES, TRACE_FORMAT

# In bytes; far more than a token of a model with thousands of heads takes.
LONGEST_LINE = 64 * 2**20

METRICS = """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
    attn_varentropy agreement agreement_published interaction_strength confidence temperature top_p
    min_p""".split()

# Why a row ended, in words. Reasons that are not listed are shown as they are.
ENDS = {
    "eos": "end of text",
    "length": "token limit",
    "confidence": "low confidence",
    "context": "context limit",
    "stop": "stop string",
    "interrupt": "stopped",
    "cancelled": "stopped",
}

# Shapes of JSON: a type (float: any finite number), a list of one shape, a tuple of shapes, or an
# object's shapes by key. A key that ends in "?" may be absent or null, `...` stands for every key,
# keys that are not listed are ignored.
_HEADER = {
    "format_version": int,
    **dict.fromkeys(("model", "sampler", "prompt"), str),
    **dict.fromkeys(("sampler_parameters", "versions", "percentiles?"), dict),
    "prompt_tokens": list,
    "messages?": [{"role": str, "content": str}],
    "calibration?": {"model": dict, "quantiles": {...: (float,) * 101}},
}
_TOKEN = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(METRICS, float),
    "loop": bool,
    **dict.fromkeys(
        ("token_confidence?", "self_certainty?", "max_prob?"), float
    ),  # of later versions
    "top?": [(int, str, float)],
    "branches?": [{"tokens": list, "text": str, "chosen": bool, "score?": float}],
    "layers?": [[float]],
    "chosen?": bool,
}
_ROW = {
    **dict.fromkeys(("row", "tokens", "forwards"), int),
    **dict.fromkeys(("text", "finish_reason?", "error?"), str),
}
_FOOTER = {"rows": [_ROW], "timings": {...: float}}


@dataclass
class TraceReader:
    """Iterates over the lines of a trace without keeping them.

    After the iteration `header` and `footer` are the trace's own (`footer` is None if the run was
    killed), `tokens` and `retracted` count each row's committed and retracted tokens, and `torn`
    says whether the last line was truncated.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    footer: dict[str, Any] | None = None
    tokens: Counter[int] = field(default_factory=Counter)
    retracted: Counter[int] = field(default_factory=Counter)
    torn: bool = False
    _number: int = 0
    _next: dict[int, int] = field(default_factory=dict)  # each row's next position
    _farthest: dict[int, int] = field(default_factory=dict)  # that of a token that was retracted

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yields the bytes and the parsed object of each complete line. UserError, which names the
        file and the line, if this is no trace, or a damaged one."""
        with opening(self.path) as file:
            while raw := file.readline(LONGEST_LINE).removeprefix(b"\xef\xbb\xbf"):
                self._number += 1
                if len(raw) == LONGEST_LINE:
                    self._refuse("the line is too long")
                record = self._parse(raw)
                if record is None:
                    break
                self._check(record)
                yield raw, record
        if not self._number:
            raise UserError(f"{self.path}: empty: not a trace")
        if not self.header:
            self._refuse("truncated within the header")

    def _parse(self, raw: bytes) -> dict[str, Any] | None:
        """The line's object; None for a truncated last line."""
        try:
            record = json.loads(raw.decode(), parse_constant=self._refuse_number)
        except (ValueError, RecursionError) as error:
            if raw.startswith(b"{") and not raw.endswith(b"\n"):
                self.torn = True
                return None
            is_utf8 = not isinstance(error, UnicodeDecodeError)
            self._refuse("not JSON: not a trace" if is_utf8 else "not UTF-8")
        if not isinstance(record, dict):
            self._refuse("not a JSON object: not a trace")
        return record

    def _check(self, record: dict[str, Any]) -> None:
        kind = record.get("type")
        if not self.header:
            if {"id", "line", "digest"} <= record.keys():
                told = "run batch with --trace DIR and give one of its traces"
                self._refuse(f"a batch's output has no page: {told}")
            if kind != "header":
                self._refuse("not a trace: the first line must be a header")
            version = record.get("format_version")
            if isinstance(version, int) and version != TRACE_FORMAT:
                self._refuse(f"trace format {version}; this version reads {TRACE_FORMAT}")
            self._check_shape(record, _HEADER)
            self.header = record
        elif self.footer is not None:
            self._refuse("data after the footer")
        elif kind in ("token", "retracted"):
            self._check_token(record)
        elif kind == "footer":
            self._check_shape(record, _FOOTER)
            for row in record["rows"]:
                count, found = row["tokens"], self.tokens[row["row"]]
                if count != found:
                    where = f"{count} tokens in row {row['row']}"
                    self._refuse(f"the footer counts {where}, the file has {found}")
            self.footer = record
        else:
            self._refuse(f"unknown line type {json.dumps(kind)}")

    def _check_token(self, record: dict[str, Any]) -> None:
        if "context" in record and "row" not in record:
            self._refuse("a trace of inspect, which generates nothing, has no page")
        self._check_shape(record, _TOKEN)
        if record["regime"] not in REGIMES:
            self._refuse(f"unknown regime {json.dumps(record['regime'])}")
        row, position = record["row"], record["position"]
        expected = self._next.setdefault(row, position)
        retracted = record["type"] == "retracted"
        # Of retracted tokens there may be any number, each after one of the position before it.
        farthest = self._farthest.get(row, expected) if retracted else expected
        if not expected <= position <= farthest:
            problem = f"row {row} has position {position}, expected {expected}"
            self._refuse(f"{problem}: lines are missing")
        (self.retracted if retracted else self.tokens)[row] += 1
        self._farthest[row] = position + 1
        self._next[row] = expected if retracted else position + 1

    def _check_shape(self, record: dict[str, Any], shape: dict[str, Any]) -> None:
        """Refuses an object that lacks a key, or has a value of another shape."""
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if not _has(record, key, inner):
                self._refuse(f"'{name}' is {'malformed' if name in record else 'missing'}")

    def _refuse_number(self, name: str) -> NoReturn:
        self._refuse(f"{name} is not a number")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: line {self._number}: {problem}")


def _has(record: dict[str, Any], key: str, shape: Any) -> bool:
    """Whether an object has a value of this shape, or none under an optional key."""
    value = record.get(key.removesuffix("?"))
    return (value is None and key.endswith("?")) or fits(value, shape)


def fits(value: Any, shape: Any) -> bool:
    """Whether a JSON value has a shape, see `_HEADER`. True is not 1, and an overflowed number is
    not a number."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if ... in shape:
            return all(fits(one, shape[...]) for one in value.values())
        return all(_has(value, key, inner) for key, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        same = isinstance(value, list) and len(value) == len(shape)
        return same and all(map(fits, value, shape))
    if isinstance(value, bool) or shape is bool:
        return isinstance(value, bool) and shape is bool
    if shape is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, shape)
