"""One answer from several samples: votes, and the choice of one of the samples.

Votes may be weighted by confidence, with unsure samples left out or ended early (Fu et al. 2025,
"Deep Think with Confidence"). A sample's confidence is its lowest group confidence. Where it would
have ended under a threshold is read off its record lows, so nothing is generated twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from entropix_jax.engine.results import Row
from entropix_jax.lab.statistics import majority_vote

MAJORITY = "majority"
WARM_UP = 5  # samples that run to their ends before others may end early

# A group confidence below all before it, nats, and the forwards up to there.
Low = tuple[float, int]


@dataclass(frozen=True)
class Sample:
    """One answer to a question, with its score (NaN without one) and mean ln p per token."""

    answer: str | None
    forwards: int
    lows: Sequence[Low]
    score: float = math.nan
    logprob: float = -math.inf

    @property
    def confidence(self) -> float:
        """The lowest group confidence, nats; 0 without tokens."""
        return self.lows[-1][0] if self.lows else 0.0

    def forwards_until(self, threshold: float) -> int:
        """The forwards of the sample if it ends once its group confidence is below a threshold."""
        return next((cost for low, cost in self.lows if low < threshold), self.forwards)


def record_lows(row: Row) -> list[Low]:
    """The record lows of a row. One that commits a branch may in fact end some tokens later than
    they say: with the first token after the branch."""
    groups = row.group_confidences()
    first = np.diff(np.minimum.accumulate(groups), prepend=np.inf) < 0
    skipped = len(row.tokens) - len(groups)
    return [(float(groups[i]), row.tokens[skipped + i].forwards) for i in np.flatnonzero(first)]


def end_threshold(confidences: Sequence[float], share: float) -> float:
    """The `confidence.threshold`, nats, that about a `share` of samples with these confidences
    stays above."""
    return float(np.percentile(confidences, 100 * (1 - share)))


def weighted_vote(samples: Sequence[Sample], share: float = 1.0) -> tuple[str | None, int]:
    """The answer whose samples, of the surest `share` of all, at least one, have the highest
    confidence in all, and the forwards of all samples. On a tie the first; None if there is none.
    """
    surest = sorted(samples, key=lambda sample: -sample.confidence)
    weights: defaultdict[str, float] = defaultdict(float)
    for sample in surest[: max(1, round(share * len(samples)))]:
        if sample.answer is not None:
            weights[sample.answer] += sample.confidence
    best = max(weights, key=lambda answer: weights[answer]) if weights else None
    return best, sum(sample.forwards for sample in samples)


def early_vote(samples: Sequence[Sample], share: float) -> tuple[str | None, int]:
    """The same of the samples that stay above a threshold; the others end once they are below.

    The first `WARM_UP` samples run to their ends and set the threshold, which a `share` of them
    stays above. (The paper also draws no further samples once enough of them agree.)
    """
    warm_up, later = samples[:WARM_UP], samples[WARM_UP:]
    threshold = end_threshold([sample.confidence for sample in warm_up], share)
    answer, _ = weighted_vote([s for s in samples if s.confidence >= threshold])
    forwards = sum(sample.forwards for sample in warm_up)
    return answer, forwards + sum(sample.forwards_until(threshold) for sample in later)


def _majority(samples: Sequence[Sample]) -> tuple[str | None, int]:
    answer = majority_vote([sample.answer for sample in samples])
    return answer, sum(sample.forwards for sample in samples)


# The paper's DeepConf-high keeps 90 % of the samples, its DeepConf-low 10 %.
VOTES: Mapping[str, Callable[[Sequence[Sample]], tuple[str | None, int]]] = {
    MAJORITY: _majority,
    "weighted": weighted_vote,
    "weighted, surest 10 %": partial(weighted_vote, share=0.1),
    "early end, surest 90 %": partial(early_vote, share=0.9),
    "early end, surest 10 %": partial(early_vote, share=0.1),
}


def best_score(samples: Sequence[Sample]) -> tuple[float, int]:
    """The highest score of the samples: what a perfect verifier would reach, the bound of any
    choice. And the forwards of all samples, as below."""
    return float(np.max([s.score for s in samples])), sum(s.forwards for s in samples)


def likeliest_score(samples: Sequence[Sample]) -> tuple[float, int]:
    """The score of the sample with the highest mean ln p per token, on a tie the first."""
    best = max(samples, key=lambda sample: sample.logprob)
    return best.score, sum(s.forwards for s in samples)


def surest_score(samples: Sequence[Sample]) -> tuple[float, int]:
    """The score of the sample with the highest lowest group confidence, on a tie the first."""
    best = max(samples, key=lambda sample: sample.confidence)
    return best.score, sum(s.forwards for s in samples)


# The choice of one sample, which free text allows, too.
CHOICES: Mapping[str, Callable[[Sequence[Sample]], tuple[float, int]]] = {
    "best": best_score,
    "likeliest": likeliest_score,
    "surest": surest_score,
}
