"""Quantile tables of a model's metrics over its own answers, and percentiles resolved with them.

A `calibration.json` holds one table for each quantity of `TABLES`: its percentiles 0, 1, ..., 100.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_json_object
from entropix_jax.host.resources import resource_folder
from entropix_jax.names import LARGEST

FORMAT = 2  # of a calibration file
TABLES = ("entropy", "varentropy", "attn_entropy_norm", "agreement")  # quantities with a table
PERCENTS = np.arange(101.0)  # of the entries of a table
THRESHOLD_TABLES = {"h1": "entropy", "h2": "entropy", "u1": "varentropy", "u2": "varentropy"}

_PERCENTILE = re.compile(r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*%")


def parse_percentile(value: Any) -> float | None:
    """Parses a percentile such as "30%" to a float; None for any other value."""
    match = _PERCENTILE.fullmatch(value.strip()) if isinstance(value, str) else None
    return None if match is None else float(match[1])


@dataclass(frozen=True, eq=False)
class Calibration:
    """The quantile tables of one model.

    Attributes:
        quantiles: float64 [101] in ascending order, for each of `TABLES`.
        source: a description of the measured text.
        tokens: the number of measured tokens.
        model: the shape of the measured model, see `check_model`; empty for the generic table.
    """

    quantiles: Mapping[str, np.ndarray]
    source: str
    tokens: int
    model: Mapping[str, int]

    @property
    def generic(self) -> bool:
        """Whether these are the generic tables."""
        return not self.model

    @classmethod
    def from_values(
        cls, values: Mapping[str, np.ndarray], source: str, model: Mapping[str, int]
    ) -> "Calibration":
        """Computes the tables of measured values, one array [n] for each of `TABLES`."""
        tables = {
            name: np.percentile(np.asarray(values[name], np.float64), PERCENTS) for name in TABLES
        }
        return cls(tables, source, len(values["entropy"]), model)

    def value(self, quantity: str, percent: float) -> float:
        """Returns a percentile (0 to 100) of a quantity, interpolated between whole percents, with
        five significant digits."""
        return float(f"{np.interp(percent, PERCENTS, self.quantiles[quantity]):.5g}")

    def rank(self, quantity: str, value: float) -> float:
        """Returns the percentile (0 to 100) of a value: the inverse of `value`."""
        return float(np.interp(value, self.quantiles[quantity], PERCENTS))

    def to_json(self) -> dict[str, Any]:
        """Returns the content of a calibration file, with five significant digits."""
        tables = {name: [float(f"{x:.5g}") for x in self.quantiles[name]] for name in TABLES}
        return {
            "format": FORMAT,
            "model": dict(self.model),
            "source": self.source,
            "tokens": self.tokens,
            "quantiles": tables,
        }

    def to_text(self) -> str:
        """Returns the text of a calibration file: JSON with one line for each table."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        return re.sub(r",\s+(?=\d)", ", ", text) + "\n"

    def check_model(self, model: Mapping[str, int], where: str, renew: str) -> None:
        """Raises UserError if the tables were measured on a model of another shape."""
        if self.model != dict(model):
            own, other = (", ".join(f"{k} {v}" for k, v in m.items()) for m in (self.model, model))
            measured = f"measured on a model with {own or 'unknown shape'}"
            raise UserError(f"{where}: {measured}, this one has {other}: run {renew}")


def read_calibration(path: Path, renew: str = "entropix-jax calibrate") -> Calibration:
    """Reads a calibration file.

    Raises:
        UserError: the file cannot be read, has another format, or holds invalid tables. `renew` is
            the command that makes a new one.
    """
    raw = read_json_object(path)
    if raw.get("format") != FORMAT:
        found = "1" if "thresholds" in raw else repr(raw.get("format"))
        raise UserError(
            f"{path}: calibration format {found} is not supported (expected {FORMAT}): run {renew}"
        )
    tables, model, tokens = raw.get("quantiles"), raw.get("model"), raw.get("tokens")
    if not isinstance(tables, dict) or set(tables) != set(TABLES):
        raise UserError(f"{path}: 'quantiles' must hold {', '.join(TABLES)}: run {renew}")
    for name, table in tables.items():
        if not _is_table(table):
            told = "must be 101 numbers in ascending order"
            raise UserError(f"{path}: quantiles.{name} {told}: run {renew}")
    if not isinstance(model, dict) or not isinstance(tokens, int):
        raise UserError(f"{path}: 'model' and 'tokens' are missing: run {renew}")
    arrays = {name: np.asarray(tables[name], np.float64) for name in TABLES}
    return Calibration(arrays, str(raw.get("source", "")), tokens, model)


@cache
def generic_calibration() -> Calibration:
    """Returns the tables for models without their own."""
    return read_calibration(resource_folder("weights") / "generic" / "calibration.json")


def _is_table(table: Any) -> bool:
    if not isinstance(table, list) or len(table) != len(PERCENTS):
        return False
    numbers = all(type(x) in (int, float) and 0 <= x <= LARGEST for x in table)
    return numbers and table == sorted(table)
