"""Where a sampler's thresholds come from: the model's own calibration, else one that is made once,
on first use, from text that the model writes itself.

That is kept in the user's cache folder, as a `calibration.json` whose name holds the model's
fingerprint. It is the same each time and on each start, or it is not used: a model that takes too
long on a machine is not tried there again.
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

from entropix_jax.calibration.boxes import boxes_of
from entropix_jax.calibration.output import calibration_text, write_text
from entropix_jax.calibration.own_text import least_seconds, measure_own_text
from entropix_jax.calibration.solver import solve
from entropix_jax.errors import UserError
from entropix_jax.files import read_json_object
from entropix_jax.loading import LanguageModel
from entropix_jax.programs import user_folder
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler, read_thresholds

WANTED = {"lelv": 0.6, "helv": 0.05, "lehv": 0.05, "hehv": 0.05}  # shares of tokens

_FORMAT = 1  # of what is kept, and of how it is made
_PATIENCE = 9.0  # seconds for the text; solving takes up to one more
_SLOW = "too_slow_on"


@dataclass(frozen=True)
class _Own:
    """What was made for a model; without thresholds where that takes too long."""

    thresholds: dict[str, float]
    where: str = ""
    notes: tuple[str, ...] = ()


May = Literal["make", "reuse", "read"]  # see `calibrate_sampler`

_of_models: WeakKeyDictionary[LanguageModel, _Own] = WeakKeyDictionary()


def calibrate_sampler(sampler: Sampler, model: LanguageModel, may: May = "make") -> Sampler:
    """A sampler with the model's own thresholds, where it asks for calibrated ones. A sampler that
    has them already gets the same again.

    They come from the model's calibration file; without one from the cache folder; and where there
    are none either they are made, if that takes less than ten seconds and if they can change the
    text. Else those of the sampler's own file stay. What a user should know of it is in the notes.

    Args:
        may: "make", or else do no more than "reuse" what was made before, or "read" the model's
            file, which is the same for all processes of a run.

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
            # Nobody asked for these: what was set must go with the published ones alone.
            published = f"{error}: the published thresholds are used"
    return sampler.with_thresholds({}, notes=(published,) if follows else ())


def _own_thresholds(model: LanguageModel, *, make: bool) -> _Own | None:
    """What was made for a model, or is made now; None where there is nothing."""
    if (own := _of_models.get(model)) is not None:
        return own
    try:
        path = _place(model)
    except UserError:  # nothing to know the model by
        return None
    own = None if path is None else _kept(path)
    if own is None and make:
        own = _make(model, path)
    if own is not None:
        _of_models[model] = own
    return own


def _place(model: LanguageModel) -> Path | None:
    """Where a model's thresholds are kept; None where nothing can be.

    Raises:
        UserError: the model cannot be told from others.
    """
    name = f"{model.fingerprint}-{jnp.dtype(model.precision.weights).name}-{_FORMAT}.json"
    try:
        folder = user_folder("calibrations")
    except UserError:  # others could write there
        return None
    return None if folder is None else folder / name


def _kept(path: Path) -> _Own | None:
    """What is kept; None where that is nothing, damaged, or says of another machine that it is too
    slow."""
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
        _keep(path, json.dumps({_SLOW: _machine()}) + "\n")
        return _Own({})
    try:
        boxes = boxes_of(load_sampler("entropix"))
        thresholds = solve(points, WANTED, boxes, nearest=True).thresholds
    except UserError:  # NaN, which the run itself will tell of
        return _Own({})
    source = f"{len(points)} tokens of the model's own text"
    where = _keep(path, calibration_text(thresholds, source))
    seconds = time.perf_counter() - began
    note = (
        f"the model has no calibration.json: thresholds were fitted to {source} in {seconds:.0f} s "
        f"and are {'not kept' if where is None else f'kept in {where}'}"
    )
    return _Own(thresholds, where or "the model's own text", (note,))


def _keep(path: Path | None, text: str) -> str | None:
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
