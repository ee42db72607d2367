"""Any distribution and any attention: the metrics against float64, and the ranges they lie in."""

from __future__ import annotations

from math import log2

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.model.attention import attention_stats, join_layers
from entropix_jax.sampler.metrics import apply_noise_floor, measure
from entropix_jax.stats import entropy_and_varentropy, sum_last
from tests.support import reference
from tests.support.draw_oracles import LLAMA3
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples

measured = jax.jit(lambda logits: entropy_and_varentropy(jax.nn.log_softmax(logits, axis=-1)))
floored = jax.jit(apply_noise_floor)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1000, LLAMA3])
def test_sums(length: int) -> None:
    """Against float64, row by row, and whatever zeros follow: to the last digit."""
    x = np.random.default_rng(length).standard_normal((2, 3, length)).astype(np.float32)
    total = jax.jit(sum_last)(jnp.asarray(x))
    wanted = x.sum(axis=-1, dtype=np.float64)
    np.testing.assert_allclose(total, wanted, atol=1e-6 * (1 + length**0.5))
    np.testing.assert_array_equal(jax.vmap(sum_last)(jnp.asarray(x)), total)
    longer = np.concatenate([x, np.zeros((2, 3, 640), np.float32)], axis=-1)
    np.testing.assert_array_equal(jax.jit(sum_last)(jnp.asarray(longer)), total)


@pytest.mark.parametrize(
    ("probs", "h", "u"),
    [
        ((0.99, 0.01), 0.080793, 0.435089),
        ((0.12,) * 8 + (0.03, 0.01), 3.154743, 0.239332),  # document 004's ten outcomes
        ((0.5, 0.5, 0.0), 1.0, 0.0),
    ],
)
def test_values_by_hand(probs: tuple[float, ...], h: float, u: float) -> None:
    with np.errstate(divide="ignore"):
        logits = jnp.log(jnp.asarray(probs))
    assert tuple(map(float, measured(logits))) == pytest.approx((h, u), abs=1e-6)
    # Only differences of logits count.
    assert tuple(map(float, measured(logits + 40.0))) == pytest.approx((h, u), abs=1e-4)


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
    log_probs = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    found = floored(log_probs, jnp.full(len(logits), epsilon, jnp.float32))
    for row, was, got in zip(logits, np.asarray(log_probs), np.asarray(found), strict=True):
        expected = reference.log_softmax(row)
        floor = np.log(epsilon) - 0.5 * np.log(row.size) if epsilon else -np.inf
        kept = expected >= floor
        near = np.isclose(expected, floor, rtol=0, atol=1e-4)  # rounding decides
        if not epsilon or not (kept | near).any():
            np.testing.assert_array_equal(got, was)
        elif (kept & ~near).any():
            np.testing.assert_array_equal((got > -np.inf)[~near], kept[~near])
            tolerance = 2e-5 + np.exp(expected[near]).sum()
            rest = np.log(np.exp(expected[kept]).sum())
            likely = kept & ~near & (expected - rest > -100)
            np.testing.assert_allclose(
                got[likely], expected[likely] - rest, rtol=1e-5, atol=tolerance
            )


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


def test_interaction_of_large_scores() -> None:
    """Scores whose sum float32 does not hold have a mean that it does."""
    scores = np.random.default_rng(5).uniform(-3e38, 3e38, size=(2, 3, 4, 512)).astype(np.float32)
    n = np.array([300, 512])
    valid = np.arange(512) < n[:, None]
    of_keys = [row[..., :m].astype(np.float64) for row, m in zip(scores, n, strict=True)]
    expected = [np.abs(row).mean(axis=(1, 2)) for row in of_keys]
    for measured in (attention_stats, jax.jit(attention_stats)):
        stats = measured(jnp.asarray(scores), jnp.asarray(valid))
        np.testing.assert_allclose(stats.interaction, expected, rtol=1e-5)


def test_layers_may_be_measured_apart() -> None:
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.normal(size=(2, 3, 4, 40)), jnp.float32)
    valid = jnp.arange(40, dtype=jnp.int32)[None, :] < jnp.asarray([[7], [40]])
    apart = join_layers([attention_stats(scores[:, i : i + 1], valid) for i in range(3)])
    chex.assert_trees_all_close(apart, attention_stats(scores, valid), rtol=1e-6)


def test_heads_that_look_at_one_key_each_do_not_agree() -> None:
    """Four heads, each on its own key: a_j is 1, the mean 1/4, so half the distance is 3/4."""
    scores = jnp.asarray(100.0 * np.eye(4)[None, None], jnp.float32)
    stats = attention_stats(scores, jnp.ones((1, 4), bool))
    metrics = measure(jnp.zeros((1, 1), jnp.float32), stats, jnp.ones((1, 1), jnp.float32))
    assert float(metrics.agreement[0]) == pytest.approx(0.25, abs=1e-6)
    assert float(metrics.agreement_published[0]) == pytest.approx(1.5 / 4, abs=1e-6)
    assert float(metrics.attn_entropy[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics.interaction_strength[0]) == pytest.approx(25.0, abs=1e-4)
