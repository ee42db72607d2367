"""Batches of the world's text, and how a model's predictions compare with the truth.

Legend: B rows, T tokens in a row, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from entropix_jax.lab.world.corpus import encode_row, write_row
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import Position

Ids = NDArray[np.int32]
Bits = NDArray[np.float64]


def write_batch(
    world: World, ids: Mapping[str, int], rng: Random, *, rows: int, length: int
) -> Ids:
    """Token ids of new rows, [B, T]."""
    batch = [encode_row(write_row(world, rng, length), ids) for _ in range(rows)]
    return np.asarray(batch, np.int32)


@dataclass(frozen=True)
class Comparison:
    """Predictions held against the truth, one entry a position; entropies in bits."""

    kinds: NDArray[np.str_]
    true_entropy: Bits
    true_varentropy: Bits
    model_entropy: Bits
    model_varentropy: Bits
    divergence: Bits  # KL(truth || model)
    surprise: Bits  # -log2 of the model's probability of the terminal that came

    @property
    def entropy_rate(self) -> float:
        """Of the truth, in bits a token."""
        return float(self.true_entropy.mean())

    @property
    def excess(self) -> float:
        """What the model's expected cross-entropy lies above the entropy rate, in bits a token."""
        return float(self.divergence.mean())

    def of_kind(self, kind: str) -> "Comparison":
        """The positions of one kind."""
        chosen = self.kinds == kind
        return Comparison(**{name: values[chosen] for name, values in vars(self).items()})

    @staticmethod
    def join(parts: "Sequence[Comparison]") -> "Comparison":
        """One comparison of several texts."""
        return Comparison(
            **{name: np.concatenate([getattr(p, name) for p in parts]) for name in vars(parts[0])}
        )


def compare(
    row: Sequence[Position], log_probs: NDArray[np.floating], ids: Mapping[str, int]
) -> Comparison:
    """Compares predictions with a row's truth.

    Args:
        row: T positions. The first is given, not predicted.
        log_probs: natural log-probabilities [T - 1, V]; entry `t` predicts `row[t + 1]`.
        ids: as `terminal_ids` gives them.
    """
    log2 = np.asarray(log_probs, np.float64) / np.log(2.0)
    probs = np.exp2(log2)
    entropy = -np.sum(probs * log2, axis=-1)
    varentropy = np.sum(probs * (log2 + entropy[:, None]) ** 2, axis=-1)
    predicted = row[1:]
    choices = [position.choice for position in predicted]
    true_entropy = np.asarray([choice.entropy for choice in choices])
    expected_surprise = [
        -np.dot(choice.probabilities, scores[[ids[t] for t in choice.terminals]])
        for choice, scores in zip(choices, log2, strict=True)
    ]
    return Comparison(
        kinds=np.asarray([choice.kind for choice in choices]),
        true_entropy=true_entropy,
        true_varentropy=np.asarray([choice.varentropy for choice in choices]),
        model_entropy=entropy,
        model_varentropy=varentropy,
        divergence=np.asarray(expected_surprise) - true_entropy,
        surprise=-log2[np.arange(len(predicted)), encode_row(predicted, ids)],
    )
