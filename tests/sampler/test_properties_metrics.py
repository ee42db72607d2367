"""Any distribution and any attention: the metrics against float64, and the ranges they lie in."""

from __future__ import annotations

from math import log2

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.model.attention import attention_stats
from entropix_jax.sampler.metrics import apply_noise_floor, measure
from entropix_jax.stats import entropy_and_varentropy
from tests.support import reference
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples

measured = jax.jit(lambda logits: entropy_and_varentropy(jax.nn.log_softmax(logits, axis=-1)))
floored = jax.jit(
    lambda logits, epsilon: apply_noise_floor(jax.nn.log_softmax(logits, axis=-1), epsilon)
)


@st.composite
def distributions(draw: st.DrawFn) -> np.ndarray:
    """Logits [B, V] of one of the vocabularies."""
    vocab = draw(st.sampled_from(sorted(VOCABULARIES)))
    return np.stack([draw(rows_of(vocab)) for _ in range(VOCABULARIES[vocab])])


@examples(40)
@given(distributions())
def test_entropy_and_varentropy(logits: np.ndarray) -> None:
    entropies, varentropies = jax.device_get(measured(jnp.asarray(logits)))
    most = log2(logits.shape[1])
    for row, h, u in zip(logits, entropies, varentropies, strict=True):
        p = np.exp(reference.log_softmax(row))
        # The variance is largest where one outcome has about half, and the others share the rest.
        scale = (most + 3) ** 2 / 4
        np.testing.assert_allclose(h, reference.entropy_bits(p), rtol=1e-5, atol=3e-6 * most)
        np.testing.assert_allclose(u, reference.varentropy_bits(p), rtol=1e-4, atol=1e-5 * scale)
        assert -1e-6 <= h <= most + 3e-5
        assert 0 <= u <= scale


@examples(40)
@given(distributions(), st.sampled_from((0.0, 2.0**-7, 2.0**-23)))
def test_the_noise_floor(logits: np.ndarray, epsilon: float) -> None:
    """What lies under it is gone and the rest a distribution; where all does, nothing changes."""
    given_epsilon = jnp.full(len(logits), epsilon, jnp.float32)
    found = np.asarray(floored(jnp.asarray(logits), given_epsilon), np.float64)
    for row, got in zip(logits, found, strict=True):
        expected, tolerance = reference.log_softmax(row), 2e-5
        if epsilon:
            floor = np.log(epsilon) - 0.5 * np.log(row.size)
            kept, near = expected >= floor, np.abs(expected - floor) < 1e-4  # rounding decides
            if near.any() and not (kept & ~near).any():
                continue
            if kept.any():
                np.testing.assert_array_equal((got > -np.inf)[~near], kept[~near])
                tolerance += np.exp(expected[near]).sum()
                rest = np.log(np.exp(expected[kept]).sum())
                expected = np.where(kept & ~near, expected - rest, -np.inf)
        likely = expected > -100
        np.testing.assert_allclose(got[likely], expected[likely], rtol=1e-5, atol=tolerance)


# Attention

LAYERS, HEADS, SLOTS, ROWS = 2, 4, 24, 4
measured_stats = jax.jit(attention_stats)
measured_all = jax.jit(measure)
scores_values = st.sampled_from((0.0, 1.0, -1.0, 1e4, -1e4, 1e-40, 30.0)) | st.floats(
    -20, 20, width=32
)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Scaled scores [B, L, N, S] and which keys count, bool [B, S]."""
    pool = np.array(draw(st.lists(scores_values, min_size=1, max_size=8)), np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.choice(pool, size=(ROWS, LAYERS, HEADS, SLOTS)).astype(np.float64)
    if draw(st.booleans()):
        scores = scores + draw(st.sampled_from((1e-3, 1.0, 5.0))) * rng.normal(size=scores.shape)
    if draw(st.booleans()):
        scores[:, :, 1:] = scores[:, :, :1]  # heads that look at the same keys
    valid = rng.random((ROWS, SLOTS)) < draw(st.sampled_from((0.05, 0.5, 1.0)))
    valid[np.arange(ROWS), rng.integers(0, SLOTS, ROWS)] = True
    return scores.astype(np.float32), valid


weights = st.sampled_from((0.0, 1.0)) | st.floats(0.0625, 1e6, width=32)
weights_of_layers = st.tuples(weights, st.just(1.0)).flatmap(st.permutations)


@examples(60)
@given(attentions(), weights_of_layers, st.sampled_from((np.nan, np.inf, -np.inf, 1e30, 0.0)))
def test_attention(
    attention: tuple[np.ndarray, np.ndarray], layer_weights: list[float], junk: float
) -> None:
    """Whatever the keys that do not count hold, and wherever they lie."""
    scores, valid = attention
    held = np.where(valid[:, None, None], scores, np.float32(junk))
    stats = measured_stats(jnp.asarray(held), jnp.asarray(valid))
    weights = np.broadcast_to(np.array(layer_weights, np.float32), (ROWS, LAYERS))
    log_probs = jnp.full((ROWS, 2), -np.log(2), jnp.float32)
    metrics = jax.device_get(measured_all(log_probs, stats, jnp.asarray(weights)))
    stats = jax.device_get(stats)
    for row in range(ROWS):
        true = reference.Attention(scores[row][:, :, valid[row]].astype(np.float64))
        assert stats.keys[row] == valid[row].sum()
        for field in ("entropy", "varentropy", "divergence", "interaction"):
            found, expected = getattr(stats, field)[row], getattr(true, field)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=field)
        for name, expected in true.metrics(weights[row]).items():
            found = getattr(metrics, name)[row]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)
        assert -1e-6 <= metrics.attn_entropy_norm[row] <= 1 + 1e-5
        assert -1e-5 <= metrics.agreement[row] <= 1 + 1e-6
        assert metrics.attn_varentropy[row] >= 0
