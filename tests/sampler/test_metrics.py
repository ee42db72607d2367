"""Metrics of any distribution and any attention, against float64, and their ranges."""

from __future__ import annotations

from math import log2

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from entropix_jax.model.attention import attention_stats
from entropix_jax.sampler.metrics import apply_noise_floor, measure, measure_confidence
from entropix_jax.sampler.settings import MAX_LIKELIEST
from entropix_jax.stats import entropy_and_varentropy, sum_last, top_of_pair
from tests.support import reference
from tests.support.draw_oracles import LLAMA3
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples

measured = jax.jit(lambda logits: entropy_and_varentropy(jax.nn.log_softmax(logits, axis=-1)))
floored = jax.jit(apply_noise_floor)
confidences = jax.jit(
    lambda logits, number: measure_confidence(jax.nn.log_softmax(logits, axis=-1), number)
)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1000, LLAMA3])
def test_sum_last(length: int) -> None:
    """Equals float64 up to rounding. Batching and trailing zeros do not change any bit."""
    x = np.random.default_rng(length).standard_normal((2, 3, length)).astype(np.float32)
    total = jax.jit(sum_last)(jnp.asarray(x))
    wanted = x.sum(axis=-1, dtype=np.float64)
    np.testing.assert_allclose(total, wanted, atol=1e-6 * (1 + length**0.5))
    np.testing.assert_array_equal(jax.vmap(sum_last)(jnp.asarray(x)), total)
    longer = np.concatenate([x, np.zeros((2, 3, 640), np.float32)], axis=-1)
    np.testing.assert_array_equal(jax.jit(sum_last)(jnp.asarray(longer)), total)


@st.composite
def distributions(draw: st.DrawFn) -> np.ndarray:
    """Draws logits [B, V] of one of the vocabularies."""
    vocab = draw(st.sampled_from(sorted(VOCABULARIES)))
    return np.stack([draw(rows_of(vocab)) for _ in range(VOCABULARIES[vocab])])


@examples(40)
@given(distributions())
def test_entropy_and_varentropy(logits: np.ndarray) -> None:
    entropies, varentropies = jax.device_get(measured(jnp.asarray(logits)))
    most = log2(logits.shape[1])
    for row, h, u in zip(logits, entropies, varentropies, strict=True):
        p = np.exp(reference.log_softmax(row))
        # The variance is largest if one outcome has about half the mass, and the others the rest.
        scale = (most + 3) ** 2 / 4
        np.testing.assert_allclose(h, reference.entropy_bits(p), rtol=1e-5, atol=3e-6 * most)
        np.testing.assert_allclose(u, reference.varentropy_bits(p), rtol=1e-4, atol=1e-5 * scale)
        assert -1e-6 <= h <= most + 3e-5
        assert 0 <= u <= scale


@examples(40)
@given(distributions(), st.data())
def test_confidence(logits: np.ndarray, data: st.DataObject) -> None:
    """The measures are finite, also for logits of -inf and at float32's limits, and lowest if all
    tokens are equally likely."""
    numbers = [data.draw(st.integers(2, MAX_LIKELIEST)) for _ in logits]
    found = jax.device_get(confidences(jnp.asarray(logits), jnp.asarray(numbers, jnp.int32)))
    for row, number, confidence, certainty, most in zip(logits, numbers, *found, strict=True):
        z = row.astype(np.float64) - row.max().astype(np.float64)
        log_probs = np.maximum(z - np.log(np.exp(z).sum()), -1e30)
        top = np.sort(log_probs)[::-1][:number]
        np.testing.assert_allclose(confidence, -top.mean(), rtol=1e-5, atol=2e-5)
        wanted = -(log_probs + np.log(row.size)).mean()
        np.testing.assert_allclose(certainty, wanted, rtol=2e-5, atol=5e-5)
        np.testing.assert_allclose(most, np.exp(log_probs.max()), rtol=1e-5)
        assert np.isfinite([confidence, certainty]).all()
        assert confidence >= np.log(len(top)) - 1e-5
        assert certainty >= -5e-5


@examples(40)
@given(distributions(), st.sampled_from((0.0, 2.0**-7, 2.0**-23)))
def test_the_noise_floor(logits: np.ndarray, epsilon: float) -> None:
    """Tokens below it get -inf and the rest is renormalised, unless all tokens are below it."""
    log_probs = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    found = floored(log_probs, jnp.full(len(logits), epsilon, jnp.float32))
    for row, was, got in zip(logits, np.asarray(log_probs), np.asarray(found), strict=True):
        expected = reference.log_softmax(row)
        floor = np.log(epsilon) - 0.5 * np.log(row.size) if epsilon else -np.inf
        kept = expected >= floor
        near = np.isclose(expected, floor, rtol=0, atol=1e-4)  # within rounding of the floor
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
    """Draws scaled scores [B, L, N, S] and the mask of valid keys, bool [B, S]."""
    pool = np.array(draw(st.lists(scores_values, min_size=1, max_size=8)), np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.choice(pool, size=(ROWS, LAYERS, HEADS, SLOTS)).astype(np.float64)
    if draw(st.booleans()):
        scores = scores + draw(st.sampled_from((1e-3, 1.0, 5.0))) * rng.normal(size=scores.shape)
    if draw(st.booleans()):
        scores[:, :, 1:] = scores[:, :, :1]  # heads with equal attention
    valid = rng.random((ROWS, SLOTS)) < draw(st.sampled_from((0.05, 0.5, 1.0)))
    valid[np.arange(ROWS), rng.integers(0, SLOTS, ROWS)] = True
    return scores.astype(np.float32), valid


weights = st.sampled_from((0.0, 1.0)) | st.floats(0.0625, 1e6, width=32)
weights_of_layers = st.tuples(weights, st.just(1.0)).flatmap(st.permutations)


@examples(60)
@given(attentions(), weights_of_layers, st.sampled_from((np.nan, np.inf, -np.inf, 1e30, 0.0)))
def test_attention_metrics(
    attention: tuple[np.ndarray, np.ndarray], layer_weights: list[float], junk: float
) -> None:
    """Masked keys have no effect, whatever their values and positions."""
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


def test_looks_of_the_sharpest_heads_of_the_upper_layers() -> None:
    """Heads that attend to the first position come last."""
    rng = np.random.default_rng(7)
    scores = rng.normal(size=(ROWS, 4, HEADS, SLOTS)).astype(np.float32) * 3
    scores[:, :, 0, 0] += 20
    valid = np.arange(SLOTS) < np.array([SLOTS, 9, 3, 1])[:, None]
    stats = attention_stats(jnp.asarray(scores), jnp.asarray(valid), looks=True)
    looks = jax.device_get(stats.looks)
    for row in range(ROWS):
        true = reference.Attention(scores[row][:, :, valid[row]].astype(np.float64))
        sharp = np.where(true.weights[2:, :, 0] > 0.5, np.inf, true.entropy[2:]).ravel()
        heads = np.argsort(sharp, kind="stable")[:3]
        assert np.array_equal(looks.layer[row], 2 + heads // HEADS)
        assert np.array_equal(looks.head[row], heads % HEADS)
        weights = true.weights[2:].reshape(2 * HEADS, -1)[heads]
        order = np.argsort(-weights, axis=1)[:, :5]
        size = order.shape[1]
        assert np.array_equal(looks.positions[row, :, :size], order)
        expected = np.take_along_axis(weights, order, axis=1)
        np.testing.assert_allclose(looks.weights[row, :, :size], expected, rtol=1e-4, atol=1e-7)
        assert not looks.weights[row, :, size:].any()


def test_interaction_of_large_scores() -> None:
    """The mean of scores is finite even if their sum overflows float32."""
    scores = np.random.default_rng(5).uniform(-3e38, 3e38, size=(2, 3, 4, 512)).astype(np.float32)
    n = np.array([300, 512])
    valid = np.arange(512) < n[:, None]
    of_keys = [row[..., :m].astype(np.float64) for row, m in zip(scores, n, strict=True)]
    expected = [np.abs(row).mean(axis=(1, 2)) for row in of_keys]
    for measured in (attention_stats, jax.jit(attention_stats)):
        stats = measured(jnp.asarray(scores), jnp.asarray(valid))
        np.testing.assert_allclose(stats.interaction, expected, rtol=1e-5)


# The largest values of a row, compared with `lax.top_k`

SPECIAL = (0.0, -0.0, 1.0, -1.0, 3e38, 1e-45, np.inf, -np.inf, np.nan, -np.nan)

of_pair = jax.jit(top_of_pair, static_argnames="k")
by_jax = jax.jit(lax.top_k, static_argnames="k")


@st.composite
def rows(draw: st.DrawFn, size: int) -> np.ndarray:
    """Draws two rows of few or many distinct values, with ties, NaN and infinities."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = draw(st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=1, max_size=6))
    made = rng.choice(np.array(pool, np.float32), size=(2, size))
    noise = rng.normal(size=made.shape).astype(np.float32)
    share = draw(st.sampled_from((0.0, 1e-3, 0.5, 1.0)))
    return np.where(rng.random(made.shape) < share, noise, made)


def check(values: np.ndarray, k: int) -> None:
    for way, some in ((of_pair, values[0]), (of_pair, values[:1])):
        expected, places = by_jax(some, k=k)
        found, found_places = way(some, k=k)
        assert np.array_equal(found_places, places)
        assert np.array_equal(found.view(np.int32), np.asarray(expected).view(np.int32))


@pytest.mark.parametrize("size", [1025, LLAMA3])
@examples(30)
@given(st.data())
def test_top_of_pair_orders_ties_and_nan_like_jax(size: int, data: st.DataObject) -> None:
    check(data.draw(rows(size)), data.draw(st.sampled_from((1, 20, 64, 1024))))
