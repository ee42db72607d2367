"""Votes weighted by confidence, with unsure samples left out or ended early (Fu et al. 2025, "Deep
Think with Confidence").

A sample's confidence is its lowest group confidence. Where it would have ended under a threshold is
read off its record lows, so nothing is generated twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from entropix_jax.engine.results import Row

WARM_UP = 5  # samples of an online vote that run to their ends
_HIGH, _LOW = 0.9, 0.1  # shares of the samples that are kept: the paper's DeepConf-high and -low

Low = tuple[
    float, int
]  # a group confidence below all before it, nats, and the forwards up to there


@dataclass(frozen=True)
class Sample:
    """One answer to a question."""

    answer: str | None
    forwards: int
    lows: Sequence[Low]

    @property
    def confidence(self) -> float:
        """The lowest group confidence, nats; 0 without tokens."""
        return self.lows[-1][0] if self.lows else 0.0

    def forwards_until(self, threshold: float) -> int:
        """The forwards of the sample if it ends once its group confidence is below a threshold."""
        return next((cost for low, cost in self.lows if low < threshold), self.forwards)


def record_lows(row: Row) -> list[Low]:
    """The record lows of a row. Where it commits a branch the engine may end it some tokens later
    than they say: at the first token after the branch."""
    groups = row.group_confidences()
    first = np.diff(np.minimum.accumulate(groups), prepend=np.inf) < 0
    skipped = len(row.tokens) - len(groups)
    return [(float(groups[i]), row.tokens[skipped + i].forwards) for i in np.flatnonzero(first)]


def weighted_vote(samples: Sequence[Sample], share: float = 1.0) -> str | None:
    """The answer whose samples have the highest confidence in all, of the `share` of samples that
    are the most confident, at least one. On a tie the first; None if no such sample has one."""
    kept = sorted(samples, key=lambda sample: -sample.confidence)
    weights: defaultdict[str, float] = defaultdict(float)
    for sample in kept[: max(1, round(share * len(samples)))]:
        if sample.answer is not None:
            weights[sample.answer] += sample.confidence
    return max(weights, key=lambda answer: weights[answer]) if weights else None


def end_threshold(confidences: Sequence[float], share: float) -> float:
    """The `confidence.threshold`, nats, that about a `share` of the samples with such lowest group
    confidences would not fall below."""
    return float(np.percentile(confidences, 100 * (1 - share)))


def online_vote(samples: Sequence[Sample], share: float) -> tuple[str | None, int]:
    """The weighted vote of the samples that stay above a threshold, and the forwards of all.

    The first `WARM_UP` samples run to their ends and set the threshold; each later one ends once
    it is below. (The paper also draws no further samples once enough of them agree.)
    """
    threshold = end_threshold([sample.confidence for sample in samples[:WARM_UP]], share)
    forwards = sum(sample.forwards for sample in samples[:WARM_UP])
    forwards += sum(sample.forwards_until(threshold) for sample in samples[WARM_UP:])
    return weighted_vote([s for s in samples if s.confidence >= threshold]), forwards


def _offline_vote(samples: Sequence[Sample], share: float) -> tuple[str | None, int]:
    return weighted_vote(samples, share), sum(sample.forwards for sample in samples)


# From samples to an answer and the forwards that it took.
Vote = Callable[[Sequence[Sample]], tuple[str | None, int]]
VOTES: Mapping[str, Vote] = {
    "weighted": partial(_offline_vote, share=1.0),
    "weighted, surest 90 %": partial(_offline_vote, share=_HIGH),
    "weighted, surest 10 %": partial(_offline_vote, share=_LOW),
    "early end, surest 90 %": partial(online_vote, share=_HIGH),
    "early end, surest 10 %": partial(online_vote, share=_LOW),
}
