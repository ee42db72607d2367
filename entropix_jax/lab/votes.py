"""One answer from several samples: votes, and the choice of one of the samples.

A vote may be weighted by confidence (Fu et al. 2025, "Deep Think with Confidence").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from entropix_jax.engine.search import vote

T = TypeVar("T")
MAJORITY = "majority"


class Sample(NamedTuple):
    """One answer to a question, with its score, mean ln p per token (-inf without tokens), and
    lowest group confidence (nats, 0 without tokens)."""

    answer: str | None
    score: float
    logprob: float
    confidence: float


def rotate(samples: Sequence[T], k: int) -> list[list[T]]:
    """Returns all runs of `k` consecutive samples, wrapping around, one from each sample."""
    n = len(samples)
    return [[samples[(i + j) % n] for j in range(k)] for i in range(n)]


def _score_winner(samples: Sequence[Sample], weights: Sequence[float] | None = None) -> float:
    winner = vote([sample.answer for sample in samples], weights)
    return next(sample.score for sample in samples if sample.answer == winner)


# The score of one answer made of several samples, on a tie that of the first. The best is what a
# perfect verifier would choose: the bound of any choice.
KINDS: Mapping[str, Callable[[Sequence[Sample]], float]] = {
    MAJORITY: _score_winner,
    "weighted": lambda samples: _score_winner(samples, [sample.confidence for sample in samples]),
    "best": lambda samples: max(sample.score for sample in samples),
    "likeliest": lambda samples: max(samples, key=lambda sample: sample.logprob).score,
    "surest": lambda samples: max(samples, key=lambda sample: sample.confidence).score,
}
VOTES = (MAJORITY, "weighted")  # the kinds without a meaning for free text
