"""A study's results as tables, written as CSV and Parquet.

Rows are streamed in the study's order: only each row's offset in the file is held in memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import UserError, require
from entropix_jax.host.files import opening, replacing
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS

_GROUP = 4096  # rows of a Parquet row group

_TEXT, _WHOLE, _NUMBER = "string", "int64", "float64"
# Columns of every row, and their Arrow types.
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
    "mean_confidence": _NUMBER,
    "lowest_group_confidence": _NUMBER,
    "tail_confidence": _NUMBER,
    "mean_self_certainty": _NUMBER,
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
    """The stored results of a study, in the order of its trials."""

    def __init__(self, path: Path, number: int) -> None:
        """Finds the results of `number` trials in the file.

        Raises:
            UserError: the file cannot be read, lacks a result, or has other lines.
        """
        self._path = path
        self._offsets = np.full(number, -1, np.int64)
        with opening(path) as file:
            offset = 0
            for count, line in enumerate(file, 1):
                trial = _trial(line)
                if trial is None:
                    raise UserError(f"{path}: line {count} is not a result of a study: remove it")
                if trial >= number:
                    raise UserError(
                        f"{path}: has results of more than {number} rows: there are fewer"
                        " items now; choose another output"
                    )
                self._offsets[trial] = offset
                offset += len(line)
        if missing := int((self._offsets < 0).sum()):
            raise UserError(f"{path}: {missing} of {number} results are missing")

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for offset in self._offsets.tolist():
                file.seek(offset)
                row: dict[str, Any] = json.loads(file.readline())
                yield row


def _trial(line: bytes) -> int | None:
    """The trial number, from 0, of a line with a result; None for another line."""
    try:
        trial = json.loads(line)["line"] - 1
    except (ValueError, LookupError, TypeError):
        return None
    return trial if isinstance(trial, int) and trial >= 0 else None


def flatten_row(
    row: Mapping[str, Any], varied: Sequence[str], measures: Sequence[str]
) -> dict[str, Any]:
    """Converts a result to a row of the table, with a column for each of the `varied` keys, and two
    for each of the task's `measures`: part and whole. Lone surrogates, which neither format can
    hold, are escaped."""
    cells = {name: row.get(name) for name in COLUMNS}
    cells |= {f"regime_{name}": row["regimes"].get(name, 0) for name in REGIMES}
    cells |= {f"action_{name}": row["actions"].get(name, 0) for name in ACTIONS}
    cells["seconds"] = row["timings"]["seconds"]
    for key in varied:
        value = row["varied"].get(key)
        cells[key] = value if value is None or isinstance(value, str) else json.dumps(value)
    own = row.get("measures", {})
    for name in measures:
        values = map(float, own[name]) if name in own else (None, None)
        cells |= dict(zip(_columns_of(name), values, strict=True))
    for name, value in cells.items():
        if isinstance(value, str):
            cells[name] = value.encode("utf-8", "backslashreplace").decode()
    return cells


def _columns_of(measure: str) -> tuple[str, str]:
    return f"measure_{measure}", f"measure_{measure}_of"


def write_tables(
    results: Results, varied: Sequence[str], measures: Sequence[str], folder: Path, name: str
) -> None:
    """Writes `name.csv` and `name.parquet`, a row per trial.

    Raises:
        UserError: they cannot be written, or pyarrow is not installed.
    """
    require("lab", "pyarrow")
    # Imported here, as it takes half a second.
    import pyarrow
    from pyarrow import parquet

    columns = {**COLUMNS, **dict.fromkeys(varied, _TEXT)}
    columns |= dict.fromkeys(chain.from_iterable(map(_columns_of, measures)), _NUMBER)
    schema = pyarrow.schema(list(columns.items()))
    with (
        replacing(folder / f"{name}.csv") as csv_path,
        replacing(folder / f"{name}.parquet") as parquet_path,
        csv_path.open("w", encoding="utf-8", newline="") as file,
        parquet.ParquetWriter(parquet_path, schema) as table,
    ):
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        remaining = (flatten_row(row, varied, measures) for row in results)
        while rows := list(islice(remaining, _GROUP)):
            writer.writerows(rows)
            table.write_table(pyarrow.Table.from_pylist(rows, schema))


def write_scores(results: Results, path: Path) -> None:
    """Writes a line of CSV per trial with its score, costs and measures, which a study that is run
    again has, too: without times, and without texts, which may quote a task's."""
    columns = ("task", "item", "setting", "seed", "score", "tokens", "forwards", "finish_reason")
    with (
        replacing(path) as scratch,
        scratch.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*columns, "measures"))
        for row in results:
            own = row.get("measures", {}).items()
            measures = " ".join(f"{name}={part:g}/{whole:g}" for name, (part, whole) in own)
            writer.writerow((*(row[name] for name in columns), measures))
