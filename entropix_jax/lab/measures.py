"""Measures of a generated text that need no reference answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any

from entropix_jax.engine.results import Row

# Measures of an answer that may tell wrong ones from right ones: +1 if a higher value means more
# uncertainty, -1 if it means less. Perplexity and the number of tokens are baselines.
UNCERTAINTY: Mapping[str, int] = {
    "mean_entropy": 1,
    "max_entropy": 1,
    "mean_varentropy": 1,
    "max_varentropy": 1,
    "mean_p1": -1,
    "min_p1": -1,
    "mean_confidence": -1,
    "lowest_group_confidence": -1,
    "tail_confidence": -1,
    "mean_self_certainty": -1,
    "mean_attn_entropy_norm": 1,
    "max_attn_entropy_norm": 1,
    "mean_agreement": -1,
    "mean_attn_varentropy": 1,
    "mean_interaction_strength": 1,
    "perplexity": 1,
    "tokens": 1,
}
# Of the fields of a token; confidence is a row's own.
_SUMMARIES: Mapping[str, Mapping[str, Callable[[Sequence[float]], float]]] = {
    "entropy": {"mean": fmean, "max": max},
    "varentropy": {"mean": fmean, "max": max},
    "max_prob": {"mean": fmean, "min": min},
    "attn_entropy_norm": {"mean": fmean, "max": max},
    "agreement": {"mean": fmean},
    "attn_varentropy": {"mean": fmean},
    "interaction_strength": {"mean": fmean},
}
_MAX_SURPRISE = 700.0  # nats; its exponential is still finite in float64


def distinct(tokens: Sequence[Hashable], n: int) -> float | None:
    """distinct-n (Li et al. 2016): distinct n-grams over all n-grams; None if there are none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(tokens: Sequence[Hashable]) -> float | None:
    """1 - the product of distinct-n for n = 2, 3, 4 (Su et al. 2022); None below four tokens."""
    shares = [distinct(tokens, n) for n in (2, 3, 4)]
    return None if None in shares else 1.0 - math.prod(share or 0.0 for share in shares)


def self_bleu(texts: Sequence[str]) -> float | None:
    """Self-BLEU (Zhu et al. 2018) of one prompt's samples: the mean BLEU-4 of each against all the
    others, by sacrebleu; 1 for equal texts.

    Empty texts are left out. None for fewer than two others.
    """
    texts = [text for text in texts if text.strip()]
    if len(texts) < 2:
        return None
    from sacrebleu.metrics import BLEU
    from sacrebleu.metrics.helpers import extract_all_word_ngrams

    if len({*texts}) == 1:
        return 1.0
    # `BLEU.sentence_score` would count the n-grams of a text once for each other text.
    tokenize = BLEU(effective_order=True).tokenizer
    counted = [extract_all_word_ngrams(tokenize(text.rstrip()), 1, 4) for text in texts]
    scores = []
    for index, (own, length) in enumerate(counted):
        others = [*counted[:index], *counted[index + 1 :]]
        correct = [0] * 4
        for gram in own.keys() & {*itertools.chain(*(grams for grams, _ in others))}:
            correct[len(gram) - 1] += min(own[gram], max(grams[gram] for grams, _ in others))
        total = [max(length - n, 0) for n in range(4)]
        nearest = min((abs(other - length), other) for _, other in others)[1]
        # Texts of fewer than four words are compared by the n-grams that they have.
        score = BLEU.compute_bleu(correct, total, length, nearest, "exp", effective_order=True)
        scores.append(score.score)
    return min(math.fsum(scores) / len(scores) / 100, 1.0)  # rounding may exceed 1


def measure_row(row: Row) -> dict[str, Any]:
    """Means and extremes of the measures of a row's tokens (see `UNCERTAINTY`), the text's
    perplexity under its own model, distinct-1, distinct-2, and repetition. Empty without tokens."""
    tokens = row.tokens
    if not tokens:
        return {}
    ids = [token.token_id for token in tokens]
    surprise = -fmean(token.logprob for token in tokens)
    return {
        **{
            f"{name}_{field.replace('max_prob', 'p1')}": summary(
                [getattr(token, field) for token in tokens]
            )
            for field, summaries in _SUMMARIES.items()
            for name, summary in summaries.items()
        },
        "perplexity": math.exp(min(surprise, _MAX_SURPRISE)),
        "distinct_1": distinct(ids, 1),
        "distinct_2": distinct(ids, 2),
        "repetition": repetition(ids),
    }
