"""Quantile tables of a model's metrics over its own answers, and percentiles resolved with them.

A `calibration.json` holds one table for each quantity of `TABLES`: its percentiles 0, 1, ..., 100.
It may also hold quantiles of the varentropy and of the largest probability among tokens of equal
entropy, and a table of P(wrong).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.files import read_json_object
from entropix_jax.host.resources import resource_folder
from entropix_jax.names import LARGEST
from entropix_jax.sampler.wrong import is_entry

FORMAT = 2  # of a calibration file
TABLES = ("entropy", "varentropy", "attn_entropy_norm", "agreement")  # quantities with a table
PERCENTS = np.arange(101.0)  # of the entries of a table
KNOTS = 51  # entropies for which there are tables of other quantities
LEVELS = np.linspace(0.0, 1.0, 21)  # of the quantiles in these tables
AT_ENTROPY = {
    "entropy": (KNOTS,),
    **dict.fromkeys(("varentropy", "max_prob"), (KNOTS, len(LEVELS))),
}
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
        at_entropy: `entropy`, float64 [KNOTS] in bits, ascending, and at each of these entropies
            the quantiles `LEVELS` of `varentropy` (bits^2) and of `max_prob`, float64 [KNOTS,
            len(LEVELS)]. None unless measured.
        wrong: `weights` and `knots` of P(wrong), see `sampler.wrong`, and the `task`, its number of
            `items` and the calibration error, `ece`. None unless fitted.
    """

    quantiles: Mapping[str, np.ndarray]
    source: str
    tokens: int
    model: Mapping[str, int]
    at_entropy: Mapping[str, np.ndarray] | None = None
    wrong: Mapping[str, Any] | None = None

    @property
    def generic(self) -> bool:
        """Whether these are the generic tables."""
        return not self.model

    @classmethod
    def from_values(
        cls, values: Mapping[str, np.ndarray], source: str, model: Mapping[str, int]
    ) -> "Calibration":
        """Computes the tables of measured values, one array [n] for each of `TABLES` and
        `AT_ENTROPY`."""
        tables = {
            name: np.percentile(np.asarray(values[name], np.float64), PERCENTS) for name in TABLES
        }
        return cls(tables, source, len(values["entropy"]), model, _at_entropy(values))

    def value(self, quantity: str, percent: float) -> float:
        """Returns a percentile (0 to 100) of a quantity, interpolated between whole percents, with
        five significant digits."""
        return float(f"{np.interp(percent, PERCENTS, self.quantiles[quantity]):.5g}")

    def rank(self, quantity: str, value: float) -> float:
        """Returns the percentile (0 to 100) of a value: the inverse of `value`."""
        return float(np.interp(value, self.quantiles[quantity], PERCENTS))

    def to_json(self) -> dict[str, Any]:
        """Returns the content of a calibration file, with five significant digits."""
        tables = {name: _rounded(self.quantiles[name]) for name in TABLES}
        tables_at = {name: _rounded(table) for name, table in (self.at_entropy or {}).items()}
        return {
            "format": FORMAT,
            "model": dict(self.model),
            "source": self.source,
            "tokens": self.tokens,
            "quantiles": tables,
            **({"at_entropy": tables_at} if tables_at else {}),
            **({"wrong": dict(self.wrong)} if self.wrong else {}),
        }

    def to_text(self) -> str:
        """Returns the text of a calibration file: JSON with one line for each table."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False)
        text = re.sub(r",\s+(?=-?\d)", ", ", text)
        text = re.sub(r"\[\s+([^][]+?)\s+\]", r"[\1]", text)
        return re.sub(r"\],\s+\[", "], [", text) + "\n"

    def check_model(self, model: Mapping[str, int], where: str, renew: str) -> None:
        """Raises UserError if the tables were measured on a model of another shape."""
        if self.model != dict(model):
            own, other = (", ".join(f"{k} {v}" for k, v in m.items()) for m in (self.model, model))
            measured = f"measured on a model with {own or 'unknown shape'}"
            raise UserError(f"{where}: {measured}, this one has {other}: run {renew}")


def read_calibration(path: Path, renew: str = "entropix-jax calibrate") -> Calibration:
    """Reads a calibration file. UserError if the file cannot be read, has another format, or holds
    invalid tables. `renew` is the command that makes a new one."""
    raw, problem = read_json_object(path), ""
    tables, model, tokens = raw.get("quantiles"), raw.get("model"), as_integer(raw.get("tokens"))
    given, wrong = raw.get("at_entropy"), raw.get("wrong")
    if raw.get("format") != FORMAT:
        found = "1" if "thresholds" in raw else repr(raw.get("format"))
        problem = f"calibration format {found} is not supported (expected {FORMAT})"
    elif not isinstance(tables, dict) or set(tables) != set(TABLES):
        problem = f"'quantiles' must hold {', '.join(TABLES)}"
    elif invalid := [name for name, table in tables.items() if not _is_table(table)]:
        problem = f"quantiles.{invalid[0]} must be 101 numbers in ascending order"
    elif not isinstance(model, dict) or tokens is None:
        problem = "'model' and 'tokens' are missing or malformed"
    elif not isinstance(given, dict | None) or not all(
        _is_table(given.get(name), *AT_ENTROPY[name]) for name in AT_ENTROPY if given is not None
    ):
        problem = "at_entropy: must hold tables in ascending order"
    elif wrong is not None and not is_entry(wrong):
        problem = "wrong: 'weights' or 'knots' is malformed"
    if problem or model is None or tokens is None or tables is None:
        raise UserError(f"{path}: {problem}: run {renew}")
    arrays = {name: np.asarray(tables[name], np.float64) for name in TABLES}
    at_entropy = given and {name: np.asarray(given[name], np.float64) for name in AT_ENTROPY}
    return Calibration(arrays, str(raw.get("source", "")), tokens, model, at_entropy, wrong)


@cache
def generic_calibration() -> Calibration:
    """Returns the tables for models without their own."""
    return read_calibration(resource_folder("weights") / "generic" / "calibration.json")


def _at_entropy(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes `Calibration.at_entropy`, each table from the tokens nearest to each knot by rank of
    the entropy."""
    sizes = np.asarray(values["entropy"], np.float64)
    order = np.argsort(sizes, kind="stable")
    centres = np.linspace(0, len(order) - 1, KNOTS)
    reach = max(len(order) / (KNOTS - 1) / 2, 1)
    near = [order[max(math.ceil(at - reach), 0) : math.floor(at + reach) + 1] for at in centres]
    found = {"entropy": np.interp(centres, np.arange(len(order)), sizes[order])}
    for name in ("varentropy", "max_prob"):
        of_tokens = np.asarray(values[name], np.float64)
        found[name] = np.stack([np.quantile(of_tokens[span], LEVELS) for span in near])
    return found


def _rounded(values: np.ndarray) -> Any:
    return [_rounded(x) if values.ndim > 1 else float(f"{x:.5g}") for x in values]


def _is_table(table: Any, length: int = len(PERCENTS), width: int | None = None) -> bool:
    """Returns whether a value is a list of ascending numbers, or of such lists."""
    if not isinstance(table, list) or len(table) != length:
        return False
    if width is not None:
        return all(_is_table(row, width) for row in table)
    numbers = all(type(x) in (int, float) and 0 <= x <= LARGEST for x in table)
    return numbers and table == sorted(table)
