"""A study's results as tables: read row by row in the study's order, written as CSV and Parquet.

No table is ever held whole: of each row its place in the file is kept, eight bytes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import UserError, require
from entropix_jax.files import opening, replacing
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS

_ROWS_AT_ONCE = 4096  # of a Parquet row group

_TEXT, _WHOLE, _NUMBER = "string", "int64", "float64"
# The columns that each row has, and their Arrow types.
COLUMNS: Mapping[str, str] = {
    "phase": _TEXT,
    "task": _TEXT,
    "item": _TEXT,
    "setting": _TEXT,
    "sampler": _TEXT,
    "seed": _WHOLE,
    "score": _NUMBER,
    "answer": _TEXT,
    "expected": _TEXT,
    "finish_reason": _TEXT,
    "error": _TEXT,
    "tokens": _WHOLE,
    "forwards": _WHOLE,
    "retracted": _WHOLE,
    **{f"regime_{regime}": _WHOLE for regime in REGIMES},
    **{f"action_{action}": _WHOLE for action in ACTIONS},
    "mean_entropy": _NUMBER,
    "max_entropy": _NUMBER,
    "mean_varentropy": _NUMBER,
    "max_varentropy": _NUMBER,
    "perplexity": _NUMBER,
    "distinct_1": _NUMBER,
    "distinct_2": _NUMBER,
    "repetition": _NUMBER,
    "seconds": _NUMBER,
    "text": _TEXT,
}


class Results:
    """What a study has stored, in the order of its trials however it was run."""

    def __init__(self, path: Path, number: int) -> None:
        """Looks where each of `number` trials' results stands.

        Raises:
            UserError: the file cannot be read, lacks a result, or has one too many, or a line that
                is none.
        """
        self._path = path
        self._places = np.full(number, -1, np.int64)
        with opening(path) as file:
            place = 0
            for count, line in enumerate(file, 1):
                trial = _trial(line)
                if trial is None:
                    raise UserError(f"{path}: line {count} is no result of a study: remove it")
                if trial >= number:
                    raise UserError(
                        f"{path}: holds results of more than {number} rows: there are fewer"
                        " items now; choose another output"
                    )
                self._places[trial] = place
                place += len(line)
        if missing := int((self._places < 0).sum()):
            raise UserError(f"{path}: {missing} of {number} results are missing")

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for place in self._places.tolist():
                file.seek(place)
                row: dict[str, Any] = json.loads(file.readline())
                yield row


def _trial(line: bytes) -> int | None:
    """The number of the trial that a line is the result of, from 0; None where it is none."""
    try:
        trial = json.loads(line)["line"] - 1
    except (ValueError, LookupError, TypeError):
        return None
    return trial if isinstance(trial, int) and trial >= 0 else None


def flat(row: Mapping[str, Any], varied: Sequence[str]) -> dict[str, Any]:
    """A result as a row of the table; `varied` are the keys that have a column each. Half a
    surrogate pair, which no table can hold, becomes an escape."""
    cells = {name: row.get(name) for name in COLUMNS}
    cells |= {f"regime_{name}": row["regimes"].get(name, 0) for name in REGIMES}
    cells |= {f"action_{name}": row["actions"].get(name, 0) for name in ACTIONS}
    cells["seconds"] = row["timings"]["seconds"]
    for key in varied:
        value = row["varied"].get(key)
        cells[key] = value if value is None or isinstance(value, str) else json.dumps(value)
    for name, value in cells.items():
        if isinstance(value, str):
            cells[name] = value.encode("utf-8", "backslashreplace").decode()
    return cells


def write_tables(results: Results, varied: Sequence[str], folder: Path, name: str) -> None:
    """Writes `name.csv` and `name.parquet`: a row for each trial, in order.

    Raises:
        UserError: they cannot be written, or pyarrow is not installed.
    """
    require("lab", "pyarrow")
    # Half a second to import: not for commands that write no tables.
    import pyarrow
    from pyarrow import parquet

    columns = {**COLUMNS, **dict.fromkeys(varied, _TEXT)}
    schema = pyarrow.schema(list(columns.items()))
    with (
        replacing(folder / f"{name}.csv") as csv_path,
        replacing(folder / f"{name}.parquet") as parquet_path,
        csv_path.open("w", encoding="utf-8", newline="") as file,
        parquet.ParquetWriter(parquet_path, schema) as table,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for rows in _groups(results, varied):
            writer.writerows(rows)
            table.write_table(pyarrow.Table.from_pylist(rows, schema))


def _groups(results: Results, varied: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    rows = []
    for row in results:
        rows.append(flat(row, varied))
        if len(rows) == _ROWS_AT_ONCE:
            yield rows
            rows = []
    if rows:
        yield rows
