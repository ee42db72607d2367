"""Samplers resolved for a model: percentiles as thresholds, and settings as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.tokens import describe_token
from entropix_jax.errors import UserError
from entropix_jax.host.arguments import checked
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.find import SUFFIX
from entropix_jax.model.loading import CALIBRATION_FILE, LanguageModel
from entropix_jax.names import SERVED, read_condition
from entropix_jax.packed import Packed, pack
from entropix_jax.sampler.calibration import Calibration, generic_calibration, read_calibration
from entropix_jax.sampler.keys import REGIME_KEYS
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.sampler.mechanisms.clarify import CLARIFY
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import MAX_WIDTH, Parts, SamplerSettings
from entropix_jax.sampler.wrong import WrongTable, find_table


@dataclass(frozen=True, eq=False)
class CalibratedSampler:
    """A sampler resolved for one model, see `calibrate_sampler`."""

    sampler: Sampler  # its percentiles resolved
    settings: SamplerSettings  # the same as arrays, of one row
    calibration: Calibration  # the tables that resolved it
    # Names of other samplers' mechanisms to compile into the step, so that these samplers share
    # one program.
    others: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: Any) -> "CalibratedSampler":
        """Returns the sampler itself, which is immutable and holds functions without a name."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise UserError("rows cannot be pickled with their sampler: use save_trace or to_json")

    @property
    def name(self) -> str:
        """The preset's or file's name."""
        return self.sampler.name

    @property
    def values(self) -> Mapping[str, Any]:
        """All settings, read-only."""
        return self.sampler.values

    @cached_property
    def parts(self) -> Parts:
        """Static parts of its compiled step."""
        own = self.sampler.parts(self.settings)
        return replace(own, used=own.used | self.others)

    @cached_property
    def packed(self) -> Packed[SamplerSettings]:
        """The settings as a row of the engine holds them."""
        return pack(jax.tree.map(np.asarray, self.settings))

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Arms, rules and transforms."""
        return self.sampler.mechanisms

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that a user should see."""
        return self.sampler.notes

    @cached_property
    def wrong_table(self) -> WrongTable | None:
        """The table of P(wrong)."""
        return find_table(self.values["wrong.table"], self.calibration.wrong)

    @property
    def notes_without_user(self) -> tuple[str, ...]:
        """The notes for a run in which no user can answer a question."""
        note = "the arm 'clarify' samples, because there is no user to ask"
        return (*self.notes, note) if CLARIFY.name in self._arms else self.notes

    @property
    def _arms(self) -> set[str]:
        return {self.values[f"arms.{name}"] for name in SERVED}

    @property
    def lanes(self) -> int:
        """Number of lanes that a fork of a row may need. A user's own arm or control may fork."""
        arms = self._arms
        own = {*self.mechanisms} - {*MECHANISMS}
        if any(mechanism.control or mechanism.name in arms for mechanism in own):
            return MAX_WIDTH - 1
        forks = arms & {BRANCH.name, CLARIFY.name}
        return max((int(self.values[f"{name}.width"]) - 1 for name in forks), default=0)


@checked
def calibrate_sampler(sampler: Sampler, model: LanguageModel) -> CalibratedSampler:
    """Resolves a sampler's percentiles with the model's quantile tables, or with the generic ones.
    UserError if the model's calibration file is damaged, of another format or of another model, if
    thresholds cross after resolution, or see `sampler_settings`."""
    path, renew = _find_tables(model), f"entropix-jax calibrate --model {model.folder}"
    if path is not None:
        calibration, where = read_calibration(path, renew), str(path)
        calibration.check_model(model_shape(model), where, renew)
    else:
        calibration, where = generic_calibration(), "the generic table"
    notes = sampler.notes
    if calibration.generic and sampler.follows_tables:
        own = f"`{renew}` measures its own"
        notes = (*notes, f"the model has no calibration: the generic table is used; {own}")
    resolved = replace(sampler.resolve(calibration, where), notes=notes)
    found = CalibratedSampler(resolved, sampler_settings(model, resolved), calibration)
    bounded = {read_condition(text)[0] for key in REGIME_KEYS for text in found.values[key]}
    if "p_wrong" not in bounded or found.wrong_table is not None:
        return found
    note = f"without a table no condition on p_wrong holds: `{renew} --task TASK` fits one"
    return replace(found, sampler=replace(resolved, notes=(*notes, note)))


def _find_tables(model: LanguageModel) -> Path | None:
    """Returns the model's calibration file, else the package's for a GGUF file of that name."""
    if (own := model.calibration_file).exists():
        return own
    shipped = resource_folder("weights") / model.folder.stem.lower() / CALIBRATION_FILE
    return shipped if model.folder.suffix.lower() == SUFFIX and shipped.exists() else None


def model_shape(model: LanguageModel) -> dict[str, int]:
    """Returns the shape that identifies a model in its calibration file. Fine-tunes of one model,
    also with added tokens, share it."""
    config = model.config
    return {"layers": config.num_layers, "width": config.width, "heads": config.num_heads}


def sampler_settings(model: LanguageModel, sampler: Sampler) -> SamplerSettings:
    """A sampler's settings as arrays, for one row of a model. UserError if a thought, layer
    weights, bans or biases do not fit the model."""
    size = model.config.vocab_size

    def encode(text: str) -> list[int]:
        tokens = model.tokenizer.encode_within(text)
        if (largest := max(tokens, default=0)) >= size:
            raise UserError(f"contains {describe_token(model, largest)}")
        return tokens

    return sampler.settings(
        num_layers=model.config.num_layers,
        epsilon=float(jnp.finfo(model.precision.activations).eps),
        encode=encode,
        token_texts=lambda: model.tokenizer.token_texts[:size],
        vocab_size=size,
    )
