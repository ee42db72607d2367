"""A sampler on the host: its keys, their types and ranges, and how they become traced arrays.

Conditions of a regime are written as in the papers: `"entropy > h2"`, where `h2` is one of the
sampler's thresholds or stands for itself.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_json_object
from entropix_jax.names import (
    BOXES,
    LARGEST,
    QUANTITIES,
    REGIMES,
    SERVED,
    THRESHOLDS,
    read_condition,
)
from entropix_jax.sampler.mechanism import Mechanism, Transform
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.own import guard
from entropix_jax.sampler.proposal import Arm
from entropix_jax.sampler.settings import (
    BIAS,
    LAST,
    LOOP_WINDOW,
    MAX_BANS,
    MAX_BIASES,
    SHARED_SECTIONS,
    SamplerSettings,
)
from entropix_jax.sampler.truncation import NUCLEUS, Masked

Mechanisms = tuple[Mechanism, ...]

_CHOICES: dict[str, tuple[str, ...]] = {
    "metrics.attn_entropy": ("normalised", "raw"),
    "metrics.agreement": ("corrected", "published"),
}
# Defaults of keys that older files and traces do not have.
_NEW_KEYS: Mapping[str, Any] = {"draw.bias": []}
Rule = tuple[Callable[[Any], bool], str]  # a test of a value, and what an error's line says


@cache
def sections(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, type]:
    """The sections of a sampler's file that become traced settings: those that all arms share, and
    each mechanism's own."""
    own = {m.name: m.settings for m in mechanisms if m.settings is not None}
    return MappingProxyType({**SHARED_SECTIONS, **own})


@cache
def scalars(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, Mapping[str, Any]]:
    """Every number and flag by its dotted key, with its `type` and its range, `low` to `high`."""
    return _settings(mechanisms, "low")


@cache
def required(mechanisms: Mechanisms = MECHANISMS) -> Set[str]:
    """The keys that every sampler's file has; of the thresholds it may leave some out."""
    return (
        _rules(mechanisms).keys() - {f"thresholds.{name}" for name in THRESHOLDS} - _NEW_KEYS.keys()
    )


@dataclass(frozen=True, repr=False)
class Sampler:
    """A sampler as dotted keys with plain values. Immutable.

    Changes of the user override the model's own thresholds, and those override the file's. `notes`
    are lines for the user, such as that published thresholds stand in for calibrated ones.
    """

    name: str
    description: str
    file_values: Mapping[str, Any]
    thresholds: Mapping[str, Any] = field(default_factory=dict)  # of the model it is meant for
    changes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    mechanisms: Mechanisms = MECHANISMS

    def __repr__(self) -> str:
        changed = ", ".join(f"{key}={value!r}" for key, value in self.changes.items())
        return f"<Sampler {self.name!r}{': ' if changed else ''}{changed}>"

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Every key with its current value, read-only."""
        given = {**self.file_values, **self.thresholds, **self.changes}
        return MappingProxyType({**_NEW_KEYS, **given})

    def with_values(self, changes: Mapping[str, Any]) -> "Sampler":
        """This sampler with other settings. UserError if a key is unknown, a value has the wrong
        type or is out of range, or nothing can lie between the bounds. Thresholds that may only fit
        beside a model's own are checked by `with_thresholds`."""
        for key in changes:
            check_key(key, self.name, self.mechanisms)
        check_values(changes, self.name, self.mechanisms)
        changed = replace(self, changes={**self.changes, **changes})
        # A user's threshold may only fit beside the model's, which are not known yet.
        pending = changed.values["thresholds.calibrated"] and not self.thresholds
        if not (pending and any(key.startswith("thresholds.") for key in changed.changes)):
            check_whole(changed.values, self.name)
        return changed

    def with_arm(self, name: str, arm: Arm) -> "Sampler":
        """This sampler with one more arm, which `arms.<regime>` may then name. An arm takes one
        row's metrics, settings and view to a proposal, in JAX (see `sampler.proposal`), and becomes
        part of the compiled step. UserError if the name is taken."""
        return self.with_mechanism(Mechanism(name, arm))

    def with_logits(self, name: str, transform: Transform) -> "Sampler":
        """This sampler with one more transform of the logits: a function from one row's logits,
        metrics, settings and view to other logits, in JAX. It becomes part of the compiled step,
        before truncation. UserError if the name is taken."""
        return self.with_mechanism(Mechanism(name, logits=transform))

    def with_truncation(self, name: str, mask: Transform) -> "Sampler":
        """This sampler with a truncation rule of one's own in place of its own, see
        `sampler.truncation.Masked`: a function from one row's logits, divided by the temperature,
        its metrics, settings and view to the tokens that may be drawn, a bool [V], in JAX.
        UserError if the name is taken."""
        changed = self.with_mechanism(Mechanism(name, cut=Masked(mask)))
        return changed.with_values({"truncation.rule": name})

    def with_mechanism(self, mechanism: Mechanism) -> "Sampler":
        """This sampler with one more mechanism, see `sampler.mechanism`. `arms.<regime>` may then
        name it, or `truncation.rule`; its settings have keys of their own, each at its default.
        UserError if the name is taken, or a setting has no default or one that does not fit it."""
        where, name = f"sampler '{self.name}'", mechanism.name
        if name in (m.name for m in self.mechanisms):
            raise UserError(f"{where}: there is a mechanism '{name}' already")
        if any(key.startswith(f"{name}.") for key in _rules(self.mechanisms)):
            raise UserError(f"{where}: there is a section '{name}' already")
        more = (*self.mechanisms, guard(mechanism))
        defaults = {
            f"{name}.{field.name}": field.metadata.get("default")
            for field in (() if mechanism.settings is None else fields(mechanism.settings))
        }
        check_values(defaults, where, more)
        return replace(self, file_values={**self.file_values, **defaults}, mechanisms=more)

    @property
    def follows_thresholds(self) -> bool:
        """Whether it takes the model's thresholds, and one that the user did not set can change the
        text. It cannot where one arm serves every regime and draws alike in all of them, as in the
        baselines."""
        if not self.values["thresholds.calibrated"]:
            return False
        arms = {self.values[f"arms.{regime}"] for regime in REGIMES}
        if len(arms) == 1 and not any(m.follows_regimes for m in self.mechanisms if m.name in arms):
            return False
        conditions = (text for box in BOXES for text in self.values[f"regimes.{box}"])
        bounds = {read_condition(text)[2] for text in conditions}
        free = {name for name in THRESHOLDS if f"thresholds.{name}" not in self.changes}
        return bool(bounds & free)

    def with_thresholds(
        self, thresholds: Mapping[str, float], where: str = "", notes: tuple[str, ...] = ()
    ) -> "Sampler":
        """This sampler with a model's own thresholds, h1, h2 (bits), u1, u2 (bits^2), if it asks
        for calibrated ones: they replace those of another model. With none, those of the sampler's
        own file stay. `notes` replace the sampler's. UserError, which names `where` they are from,
        if one is out of range, or the bounds leave nothing between them."""
        own = {f"thresholds.{name}": value for name, value in thresholds.items()}
        own = own if self.values["thresholds.calibrated"] else {}
        check_values(own, where)
        fitted = replace(self, thresholds=own, notes=notes)
        check_whole(fitted.values, f"{self.name} with {where}" if own else self.name)
        return fitted

    def settings(
        self, *, num_layers: int, epsilon: float, encode: Callable[[str], Sequence[int]]
    ) -> SamplerSettings:
        """The settings of one row, to be traced: NumPy scalars and arrays, without a row axis.

        `epsilon` is that of the dtype of the model's logits, for the noise floor; `encode` makes
        token ids of a text and adds none. UserError if a text has too many tokens, or the model
        another number of layers.
        """
        values = self.values
        low, high = _boxes(values, self.name)
        parts = {
            name: section(
                **{
                    field.name: self._traced(f"{name}.{field.name}", field.metadata, encode)
                    for field in fields(section)
                    if field.metadata
                }
            )
            for name, section in sections(self.mechanisms).items()
        }
        names = [mechanism.name for mechanism in self.mechanisms]
        arrays: dict[str, Any] = dict(
            low=low,
            high=high,
            arms=np.array([names.index(values[f"arms.{name}"]) for name in SERVED], np.int32),
            rule=np.int32(names.index(values["truncation.rule"])),
            layer_weights=_layer_weights(values["metrics.layers"], num_layers, self.name),
            attn_entropy_normalised=np.asarray(values["metrics.attn_entropy"] == "normalised"),
            agreement_published=np.asarray(values["metrics.agreement"] == "published"),
            noise_epsilon=np.float32(epsilon if values["metrics.noise_floor"] else 0.0),
            bans=_padded(values["draw.bans"], MAX_BANS),
            biased=_padded([token for token, _ in values["draw.bias"]], MAX_BIASES),
            biases=_biases(values["draw.bias"]),
            **{name: parts.pop(name) for name in SHARED_SECTIONS},
        )
        settings = SamplerSettings(
            **arrays, own=parts, mechanisms=self.mechanisms, used=frozenset()
        )
        return replace(settings, used=self._used(settings))

    def _used(self, settings: SamplerSettings) -> frozenset[str]:
        """See `SamplerSettings.used`."""
        used = {self.values["truncation.rule"]} - {NUCLEUS}
        used |= {LAST} if self.values[LAST] else set()
        for m in self.mechanisms:
            parts = (m.logits, m.reweigh, m.replaces, m.holds, m.active, None if m.cut else m.learn)
            if any(parts) and (m.active is None or m.active(settings)):
                used.add(m.name)
        return frozenset(used)

    def _traced(
        self, key: str, meta: Mapping[str, Any], encode: Callable[[str], Sequence[int]]
    ) -> np.ndarray:
        """The array of a field that is a `number`, a `flag` or `texts`."""
        value = self.values[key]
        if "low" in meta:
            kinds = {bool: np.bool_, int: np.int32, float: np.float32}
            return np.asarray(value, kinds[meta["type"]])
        encoded = [ids for text in _as_list(value) if text and (ids := list(encode(text)))]
        for ids in encoded:
            if len(ids) > meta["longest"]:
                told = f"{len(ids)} tokens long, at most {meta['longest']} are possible"
                raise UserError(f"sampler '{self.name}': {key} is {told}")
        encoded += [[]] * (meta["most"] - len(encoded))
        return np.stack([_padded(ids, meta["longest"]) for ids in encoded])


def read_thresholds(path: Path) -> dict[str, float]:
    """A model's own thresholds, from its calibration file. UserError if it cannot be read, or does
    not hold the four."""
    stored = read_json_object(path).get("thresholds")
    if not isinstance(stored, dict) or set(stored) != set(THRESHOLDS):
        raise UserError(f"{path}: 'thresholds' must hold {', '.join(THRESHOLDS)}")
    check_values({f"thresholds.{name}": value for name, value in stored.items()}, str(path))
    return stored


def check_key(key: str, where: str, mechanisms: Mechanisms = MECHANISMS) -> None:
    """Refuses (UserError, which `where` begins) a key that no sampler has."""
    keys = sorted(_rules(mechanisms))
    if key not in keys:
        close = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
        raise UserError(f"{where}: no sampler key '{key}', did you mean '{close[0]}'?")


def check_values(
    values: Mapping[str, Any], where: str, mechanisms: Mechanisms = MECHANISMS
) -> None:
    """Refuses (UserError) a value of the wrong type or out of range; the keys are known ones."""
    rules = _rules(mechanisms)
    for key, value in values.items():
        fits, told = rules[key]
        if not fits(value):
            raise UserError(f"{where}: {key} = {value!r}: must be {told}")


def check_whole(values: Mapping[str, Any], where: str) -> None:
    """Refuses (UserError) values that do not go together; all keys are there."""
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


@cache
def _rules(mechanisms: Mechanisms) -> Mapping[str, Rule]:
    """The rule of each key that a sampler may have."""
    rules = {f"thresholds.{name}": _number_rule(float, 0.0, LARGEST) for name in THRESHOLDS}
    for key in ("thresholds.calibrated", "metrics.noise_floor"):
        rules[key] = _number_rule(bool, False, True)
    for key, meta in scalars(mechanisms).items():
        rules[key] = _number_rule(meta["type"], meta["low"], meta["high"])
    for key, meta in _settings(mechanisms, "longest").items():
        most = meta["most"]
        rules[key] = partial(_are_texts, most), f"text, or a list of at most {most} texts"
    arms = tuple(m.name for m in mechanisms if m.propose is not None)
    choices = {f"arms.{name}": arms for name in SERVED}
    choices["truncation.rule"] = tuple(m.name for m in mechanisms if m.cut is not None)
    for key, names in (_CHOICES | choices).items():
        rules[key] = names.__contains__, f"one of {', '.join(names)}"
    for box in BOXES:
        conditions = 'a list of conditions such as "entropy < 0.5"'
        rules[f"regimes.{box}"] = partial(_is_list, str), conditions
    weights = f'"all", "last" or a list of weights from 0 to {LARGEST:g}, with one that counts'
    rules["metrics.layers"] = _are_layers, weights
    rules["draw.bans"] = _are_bans, f"a list of at most {MAX_BANS} token ids"
    pairs = f"a list of at most {MAX_BIASES} pairs [token id, bias in [{BIAS[0]:g}, {BIAS[1]:g}]]"
    rules["draw.bias"] = _are_biases, f"{pairs}, each token once"
    return rules


def _number_rule(kind: type, low: float, high: float) -> Rule:
    told = f"{'an integer' if kind is int else 'a number'} in [{low}, {high}]"
    return partial(_is_number, kind, low, high), "true or false" if kind is bool else told


def _is_number(kind: type, low: float, high: float, value: Any) -> bool:
    # A bool is an int, too, and an integer is a number.
    if not isinstance(value, int | float) or isinstance(value, bool) != (kind is bool):
        return False
    return (kind is not int or isinstance(value, int)) and low <= value <= high


def _is_list(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _are_texts(most: int, value: Any) -> bool:
    return isinstance(value, str) or (_is_list(str, value) and len(value) <= most)


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list):
        return value in ("all", "last")
    numbers = all(_is_number(float, 0.0, LARGEST, weight) for weight in value)
    return numbers and max(value, default=0) >= 1 / LARGEST


def _are_bans(value: Any) -> bool:
    short = isinstance(value, list) and len(value) <= MAX_BANS
    return short and all(_is_number(int, 0, 2**31 - 1, token) for token in value)


def _are_biases(value: Any) -> bool:
    short = _is_list(list, value) and len(value) <= MAX_BIASES
    if not short or any(len(pair) != 2 for pair in value):
        return False
    fits = all(_is_number(int, 0, 2**31 - 1, i) and _is_number(float, *BIAS, x) for i, x in value)
    return fits and len({token for token, _ in value}) == len(value)


def _boxes(values: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds, float32 [4 boxes, 5 quantities] each."""
    low = np.full((len(BOXES), len(QUANTITIES)), -np.inf, np.float32)
    high = np.full_like(low, np.inf)
    for i, box in enumerate(BOXES):
        for condition in values[f"regimes.{box}"]:
            problem = f"{where}: regimes.{box}: {condition!r}"
            try:
                quantity, sign, bound = read_condition(condition)
            except ValueError as error:
                raise UserError(f"{problem}: {error}") from None
            if isinstance(bound, str) and f"thresholds.{bound}" not in values:
                raise UserError(f"{problem}: thresholds.{bound} is not given")
            number = float(values[f"thresholds.{bound}"] if isinstance(bound, str) else bound)
            j = QUANTITIES.index(quantity)
            if sign == "<":
                high[i, j] = min(high[i, j], number)
            else:
                low[i, j] = max(low[i, j], number)
            if low[i, j] >= high[i, j]:
                raise UserError(
                    f"{problem}: no {quantity} is above {low[i, j]:g} and below {high[i, j]:g}"
                )
    return low, high


def _layer_weights(layers: str | list[float], num_layers: int, where: str) -> Any:
    if layers == "all":
        return np.ones(num_layers, np.float32)
    if layers == "last":
        return np.eye(num_layers, dtype=np.float32)[-1]
    if len(layers) != num_layers:
        told = f"metrics.layers has {len(layers)} weights, the model has {num_layers} layers"
        raise UserError(f"sampler '{where}': {told}")
    return np.asarray(layers, np.float32)


def _padded(ids: Sequence[int], length: int) -> np.ndarray:
    return np.asarray([*ids, *[-1] * (length - len(ids))], np.int32)


def _biases(pairs: Sequence[Sequence[float]]) -> np.ndarray:
    """The biases alone, float32 [MAX_BIASES]."""
    return np.asarray([*(x for _, x in pairs), *[0] * (MAX_BIASES - len(pairs))], np.float32)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


@cache
def _settings(mechanisms: Mechanisms, kind: str) -> Mapping[str, Mapping[str, Any]]:
    """The metadata of every field of that kind, by its dotted key."""
    return {
        f"{name}.{field.name}": field.metadata
        for name, section in sections(mechanisms).items()
        for field in fields(section)
        if kind in field.metadata
    }
