"""A study's results as one data frame with a row per trial, and as CSV."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening, replacing
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS

_COUNTS = (
    *("seed", "tokens", "forwards", "retracted"),
    *(f"regime_{regime}" for regime in REGIMES),
    *(f"action_{action}" for action in ACTIONS),
)
_NUMBERS = (
    *("mean_confidence", "lowest_group_confidence", "tail_confidence", "mean_self_certainty"),
    *("mean_entropy", "max_entropy", "mean_varentropy", "max_varentropy", "perplexity"),
    *("distinct_1", "distinct_2", "repetition", "seconds"),
)
# Columns of `results.csv`, before those of varied keys and of the tasks' own measures.
COLUMNS = (
    *("phase", "task", "item", "setting", "sampler", "seed", "score", "answer", "expected"),
    *("finish_reason", "error", *_COUNTS[1:], *_NUMBERS, "text"),
)
_OBJECTS = ("varied", "measures")  # not in the file
_SCORES = ("task", "item", "setting", "seed", "score", "tokens", "forwards", "finish_reason")


def read_results(path: Path, ids: Iterable[str]) -> pd.DataFrame:
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
            rows[row["id"]] = row
    if missing := sum(row is None for row in rows.values()):
        raise UserError(f"{path}: {missing} of {len(rows)} results are missing")
    return results_frame([*rows.values()])


def results_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
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


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {name: row.get(name) for name in COLUMNS}
    cells |= {f"regime_{name}": number for name, number in row["regimes"].items()}
    cells |= {f"action_{name}": number for name, number in row["actions"].items()}
    cells["seconds"] = row["timings"]["seconds"]
    for key, value in row["varied"].items():
        cells[key] = value if isinstance(value, str) else json.dumps(value)
    for name, (part, whole) in row.get("measures", {}).items():
        cells |= {f"measure_{name}": part, f"measure_{name}_of": whole}
    return cells | {"varied": row["varied"], "measures": row.get("measures", {})}


def write_results(frame: pd.DataFrame, path: Path) -> None:
    """Writes a line of CSV per trial. UserError if it cannot be written."""
    # With this end of lines a carriage return in a text is quoted, too.
    _write(frame.drop(columns=[*_OBJECTS]), path, "\r\n")


def write_scores(frame: pd.DataFrame, path: Path) -> None:
    """Writes a reproducible line of CSV per trial with its score, costs and measures, without
    times, and without texts, which may quote a task's. UserError as for `write_results`."""

    def describe(own: Mapping[str, Sequence[float]]) -> str:
        return " ".join(f"{name}={part:g}/{whole:g}" for name, (part, whole) in own.items())

    _write(frame[[*_SCORES]].assign(measures=frame["measures"].map(describe)), path, "\n")


def _write(frame: pd.DataFrame, path: Path, end: str) -> None:
    with replacing(path) as scratch:
        # Lone surrogates, which UTF-8 does not have, are escaped.
        frame.to_csv(scratch, index=False, lineterminator=end, errors="backslashreplace")
