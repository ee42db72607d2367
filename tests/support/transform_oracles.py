"""Plain float64 implementations of the transforms of logits, for one row, with loops over its
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.draw_oracles import softmax


def modified(
    logits: np.ndarray,
    heard: np.ndarray,
    text: Sequence[int],
    values: Mapping[str, Any],
    banned: Sequence[int] = (),
) -> np.ndarray:
    """Applies biases, repetition penalty, bans and noise floor to logits. `heard` are the model's
    log-probabilities, -inf below the floor."""
    z, penalty = logits.copy(), values["repetition.penalty"]
    raised = []
    for token, bias in values["draw.bias"]:
        z[token] += bias
        raised += [token] if bias > 0 else []
    for token in set(text):
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    z[[*values["draw.bans"], *banned]] = -np.inf
    audible = np.where(heard > -np.inf, z, -np.inf)
    if not (audible > -np.inf).any():
        return z
    audible[raised] = z[raised]
    return audible


def repetition(
    logits: np.ndarray,
    tokens: Sequence[int],
    generated: int,
    penalty: float,
    frequency: float,
    presence: float,
) -> np.ndarray:
    z = logits.astype(np.float64)
    for token in set(tokens):
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in tokens[len(tokens) - generated :]:
        z[token] -= frequency
    for token in set(tokens[len(tokens) - generated :]):
        z[token] -= presence
    return z


def no_repeat_ngram(logits: np.ndarray, tokens: Sequence[int], size: int) -> np.ndarray:
    z = logits.astype(np.float64)
    last = tuple(tokens[len(tokens) - size + 1 :])
    for i in range(len(tokens) - size + 1):
        if tuple(tokens[i : i + size - 1]) == last and size <= len(tokens) + 1:
            z[tokens[i + size - 1]] = -np.inf
    return z if np.any(z > -np.inf) else logits.astype(np.float64)


def dry(
    logits: np.ndarray,
    tokens: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    window: int,
    breakers: Sequence[Sequence[int]],
    longest: int = 64,
) -> np.ndarray:
    """Penalises tokens after earlier occurrences of the text's end, by the matched length."""
    tokens = [*tokens[max(len(tokens) - window, 0) :]]
    # Matches end at the last breaker.
    limit = longest
    for breaker in breakers:
        for end in range(len(breaker), len(tokens) + 1):
            if tokens[end - len(breaker) : end] == [*breaker]:
                limit = min(limit, len(tokens) - end)
    lengths: dict[int, int] = {}
    for place in range(1, len(tokens)):  # of the token after the match
        same = 0
        while same < min(place, limit) and tokens[place - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= allowed_length and [tokens[place]] not in [[*b] for b in breakers]:
            lengths[tokens[place]] = max(same, lengths.get(tokens[place], 0))
    z = logits.astype(np.float64)
    for token, length in lengths.items():
        z[token] -= multiplier * base ** (length - allowed_length)
    return z


def xtc(logits: np.ndarray, threshold: float) -> np.ndarray:
    """Masks all tokens above the threshold except for the least likely one."""
    p = softmax(logits.astype(np.float64), 1.0)
    order = np.lexsort((np.arange(p.size), -p))
    top = [token for token in order if p[token] >= threshold]
    z = logits.astype(np.float64)
    z[top[:-1]] = -np.inf
    return z


class AdaptiveP:
    """Adaptive-p with the weighted sum and total weight of all tokens so far. Both start as if the
    mean had converged to the target."""

    def __init__(self, target: float, decay: float) -> None:
        self.target, self.decay = target, decay
        self.sum, self.weight = target / (1 - decay), 1 / (1 - decay)

    def logits(self, logits: np.ndarray) -> np.ndarray:
        p = softmax(logits.astype(np.float64), 1.0)
        aim = min(max(2 * self.target - self.sum / self.weight, 0.0), 1.0)
        distance = np.abs(p - aim) / 0.3
        z = 5 - 10 * distance**2 / (1 + distance)
        return np.where(logits > -np.inf, z, -np.inf)

    def drew(self, probability: float) -> None:
        self.sum = probability + self.decay * self.sum
        self.weight = 1 + self.decay * self.weight
