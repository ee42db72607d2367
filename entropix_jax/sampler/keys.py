"""The keys of a sampler, such as `base.temperature`: the rule of each, and checks of their values.

Ranges of numbers, sizes of texts and defaults are stated where the settings are
(`sampler.settings`). Conditions of a regime are written as in the papers: `"entropy > h2"`. A bound
is the name of a threshold, a number or a percentile.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from entropix_jax.errors import UserError, nearest
from entropix_jax.names import BOXES, LARGEST, QUANTITIES, SERVED, THRESHOLDS, read_condition
from entropix_jax.sampler.calibration import TABLES, parse_percentile
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
)

Mechanisms = tuple[Mechanism, ...]
Rule = tuple[Callable[[Any], bool], str]  # a test of a value, and what an error's line says

THRESHOLD_KEYS = tuple(f"thresholds.{name}" for name in THRESHOLDS)
REGIME_KEYS = tuple(f"regimes.{box}" for box in BOXES)


@cache
def sections(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, type]:
    """The sections of a sampler's file that become traced settings: those that all arms share, and
    each mechanism's own."""
    own = {m.name: m.settings for m in mechanisms if m.settings is not None}
    return MappingProxyType({**SHARED_SECTIONS, **own})


@cache
def scalars(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, Mapping[str, Any]]:
    """Returns `type` and range, `low` to `high`, of each number and flag by dotted key."""
    return {key: meta for key, meta in _fields(mechanisms) if "low" in meta}


@cache
def defaults(mechanisms: Mechanisms = MECHANISMS) -> Mapping[str, Any]:
    """Returns the default values of optional keys."""
    of_fields = {key: meta["default"] for key, meta in _fields(mechanisms)}
    given = {key: value for key, value in of_fields.items() if value is not None}
    return MappingProxyType(
        {"draw.bias": [], "metrics.units": "bits", "arms.start": "argmax", **given}
    )


def check_values(
    values: Mapping[str, Any], where: str, mechanisms: Mechanisms = MECHANISMS
) -> None:
    """Raises UserError for an unknown key, or a value of the wrong type or out of range."""
    for key in values:
        check_key(key, where, rules(mechanisms))
    for key, value in values.items():
        fits, told = rules(mechanisms)[key]
        if not fits(value):
            raise UserError(f"{where}: {key} = {value!r}: must be {told}")


def check_whole(
    values: Mapping[str, Any], where: str, mechanisms: Mechanisms = MECHANISMS, hint: str = ""
) -> None:
    """Raises UserError if a required key is missing (the message ends with `hint`) or two valid
    values conflict. Percentiles are compared only within a pair: h1 and h2, u1 and u2."""
    optional = {*THRESHOLD_KEYS, *defaults(mechanisms)}
    if missing := sorted(rules(mechanisms).keys() - optional - values.keys()):
        are = "is" if len(missing) == 1 else f"and {len(missing) - 1} more are"
        raise UserError(f"{where}: '{missing[0]}' {are} missing{hint}")
    for low, high in (THRESHOLD_KEYS[:2], THRESHOLD_KEYS[2:]):
        given = values.get(low), values.get(high)
        percents = tuple(map(parse_percentile, given))
        first, second = given if None in percents else percents
        if isinstance(first, int | float) and isinstance(second, int | float) and first > second:
            raise UserError(f"{where}: {low} = {given[0]} is above {high} = {given[1]}")
    if values["loop.max_period"] * values["loop.repeats"] > LOOP_WINDOW:
        raise UserError(
            f"{where}: loop.max_period times loop.repeats may be at most {LOOP_WINDOW}: "
            "the guard looks no farther back"
        )
    for box in BOXES:
        conditions(box, values, where)


def conditions(
    box: str, values: Mapping[str, Any], where: str
) -> list[tuple[int, bool, float, int]]:
    """Reads the conditions of a regime: the fields of `ConditionSettings` for each.

    Raises:
        UserError: a condition is invalid, there are too many, or nothing can lie between two
            bounds. Percentiles are not compared.
    """
    found: list[tuple[int, bool, float, int]] = []
    between: dict[str, tuple[np.float32, np.float32]] = {}  # the tightest bounds of each quantity
    for text in dict.fromkeys(values[f"regimes.{box}"]):
        problem = f"{where}: regimes.{box}: {text!r}"
        try:
            quantity, sign, bound = read_condition(text)
        except ValueError as error:
            raise UserError(f"{problem}: {error}") from None
        if quantity not in QUANTITIES:
            raise UserError(f"{problem}: no quantity '{quantity}'{nearest(quantity, QUANTITIES)}")
        if bound in THRESHOLDS and f"thresholds.{bound}" not in values:
            raise UserError(f"{problem}: thresholds.{bound} is not given")
        is_named = bound in THRESHOLDS
        number = values[f"thresholds.{bound}"] if is_named else bound
        if isinstance(bound, str) and not is_named:
            if not _is_percentile(bound):
                raise UserError(f'{problem}: a percentile must be from "0%" to "100%"')
            if quantity not in TABLES:
                raise UserError(f"{problem}: {quantity} has no percentiles")
        if not isinstance(number, str):
            low, high = between.get(quantity, (-np.float32(np.inf), np.float32(np.inf)))
            low = max(low, np.float32(number)) if sign == ">" else low
            high = min(high, np.float32(number)) if sign == "<" else high
            if low >= high:
                raise UserError(f"{problem}: no {quantity} is above {low:g} and below {high:g}")
            between[quantity] = low, high
        threshold = THRESHOLDS.index(bound) if is_named else -1
        value = 0.0 if isinstance(bound, str) else bound
        found.append((QUANTITIES.index(quantity), sign == ">", value, threshold))
    if len(found) > MAX_CONDITIONS:
        raise UserError(f"{where}: regimes.{box} has more than {MAX_CONDITIONS} conditions")
    return found


@cache
def rules(mechanisms: Mechanisms) -> Mapping[str, Rule]:
    """Returns the rule of each key of a sampler."""
    found: dict[str, Rule] = {key: _rule_of(meta) for key, meta in _fields(mechanisms)}
    threshold = f'a number in [0, {LARGEST:g}], or a percentile from "0%" to "100%"'
    found |= dict.fromkeys(THRESHOLD_KEYS, (_is_threshold, threshold))
    listed = partial(_is_list, str), 'a list of conditions such as "entropy < 0.5"'
    found |= dict.fromkeys(REGIME_KEYS, listed)
    arms = tuple(m.name for m in mechanisms if m.propose is not None)
    choices = {
        **{f"arms.{name}": arms for name in SERVED},
        "truncation.rule": tuple(m.name for m in mechanisms if m.rule is not None),
        "metrics.attn_entropy": ("normalised", "raw"),
        "metrics.agreement": ("corrected", "published"),
        "metrics.units": ("bits", "thresholds"),
    }
    for key, names in choices.items():
        found[key] = names.__contains__, f"one of {', '.join(names)}"
    weights = f'"all", "last" or a list of weights from 0 to {LARGEST:g}, with one that counts'
    pairs = f"a list of at most {MAX_BIASES} pairs [token id, bias in [{BIAS[0]:g}, {BIAS[1]:g}]]"
    return found | {
        "metrics.noise_floor": (partial(_is_number, bool, False, True), "true or false"),
        "metrics.layers": (_are_layers, weights),
        "draw.bans": (_are_bans, f"a list of at most {MAX_BANS} token ids"),
        "draw.bias": (_are_biases, f"{pairs}, each token once"),
    }


def _fields(mechanisms: Mechanisms) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The dotted key of each field of the sections that a file has, with its metadata."""
    for name, section in sections(mechanisms).items():
        for field in fields(section):
            if field.metadata:
                yield f"{name}.{field.name}", field.metadata


def _rule_of(meta: Mapping[str, Any]) -> Rule:
    """The rule of a field that is a `number`, a `flag`, `texts` or `of_tokens`."""
    if "rule" in meta:
        rule: Rule = meta["rule"]
        return rule
    if "longest" in meta:
        return partial(_are_texts, meta["most"]), f"text, or a list of at most {meta['most']} texts"
    kind, low, high = meta["type"], meta["low"], meta["high"]
    told = f"{'an integer' if kind is int else 'a number'} in [{low}, {high}]"
    return partial(_is_number, kind, low, high), "true or false" if kind is bool else told


def _is_number(kind: type, low: float, high: float, value: Any) -> bool:
    # A bool is an int, too, and an integer is a number.
    if not isinstance(value, int | float) or isinstance(value, bool) != (kind is bool):
        return False
    return (kind is not int or isinstance(value, int)) and low <= value <= high


def _is_percentile(value: Any) -> bool:
    percent = parse_percentile(value)
    return percent is not None and 0 <= percent <= 100


def _is_threshold(value: Any) -> bool:
    return _is_percentile(value) or _is_number(float, 0.0, LARGEST, value)


def _is_list(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _are_texts(most: int, value: Any) -> bool:
    return isinstance(value, str) or (_is_list(str, value) and len(value) <= most)


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list):
        return value in ("all", "last")
    numbers = all(_is_number(float, 0.0, LARGEST, weight) for weight in value)
    return numbers and max(value, default=0) >= 1 / LARGEST


_is_token = partial(_is_number, int, 0, 2**31 - 1)


def _are_bans(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_BANS and all(map(_is_token, value))


def _are_biases(value: Any) -> bool:
    short = _is_list(list, value) and len(value) <= MAX_BIASES
    if not short or any(len(pair) != 2 for pair in value):
        return False
    fits = all(_is_token(token) and _is_number(float, *BIAS, bias) for token, bias in value)
    return fits and len({token for token, _ in value}) == len(value)


def as_list(value: Any) -> Any:
    """A text as a list of one, a list as it is."""
    return [value] if isinstance(value, str) else value
