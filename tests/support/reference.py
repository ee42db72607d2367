"""A second, plain implementation of the formulas in float64 NumPy.

It has no caches, batches, padding or jit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from entropix_jax.model.config import ModelConfig, RopeScaling
from entropix_jax.model.params import Params


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    top = x.max(axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


def entropy_bits(p: np.ndarray) -> float:
    """Returns the entropy of a distribution, over outcomes with p > 0."""
    p = np.asarray(p, np.float64)[np.asarray(p) > 0]
    return float(-(p * np.log2(p)).sum())


def varentropy_bits(p: np.ndarray) -> float:
    p = np.asarray(p, np.float64)[np.asarray(p) > 0]
    return float((p * (-np.log2(p) - entropy_bits(p)) ** 2).sum())


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Returns the probability that a positive case scores higher than another, ties as half."""
    over = scores[positive][:, None] - scores[~positive]
    return float(np.mean(np.sign(over) + 1) / 2)


@dataclass
class Attention:
    """Attention of one position of one row, from scaled scores `s[L, N, n]` over its keys."""

    scores: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        return np.exp(log_softmax(self.scores))

    @property
    def entropy(self) -> np.ndarray:
        return np.apply_along_axis(entropy_bits, -1, self.weights)

    @property
    def varentropy(self) -> np.ndarray:
        return np.apply_along_axis(varentropy_bits, -1, self.weights)

    @property
    def divergence(self) -> np.ndarray:
        a = self.weights
        return np.array([np.abs(x - x.mean(axis=0)).sum(axis=-1).mean() for x in a])

    @property
    def interaction(self) -> np.ndarray:
        return np.abs(self.scores).mean(axis=(1, 2))

    def metrics(self, layer_weights: np.ndarray) -> dict[str, float]:
        """Computes the six metrics of attention from their definitions."""
        n = self.scores.shape[-1]
        w = np.asarray(layer_weights, np.float64) / np.sum(layer_weights)
        a, e = self.weights, self.entropy
        away = np.abs(a - a.mean(axis=1, keepdims=True))  # [L, N, n]
        return {
            "attn_entropy": w @ e.mean(axis=1),
            "attn_entropy_norm": w @ (e / np.log2(max(n, 2))).mean(axis=1),
            "attn_varentropy": w @ ((e - e.mean(axis=1, keepdims=True)) ** 2).mean(axis=1),
            "agreement": 1 - w @ (away.sum(axis=2) / 2).mean(axis=1),
            "agreement_published": w @ away.mean(axis=(1, 2)),
            "interaction_strength": w @ self.interaction,
        }


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns radians per position, by Llama 3's three bands of wavelengths."""
    out = []
    for i in range(config.head_dim // 2):
        frequency = 1 / config.rope_theta ** (2 * i / config.head_dim)
        s = config.rope_scaling
        if s is not None:
            assert isinstance(s, RopeScaling)
            wavelength = 2 * np.pi / frequency
            longest = s.original_max_positions / s.low_freq_factor
            shortest = s.original_max_positions / s.high_freq_factor
            if wavelength > longest:
                frequency /= s.factor
            elif wavelength > shortest:
                smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (
                    s.high_freq_factor - s.low_freq_factor
                )
                frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        out.append(frequency)
    return np.array(out)


def rotate(config: ModelConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotates `x[T, heads, H]` as complex numbers, whose halves are real and imaginary parts."""
    half = config.head_dim // 2
    angles = positions[:, None, None] * inverse_frequencies(config)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def forward(
    params: Params, config: ModelConfig, tokens: np.ndarray
) -> tuple[np.ndarray, list[Attention]]:
    """Runs one row in one pass. Returns logits [T, V], and the attention of each position."""
    p = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), params)
    number, n, k, h = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    positions = np.arange(number)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * weight

    x = p.embedding[tokens]
    all_scores = []
    for layer in p.layers:
        y = norm(x, layer.attention_norm)
        q = rotate(config, (y @ layer.query.T).reshape(number, n, h), positions)
        keys = rotate(config, (y @ layer.key.T).reshape(number, k, h), positions)
        values = (y @ layer.value.T).reshape(number, k, h)
        scores = np.zeros((n, number, number))
        mixed = np.zeros((number, n, h))
        for head in range(n):
            group = head // (n // k)
            scores[head] = q[:, head] @ keys[:, group].T / np.sqrt(h)
            for t in range(number):
                a = np.exp(log_softmax(scores[head, t, : t + 1]))
                mixed[t, head] = a @ values[: t + 1, group]
        all_scores.append(scores)
        x = x + mixed.reshape(number, n * h) @ layer.output.T
        y = norm(x, layer.mlp_norm)
        gate = y @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.up.T)) @ layer.down.T
    logits = norm(x, p.final_norm) @ p.unembedding.T
    stacked = np.stack(all_scores)
    return logits, [Attention(stacked[:, :, t, : t + 1]) for t in range(number)]


def continuation(
    params: Params, config: ModelConfig, before: Sequence[int], after: Sequence[int]
) -> tuple[float, bool]:
    """Returns the log-probability of `after` from one pass over the whole text, and whether each of
    its tokens is the most likely one."""
    logits, _ = forward(params, config, np.array([*before, *after][:-1]))
    logits = logits[len(before) - 1 :]
    total = log_softmax(logits)[np.arange(len(after)), [*after]].sum()
    return float(total), bool((logits.argmax(axis=-1) == [*after]).all())
