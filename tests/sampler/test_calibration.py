"""Quantile tables: percentiles, ranks, their file, and the tables that the package ships."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import generic_calibration as script
import numpy as np
import pytest

from entropix_jax.errors import UserError
from entropix_jax.sampler.calibration import (
    PERCENTS,
    TABLES,
    Calibration,
    generic_calibration,
    parse_percentile,
    read_calibration,
)
from entropix_jax.sampler.presets import load_sampler

MODEL = {"layers": 4, "width": 192, "heads": 6}
RENEW = "entropix-jax calibrate --model some/model"


def measured(count: int = 1234) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.gamma(0.7, 2.0, count).astype(np.float32) for name in TABLES}


def calibration() -> Calibration:
    return Calibration.from_values(measured(), "some text", MODEL)


def content() -> dict[str, Any]:
    own: dict[str, Any] = calibration().to_json()
    return own


def test_whole_percentiles_are_numpys() -> None:
    own, values = calibration(), measured()
    assert own.tokens == 1234
    for name in TABLES:
        expected = np.percentile(values[name].astype(np.float64), PERCENTS)
        got = [own.value(name, percent) for percent in PERCENTS]
        np.testing.assert_allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("percent", [0.5, 2.25, 30.1, 59.9, 99.75])
def test_fractional_percentiles_are_interpolated(percent: float) -> None:
    own = calibration()
    for name in TABLES:
        low, high = math.floor(percent), math.ceil(percent)
        below, above = own.value(name, low), own.value(name, high)
        expected = below + (above - below) * (percent - low)
        assert own.value(name, percent) == pytest.approx(expected, rel=1e-4)
        assert below <= own.value(name, percent) <= above


def test_rank_is_the_inverse_of_value() -> None:
    own = calibration()
    for name in TABLES:
        for percent in (0, 1, 12.5, 30, 60, 99.5, 100):
            assert own.rank(name, own.value(name, percent)) == pytest.approx(percent, abs=0.05)
        assert own.rank(name, -1.0) == 0
        assert own.rank(name, 1e5) == 100


@pytest.mark.parametrize(
    ("value", "percent"),
    [
        ("30%", 30),
        (" 2.5 % ", 2.5),
        (".5%", 0.5),
        ("-1%", -1),
        ("30", None),
        ("%", None),
        ("h1", None),
        (30.0, None),
        (None, None),
    ],
)
def test_percentiles_are_parsed(value: object, percent: float | None) -> None:
    assert parse_percentile(value) == percent


def test_the_file_holds_the_tables(tmp_path: Path) -> None:
    own = calibration()
    text = own.to_text()
    assert json.loads(text) == own.to_json()
    assert max(map(len, text.splitlines())) <= 130
    path = tmp_path / "calibration.json"
    path.write_text(text)
    read = read_calibration(path)
    assert (read.source, read.tokens, read.model) == ("some text", 1234, MODEL)
    assert not read.generic
    assert read.to_text() == text
    for name in TABLES:
        np.testing.assert_allclose(read.quantiles[name], own.quantiles[name], rtol=1e-4)
        assert read.value(name, 30) == own.value(name, 30)


def test_thresholds_are_resolved() -> None:
    own = calibration()
    sampler = load_sampler("entropix").with_values(
        {
            "thresholds.h1": "12.5%",
            "thresholds.u2": 40.0,
            "regimes.lelv": ["entropy < h1", "agreement > 40%"],
        }
    )
    assert sampler.percentiles.keys() == {
        "thresholds.h1",
        "thresholds.h2",
        "thresholds.u1",
        "regimes.lelv",
    }
    values = sampler.resolve(own).values
    assert values["thresholds.h1"] == own.value("entropy", 12.5)
    assert values["thresholds.u1"] == own.value("varentropy", 60)
    assert values["thresholds.u2"] == 40.0
    assert values["regimes.lelv"][1] == f"agreement > {own.value('agreement', 40)}"


def test_crossing_thresholds_are_refused() -> None:
    """A number and a percentile are compared once the percentile is resolved."""
    sampler = load_sampler("entropix").with_values({"thresholds.h1": 50.0})
    with pytest.raises(UserError, match=r"entropix with a file: thresholds\.h1 = 50\.0 is above"):
        sampler.resolve(calibration(), "a file")


TABLE = content()["quantiles"]["entropy"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 1}, "calibration format 1 is not supported (expected 2)"),
        ({"format": None, "thresholds": {"h1": 0.3}}, "calibration format 1 is not supported"),
        ({"format": 3}, "calibration format 3 is not supported"),
        ({"quantiles": None}, "'quantiles' must hold entropy, varentropy,"),
        ({"quantiles": {"entropy": TABLE}}, "'quantiles' must hold entropy, varentropy,"),
        ({"entropy": TABLE[::-1]}, "quantiles.entropy must be 101 numbers in ascending order"),
        ({"entropy": TABLE[1:]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [*TABLE[:-1], math.nan]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [*TABLE[:-1], math.inf]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [-1.0, *TABLE[1:]]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": ["0", *TABLE[1:]]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": [False, *TABLE[1:]]}, "quantiles.entropy must be 101 numbers"),
        ({"entropy": 1}, "quantiles.entropy must be 101 numbers"),
        ({"model": None}, "'model' and 'tokens' are missing"),
        ({"tokens": "many"}, "'model' and 'tokens' are missing"),
    ],
)
def test_invalid_files(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """Each error is one line that ends with the command that renews the file."""
    own = content()
    for name, value in changes.items():
        (own["quantiles"] if name in TABLES else own)[name] = value
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(own))
    with pytest.raises(UserError) as error:
        read_calibration(path, RENEW)
    assert str(error.value).startswith(f"{path}: {complaint}")
    assert str(error.value).endswith(f": run {RENEW}")


@pytest.mark.parametrize("text", ["", "[]", "{", "\0"])
def test_files_without_a_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"calibration\.json: "):
        read_calibration(path)


def test_tables_of_another_model_are_refused() -> None:
    own = calibration()
    own.check_model(dict(MODEL), "a file", RENEW)
    with pytest.raises(UserError) as error:
        own.check_model({**MODEL, "layers": 5}, "a file", RENEW)
    assert str(error.value) == (
        "a file: measured on a model with layers 4, width 192, heads 6, "
        f"this one has layers 5, width 192, heads 6: run {RENEW}"
    )


# Shipped tables


@pytest.mark.parametrize(
    ("quantity", "percent", "threshold"),
    [
        ("entropy", 30, "0.43"),
        ("entropy", 70, "3.61"),
        ("varentropy", 40, "2.50"),
        ("varentropy", 75, "5.20"),
    ],
)
def test_anchors_of_the_generic_table(quantity: str, percent: float, threshold: str) -> None:
    """The public implementation's thresholds, in bits."""
    own = generic_calibration()
    assert own.generic
    assert f"{own.value(quantity, percent):.2f}" == threshold


def test_the_generic_table_is_that_of_its_script() -> None:
    weights = script.WEIGHTS
    base = read_calibration(weights / "smollm2" / "calibration.json")
    own = generic_calibration()
    for name in TABLES:
        expected = base.quantiles[name]
        if name in script.ANCHORS:
            expected = script.rescale(expected, script.ANCHORS[name])
        np.testing.assert_allclose(own.quantiles[name], expected, rtol=1e-4, atol=1e-9)
    assert own.tokens == base.tokens
    assert own.model == {}
