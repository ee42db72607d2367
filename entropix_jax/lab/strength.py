"""The fork strength of a token: how much the choice of the token changes the outcome.

Alternative i has probability p_i, renormalised over the alternatives, and leads to the outcome
distribution o_i. With o = sum p_i o_i, the strength is F = sum p_i TV(o_i, o), where TV is the
total variation, half the L1 distance.
"""

import numpy as np
from numpy.typing import ArrayLike

LEAST = 0.05  # probability of an alternative
_PERMUTATIONS = 100


def fork_strength(chances: ArrayLike, outcomes: ArrayLike) -> float:
    """Returns F in [0, 1), 0 for a single alternative.

    Args:
        chances: [K] probabilities of the alternatives, of any sum.
        outcomes: [K, A] probabilities of the outcomes after each alternative.
    """
    return float(_strengths(np.asarray(chances, float), np.asarray(outcomes, float)))


def permuted_strength(chances: ArrayLike, counts: ArrayLike) -> float:
    """Returns the mean F of 100 permutations of sampled outcomes among the alternatives: the upward
    bias of F where the alternatives have equal outcomes. The permutations are always the same.

    Args:
        chances: as for `fork_strength`.
        counts: int [K, A] samples of each outcome, the same number for each alternative.
    """
    tally = np.asarray(counts)
    alternatives, kinds = tally.shape
    samples = np.repeat(np.tile(np.arange(kinds), alternatives), tally.ravel())
    shuffled = np.random.default_rng(0).permuted(np.tile(samples, (_PERMUTATIONS, 1)), axis=1)
    places = np.arange(samples.size) // (samples.size // alternatives)
    cells = (np.arange(_PERMUTATIONS)[:, None] * alternatives + places) * kinds + shuffled
    size = (_PERMUTATIONS, alternatives, kinds)
    permuted = np.bincount(cells.ravel(), minlength=int(np.prod(size))).reshape(size)
    shares = permuted / permuted.sum(axis=-1, keepdims=True)
    return float(_strengths(np.asarray(chances, float), shares).mean())


def _strengths(chances: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """F of each `outcomes[..., K, A]`: float64 [...]."""
    p = chances / chances.sum()
    mean = np.einsum("k,...ka->...a", p, outcomes)
    distances = np.abs(outcomes - mean[..., None, :]).sum(axis=-1) / 2
    strengths: np.ndarray = distances @ p
    return strengths
