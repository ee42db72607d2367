"""The replay of a whole trace, and its reading from a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.shapes import fits
from entropix_jax.names import read_condition
from entropix_jax.replay.formulas import ARMS, RULES
from entropix_jax.replay.row import Row
from entropix_jax.replay.state import Doubt, Line
from entropix_jax.report.reading import TraceReader
from entropix_jax.sampler.wrong import is_entry

if TYPE_CHECKING:
    from entropix_jax.replay.model import ModelReader

# Shapes of the header and of a row's request.
_HEADER: dict[str, Any] = {
    "seed": int,
    "model_config": dict,
    "precision": {"weights": str, "activations": str},
    "percentiles": dict,
    "calibration": {"quantiles": dict.fromkeys(("entropy", "varentropy"), (float,) * 101)},
}
_REQUEST = {
    **dict.fromkeys(("seed", "max_new_tokens", "budget"), int),
    **dict.fromkeys(("lookup", "ask", "clarify"), bool),
    "row_id": str,
    "eos_ids": [int],
    "stop": [str],
    "source?": (int, int),
    "moves": [{"lines": int, "kept": int, "rewinds": int, "forced": [int], "action": str}],
}
_UNVERIFIED = "it cannot be verified"
SECTIONS = """adaptive adaptive_p arms backspace base branch budget_forcing clarify confidence draw
    dry dynatemp edt epsilon eta explore forking inject lookup loop metrics min_k mirostat
    no_repeat_ngram p_less phrases regimes repetition resample start surrogate think_end thresholds
    top_a top_h top_n_sigma truncation typical view wrong xtc""".split()


@dataclass(frozen=True)
class Trace:
    """The lines of a trace."""

    header: Mapping[str, Any]
    rows: Mapping[int, Sequence[Line]]  # tokens of each row, retracted ones included
    footer: Line


@dataclass(frozen=True)
class Replay:
    """The result of a replay: the number of lines that follow, of those that follow only within
    rounding, and the first line in doubt, if any."""

    tokens: int
    rounded: int
    doubt: Doubt | None

    def __str__(self) -> str:
        if self.doubt is not None:
            return str(self.doubt)
        near = f" ({self.rounded} within rounding)" if self.rounded else ""
        return f"every one of {self.tokens} tokens follows from the settings{near}"


def read_trace(path: Path) -> Trace:
    """Reads a trace for a replay. UserError if the file is no complete trace, or lacks what a
    replay needs."""
    reader, rows, number = TraceReader(path), dict[int, list[Line]](), 0
    for number, (_, record) in enumerate(reader, 1):
        if record["type"] in ("token", "retracted"):
            rows.setdefault(record["row"], []).append(Line(number, record))
    if reader.torn or reader.footer is None:
        raise UserError(f"{path}: cut off after line {number}: only a whole trace can be verified")
    if not rows:
        raise UserError(f"{path}: has no tokens: {_UNVERIFIED}")
    header, footer = reader.header, Line(number, reader.footer)
    for key, shape in _HEADER.items():
        if not fits(header.get(key), shape):
            raise UserError(f"{path}: line 1: '{key}' is missing or malformed: {_UNVERIFIED}")
    for row in footer["rows"]:
        where, request = f"{path}: line {number}: row {row['row']}", row.get("request")
        if not fits(request, _REQUEST):
            problem = "its request is missing, as in traces of earlier versions, or malformed"
            raise UserError(f"{where}: {problem}: {_UNVERIFIED}")
        if request["source"] and request["source"][0] not in [r["row"] for r in footer["rows"]]:
            problem = "it continues a row that is not in the trace"
            raise UserError(f"{where}: {problem}: {_UNVERIFIED}")
    if not {*rows} <= {row["row"] for row in footer["rows"]}:
        raise UserError(f"{path}: line {number}: the footer lacks a row")
    _check_settings(path, header["sampler_parameters"])
    own = header["calibration"].get("wrong")
    if own is not None and not is_entry(own):
        problem = "the calibration's table of P(wrong) is malformed"
        raise UserError(f"{path}: line 1: {problem}: {_UNVERIFIED}")
    return Trace(header, rows, footer)


def _check_settings(path: Path, v: Mapping[str, Any]) -> None:
    """Raises UserError for settings that a replay cannot follow."""
    own = [key for key in v if key.partition(".")[0] not in SECTIONS]
    own += [key for key in v if key.startswith("arms.") and v[key] not in [*ARMS]]
    own += [key for key in ("truncation.rule",) if v.get(key) not in [*RULES]]
    if own:
        problem = "belongs to a mechanism of a plugin, which cannot be verified"
        raise UserError(f"{path}: line 1: the setting {own[0]} {problem}")
    bounds = [key for key in v if key.startswith(("regimes.", "thresholds."))]
    if open_ := [key for key in bounds if "%" in str(v[key])]:
        problem = f"{open_[0]} is a percentile, not a number"
        raise UserError(f"{path}: line 1: {problem}: {_UNVERIFIED}")
    if v.get("surrogate.varentropy") != "measured":
        problem = "surrogate.varentropy needs tables that a trace does not have"
        raise UserError(f"{path}: line 1: {problem}: {_UNVERIFIED}")


def replay(trace: Trace, model: "ModelReader") -> Replay:
    """Recomputes each token of a run from its settings, and compares the lines with it.

    `model` must be the trace's model, in the trace's precision.
    """
    doubts, rounded, rows = [], 0, dict[int, Row]()
    try:
        check_header(trace, model)
    except Doubt as doubt:
        return Replay(0, 0, doubt)
    for index, ended in enumerate(trace.footer["rows"]):
        lines = trace.rows.get(ended["row"], ())
        row = Row(trace.header, lines, trace.footer, index, model)
        source = row.request["source"]
        try:
            if source is not None and source[0] not in rows:
                continue  # its source is in doubt
            if source is not None:
                row.adopt(rows[source[0]].entries[: source[1]])
            row.run()
            rows[ended["row"]] = row
        except Doubt as doubt:
            doubts.append(doubt)
        rounded += row.rounded
    first = min(doubts, key=lambda doubt: doubt.line.number, default=None)
    return Replay(sum(map(len, trace.rows.values())), rounded, first)


def check_header(trace: Trace, model: "ModelReader") -> None:
    """Raises Doubt if the header contradicts itself, the footer, or the model's tokenizer, or if a
    token is not one of the model's."""
    header, line, size = trace.header, Line(1, {}), len(model.texts)
    for line in sorted(chain(*trace.rows.values()), key=lambda line: line.number):
        branches = [branch["tokens"] for branch in line["branches"] or ()]
        for ids in ([line["token_id"]], *branches):
            if not ids or not fits(ids, [int]) or not 0 <= min(ids) <= max(ids) < size:
                raise Doubt(line, "draw", "token ids", ids, f"ids below {size}")
    line = Line(1, {})
    seeds = {row["request"]["seed"] for row in trace.footer["rows"]}
    if seeds - {header["seed"]}:
        raise Doubt(line, "header", "seed", header["seed"], min(seeds - {header["seed"]}))
    if not fits(ids := header["prompt_tokens"], [int]) or not all(0 <= i < size for i in ids):
        raise Doubt(line, "prompt", "prompt_tokens", ids, f"ids below {size}")
    if header["prompt"] != (prompt := model.decode(header["prompt_tokens"])):
        raise Doubt(line, "prompt", "prompt", header["prompt"], prompt)
    tables = header["calibration"]["quantiles"]
    for key, written in header["percentiles"].items():
        value = header["sampler_parameters"].get(key)
        try:
            expected = _resolve(key, written, tables)
        except (AttributeError, KeyError, TypeError, ValueError):
            expected = None
        if expected is None or expected != value:
            raise Doubt(line, "header", key, value, expected)


def _resolve(key: str, written: Any, tables: Mapping[str, Sequence[float]]) -> Any:
    """Returns a threshold or the conditions of a regime, with percentiles as numbers."""

    def value(quantity: str, percent: str) -> float:
        at = float(percent.strip().rstrip("%"))
        return float(f"{np.interp(at, np.arange(101.0), tables[quantity]):.5g}")

    section, _, name = key.partition(".")
    if section == "thresholds":
        return value("entropy" if name.startswith("h") else "varentropy", written)
    parsed = [(text, *read_condition(text)) for text in written]
    return [
        f"{quantity} {sign} {value(quantity, str(bound))}" if "%" in str(bound) else text
        for text, quantity, sign, bound in parsed
    ]
