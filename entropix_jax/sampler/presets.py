"""Samplers as files: TOML, found by name under `configs/`, checked key by key.

A file may extend another one, and then holds only what it changes. Conditions of a regime are
written as in the papers: `"entropy > h2"`, where `h2` is a number of the file's `[thresholds]` or
stands for itself.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.files import read_json_object, read_text
from entropix_jax.resources import resource_folder
from entropix_jax.sampler.arms import ARMS
from entropix_jax.sampler.params import (
    BOXES,
    LOOP_WINDOW,
    MAX_BANS,
    MAX_THOUGHT,
    QUANTITIES,
    REGIMES,
    SECTIONS,
    SamplerParams,
    scalars,
)

THRESHOLDS = ("h1", "h2", "u1", "u2")
CALIBRATION_FILE = "calibration.json"

# Of a bound or a layer's weight: far past any that is of use, and well within float32.
_LARGEST = 1e6

_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*(\S+)\s*")
_CHOICES: dict[str, tuple[str, ...]] = {
    **{f"arms.{regime}": tuple(ARMS) for regime in REGIMES},
    "metrics.attn_entropy": ("normalised", "raw"),
    "metrics.agreement": ("corrected", "published"),
}
_OTHER = {
    "thresholds.calibrated",
    "metrics.layers",
    "metrics.noise_floor",
    "inject.thought",
    "draw.bans",
    *(f"regimes.{box}" for box in BOXES),
}
_REQUIRED = {*scalars(), *_CHOICES, *_OTHER}
_KEYS = sorted(_REQUIRED | {f"thresholds.{name}" for name in THRESHOLDS})


@dataclass(frozen=True)
class Sampler:
    """A sampler by its settings: a dotted key and a plain value each. Immutable.

    `notes` are lines that a user should see, such as that published bounds stand in for calibrated
    ones.
    """

    name: str
    description: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def with_values(self, changes: Mapping[str, Any]) -> "Sampler":
        """This sampler with other settings.

        Raises:
            UserError: an unknown key (the nearest known one is named), a value of the wrong type or
                out of range, or bounds that nothing can lie between.
        """
        for key in changes:
            _check_key(key, self.name)
        values = {**self.values, **changes}
        _check(values, self.name)
        return replace(self, values=values)

    def calibrated(self, model_folder: Path) -> "Sampler":
        """This sampler with the model's own thresholds, where it asks for calibrated ones.

        They come from `calibration.json` in the model's folder. Without that file the thresholds
        stay as they are, and a note says so.

        Raises:
            UserError: the file is damaged.
        """
        if not self.values["thresholds.calibrated"]:
            return self
        path = model_folder / CALIBRATION_FILE
        if not path.exists():
            note = (
                f"sampler '{self.name}': this model was never calibrated; "
                "the published thresholds are used"
            )
            return replace(self, notes=(*self.notes, note))
        thresholds = read_json_object(path).get("thresholds")
        if not isinstance(thresholds, dict) or set(thresholds) != set(THRESHOLDS):
            raise UserError(f"{path}: 'thresholds' must hold {', '.join(THRESHOLDS)}")
        try:
            return self.with_values({f"thresholds.{k}": v for k, v in thresholds.items()})
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def params(
        self, *, num_layers: int, epsilon: float, encode: Callable[[str], Sequence[int]]
    ) -> SamplerParams:
        """The traced parameters of one row: scalars and small arrays, without a row axis.

        Args:
            num_layers: L, of the model.
            epsilon: machine epsilon of the model's logits, for the noise floor.
            encode: text to token ids, nothing added.

        Raises:
            UserError: a thought longer than MAX_THOUGHT tokens, or weights of layers that the model
                does not have.
        """
        values = self.values
        low, high = _boxes(values, self.name)
        sections = {
            name: {
                key.removeprefix(f"{name}."): _array(field["type"], values[key])
                for key, field in scalars().items()
                if key.startswith(f"{name}.")
            }
            for name in SECTIONS
        }
        thought = list(encode(values["inject.thought"])) if values["inject.thought"] else []
        if len(thought) > MAX_THOUGHT:
            raise UserError(
                f"sampler '{self.name}': inject.thought is {len(thought)} tokens long, "
                f"at most {MAX_THOUGHT} are possible"
            )
        sections["inject"]["thought"] = _padded(thought, MAX_THOUGHT, 0)
        sections["inject"]["thought_length"] = jnp.int32(len(thought))
        return SamplerParams(
            low=jnp.asarray(low),
            high=jnp.asarray(high),
            arms=jnp.array([list(ARMS).index(values[f"arms.{r}"]) for r in REGIMES], jnp.int32),
            layer_weights=_layer_weights(values["metrics.layers"], num_layers, self.name),
            attn_entropy_normalised=jnp.asarray(values["metrics.attn_entropy"] == "normalised"),
            agreement_published=jnp.asarray(values["metrics.agreement"] == "published"),
            noise_epsilon=jnp.float32(epsilon if values["metrics.noise_floor"] else 0.0),
            bans=_padded(values["draw.bans"], MAX_BANS, -1),
            **{name: SECTIONS[name](**section) for name, section in sections.items()},
        )


def load_sampler(name_or_path: str) -> Sampler:
    """The preset of a name under `configs/`, or the sampler of a TOML file.

    Raises:
        UserError: no such preset or file (the nearest name is given), or a file that is not a
        sampler.
    """
    path, raw = _read(name_or_path, ())
    description = raw.pop("description", "")
    if not isinstance(description, str):
        raise UserError(f"{path}: 'description' must be text, not {description!r}")
    flat = _flatten(raw)
    for key in flat:
        _check_key(key, str(path))
    if missing := sorted(_REQUIRED - set(flat)):
        raise UserError(
            f"{path}: '{missing[0]}' is missing; 'extends' takes it from another preset"
        )
    _check(flat, str(path))
    return Sampler(name=path.stem, description=description, values=flat)


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(path.stem for path in resource_folder("configs").glob("*.toml"))


def parse_setting(text: str) -> tuple[str, Any]:
    """A command line's `sampler.key=value` as key and value; the value is TOML, or else plain text.

    Raises:
        UserError: it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("sampler."):
        raise UserError(f"--set {text}: expected sampler.KEY=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    return key.removeprefix("sampler."), parsed["value"] if parsed.keys() == {"value"} else value


def _read(name_or_path: str, seen: tuple[Path, ...]) -> tuple[Path, dict[str, Any]]:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = resource_folder("configs") / f"{name_or_path}.toml"
        if name_or_path not in preset_names():
            raise UserError(
                f"no sampler preset '{name_or_path}'{_nearest(name_or_path, preset_names())}; "
                "a file's name ends in .toml"
            )
    identity = path.resolve()
    if identity in seen:
        raise UserError(f"{path}: extends itself")
    try:
        raw = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # a number may be too long for Python
        raise UserError(f"{path}: not valid TOML: {error}") from None
    base = raw.pop("extends", None)
    if base is None:
        return path, raw
    if not isinstance(base, str):
        raise UserError(f"{path}: 'extends' must be the name of a preset, not {base!r}")
    if base.endswith(".toml"):
        base = str(path.parent / base)
    thresholds = raw.get("thresholds")
    if isinstance(thresholds, dict) and set(thresholds) & set(THRESHOLDS):
        # Who sets thresholds means them: the model's own must not take their place.
        thresholds.setdefault("calibrated", False)
    return path, _merge(_read(base, (*seen, identity))[1], raw)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f", did you mean '{close[0]}'?" if close else f" (known: {', '.join(known)})"


def _check_key(key: str, where: str) -> None:
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.0)
        raise UserError(f"{where}: no sampler key '{key}', did you mean '{close[0]}'?")


def _check(values: Mapping[str, Any], where: str) -> None:
    """Types, ranges and bounds of all values."""
    for key, value in values.items():
        problem = _problem(key, value)
        if problem:
            raise UserError(f"{where}: {key} = {value!r}: {problem}")
    for low, high in (("h1", "h2"), ("u1", "u2")):
        first, second = values.get(f"thresholds.{low}"), values.get(f"thresholds.{high}")
        if first is not None and second is not None and first > second:
            raise UserError(
                f"{where}: thresholds.{low} = {first} is above thresholds.{high} = {second}"
            )
    if values["loop.max_period"] * values["loop.repeats"] > LOOP_WINDOW:
        raise UserError(
            f"{where}: loop.max_period times loop.repeats may be at most {LOOP_WINDOW}: "
            "the guard looks no farther back"
        )
    _boxes(values, where)


def _problem(key: str, value: Any) -> str | None:
    """What is wrong with one value, None if nothing is."""
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            return f"must be one of {', '.join(_CHOICES[key])}"
    elif field := scalars().get(key):
        return _number_problem(value, field["type"], field["low"], field["high"])
    elif key.startswith("regimes."):
        if not _is_list(value, str):
            return 'must be a list of conditions such as "entropy < 0.5"'
    elif key in ("thresholds.calibrated", "metrics.noise_floor"):
        return _number_problem(value, bool, False, True)
    elif key.startswith("thresholds."):
        return _number_problem(value, float, 0.0, _LARGEST)
    elif key == "metrics.layers":
        if value in ("all", "last"):
            return None
        if not (_is_list(value, float) and all(0 <= v <= _LARGEST for v in value)):
            return f'must be "all", "last" or a list of weights from 0 to {_LARGEST:g}'
        if max(value, default=0) < 1 / _LARGEST:
            return "a list of weights needs one that counts"
    elif key == "inject.thought":
        if not isinstance(value, str):
            return "must be text"
    elif not (
        _is_list(value, int) and len(value) <= MAX_BANS and all(0 <= v < 2**31 for v in value)
    ):
        return f"must be a list of at most {MAX_BANS} token ids"
    return None


def _number_problem(value: Any, kind: type, low: float, high: float) -> str | None:
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false"
    if not _is_number(value, kind):
        return "must be an integer" if kind is int else "must be a number"
    if not low <= value <= high:
        return f"must lie in [{low}, {high}]"
    return None


def _is_number(value: Any, kind: type) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value == value


def _is_list(value: Any, kind: type) -> bool:
    if not isinstance(value, list):
        return False
    if kind is str:
        return all(isinstance(v, str) for v in value)
    return all(_is_number(v, kind) for v in value)


def _boxes(values: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds, float32 [4 boxes, 4 quantities] each."""
    low = np.full((len(BOXES), len(QUANTITIES)), -np.inf, np.float32)
    high = np.full_like(low, np.inf)
    for i, box in enumerate(BOXES):
        for condition in values[f"regimes.{box}"]:
            match = _CONDITION.fullmatch(condition)
            problem = f"{where}: regimes.{box}: {condition!r}"
            if not match:
                raise UserError(f"{problem}: expected QUANTITY < NUMBER or QUANTITY > NUMBER")
            quantity, sign, bound = match.groups()
            if quantity not in QUANTITIES:
                raise UserError(
                    f"{problem}: no quantity '{quantity}'{_nearest(quantity, QUANTITIES)}"
                )
            number = _bound(bound, values, problem)
            j = QUANTITIES.index(quantity)
            if sign == "<":
                high[i, j] = min(high[i, j], number)
            else:
                low[i, j] = max(low[i, j], number)
            if low[i, j] >= high[i, j]:
                raise UserError(
                    f"{problem}: no {quantity} is above {low[i, j]} and below {high[i, j]}"
                )
    return low, high


def _bound(text: str, values: Mapping[str, Any], problem: str) -> float:
    if text in THRESHOLDS:
        if f"thresholds.{text}" not in values:
            raise UserError(f"{problem}: thresholds.{text} is not given")
        return float(values[f"thresholds.{text}"])
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise UserError(
            f"{problem}: '{text}' is neither a number up to {_LARGEST:g} "
            f"nor one of {', '.join(THRESHOLDS)}"
        )
    return number


def _layer_weights(layers: str | list[float], num_layers: int, where: str) -> jax.Array:
    if layers == "all":
        return jnp.ones(num_layers, jnp.float32)
    if layers == "last":
        return jnp.eye(num_layers, dtype=jnp.float32)[-1]
    if len(layers) != num_layers:
        raise UserError(
            f"sampler '{where}': metrics.layers has {len(layers)} weights, "
            f"the model has {num_layers} layers"
        )
    return jnp.asarray(layers, jnp.float32)


def _array(kind: type, value: float) -> jax.Array:
    return jnp.asarray(value, {bool: jnp.bool_, int: jnp.int32, float: jnp.float32}[kind])


def _padded(ids: Sequence[int], length: int, filler: int) -> jax.Array:
    return jnp.asarray([*ids, *[filler] * (length - len(ids))], jnp.int32)
