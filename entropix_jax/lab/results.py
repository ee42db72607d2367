"""A study's rows: the results of its trials, from files and as a data frame."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from entropix_jax.batch.output import find_difference
from entropix_jax.batch.storage import open_file, read_lines
from entropix_jax.errors import UserError
from entropix_jax.host.files import opening, replacing
from entropix_jax.lab.measures import UNCERTAINTY
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS

Row = Mapping[str, Any]  # the result of a trial

_COUNTS = (
    *("seed", "tokens", "forwards", "retracted"),
    *(f"regime_{regime}" for regime in REGIMES),
    *(f"action_{action}" for action in ACTIONS),
)
_NUMBERS = (
    *(name for name in UNCERTAINTY if name != "tokens"),
    *("distinct_1", "distinct_2", "repetition"),
)
# Columns of `results.csv`, before those of varied keys and of the tasks' own measures.
COLUMNS = (
    *("phase", "task", "item", "setting", "sampler", "seed", "score", "answer", "expected"),
    *("finish_reason", "error", *_COUNTS[1:], *_NUMBERS, "text"),
)
_OBJECTS = ("varied", "measures")  # not in the file
# What every row has.
_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("phase", "task", "item", "setting", "sampler", "text", "finish_reason"), str),
    **dict.fromkeys(("seed", "tokens", "forwards", "retracted"), int),
    **dict.fromkeys(("varied", "regimes", "actions"), dict),
    "score": float | None,
    "answer": str | None,
}
_DIGITS = 6  # significant ones of a measure
_CLOSE = 1e-3  # relative, or absolute below 1


def read_results(path: Path, ids: Iterable[str]) -> list[Row]:
    """Reads the stored results of trials, in the order of their `ids`. A `Store` has checked the
    lines.

    Raises:
        UserError: the file cannot be read, lacks a result, or has one of another trial.
    """
    rows: dict[str, Any] = dict.fromkeys(ids)
    with opening(path) as file:
        for line in file:
            row = json.loads(line)
            if row["id"] not in rows:
                raise UserError(
                    f"{path}: has a result of '{row['id']}': there are fewer items now; choose"
                    " another output"
                )
            rows[row["id"]] = _reproducible(row)
    if missing := sum(row is None for row in rows.values()):
        raise UserError(f"{path}: {missing} of {len(rows)} results are missing")
    return [*rows.values()]


def read_rows(path: str) -> dict[str, Row]:
    """Reads the rows of `write_rows`, or stored results, by the trial's id: in the order of the
    trials. Files may be compressed (.gz, .xz).

    Raises:
        UserError: the file cannot be read, or has a line that is not a row, or a row twice.
    """
    rows: dict[str, tuple[int, Row]] = {}
    with open_file(path) as file:
        for number, line in enumerate(read_lines(path, file), 1):
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict) or not all(
                key in row and isinstance(row[key], kind) for key, kind in _KINDS.items()
            ):
                raise UserError(f"{path}: line {number} is not a row of a study")
            if (name := name_trial(row)) in rows:
                raise UserError(f"{path}: line {number}: has the row '{name}' twice")
            rows[name] = row.get("line", number), _reproducible(row)
    return {name: row for name, (_, row) in sorted(rows.items(), key=lambda one: one[1][0])}


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Writes rows as compressed JSON lines, with the same bytes for the same rows. UserError if the
    file cannot be written."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    with replacing(path) as scratch:
        scratch.write_bytes(lzma.compress("".join(lines).encode("utf-8", "backslashreplace")))


def name_trial(row: Row) -> str:
    """The id of a row's trial."""
    return "/".join(str(row[key]) for key in ("phase", "task", "item", "setting", "seed"))


def _reproducible(row: Row) -> Row:
    """Returns a row without times and the keys of its store, its measures with `_DIGITS` digits."""
    return {
        key: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
        for key, value in row.items()
        if key not in ("id", "line", "digest", "timings")
    }


def find_differences(rows: Mapping[str, Row], others: Mapping[str, Row]) -> Iterator[str]:
    """Yields a line for each row that is missing from others or differs there. Measures differ if
    they are not close: different batches and machines round differently."""
    for name, row in rows.items():
        if (other := others.get(name)) is None:
            yield f"{name}: missing"
            continue
        close = {
            key: value
            for key, value in other.items()
            if key != "score"
            and isinstance(value, float)
            and isinstance(row.get(key), float)
            and math.isclose(value, row[key], rel_tol=_CLOSE, abs_tol=_CLOSE)
        }
        if difference := find_difference(other, {**row, **close}):
            yield f"{name}: {difference}"


def results_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Returns the frame of stored results: `COLUMNS`; a column for each further action and varied
    key; numerator and denominator of each task's measures; the objects `varied` and `measures`."""
    frame = pd.DataFrame([_flatten(row) for row in rows], dtype=object)
    counts = [name for name in frame if name in _COUNTS or name.startswith("action_")]
    frame[counts] = frame[counts].fillna(0)
    numbers = ["score", *_NUMBERS, *(name for name in frame if name.startswith("measure_"))]
    types = dict.fromkeys(counts, "int64") | dict.fromkeys(numbers, "float64")
    varied = sorted({key for values in frame["varied"] for key in values})
    own = [f"measure_{name}{end}" for name in own_measures(frame) for end in ("", "_of")]
    others = [name for name in counts if name not in COLUMNS]
    return frame.astype(types)[[*COLUMNS, *others, *varied, *own, *_OBJECTS]]


def own_measures(frame: pd.DataFrame) -> list[str]:
    """The names of the tasks' own measures, in the order of their first rows."""
    return [*dict.fromkeys(name for own in frame["measures"] for name in own)]


def _flatten(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {name: row.get(name) for name in COLUMNS}
    cells |= {f"regime_{name}": number for name, number in row["regimes"].items()}
    cells |= {f"action_{name}": number for name, number in row["actions"].items()}
    for key, value in row["varied"].items():
        cells[key] = value if isinstance(value, str) else json.dumps(value)
    for name, (part, whole) in row.get("measures", {}).items():
        cells |= {f"measure_{name}": part, f"measure_{name}_of": whole}
    return cells | {"varied": row["varied"], "measures": row.get("measures", {})}


def write_results(frame: pd.DataFrame, path: Path) -> None:
    """Writes a line of CSV per trial. UserError if it cannot be written."""
    with replacing(path) as scratch:
        # With this end of lines a carriage return in a text is quoted, too. Lone surrogates, which
        # UTF-8 does not have, are escaped.
        frame.drop(columns=[*_OBJECTS]).to_csv(
            scratch, index=False, lineterminator="\r\n", errors="backslashreplace"
        )
