"""A sampler on the host: its description as dotted keys, and its conversion to traced arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.names import REGIMES, SERVED, THRESHOLDS, read_condition
from entropix_jax.sampler.calibration import THRESHOLD_TABLES, Calibration, parse_percentile
from entropix_jax.sampler.context import Arm, Filter
from entropix_jax.sampler.filters import NUCLEUS
from entropix_jax.sampler.keys import (
    REGIME_KEYS,
    THRESHOLD_KEYS,
    Host,
    check_values,
    check_whole,
    defaults,
    keys,
    sections,
)
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import ACTING, MECHANISMS
from entropix_jax.sampler.settings import BIAS, SHARED_SECTIONS, Parts, SamplerSettings


@dataclass(frozen=True, repr=False)
class Sampler:
    """A sampler as dotted keys with plain values. Immutable.

    The user's changes override the file's values. `resolve` turns percentiles into numbers. `notes`
    are lines for the user.
    """

    name: str
    description: str
    file_values: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None  # whose tables resolve the percentiles
    notes: tuple[str, ...] = ()
    mechanisms: tuple[Mechanism, ...] = MECHANISMS

    def __repr__(self) -> str:
        changed = ", ".join(f"{key}={value!r}" for key, value in self.changes.items())
        return f"<Sampler {self.name!r}{': ' if changed else ''}{changed}>"

    def __reduce__(self) -> Any:
        """Copies and pickles the fields. A pickle has no copies of the package's mechanisms."""
        values = [getattr(self, field.name) for field in fields(self)]
        return Sampler, (*values[:-1], *([] if self.mechanisms == MECHANISMS else values[-1:]))

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Every key with its current value, read-only; percentiles as numbers once resolved."""
        tables, resolved = self.calibration, {}
        if tables is not None:
            resolved = {key: _resolve(key, held, tables) for key, held in self.percentiles.items()}
        return MappingProxyType({**self.written, **resolved})

    @cached_property
    def written(self) -> Mapping[str, Any]:
        """Every key with its value as written, read-only."""
        return MappingProxyType({**defaults(self.mechanisms), **self.file_values, **self.changes})

    @cached_property
    def percentiles(self) -> Mapping[str, Any]:
        """The keys whose values hold percentiles, with these values, read-only."""
        held = {key: self.written.get(key) for key in (*THRESHOLD_KEYS, *REGIME_KEYS)}
        return MappingProxyType({k: v for k, v in held.items() if "%" in str(v)})

    def with_values(self, changes: Mapping[str, Any]) -> "Sampler":
        """Returns a sampler with changed settings. UserError if a key is unknown, a value has the
        wrong type or is out of range, or nothing can lie between the bounds. Percentiles are
        checked once they are resolved."""
        changes = check_values(changes, self.name, self.mechanisms)
        changed = replace(self, changes={**self.changes, **changes})
        check_whole(changed.values, self.name, self.mechanisms)
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
        """Returns a sampler with another truncation rule: a function of one row's logits, divided
        by the temperature, and `Context` that returns logits, -inf for removed tokens, in JAX.
        UserError if the name is taken."""
        changed = self.with_mechanism(Mechanism(name, rule=rule))
        return changed.with_values({"truncation.rule": name})

    def with_mechanism(self, mechanism: Mechanism) -> "Sampler":
        """Returns this sampler with one more mechanism, see `sampler.mechanism`. `arms.<regime>` or
        `truncation.rule` may then name it. Its settings get their own keys, at their defaults.
        UserError if the name is taken, or a setting has no valid default."""
        where, name = f"sampler '{self.name}'", mechanism.name
        if name in (m.name for m in self.mechanisms):
            raise UserError(f"{where}: there is a mechanism '{name}' already")
        if any(key.startswith(f"{name}.") for key in keys(self.mechanisms)):
            raise UserError(f"{where}: there is a section '{name}' already")
        more = (*self.mechanisms, mechanism.guarded())
        settings = () if mechanism.settings is None else fields(mechanism.settings)
        values = {f"{name}.{field.name}": field.metadata.get("default") for field in settings}
        check_values(values, where, more)
        return replace(self, mechanisms=more)

    @property
    def follows_tables(self) -> bool:
        """Whether a percentile can change the text. It cannot if one arm serves every regime and
        draws the same way in all of them, as in the baselines."""
        arms = {self.written[f"arms.{regime}"] for regime in REGIMES}
        all_arms = [m for m in self.mechanisms if m.name in {*arms, self.written["arms.loop"]}]
        if len(arms) == 1 and not any(m.control or m.name == "adaptive" for m in all_arms):
            return False
        texts = [text for key in REGIME_KEYS for text in self.written[key]]
        bounds = {read_condition(text)[2] for text in texts}
        if self.written["metrics.units"] == "thresholds":
            bounds |= {"h2", "u2"}
        named = {f"thresholds.{bound}" for bound in bounds if isinstance(bound, str)}
        return any(key in named or key in REGIME_KEYS for key in self.percentiles)

    def resolve(self, calibration: Calibration, where: str = "") -> "Sampler":
        """Returns this sampler with its percentiles as numbers, from a model's quantile tables.
        UserError, which names `where` the tables are from, if thresholds cross, or nothing can lie
        between the bounds of a regime."""
        resolved = replace(self, calibration=calibration)
        place = f"{self.name} with {where}" if where and self.percentiles else self.name
        check_whole(resolved.values, place, self.mechanisms)
        return resolved

    def settings(self, **model: Any) -> SamplerSettings:
        """Returns the settings of one row, to be traced: NumPy scalars and arrays, without a row
        axis. `model` has the fields of `keys.Host`, except for the calibration. UserError if a
        value does not fit the model, such as a text of too many tokens."""
        if self.percentiles and self.calibration is None:
            raise ValueError(f"the percentiles of {self!r} are not resolved")
        host = Host(**model, calibration=self.calibration)
        known, arrays = keys(self.mechanisms), dict[str, Any]()
        for name, value in self.values.items():
            try:
                arrays[name] = known[name].array(value, host)
            except UserError as error:
                raise UserError(f"sampler '{self.name}': {name} {error}") from None
        of_sections = {
            name: kind(**{f.name: arrays[f"{name}.{f.name}"] for f in fields(kind) if f.metadata})
            for name, kind in sections(self.mechanisms).items()
        }
        shared = {name: of_sections.pop(name) for name in SHARED_SECTIONS}
        # 0 for a threshold that no regime uses.
        values = np.array([arrays.get(key, 0.0) for key in THRESHOLD_KEYS], np.float32)
        thresholds = replace(shared.pop("thresholds"), values=values, quantiles=self._quantiles)
        bans, (biased, biases) = arrays["draw.bans"], arrays["draw.bias"]
        banned = np.where(biases <= BIAS[0], biased, -1)
        conditions = [arrays[key] for key in REGIME_KEYS]
        return SamplerSettings(
            conditions=jax.tree.map(lambda *of_boxes: np.stack(of_boxes), *conditions),
            arms=np.stack([arrays[f"arms.{name}"] for name in SERVED]),  # type: ignore[arg-type]
            rule=arrays["truncation.rule"],
            layer_weights=arrays["metrics.layers"],
            attn_entropy_normalised=arrays["metrics.attn_entropy"],
            agreement_published=arrays["metrics.agreement"],
            in_thresholds=arrays["metrics.units"],
            noise_epsilon=arrays["metrics.noise_floor"],
            bans=bans,
            biased=biased,
            biases=biases,
            unwritable=np.concatenate([bans, banned]),  # type: ignore[arg-type]
            thresholds=thresholds,
            **shared,
            own=of_sections,
        )

    def parts(self, settings: SamplerSettings) -> Parts:
        """Returns the parts of the sampler's compiled step, from its own `settings`."""
        used = {self.values["truncation.rule"]} - {NUCLEUS}
        starts = self.values["start.tokens"] > 0
        used |= {self.values[f"arms.{name}"] for name in SERVED if name != "start" or starts}
        for m in self.mechanisms:
            learns = None if m.rule else m.learn
            acts = None if m.propose else m.control or m.holds
            does = (m.observe, m.logits, m.reweigh, acts, m.active, learns)
            if any(does) and (m.active is None or m.active(settings)):
                used.add(m.name)
        if not used <= {mechanism.name for mechanism in MECHANISMS}:
            # A user's own may ask for the action of any arm.
            used |= ACTING
        if "clarify" in used:
            used.add("question")
        return Parts(self.mechanisms, frozenset(used))

    @property
    def _quantiles(self) -> np.ndarray:
        """The quantiles that dynamic thresholds follow, float32 [4]: those written, or those of the
        numbers in the model's tables. -1 without tables."""
        if self.calibration is None:
            return np.full(4, -1, np.float32)
        percents = []
        for name, key in zip(THRESHOLDS, THRESHOLD_KEYS, strict=True):
            percent = parse_percentile(self.written.get(key))
            if percent is None:
                value = float(self.values.get(key, 0.0))
                percent = self.calibration.rank(THRESHOLD_TABLES[name], value)
            percents.append(percent)
        return np.asarray(percents, np.float32) / np.float32(100)


def _resolve(key: str, held: Any, tables: Calibration) -> Any:
    """Returns a threshold, or the conditions of a regime, with percentiles as numbers."""
    if key in REGIME_KEYS:
        return [_resolve_condition(text, tables) for text in held]
    percent: Any = parse_percentile(held)
    return tables.value(THRESHOLD_TABLES[key.partition(".")[2]], percent)


def _resolve_condition(text: str, tables: Calibration) -> str:
    quantity, sign, bound = read_condition(text)
    percent = parse_percentile(bound)
    return text if percent is None else f"{quantity} {sign} {tables.value(quantity, percent)}"
