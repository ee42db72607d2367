"""The model of a server: its samplers, and the list of its programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.listed import ProgramList
from entropix_jax.engine.tokens import describe_token, find_no_token
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.lookup import Lookup
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.files import is_preset, preset_names
from entropix_jax.sampler.mechanisms import ACTING, MECHANISMS
from entropix_jax.sampler.mechanisms.surrogate import SURROGATE
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.serve.schema import ApiError

_SAMPLERS = 256  # samplers in the cache
_MAX_CHARACTERS = 2**16  # of a sampler's settings
PLAIN, GREEDY = "temperature", "greedy"  # presets
# Values with which each option of the API acts.
_OPTIONS = {"repetition.frequency": 1e-6, "repetition.presence": 1e-6, "repetition.penalty": 1.01}
_OPTIONS |= {"base.top_k": 1, "base.min_p": 0.1, "base.top_p": 0.5}


@dataclass(frozen=True)
class ServedModel:
    """The model of a server.

    Attributes:
        name: its name in the API.
        sampler: of requests without sampling options.
        context: cache positions of a row.
        top: maximum number of alternatives per token.
        presets: whose mechanisms are compiled, None for all mechanisms.
        lookup: of all rows.
    """

    name: str
    model: LanguageModel
    sampler: Sampler
    context: int
    top: int
    presets: Sequence[str] | None = None
    lookup: Lookup | None = None

    def list_programs(self) -> ProgramList:
        """Returns the list of the server's programs: first the mechanisms of its sampler and of the
        API's options, then also those of the presets, by default all, and the user's own."""

        def mechanisms_of(choices: Iterable[str | None]) -> frozenset[str]:
            samplers = (self.choose_sampler(choice, _OPTIONS) for choice in choices)
            return frozenset[str]().union(*(sampler.parts.used for sampler in samplers))

        first = mechanisms_of((None, GREEDY, PLAIN))
        user_mechanisms = self.sampler.mechanisms[len(MECHANISMS) :]
        every = first | mechanisms_of(self.presets or ())
        every |= {mechanism.name for mechanism in user_mechanisms}
        if self.presets is None:
            # A surrogate is a control for studies, and takes time to compile.
            every |= {mechanism.name for mechanism in MECHANISMS} - {SURROGATE.name}
        elif user_mechanisms:
            every |= ACTING
        return ProgramList(self.choose_sampler(), [*dict.fromkeys((first, every))])

    def check_name(self, name: str) -> None:
        """Raises ApiError (404) if a request names another model."""
        if name != self.name:
            message = f"no model {name!r}: this server has {self.name!r}"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def check_tokens(self, tokens: Sequence[int], place: str, param: str) -> None:
        """Raises ApiError if one of the numbers is not a token id. The message begins with the
        `place` of the numbers."""
        if (wrong := find_no_token(self.model, tokens)) is not None:
            raise ApiError(f"{place} holds {describe_token(self.model, wrong)}", param=param)

    def choose_sampler(
        self,
        choice: str | Mapping[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
        base: CalibratedSampler | None = None,
    ) -> CalibratedSampler:
        """Returns a request's sampler. Equal ones are one object while they are in the cache.

        Args:
            choice: the name of a preset, or settings, whose key `extends` names one.
            changes: further settings.
            base: the sampler without a preset, by default the server's.

        Raises:
            ApiError: there is no such preset, or a setting is wrong.
        """
        own = {"extends": choice} if isinstance(choice, str) else choice
        settings: dict[str, Any] = {**(own or {}), **(changes or {})}
        preset = settings.pop("extends", None)
        name = None
        if base is not None and preset is None:
            if not settings:
                return base
            name, settings = base.name, {**base.sampler.written, **settings}
        key = json.dumps([preset, name, settings], sort_keys=True)
        try:
            if len(key) > _MAX_CHARACTERS:
                message = f"the sampler's settings take more than {_MAX_CHARACTERS} characters"
                raise UserError(message)
            calibrated: CalibratedSampler = self._calibrated(key)
        except UserError as error:
            raise ApiError(str(error), param="entropix.sampler") from None
        return calibrated

    @cached_property
    def _calibrated(self) -> Any:
        return lru_cache(_SAMPLERS)(self._calibrate)

    def _calibrate(self, key: str) -> CalibratedSampler:
        preset, name, settings = json.loads(key)
        sampler = self.sampler
        if name is not None:
            sampler = Sampler(name, "", {}, mechanisms=sampler.mechanisms)
        elif preset is not None:
            if not is_preset(preset):  # the name of a file is refused
                names = preset_names()
                raise UserError(f"no sampler preset {preset!r}{nearest(str(preset), names)}")
            sampler = load_sampler(preset, sampler.mechanisms[len(MECHANISMS) :])
        return calibrate_sampler(sampler.with_values(settings), self.model)
