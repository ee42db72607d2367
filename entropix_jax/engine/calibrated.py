"""A sampler's thresholds for one model: the model's own calibration, else one made on first use
from text that the model writes itself.

The latter is kept in the user's cache folder as a `calibration.json` whose name has the model's
fingerprint. Thresholds must be the same on every start or not be used at all: a model that is too
slow to calibrate on a machine is not tried there again.
"""

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from entropix_jax.engine.own_text import least_seconds, measure_own_text
from entropix_jax.engine.preparation import CalibratedSampler, sampler_settings
from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import user_folder
from entropix_jax.host.files import read_json_object
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.boxes import read_boxes
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler, read_thresholds
from entropix_jax.sampler.solver import solve
from entropix_jax.sampler.thresholds import calibration_text, write_text

WANTED = {"lelv": 0.6, "helv": 0.05, "lehv": 0.05, "hehv": 0.05}  # shares of tokens

_FORMAT = 1  # of what is kept, and of how it is made
_PATIENCE = 9.0  # seconds for the text; solving takes up to one more
_SLOW = "too_slow_on"


@dataclass(frozen=True)
class _Own:
    """Thresholds made for a model; empty where that takes too long."""

    thresholds: dict[str, float]
    where: str = ""
    notes: tuple[str, ...] = ()


May = Literal["make", "reuse", "read"]  # see `fit_thresholds`

_of_models: WeakKeyDictionary[LanguageModel, _Own] = WeakKeyDictionary()


def calibrate_sampler(
    sampler: Sampler, model: LanguageModel, may: May = "make"
) -> CalibratedSampler:
    """A sampler as it runs on a model: with the model's thresholds, and its parameters as arrays.

    Raises:
        UserError: see `fit_thresholds` and `sampler_settings`.
    """
    fitted = fit_thresholds(sampler, model, may)
    return CalibratedSampler(fitted, sampler_settings(model, fitted))


def fit_thresholds(sampler: Sampler, model: LanguageModel, may: May = "make") -> Sampler:
    """A sampler with the model's thresholds, if it asks for calibrated ones.

    They come from the model's calibration file, else from the cache folder, else they are made, if
    that takes less than ten seconds and they can change the text. Else those of the sampler's own
    file stay. Its notes say which, where a user should know.

    Args:
        may: "make"; or only "reuse" thresholds made before; or only "read" the model's file, which
            is the same for all processes of a run.

    Raises:
        UserError: the model's file is damaged, or the bounds leave nothing between them.
    """
    if not sampler.values["thresholds.calibrated"]:
        return sampler.with_thresholds({})
    file = model.calibration_file
    if file.exists():
        return sampler.with_thresholds(read_thresholds(file), str(file))
    follows = sampler.follows_thresholds
    own = None if may == "read" else _own_thresholds(model, make=follows and may == "make")
    published = f"'{sampler.name}': model never calibrated, the published thresholds are used"
    if own is not None and own.thresholds:
        try:
            return sampler.with_thresholds(own.thresholds, own.where, own.notes if follows else ())
        except UserError as error:
            # Nobody asked for these: a user's settings need to fit the published ones alone.
            published = f"{error}: the published thresholds are used"
    return sampler.with_thresholds({}, notes=(published,) if follows else ())


def _own_thresholds(model: LanguageModel, *, make: bool) -> _Own | None:
    """Thresholds made for a model, before or now; None where there are none."""
    if (own := _of_models.get(model)) is not None:
        return own
    try:
        path = _cache_file(model)
    except UserError:  # no fingerprint
        return None
    own = None if path is None else _read_cached(path)
    if own is None and make:
        own = _make(model, path)
    if own is not None:
        _of_models[model] = own
    return own


def _cache_file(model: LanguageModel) -> Path | None:
    """The file of a model's thresholds; None where nothing can be kept.

    Raises:
        UserError: the model has no fingerprint.
    """
    name = f"{model.fingerprint}-{jnp.dtype(model.precision.weights).name}-{_FORMAT}.json"
    try:
        folder = user_folder("calibrations")
    except UserError:  # others could write there
        return None
    return None if folder is None else folder / name


def _read_cached(path: Path) -> _Own | None:
    """What the file holds; None where it is missing, damaged, or another machine was too slow."""
    try:
        if read_json_object(path).get(_SLOW) == _machine():
            return _Own({})
        return _Own(read_thresholds(path), str(path))
    except UserError:
        return None


def _make(model: LanguageModel, path: Path | None) -> _Own:
    if least_seconds(model) > _PATIENCE:
        return _Own({})
    began = time.perf_counter()
    points = measure_own_text(model, _PATIENCE)
    if points is None:
        _write_cached(path, json.dumps({_SLOW: _machine()}) + "\n")
        return _Own({})
    try:
        boxes = read_boxes(load_sampler("entropix"))
        thresholds = solve(points, WANTED, boxes, nearest=True).thresholds
    except UserError:  # NaN, which the run itself will report
        return _Own({})
    source = f"{len(points)} tokens of the model's own text"
    where = _write_cached(path, calibration_text(thresholds, source))
    seconds = time.perf_counter() - began
    note = (
        f"the model has no calibration.json: thresholds were fitted to {source} in {seconds:.0f} s "
        f"and are {'not kept' if where is None else f'kept in {where}'}"
    )
    return _Own(thresholds, where or "the model's own text", (note,))


def _write_cached(path: Path | None, text: str) -> str | None:
    """Where the text is kept; None where it cannot be."""
    try:
        if path is not None:
            write_text(path, text)
            return str(path)
    except UserError:  # a full disk
        pass
    return None


def _machine() -> str:
    return f"{platform.node()}, {os.cpu_count()} cores, {jax.local_devices()[0].device_kind}"
