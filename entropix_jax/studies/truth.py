"""The model's entropy held against the true one, where the truth is known: on text of the tiny
world, whose generator knows the distribution of every next word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.files import read_json_object
from entropix_jax.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.preparation import CalibratedSampler
from entropix_jax.scoring import score_tokens
from entropix_jax.studies.statistics import Floats
from entropix_jax.world.corpus import encode_row, terminal_ids, write_row
from entropix_jax.world.facts import WORLD_SEED, create

_LENGTH = 512  # tokens of a text


@dataclass(frozen=True)
class Truth:
    """Positions of one regime, as the model's own entropy tells it; bits and bits^2."""

    regime: str
    true_entropy: Floats
    model_entropy: Floats
    true_varentropy: Floats
    model_varentropy: Floats

    @property
    def number(self) -> int:
        """How many positions."""
        return len(self.true_entropy)

    @property
    def entropy_error(self) -> float:
        """The mean distance of the model's entropy from the true one, bits."""
        return float(np.abs(self.model_entropy - self.true_entropy).mean())

    @property
    def varentropy_error(self) -> float:
        """The same of the varentropy, bits^2."""
        return float(np.abs(self.model_varentropy - self.true_varentropy).mean())


def hold_against_truth(
    model: LanguageModel, sampler: CalibratedSampler, *, texts: int
) -> list[Truth]:
    """Reads texts of the world that were not trained on; regimes with positions, in their order.

    Args:
        sampler: whose bounds tell the regimes.
        texts: of 512 tokens each, always the same ones.

    Raises:
        UserError: a model that does not speak the world's language.
    """
    ids = _terminals(model)
    if ids is None:
        raise UserError(
            f"{model.folder}: does not speak the tiny world's language: its true entropy is known"
            " of no other"
        )
    world, rng = create(WORLD_SEED), Random("held against the truth 0")
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in REGIMES}
    for _ in range(texts):
        row = write_row(world, rng, _LENGTH)
        tokens = encode_row(row, ids)
        for position, token in zip(row[1:], score_tokens(model, tokens, sampler), strict=True):
            true = position.choice
            found[token.regime].append(
                (true.entropy, token.entropy, true.varentropy, token.varentropy)
            )
    return [Truth(regime, *np.asarray(points).T) for regime, points in found.items() if points]


def speaks_of_the_world(model: LanguageModel) -> bool:
    """Whether a model's tokens are the words of the tiny world."""
    return _terminals(model) is not None


def _terminals(model: LanguageModel) -> Mapping[str, int] | None:
    """The world's words as the model's tokens; None where it has other ones."""
    try:
        return terminal_ids(read_json_object(model.folder / "tokenizer.json"))
    except (KeyError, TypeError, ValueError, UserError):
        return None
