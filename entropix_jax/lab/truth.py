"""Compares the model's entropy with the true one on text of the tiny world, whose generator knows
the distribution of every next word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import numpy as np

from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.engine.score import score_tokens
from entropix_jax.errors import UserError
from entropix_jax.host.files import read_json_object
from entropix_jax.lab.statistics import Floats
from entropix_jax.lab.world.corpus import encode_row, terminal_ids, write_row
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES

_LENGTH = 512  # tokens of a text


@dataclass(frozen=True)
class Truth:
    """The n positions of one regime under the model's own entropy: [n] each, bits and bits^2."""

    regime: str
    true_entropy: Floats
    model_entropy: Floats
    true_varentropy: Floats
    model_varentropy: Floats

    @property
    def number(self) -> int:
        """n."""
        return len(self.true_entropy)

    @property
    def entropy_error(self) -> float:
        """Mean absolute error of the model's entropy, bits."""
        return float(np.abs(self.model_entropy - self.true_entropy).mean())

    @property
    def varentropy_error(self) -> float:
        """Mean absolute error of the model's varentropy, bits^2."""
        return float(np.abs(self.model_varentropy - self.true_varentropy).mean())


def compare_with_truth(
    model: LanguageModel, sampler: CalibratedSampler, *, texts: int
) -> list[Truth]:
    """Scores held-out texts of the world; returns the regimes that occur, in their order.

    Args:
        sampler: defines the regimes.
        texts: number of texts of 512 tokens, always the same ones.

    Raises:
        UserError: the model's vocabulary is not the world's.
    """
    ids = _terminals(model)
    if ids is None:
        raise UserError(
            f"{model.folder}: not a model of the tiny world: only for its text is the true entropy"
            " known"
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


def has_world_vocabulary(model: LanguageModel) -> bool:
    """Whether every word of the tiny world is one token of the model."""
    return _terminals(model) is not None


def _terminals(model: LanguageModel) -> Mapping[str, int] | None:
    """The token of each of the world's words; None if one has none."""
    try:
        return terminal_ids(read_json_object(model.folder / "tokenizer.json"))
    except (KeyError, TypeError, ValueError, UserError):
        return None
