"""What can be said of a generated text without knowing what was asked."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from entropix_jax.results import Row

_MOST_SURPRISE = 700.0  # nats, of which float64 still holds the exponential


def distinct(tokens: Sequence[Hashable], n: int) -> float | None:
    """distinct-n (Li et al. 2016): different n-grams over all n-grams; None of a text too short."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(tokens: Sequence[Hashable]) -> float | None:
    """How much of a text says again what stood in it: 1 - the product of distinct-n for n = 2, 3,
    4 (Su et al. 2022); None of a text of less than four tokens."""
    shares = [distinct(tokens, n) for n in (2, 3, 4)]
    return None if None in shares else 1.0 - math.prod(share or 0.0 for share in shares)


def measures_of(row: Row) -> dict[str, Any]:
    """Mean and highest entropy (bits) and varentropy (bits^2) of a row's tokens, the perplexity of
    its text under the model that wrote it (exp of the mean surprise), distinct-1, distinct-2, and
    repetition. Nothing of a row without tokens."""
    tokens = row.tokens
    if not tokens:
        return {}
    ids = [token.token_id for token in tokens]
    entropies = [token.entropy for token in tokens]
    varentropies = [token.varentropy for token in tokens]
    surprise = -math.fsum(token.logprob for token in tokens) / len(tokens)
    return {
        "mean_entropy": math.fsum(entropies) / len(tokens),
        "max_entropy": max(entropies),
        "mean_varentropy": math.fsum(varentropies) / len(tokens),
        "max_varentropy": max(varentropies),
        "perplexity": math.exp(min(surprise, _MOST_SURPRISE)),
        "distinct_1": distinct(ids, 1),
        "distinct_2": distinct(ids, 2),
        "repetition": repetition(ids),
    }
