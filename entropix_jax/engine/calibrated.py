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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entropix_jax.engine.preparation import CalibratedSampler, sampler_settings
from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import user_folder
from entropix_jax.host.files import read_json_object, replacing
from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.params import Params
from entropix_jax.model.precision import choose_precision
from entropix_jax.names import THRESHOLDS
from entropix_jax.sampler.sampler import Sampler, read_thresholds
from entropix_jax.stats import entropy_and_varentropy

WANTED = {"lelv": 0.6, "helv": 0.05, "lehv": 0.05, "hehv": 0.05}  # shares of tokens

# About 4,000 tokens give each regime's share to half a percentage point or so; in texts as long as
# an answer, since a model is less certain where a text begins.
TOKENS = 4096
_LENGTH = 256  # tokens of a text
_CHUNK = 16  # steps between two looks at the clock
_MOST_ROWS = 256
_SEED = 0

_FORMAT = 2  # of what is kept, and of how it is made
_PATIENCE = 9.0  # seconds for the text
_CUTS = 129  # quantiles that are tried
_STARTS = ((0.6, 0.9, 0.6, 0.9), (0.6, 0.8, 0.6, 0.8), (0.7, 0.7, 0.65, 0.95))  # quantiles
_SLOW = "too_slow_on"


@dataclass(frozen=True)
class _Own:
    """Thresholds made for a model; empty where that takes too long."""

    thresholds: dict[str, float]
    where: str = ""
    notes: tuple[str, ...] = ()


_Carry = tuple[KVCache, jax.Array]
May = Literal["make", "reuse", "read"]  # see `fit_thresholds`

_of_models: WeakKeyDictionary[LanguageModel, _Own] = WeakKeyDictionary()


def calibrate_sampler(
    sampler: Sampler, model: LanguageModel, may: May = "make"
) -> CalibratedSampler:
    """A sampler as it runs on a model: with the model's thresholds, and its parameters as arrays.
    UserError: see `fit_thresholds` and `sampler_settings`."""
    fitted = fit_thresholds(sampler, model, may)
    return CalibratedSampler(fitted, sampler_settings(model, fitted))


def fit_thresholds(sampler: Sampler, model: LanguageModel, may: May = "make") -> Sampler:
    """A sampler with the model's thresholds, if it asks for calibrated ones.

    They come from the model's calibration file, else from the cache folder, else they are made, if
    that takes less than ten seconds and they can change the text. Else those of the sampler's own
    file stay. Its notes say which, where a user should know.

    It may "make" thresholds, or only "reuse" those made before, or only "read" the model's file,
    which is the same for all processes of a run. UserError if that file is damaged, or the bounds
    leave nothing between them.
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
    path = _cache_file(model)
    own = None if path is None else _read_cached(path)
    if own is None and make:
        own = _make(model, path)
    if own is not None:
        _of_models[model] = own
    return own


def _cache_file(model: LanguageModel) -> Path | None:
    """The file of a model's thresholds; None where nothing can be kept."""
    try:
        kind = jnp.dtype(model.precision.weights).name
        if model.precision != choose_precision(kind):  # as it was asked for
            kind += f"-{jnp.dtype(model.precision.activations).name}"
        name = f"{model.fingerprint}-{kind}-{_FORMAT}.json"
        folder = user_folder("calibrations")
    except UserError:  # the model's files are gone; others could write there
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
    began = time.perf_counter()
    points = measure_own_text(model, _PATIENCE)
    if points is None:
        _write_cached(path, json.dumps({_SLOW: _machine()}) + "\n")
        return _Own({})
    if not np.isfinite(points).all():  # which the run itself will report
        return _Own({})
    thresholds = fit(points)
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
            with replacing(path) as scratch:
                scratch.write_text(text, encoding="utf-8")
            return str(path)
    except UserError:  # a full disk
        pass
    return None


def fit(points: np.ndarray) -> dict[str, float]:
    """Thresholds whose regimes, as `entropix` has them, hold about the WANTED shares of the points,
    float32 [n, 2]: each in turn takes the best of the points' quantiles, until none moves. Where
    the shares are out of reach, the largest deviation is about the least that is possible;
    `lab.solver`, which also knows other boxes, comes closer by less than a percentage point.
    """
    wanted = np.array([*WANTED.values()])
    entropy, varentropy = points.T
    cuts = [np.quantile(x, np.linspace(0, 1, _CUTS)).astype(np.float32) for x in points.T]

    def losses(*thresholds: np.ndarray) -> np.ndarray:
        """The distances from the wanted shares, for each of [m, 1] values of one threshold."""
        h1, h2, u1, u2 = thresholds
        low, high = varentropy < u1, varentropy > u2
        boxes = [(entropy < h1) & low, (entropy > h2) & low, (entropy < h2) & high]
        counts = [np.mean(box, axis=-1) for box in (*boxes, (entropy > h2) & high)]
        off = np.abs(np.stack(np.broadcast_arrays(*counts), axis=-1) - wanted)
        crossed = np.squeeze((h1 > h2) | (u1 > u2), axis=-1)
        return np.where(crossed, np.inf, off.max(axis=-1) + 0.01 * off.sum(axis=-1))

    best, least = [], np.inf
    for start in _STARTS:
        now = [cuts[i // 2][[[round(share * (_CUTS - 1))]]] for i, share in enumerate(start)]
        loss, before = losses(*now)[0], np.inf
        while loss < before:
            before = loss
            for i in range(4):
                trials = cuts[i // 2][:, None]
                found = losses(*now[:i], trials, *now[i + 1 :])
                if found.min() < loss:
                    loss, now[i] = found.min(), trials[[np.argmin(found)]]
        if loss < least:
            best, least = now, loss
    return {name: float(f"{x.item():.4g}") for name, x in zip(THRESHOLDS, best, strict=True)}


def calibration_text(thresholds: Mapping[str, float], source: str) -> str:
    """The content of a model's `calibration.json`; `source` describes the text used."""
    ordered = {name: float(thresholds[name]) for name in THRESHOLDS}
    return json.dumps({"thresholds": ordered, "source": source}, indent=2) + "\n"


def _machine() -> str:
    return f"{platform.node()}, {os.cpu_count()} cores, {jax.local_devices()[0].device_kind}"


# The text that a model writes itself, at temperature 1: its loop has no sampler in it, so it
# compiles in a few seconds.


def start_of_text(model: LanguageModel) -> list[int]:
    """The tokens that a text begins with, at least one.

    Where the tokenizer adds none: the checkpoint's beginning-of-text token, an end token (training
    puts it between two texts), or a line break.
    """
    tokenizer = model.tokenizer
    if start := tokenizer.encode("", add_bos=True):
        return start
    named = (tokenizer.named_token_id(name) for name in ("bos_token", "eos_token"))
    found = [i for i in (*named, *model.generation.eos_ids) if i is not None]
    return (found or tokenizer.encode_within("\n") or [0])[:1]


def measure_own_text(model: LanguageModel, seconds: float) -> np.ndarray | None:
    """Entropy (bits) and varentropy (bits^2) before each token that the model writes: float32
    [n, 2], with n about TOKENS, the same ones each time. None where it takes more than `seconds`;
    compiling and the first chunk are not interrupted."""
    began = time.perf_counter()
    length = min(_LENGTH, model.config.max_positions)
    chunk = min(_CHUNK, length)
    chunks = length // chunk
    rows = min(-(-TOKENS // (chunk * chunks)), _MOST_ROWS)
    cache = init_cache(model.config, rows, chunk * chunks, model.precision.activations)
    tokens = jnp.full(rows, start_of_text(model)[0], jnp.int32)
    key = jax.random.key(_SEED)
    points = []
    for left in reversed(range(chunks)):
        before = time.perf_counter()
        cache, tokens, found = _write(
            model.params, cache, tokens, key, config=model.config, steps=chunk
        )
        points.append(np.asarray(found).reshape(-1, 2))
        now = time.perf_counter()
        # The first chunk compiles, so its time says little about the others.
        pace = now - before if len(points) > 1 else 0.0
        if left and now - began + left * pace > seconds:
            return None
    return np.concatenate(points)


@partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="cache")
def _write(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    steps: int,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Samples `steps` tokens: the cache, the last tokens int32 [B], and entropy and varentropy of
    each step, float32 [steps, B, 2]."""

    def step(carry: _Carry, _: None) -> tuple[_Carry, jax.Array]:
        cache, tokens = carry
        number = cache.length[0]
        hidden, _stats, cache = forward(
            params, config, tokens[:, None], jnp.ones_like(tokens), cache, window=cache.capacity
        )
        logits = unembed(params, hidden[:, 0])
        pair = entropy_and_varentropy(jax.nn.log_softmax(logits, axis=-1))
        drawn = jax.random.categorical(jax.random.fold_in(key, number), logits, axis=-1)
        return (cache, drawn.astype(jnp.int32)), jnp.stack(pair, axis=-1)

    (cache, tokens), points = lax.scan(step, (cache, tokens), length=steps)
    return cache, tokens, points
