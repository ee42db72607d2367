"""A sampler on the host: its keys, their types and ranges, and how they become traced arrays.

Conditions of a regime are written as in the papers: `"entropy > h2"`, where `h2` is one of the
sampler's thresholds or stands for itself.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from entropix_jax.errors import UserError, nearest
from entropix_jax.names import (
    BOXES,
    LARGEST,
    QUANTITIES,
    REGIMES,
    SERVED,
    THRESHOLDS,
    read_condition,
)
from entropix_jax.sampler.calibration import (
    TABLES,
    THRESHOLD_TABLES,
    Calibration,
    parse_percentile,
)
from entropix_jax.sampler.context import Arm, Filter
from entropix_jax.sampler.filters import NUCLEUS
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.own import guard
from entropix_jax.sampler.sentences import SentenceFlags, flag_tokens
from entropix_jax.sampler.settings import (
    BIAS,
    LOOP_WINDOW,
    MAX_BANS,
    MAX_BIASES,
    SHARED_SECTIONS,
    SamplerSettings,
)

Mechanisms = tuple[Mechanism, ...]

_CHOICES: dict[str, tuple[str, ...]] = {
    "metrics.attn_entropy": ("normalised", "raw"),
    "metrics.agreement": ("corrected", "published"),
    "metrics.units": ("bits", "thresholds"),
}
# Defaults of keys that older files and traces do not have.
_NEW_KEYS: Mapping[str, Any] = {
    "draw.bias": [],
    "thresholds.dynamic": False,
    "thresholds.rate": 0.02,
    "metrics.units": "bits",
    "adaptive.most": LARGEST,
    "inject.after": "",
    "inject.earliest": 0,
    "loop.hottest": LARGEST,
}
# Removed keys, each with the hint of its error.
OLD_KEYS = {
    "thresholds.calibrated": 'thresholds are percentiles now, such as thresholds.h1 = "30%"',
}
_THRESHOLD_KEYS = tuple(f"thresholds.{name}" for name in THRESHOLDS)
_REGIME_KEYS = tuple(f"regimes.{box}" for box in BOXES)
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
    return _rules(mechanisms).keys() - {*_THRESHOLD_KEYS} - _NEW_KEYS.keys()


@dataclass(frozen=True, repr=False)
class Sampler:
    """A sampler as dotted keys with plain values. Immutable.

    Changes of the user override the file's values. Percentiles stay as written until `resolve`
    turns them into numbers. `notes` are lines for the user.
    """

    name: str
    description: str
    file_values: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None  # whose tables resolve the percentiles
    notes: tuple[str, ...] = ()
    mechanisms: Mechanisms = MECHANISMS

    def __repr__(self) -> str:
        changed = ", ".join(f"{key}={value!r}" for key, value in self.changes.items())
        return f"<Sampler {self.name!r}{': ' if changed else ''}{changed}>"

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Every key with its current value, read-only; percentiles as numbers once resolved."""
        return MappingProxyType({**self.written, **self._resolved})

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """Every key with its value as written, read-only."""
        return MappingProxyType({**_NEW_KEYS, **self.file_values, **self.changes})

    @cached_property
    def percentiles(self) -> Mapping[str, Any]:
        """The keys whose values hold percentiles, with these values, read-only."""
        held = {key: self.written.get(key) for key in (*_THRESHOLD_KEYS, *_REGIME_KEYS)}
        return MappingProxyType({k: v for k, v in held.items() if _holds_percentile(v)})

    @cached_property
    def _resolved(self) -> Mapping[str, Any]:
        """The values of `percentiles` as numbers; empty before `resolve`."""
        if self.calibration is None:
            return {}
        resolved: dict[str, Any] = {}
        for key, value in self.percentiles.items():
            if (percent := parse_percentile(value)) is not None:
                quantity = THRESHOLD_TABLES[key.partition(".")[2]]
                resolved[key] = self.calibration.value(quantity, percent)
            else:
                resolved[key] = [_resolve_condition(one, self.calibration) for one in value]
        return resolved

    def with_values(self, changes: Mapping[str, Any]) -> "Sampler":
        """Returns this sampler with other settings.

        Raises:
            UserError: a key is unknown, a value has the wrong type or is out of range, or nothing
                can lie between the bounds. Percentiles are checked once they are resolved.
        """
        for key in changes:
            check_key(key, self.name, self.mechanisms)
        check_values(changes, self.name, self.mechanisms)
        changed = replace(self, changes={**self.changes, **changes})
        check_whole(changed.values, self.name)
        return changed

    def with_arm(self, name: str, arm: Arm) -> "Sampler":
        """Returns this sampler with one more arm, which `arms.<regime>` may then name: a function
        of one row's `Context` that returns a `Proposal`, in JAX. It becomes part of the compiled
        step. UserError if the name is taken."""
        return self.with_mechanism(Mechanism(name, arm))

    def with_logits(self, name: str, own: Filter) -> "Sampler":
        """Returns this sampler with one more filter before the temperature: a function of one row's
        logits and `Context` that returns logits, in JAX. It becomes part of the compiled step.
        UserError if the name is taken."""
        return self.with_mechanism(Mechanism(name, logits=own))

    def with_truncation(self, name: str, rule: Filter) -> "Sampler":
        """Returns this sampler with a truncation rule of one's own in place of its own: a function
        of one row's logits, divided by the temperature, and `Context` that returns logits, -inf for
        a token that is not to be drawn, in JAX. UserError if the name is taken."""
        changed = self.with_mechanism(Mechanism(name, rule=rule))
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
    def follows_tables(self) -> bool:
        """Whether a percentile can change the text. It cannot where one arm serves every regime
        and draws alike in all of them, as in the baselines."""
        arms = {self.written[f"arms.{regime}"] for regime in REGIMES}
        uses_bounds = {"adaptive", "backspace"} & {*arms, self.written["arms.loop"]}
        alike = not any(m.follows_regimes for m in self.mechanisms if m.name in arms)
        if len(arms) == 1 and alike and not uses_bounds:
            return False
        conditions = [text for key in _REGIME_KEYS for text in self.written[key]]
        bounds = {read_condition(text)[2] for text in conditions}
        if self.written["metrics.units"] == "thresholds":
            bounds |= {"h2", "u2"}
        named = {f"thresholds.{bound}" for bound in bounds if isinstance(bound, str)}
        return any(key in named or key in _REGIME_KEYS for key in self.percentiles)

    def resolve(self, calibration: Calibration, where: str = "") -> "Sampler":
        """Returns this sampler with its percentiles as numbers, from a model's quantile tables.

        Raises:
            UserError: thresholds cross, or nothing can lie between the bounds of a regime. The
                message names `where` the tables are from.
        """
        resolved = replace(self, calibration=calibration)
        place = f"{self.name} with {where}" if where and self.percentiles else self.name
        check_whole(resolved.values, place)
        return resolved

    def settings(
        self,
        *,
        num_layers: int,
        epsilon: float,
        encode: Callable[[str], Sequence[int]],
        token_texts: Callable[[], Sequence[str]],
        vocab_size: int,
    ) -> SamplerSettings:
        """Returns the settings of one row, to be traced: NumPy scalars and arrays, without a row
        axis.

        Args:
            num_layers: of the model.
            epsilon: machine epsilon of the model's logits, for the noise floor.
            encode: returns the token ids of a text, without special tokens.
            token_texts: returns the text of each token, for `inject.after`.
            vocab_size: V, at least the number of these texts.

        Raises:
            UserError: a text has too many tokens, or the model another number of layers.
        """
        values = self.values
        if self.percentiles and self.calibration is None:
            raise ValueError(f"the percentiles of {self!r} are not resolved")
        boxes = _boxes(values, self.name)
        vocabulary = _Vocabulary(encode, token_texts, vocab_size)
        derived = {"thresholds": {"values": self._thresholds, "quantiles": self._quantiles}}
        parts = {
            name: section(
                **{
                    field.name: self._traced(f"{name}.{field.name}", field.metadata, vocabulary)
                    for field in fields(section)
                    if field.metadata
                },
                **derived.get(name, {}),
            )
            for name, section in sections(self.mechanisms).items()
        }
        names = [mechanism.name for mechanism in self.mechanisms]
        arrays: dict[str, Any] = dict(
            low=boxes.low,
            high=boxes.high,
            low_thresholds=boxes.low_thresholds,
            high_thresholds=boxes.high_thresholds,
            arms=np.array([names.index(values[f"arms.{name}"]) for name in SERVED], np.int32),
            rule=np.int32(names.index(values["truncation.rule"])),
            layer_weights=_layer_weights(values["metrics.layers"], num_layers, self.name),
            attn_entropy_normalised=np.asarray(values["metrics.attn_entropy"] == "normalised"),
            agreement_published=np.asarray(values["metrics.agreement"] == "published"),
            in_thresholds=np.asarray(values["metrics.units"] == "thresholds"),
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

    @property
    def _thresholds(self) -> np.ndarray:
        """h1, h2 (bits), u1, u2 (bits^2), float32 [4]; 0 for one that no regime uses."""
        values = [self.values.get(key, 0.0) for key in _THRESHOLD_KEYS]
        return np.asarray(values, np.float32)

    @property
    def _quantiles(self) -> np.ndarray:
        """The quantiles that dynamic thresholds follow, float32 [4]: those written, or those of the
        numbers in the model's tables. -1 without tables."""
        if self.calibration is None:
            return np.full(4, -1, np.float32)
        percents = []
        for name, key in zip(THRESHOLDS, _THRESHOLD_KEYS, strict=True):
            percent = parse_percentile(self.written.get(key))
            if percent is None:
                value = float(self.values.get(key, 0.0))
                percent = self.calibration.rank(THRESHOLD_TABLES[name], value)
            percents.append(percent)
        return np.asarray(percents, np.float32) / np.float32(100)

    def _used(self, settings: SamplerSettings) -> frozenset[str]:
        """See `SamplerSettings.used`."""
        used = {self.values["truncation.rule"]} - {NUCLEUS}
        for m in self.mechanisms:
            learns = None if m.rule else m.learn
            parts = (m.logits, m.reweigh, m.replaces, m.holds, m.active, learns)
            if any(parts) and (m.active is None or m.active(settings)):
                used.add(m.name)
        return frozenset(used)

    def _traced(self, key: str, meta: Mapping[str, Any], vocabulary: "_Vocabulary") -> Any:
        """Returns the array of a field that is a `number`, a `flag`, `texts` or `marks`."""
        value = self.values[key]
        if "marks" in meta:
            return vocabulary.flags([mark for mark in _as_list(value) if mark])
        if "low" in meta:
            kinds = {bool: np.bool_, int: np.int32, float: np.float32}
            return np.asarray(value, kinds[meta["type"]])
        given = (list(vocabulary.encode(text)) for text in _as_list(value) if text)
        encoded = [ids for ids in given if ids]
        for ids in encoded:
            if len(ids) > meta["longest"]:
                told = f"{len(ids)} tokens long, at most {meta['longest']} are possible"
                raise UserError(f"sampler '{self.name}': {key} is {told}")
        encoded += [[]] * (meta["most"] - len(encoded))
        return np.stack([_padded(ids, meta["longest"]) for ids in encoded])


def check_key(key: str, where: str, mechanisms: Mechanisms = MECHANISMS) -> None:
    """Refuses (UserError, which `where` begins) a key that no sampler has."""
    keys = sorted(_rules(mechanisms))
    if key in OLD_KEYS:
        raise UserError(f"{where}: '{key}' is no longer a sampler key: {OLD_KEYS[key]}")
    if key not in keys:
        close = nearest(key, keys, otherwise=" (docs/settings.md lists the keys)")
        raise UserError(f"{where}: no sampler key '{key}'{close}")


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
    """Refuses (UserError) values that conflict. All keys must be there. Percentiles are compared
    only within a pair: h1 and h2, u1 and u2."""
    for low, high in (("h1", "h2"), ("u1", "u2")):
        first, second = values.get(f"thresholds.{low}"), values.get(f"thresholds.{high}")
        alike = isinstance(first, str) == isinstance(second, str)
        numbers = _comparable(first), _comparable(second)
        if alike and numbers[0] is not None and numbers[1] is not None and numbers[0] > numbers[1]:
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
    told = f'a number in [0, {LARGEST:g}], or a percentile from "0%" to "100%"'
    rules: dict[str, Rule] = dict.fromkeys(_THRESHOLD_KEYS, (_is_threshold, told))
    rules["metrics.noise_floor"] = _number_rule(bool, False, True)
    for key, meta in scalars(mechanisms).items():
        rules[key] = _number_rule(meta["type"], meta["low"], meta["high"])
    for key, meta in _settings(mechanisms, "longest").items():
        most = meta["most"]
        rules[key] = partial(_are_texts, most), f"text, or a list of at most {most} texts"
    for key in _settings(mechanisms, "marks"):
        rules[key] = _are_marks, 'a list of single characters, such as [".", "?"]'
    arms = tuple(m.name for m in mechanisms if m.propose is not None)
    choices = {f"arms.{name}": arms for name in SERVED}
    choices["truncation.rule"] = tuple(m.name for m in mechanisms if m.rule is not None)
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


def _is_threshold(value: Any) -> bool:
    percent = parse_percentile(value)
    if percent is not None:
        return 0 <= percent <= 100
    return _is_number(float, 0.0, LARGEST, value)


def _comparable(bound: Any) -> float | None:
    """Returns a percentile's or number's value; None for any other bound."""
    percent = parse_percentile(bound)
    return float(bound) if percent is None and not isinstance(bound, str | None) else percent


def _holds_percentile(value: Any) -> bool:
    if isinstance(value, list):
        return any("%" in str(one) for one in value)
    return parse_percentile(value) is not None


def _resolve_condition(text: str, calibration: Calibration) -> str:
    """Returns a condition with its percentile, if it has one, as a number."""
    quantity, sign, bound = read_condition(text)
    percent = parse_percentile(bound)
    return text if percent is None else f"{quantity} {sign} {calibration.value(quantity, percent)}"


def _are_marks(value: Any) -> bool:
    return isinstance(value, str | list) and all(
        isinstance(one, str) and len(one) <= 1 for one in _as_list(value)
    )


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


@dataclass(frozen=True)
class _Boxes:
    """The bounds of the four boxes on the five quantities, each [4, 5]."""

    low: np.ndarray  # float32
    high: np.ndarray  # float32
    low_thresholds: np.ndarray  # int32, indices into THRESHOLDS; -1: none
    high_thresholds: np.ndarray  # int32


def _boxes(values: Mapping[str, Any], where: str) -> _Boxes:
    """Reads the conditions of the regimes. Bounds that are percentiles are not compared."""
    shape = len(BOXES), len(QUANTITIES)
    boxes = _Boxes(
        low=np.full(shape, -np.inf, np.float32),
        high=np.full(shape, np.inf, np.float32),
        low_thresholds=np.full(shape, -1, np.int32),
        high_thresholds=np.full(shape, -1, np.int32),
    )
    # The bounds with the thresholds' values in place, which must leave something between them.
    whole = {"<": np.full(shape, np.inf), ">": np.full(shape, -np.inf)}
    for i, box in enumerate(BOXES):
        for condition in values[f"regimes.{box}"]:
            problem = f"{where}: regimes.{box}: {condition!r}"
            try:
                quantity, sign, bound = read_condition(condition)
            except ValueError as error:
                raise UserError(f"{problem}: {error}") from None
            if bound in THRESHOLDS and f"thresholds.{bound}" not in values:
                raise UserError(f"{problem}: thresholds.{bound} is not given")
            percent = parse_percentile(bound)
            if isinstance(bound, str) and bound not in THRESHOLDS:
                if percent is None or not 0 <= percent <= 100:
                    raise UserError(f'{problem}: a percentile must be from "0%" to "100%"')
                if quantity not in TABLES:
                    raise UserError(f"{problem}: {quantity} has no percentiles")
                continue
            j = QUANTITIES.index(quantity)
            tighter = min if sign == "<" else max
            if isinstance(bound, str):
                number = _comparable(values[f"thresholds.{bound}"])
                named = boxes.high_thresholds if sign == "<" else boxes.low_thresholds
                # Of two thresholds on one side the tighter one bounds.
                both = [THRESHOLDS.index(bound), *named[i, j : j + 1].clip(min=-1)]
                order = [_comparable(values[_THRESHOLD_KEYS[k]]) or 0.0 for k in both if k >= 0]
                named[i, j] = both[order.index(tighter(order))]
                if isinstance(values[f"thresholds.{bound}"], str):
                    continue
            else:
                number = float(bound)
                numbers = boxes.high if sign == "<" else boxes.low
                numbers[i, j] = tighter(numbers[i, j], np.float32(number))
            whole[sign][i, j] = tighter(whole[sign][i, j], np.float32(number))
            if whole[">"][i, j] >= whole["<"][i, j]:
                low, high = whole[">"][i, j], whole["<"][i, j]
                raise UserError(f"{problem}: no {quantity} is above {low:g} and below {high:g}")
    return boxes


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a model, as far as settings need them; see `Sampler.settings`."""

    encode: Callable[[str], Sequence[int]]
    token_texts: Callable[[], Sequence[str]]
    vocab_size: int

    def flags(self, marks: Sequence[str]) -> SentenceFlags:
        """Returns the flags of all tokens for the marks that end a sentence."""
        flags: Any = np.zeros(self.vocab_size, np.uint8)
        if marks:
            own = flag_tokens(self.token_texts(), marks)
            flags[: len(own)] = own
        given: Any = np.asarray(bool(marks))
        return SentenceFlags(given=given, of_token=flags)


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
