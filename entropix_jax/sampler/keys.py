"""The keys of a sampler, such as `base.temperature`: defaults, valid values, and traced arrays.

Most keys are fields of a section of settings, which state kind and range (`sampler.settings`). The
others are listed in `_others`. Conditions of a regime are written as in the papers: `"entropy >
h2"`. A bound is the name of a threshold, a number or a percentile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from entropix_jax.errors import UserError, nearest
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.shapes import fits
from entropix_jax.names import BOXES, LARGEST, QUANTITIES, SERVED, THRESHOLDS, read_condition
from entropix_jax.sampler.calibration import TABLES, Calibration, parse_percentile
from entropix_jax.sampler.files import check_key
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.settings import (
    BIAS,
    LOOP_WINDOW,
    MAX_BANS,
    MAX_BIASES,
    MAX_CONDITIONS,
    SHARED_SECTIONS,
    ConditionSettings,
)

Mechanisms = tuple[Mechanism, ...]

THRESHOLD_KEYS = tuple(f"thresholds.{name}" for name in THRESHOLDS)
REGIME_KEYS = tuple(f"regimes.{box}" for box in BOXES)


@dataclass(frozen=True)
class Host:
    """The properties of a model that the arrays of a sampler depend on."""

    num_layers: int
    epsilon: float  # machine epsilon of the logits, for the noise floor
    encode: Callable[[str], Sequence[int]]  # returns the token ids of a text, without special ones
    token_texts: Callable[[], Sequence[str]]  # returns the text of each token
    vocab_size: int  # V, at least the number of these texts
    calibration: Calibration | None  # of the sampler


@dataclass(frozen=True)
class Key:
    """A key of a sampler: which values are valid, and the arrays of a value."""

    fits: Callable[[Any], bool]  # returns whether a value is valid
    expected: str  # what a value must be, for an error
    # Returns the arrays of a value, NumPy. In a message of its UserError the key's name goes first.
    array: Callable[[Any, Host], Any]
    default: Any = None  # the value if no file has the key; None: the key is required
    kind: type | None = None  # of a number or flag: bool, int or float, with its range
    low: float = 0.0
    high: float = 0.0


@cache
def sections(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, type]:
    """Returns the sections of a sampler's file that become traced settings: the shared ones and
    each mechanism's own."""
    of_mechanisms = {m.name: m.settings for m in mechanisms if m.settings is not None}
    return MappingProxyType({**SHARED_SECTIONS, **of_mechanisms})


@cache
def keys(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, Key]:
    """Returns the keys of a sampler by their names."""
    in_sections = {
        f"{name}.{field.name}": _of_field(**field.metadata)
        for name, section in sections(mechanisms).items()
        for field in fields(section)
        if field.metadata
    }
    return MappingProxyType({**in_sections, **_others(mechanisms)})


@cache
def defaults(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, Any]:
    """Returns the default values of optional keys."""
    optional = {k: key.default for k, key in keys(mechanisms).items() if key.default is not None}
    return MappingProxyType(optional)


def check_values(
    values: Mapping[str, Any], where: str, mechanisms: Mechanisms = MECHANISMS
) -> dict[str, Any]:
    """Returns the values in Python's own types. UserError for an unknown key or invalid value."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: settings must be a dict of keys and values, not {values!r}")
    for name in values:
        check_key(str(name), where, keys(mechanisms))
    found = {}
    for name, value in values.items():
        key = keys(mechanisms)[name]
        plain = value.tolist() if hasattr(value, "tolist") else value  # of NumPy
        found[name] = plain if key.kind is not int or (i := as_integer(plain)) is None else i
        if not key.fits(found[name]):
            raise UserError(f"{where}: {name} = {value!r}: must be {key.expected}")
    return found


def check_whole(
    values: Mapping[str, Any], where: str, mechanisms: Mechanisms = MECHANISMS, hint: str = ""
) -> None:
    """Raises UserError if a required key is missing (the message ends with `hint`) or two valid
    values conflict. Percentiles are compared only within a pair: h1 and h2, u1 and u2."""
    optional = {*THRESHOLD_KEYS, *defaults(mechanisms)}
    if missing := sorted(keys(mechanisms).keys() - optional - values.keys()):
        are = "is" if len(missing) == 1 else f"and {len(missing) - 1} more are"
        raise UserError(f"{where}: '{missing[0]}' {are} missing{hint}")
    for low, high in (THRESHOLD_KEYS[:2], THRESHOLD_KEYS[2:]):
        pair = values.get(low), values.get(high)
        percents = tuple(map(parse_percentile, pair))
        first, second = pair if None in percents else percents
        if isinstance(first, int | float) and isinstance(second, int | float) and first > second:
            raise UserError(f"{where}: {low} = {pair[0]} is above {high} = {pair[1]}")
    if values["loop.max_period"] * values["loop.repeats"] > LOOP_WINDOW:
        raise UserError(
            f"{where}: loop.max_period times loop.repeats may be at most {LOOP_WINDOW}: "
            "the guard looks no farther back"
        )
    for name in REGIME_KEYS:
        _check_conditions(name, values, where)


def _check_conditions(name: str, values: Mapping[str, Any], where: str) -> None:
    """Raises UserError if a condition of a regime is invalid, there are too many, or nothing can
    lie between two bounds. Percentiles are not compared."""
    between: dict[str, tuple[np.float32, np.float32]] = {}  # the tightest bounds of each quantity
    conditions = dict.fromkeys(values[name])
    for text in conditions:
        problem = f"{where}: {name}: {text!r}"
        try:
            quantity, sign, bound = read_condition(text)
        except ValueError as error:
            raise UserError(f"{problem}: {error}") from None
        if quantity not in QUANTITIES:
            raise UserError(f"{problem}: no quantity '{quantity}'{nearest(quantity, QUANTITIES)}")
        if bound in THRESHOLDS:
            if f"thresholds.{bound}" not in values:
                raise UserError(f"{problem}: thresholds.{bound} is not given")
            bound = values[f"thresholds.{bound}"]
        elif isinstance(bound, str):
            if not _is_percentile(bound):
                raise UserError(f'{problem}: a percentile must be from "0%" to "100%"')
            if quantity not in TABLES:
                raise UserError(f"{problem}: {quantity} has no percentiles")
        if not isinstance(bound, str):
            low, high = between.get(quantity, (-np.float32(np.inf), np.float32(np.inf)))
            low = max(low, np.float32(bound)) if sign == ">" else low
            high = min(high, np.float32(bound)) if sign == "<" else high
            if low >= high:
                raise UserError(f"{problem}: no {quantity} is above {low:g} and below {high:g}")
            between[quantity] = low, high
    if len(conditions) > MAX_CONDITIONS:
        raise UserError(f"{where}: {name} has more than {MAX_CONDITIONS} conditions")


def _of_field(**metadata: Any) -> Key:
    """Returns the key of a field, from what `number`, `flag`, `texts` or `setting` state."""
    make: Any = _texts if "length" in metadata else _number if "kind" in metadata else Key
    key: Key = make(**metadata)
    return key


def _number(kind: type, low: float, high: float, default: Any) -> Key:
    """Returns the key of a number from `low` to `high`, or of a flag."""
    dtype, noun = {
        bool: ("bool", "true or false"),
        int: ("int32", f"an integer in [{low}, {high}]"),
        float: ("float32", f"a number in [{low}, {high}]"),
    }[kind]

    def array(value: Any, host: Host) -> np.ndarray:
        return np.asarray(value, dtype)

    return Key(partial(_is_number, kind, low, high), noun, array, default, kind, low, high)


def _texts(count: int, length: int, default: Any) -> Key:
    """Returns the key of a text, or a list of up to `count`, of `length` tokens each."""

    def are_valid(value: Any) -> bool:
        return isinstance(value, str) or (fits(value, [str]) and len(value) <= count)

    def array(value: Any, host: Host) -> np.ndarray:
        values = [value] if isinstance(value, str) else value
        encoded = [list(host.encode(text)) for text in values if text]
        if too_long := [len(ids) for ids in encoded if len(ids) > length]:
            raise UserError(f"is {too_long[0]} tokens long, at most {length} are possible")
        rows = [*filter(None, encoded), *[[]] * count][:count]
        return np.stack([_padded(ids, length) for ids in rows])

    return Key(are_valid, f"text, or a list of at most {count} texts", array, default)


def _choice(names: Sequence[str], array: Callable[[Any, Host], Any], default: Any = None) -> Key:
    """Returns the key of a value that is one of some names."""
    return Key(names.__contains__, f"one of {', '.join(names)}", array, default)


def _others(mechanisms: Mechanisms) -> dict[str, Key]:
    """Returns the keys that are not fields of a section."""
    names = [m.name for m in mechanisms]
    arms = [m.name for m in mechanisms if m.propose is not None]
    rules = [m.name for m in mechanisms if m.rule is not None]
    threshold = f'a number in [0, {LARGEST:g}], or a percentile from "0%" to "100%"'
    conditions = 'a list of conditions such as "entropy < 0.5"'
    above = f"at least one of {1 / LARGEST:g} or more"
    weights = f'"all", "last" or a list of weights from 0 to {LARGEST:g}, {above}'
    bans = f"a list of at most {MAX_BANS} token ids"
    biases = f"a list of at most {MAX_BIASES} pairs [token id, bias in [{BIAS[0]:g}, {BIAS[1]:g}]]"

    def index(name: str, host: Host) -> Any:
        return np.int32(names.index(name))

    def is_(name: str) -> Callable[[Any, Host], Any]:
        return lambda value, host: np.asarray(value == name)

    def forbidden(tokens: list[int], host: Host) -> Any:
        return _padded(_known(tokens, host), MAX_BANS)

    def floor(value: bool, host: Host) -> Any:
        return np.float32(host.epsilon if value else 0.0)

    return {
        **dict.fromkeys(THRESHOLD_KEYS, Key(_is_threshold, threshold, lambda x, _: np.float32(x))),
        **dict.fromkeys(REGIME_KEYS, Key(partial(fits, shape=[str]), conditions, _conditions)),
        **{f"arms.{name}": _choice(arms, index) for name in SERVED},
        "arms.start": _choice(arms, index, "argmax"),
        "truncation.rule": _choice(rules, index),
        "metrics.attn_entropy": _choice(("normalised", "raw"), is_("normalised")),
        "metrics.agreement": _choice(("corrected", "published"), is_("published")),
        "metrics.units": _choice(("bits", "thresholds"), is_("thresholds"), "bits"),
        "metrics.noise_floor": Key(partial(fits, shape=bool), "true or false", floor),
        "metrics.layers": Key(_are_layers, weights, _layer_weights),
        "draw.bans": Key(partial(_are_tokens, MAX_BANS), bans, forbidden),
        "draw.bias": Key(_are_biases, f"{biases}, each token once", _biases, []),
    }


def _is_number(kind: type, low: float, high: float, value: Any) -> bool:
    return fits(value, kind) and low <= value <= high


def _is_percentile(value: Any) -> bool:
    percent = parse_percentile(value)
    return percent is not None and 0 <= percent <= 100


def _is_threshold(value: Any) -> bool:
    return _is_percentile(value) or _is_number(float, 0.0, LARGEST, value)


def _conditions(texts: list[str], host: Host) -> ConditionSettings:
    """Returns the conditions of one regime: fields [MAX_CONDITIONS]."""
    found = []
    for quantity, sign, bound in map(read_condition, dict.fromkeys(texts)):
        threshold = THRESHOLDS.index(bound) if bound in THRESHOLDS else -1
        value = 0.0 if isinstance(bound, str) else bound
        found.append((QUANTITIES.index(quantity), sign == ">", value, threshold))
    columns: Any = zip(*found, *[(-1, False, 0.0, -1)] * (MAX_CONDITIONS - len(found)), strict=True)
    arrays: Any = map(np.asarray, columns, ("int32", "bool", "float32", "int32"))
    return ConditionSettings(*arrays)


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list):
        return value in ("all", "last")
    in_range = all(_is_number(float, 0.0, LARGEST, weight) for weight in value)
    return in_range and max(value, default=0) >= 1 / LARGEST


def _layer_weights(layers: str | list[float], host: Host) -> Any:
    if layers == "all":
        return np.ones(host.num_layers, np.float32)
    if layers == "last":
        return np.eye(host.num_layers, dtype=np.float32)[-1]
    if len(layers) != host.num_layers:
        raise UserError(f"has {len(layers)} weights, the model has {host.num_layers} layers")
    return np.asarray(layers, np.float32)


def _are_tokens(limit: int, value: Any) -> bool:
    return fits(value, [int]) and len(value) <= limit and all(0 <= i < 2**31 for i in value)


def _are_biases(value: Any) -> bool:
    if not fits(value, [(int, float)]) or len({token for token, _ in value}) < len(value):
        return False
    in_range = all(BIAS[0] <= bias <= BIAS[1] for _, bias in value)
    return in_range and _are_tokens(MAX_BIASES, [token for token, _ in value])


def _biases(pairs: list[tuple[int, float]], host: Host) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and their biases: int32 and float32 [MAX_BIASES]."""
    tokens = _known([token for token, _ in pairs], host)
    biases = _padded([bias for _, bias in pairs], MAX_BIASES, 0.0, "float32")
    return _padded(tokens, MAX_BIASES), biases


def _known(tokens: list[int], host: Host) -> list[int]:
    """Returns the tokens. UserError if one is not a token of the model."""
    if wrong := [token for token in tokens if token >= host.vocab_size]:
        raise UserError(f"holds {wrong[0]}, which is not a token id")
    return tokens


def _padded(values: Sequence[Any], size: int, fill: float = -1, dtype: str = "int32") -> np.ndarray:
    """Returns values and then `fill`: an array [size]."""
    return np.asarray([*values, *[fill] * (size - len(values))], dtype)
