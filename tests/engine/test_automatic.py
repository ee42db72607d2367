"""Thresholds that are made for a model on first use: when, how often, and where they lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from entropix_jax.cli import batch
from entropix_jax.engine import api
from entropix_jax.engine import calibrated as automatic
from entropix_jax.engine.calibrated import May, fit_thresholds, measure_own_text, start_of_text
from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.mesh import parse_mesh
from entropix_jax.names import REGIMES, THRESHOLDS
from entropix_jax.sampler.presets import load_sampler, preset_names
from entropix_jax.sampler.sampler import Sampler
from tests.support.model_folders import PUBLISHED, poisoned, token_ids, write_model
from tests.support.runs import Spec, run_specs

QUADRANTS = load_sampler("quadrants")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), calibrated=False))


@pytest.fixture
def model(folder: str) -> LanguageModel:
    """Loaded anew: a model knows the thresholds that were made for it."""
    return load(folder)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrations are kept in a test; there is as much time as it takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(automatic, "_PATIENCE", 600.0)
    return tmp_path / "cache" / "entropix_jax" / "calibrations"


@pytest.fixture
def measured(kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[LanguageModel]:
    """The models that were measured."""
    models = []

    def measure(model: LanguageModel, seconds: float) -> np.ndarray | None:
        models.append(model)
        return np.random.default_rng(0).exponential(0.8, (500, 2)).astype(np.float32)

    monkeypatch.setattr(automatic, "measure_own_text", measure)
    return models


def thresholds_of(sampler: Sampler) -> dict[str, float]:
    return {name: sampler.values[f"thresholds.{name}"] for name in THRESHOLDS}


def test_made_on_first_use_and_kept(folder: str, kept: Path) -> None:
    """From the model's own text, in a file that is a calibration.json; the same each time."""
    sampler = fit_thresholds(QUADRANTS, load(folder))
    (path,) = kept.iterdir()
    stored = json.loads(path.read_text())
    assert stored["thresholds"] == thresholds_of(sampler) != PUBLISHED
    assert stored["source"] == "4144 tokens of the model's own text"
    (note,) = sampler.notes
    assert note.startswith("the model has no calibration.json: thresholds were fitted to 4144")
    assert note.endswith(f"kept in {path}")

    again = fit_thresholds(QUADRANTS, load(folder))
    assert (thresholds_of(again), again.notes) == (stored["thresholds"], ())
    for damaged in ("{", "[]", '{"thresholds": {"h1": 1}}', json.dumps({"too_slow_on": "another"})):
        path.write_text(damaged)
        anew = fit_thresholds(QUADRANTS, load(folder))
        assert thresholds_of(anew) == stored["thresholds"]
        assert len(anew.notes) == 1
        assert json.loads(path.read_text()) == stored


def test_what_is_measured_is_the_models_text(model: LanguageModel) -> None:
    """As the reader of texts measures it: a model that is sure of what follows has no entropy."""
    points = measure_own_text(model, 600.0)
    assert points is not None
    assert points.shape == (4144, 2)
    assert np.isfinite(points).all()
    # All texts begin alike, and go on each its own way.
    rows = points.reshape(7, 16, 37, 2)
    assert np.ptp(rows[0, 0], axis=0).max() < 1e-4
    assert np.ptp(rows[0, 1], axis=0).min() > 0.01
    start = model.tokenizer.encode("", add_bos=True)
    (row,) = run_specs(model, [Spec(start)], "greedy").run()
    assert rows[0, 0, 0, 0] == pytest.approx(row.tokens[0].entropy, abs=1e-4)
    assert rows[0, 0, 0, 1] == pytest.approx(row.tokens[0].varentropy, abs=1e-4)


def test_they_are_made_once_for_a_model_and_a_type(
    model: LanguageModel, measured: list[LanguageModel], kept: Path, folder: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="thresholds were fitted"):
        (row,) = api.stream(model, "Once", "quadrants", max_new_tokens=1).rows
    sampler = row.request.sampler.sampler
    assert thresholds_of(fit_thresholds(sampler, model)) == thresholds_of(sampler) != PUBLISHED
    fit_thresholds(load_sampler("document-004"), model)
    assert measured == [model]
    other = write_model(tmp_path / "other", lambda p: replace(p, head=2 * p.head), calibrated=False)
    for place, dtype in ((folder, None), (folder, "bfloat16"), (other, None), (folder, "float32")):
        fit_thresholds(QUADRANTS, load(str(place), dtype))
    assert len(measured) == len([*kept.iterdir()]) == 3
    # A folder that others could write to is not read.
    kept.chmod(0o777)
    (note,) = fit_thresholds(QUADRANTS, load(folder)).notes
    assert note.endswith("are not kept")
    assert len(measured) == 4


def test_without_a_cache_folder_they_last_as_long_as_the_model(
    model: LanguageModel,
    measured: list[LanguageModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        (note,) = fit_thresholds(QUADRANTS, model).notes
        assert note.endswith("are not kept")
    assert len(measured) == 1


def test_a_deadline_is_held(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    # A second a chunk; there are seven. After two it is known that ten will not do for all.
    assert measure_own_text(model, 8.0) is None
    assert next(clock) == 5  # looked at once, and twice for each chunk


def test_too_slow_is_remembered_on_that_machine_alone(
    kept: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(automatic, "measure_own_text", lambda *_: tried.append(0))
    for _ in range(3):
        sampler = fit_thresholds(QUADRANTS, load(folder))
        assert thresholds_of(sampler) == PUBLISHED
        assert "never calibrated, the published thresholds are used" in sampler.notes[0]
    assert len(tried) == 1
    monkeypatch.setattr(automatic, "_machine", lambda: "another")
    fit_thresholds(QUADRANTS, load(folder))
    assert len(tried) == 2


def test_a_model_without_numbers_has_none(kept: Path, tmp_path: Path) -> None:
    start = token_ids()["<|begin_of_text|>"]
    model = load(str(write_model(tmp_path / "model", poisoned(start), calibrated=False)))
    sampler = fit_thresholds(QUADRANTS, model)
    assert thresholds_of(sampler) == PUBLISHED
    assert [*kept.iterdir()] == []


# Who needs them.


def test_who_follows_thresholds() -> None:
    """What has one arm for all regimes does not, unless that arm looks at the regimes itself."""
    following = {name for name in preset_names() if load_sampler(name).follows_thresholds}
    assert following == {"quadrants", "document-002", "document-004"}
    greedy = load_sampler("greedy")
    assert greedy.with_values({"arms.hehv": "resample"}).follows_thresholds
    for arm, follows in (("sample", False), ("inject", True), ("branch", True)):
        all_alike = QUADRANTS.with_values({f"arms.{regime}": arm for regime in REGIMES})
        assert all_alike.follows_thresholds is follows
    bounds = {f"thresholds.{name}": value for name, value in PUBLISHED.items()}
    assert not QUADRANTS.with_values(bounds).follows_thresholds
    numbers = {f"regimes.{regime}": ["entropy < 1"] for regime in REGIMES[:-1]}
    assert not QUADRANTS.with_values(numbers).follows_thresholds


def test_a_baseline_takes_what_is_there_and_makes_nothing(
    model: LanguageModel, measured: list[LanguageModel], folder: str
) -> None:
    """Its trace tells regimes by the thresholds that a sampler that follows them would have."""
    baseline = load_sampler("min-p")
    sampler = fit_thresholds(baseline, model)
    assert (thresholds_of(sampler), sampler.notes, measured) == (PUBLISHED, (), [])
    made = thresholds_of(fit_thresholds(QUADRANTS, model))
    for one in (model, load(folder)):
        sampler = fit_thresholds(baseline, one)
        assert (thresholds_of(sampler), sampler.notes) == (made, ())
    # Processes of one run read the model's own file alone.
    assert thresholds_of(fit_thresholds(QUADRANTS, model, "read")) == PUBLISHED


def test_processes_of_one_run_make_none(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(sampler: Sampler, model: LanguageModel, may: May) -> CalibratedSampler:
        raise AssertionError(may)

    monkeypatch.setattr("entropix_jax.batch.run.calibrate_sampler", calibrate)
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n')
    monkeypatch.chdir(tmp_path)
    own = ["--input", "in.jsonl", "--output", "out.jsonl", "--model", folder, "--distributed"]
    with pytest.raises(AssertionError, match="read"):
        batch.main([*own, "--processes", "1", "--process", "0"])


def test_the_models_own_file_comes_first(measured: list[LanguageModel], tmp_path: Path) -> None:
    model = load(str(write_model(tmp_path / "own", calibrated=False)))
    made = fit_thresholds(QUADRANTS, model)
    own = {"h1": 0.5, "h2": 1.5, "u1": 0.25, "u2": 2.0}
    model.calibration_file.write_text(json.dumps({"thresholds": own}))
    assert thresholds_of(fit_thresholds(made, model)) == own


def test_thresholds_that_nobody_asked_for_stand_in_nobodys_way(
    model: LanguageModel, measured: list[LanguageModel]
) -> None:
    made = thresholds_of(fit_thresholds(QUADRANTS, model))
    own = (made["h2"] + PUBLISHED["h2"]) / 2
    assert made["h2"] < own
    sampler = fit_thresholds(QUADRANTS.with_values({"thresholds.h1": own}), model)
    assert thresholds_of(sampler) == {**PUBLISHED, "h1": own}
    (note,) = sampler.notes
    assert "is above thresholds.h2" in note
    assert note.endswith("the published thresholds are used")


# Where a text begins.


def test_the_start_of_a_text(model: LanguageModel) -> None:
    ids = token_ids()
    assert start_of_text(model) == [ids["<|begin_of_text|>"]]

    def start(named: dict[str, int], eos: tuple[int, ...], line: list[int]) -> list[int]:
        """Of a model whose tokenizer puts nothing before a text."""
        tokenizer = SimpleNamespace(encode_within=lambda text: line, named_token_id=named.get)
        tokenizer.encode = lambda text, add_bos: []
        generation = SimpleNamespace(eos_ids=eos)
        other: Any = SimpleNamespace(tokenizer=tokenizer, generation=generation)
        return start_of_text(other)

    assert start({"bos_token": 3, "eos_token": 4}, (5, 6), [7]) == [3]
    assert start({"eos_token": 4}, (5, 6), [7]) == [4]
    assert start({}, (5, 6), [7]) == [5]
    assert start({}, (), [7, 8]) == [7]
    assert start({}, (), []) == [0]


def test_on_several_devices(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "TOKENS", 64)
    alone, spread = load(folder), load(str(folder), mesh=parse_mesh("model=2", jax.devices()))
    points = [measure_own_text(model, 600.0) for model in (alone, spread)]
    assert points[0] is not None
    assert points[1] is not None
    np.testing.assert_allclose(points[1], points[0], atol=1e-3)
