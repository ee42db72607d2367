from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.attention import attention_stats, join_layers
from entropix_jax.sampler.metrics import Metrics, apply_noise_floor, measure, noise_floor
from entropix_jax.stats import AttnStats, entropy_and_varentropy, sum_last
from tests.support import reference

LLAMA_VOCAB = 128256
NEVER = -np.inf


def measured(logits: np.ndarray) -> tuple[float, float]:
    """Entropy and varentropy of float32 logits, by the code under test."""
    log_probs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
    h, u = jax.jit(entropy_and_varentropy)(log_probs)
    return float(h), float(u)


def logits_for(*probs: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1000, LLAMA_VOCAB])
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
        ((1.0, 0.0, 0.0), 0.0, 0.0),
        ((0.5, 0.5, 0.0), 1.0, 0.0),
    ],
)
def test_values_by_hand(probs: tuple[float, ...], h: float, u: float) -> None:
    assert measured(logits_for(*probs)) == pytest.approx((h, u), abs=1e-6)
    shifted = logits_for(*probs) + 40.0  # only differences of logits count
    assert measured(shifted) == pytest.approx((h, u), abs=1e-4)


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("vocab", [2, 17, 4096, LLAMA_VOCAB])
def test_against_float64(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = (scale * rng.normal(size=(2, vocab))).astype(np.float32)
    logits[1, vocab // 2 :] = NEVER
    log_probs = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    h, u = jax.jit(entropy_and_varentropy)(log_probs)
    assert h.dtype == u.dtype == jnp.float32
    for row in range(2):
        p = np.exp(reference.log_softmax(logits[row]))
        assert float(h[row]) == pytest.approx(reference.entropy_bits(p), abs=3e-5)
        assert float(u[row]) == pytest.approx(reference.varentropy_bits(p), abs=2e-4, rel=1e-5)


@pytest.mark.parametrize("far", [-200.0, -1e30, float(np.finfo(np.float32).min), NEVER])
def test_what_cannot_happen_adds_nothing(far: float) -> None:
    """A probability that float32 rounds to 0 is one, however far down its logit lies."""
    assert measured(np.array([0.0, 0.0, far])) == pytest.approx((1.0, 0.0), abs=1e-6)
    assert measured(np.array([0.0, far])) == (0.0, 0.0)


def test_noise_floor_values() -> None:
    assert float(noise_floor(jnp.float32(2.0**-7), LLAMA_VOCAB)) == pytest.approx(-10.73, abs=5e-3)
    want = np.log(2.0**-23) - np.log(np.sqrt(LLAMA_VOCAB))
    assert float(noise_floor(jnp.float32(2.0**-23), LLAMA_VOCAB)) == pytest.approx(want, abs=1e-5)


def test_noise_floor_silences_what_lies_under_it() -> None:
    """The floor of V = 16 at epsilon 2^-7 is -6.24 nats: one of the three last tokens is above."""
    p = np.full(16, 0.9925 / 13)
    p[13:] = 0.0005, 0.001, 0.006
    log_probs = jnp.log(jnp.asarray(np.stack([p, p]), jnp.float32))
    got = np.asarray(apply_noise_floor(log_probs, jnp.asarray([2.0**-7, 0.0], jnp.float32)))
    np.testing.assert_array_equal(got[1], log_probs[1])  # off: bit for bit
    kept = p > np.exp(np.log(2.0**-7) - np.log(4))
    assert kept.tolist() == [True] * 13 + [False, False, True]
    np.testing.assert_array_equal(np.isfinite(got[0]), kept)
    np.testing.assert_allclose(np.exp(got[0][kept]), p[kept] / p[kept].sum(), rtol=1e-5)


def test_without_a_noise_floor_nothing_is_touched() -> None:
    """Not even the last bits by which the probabilities miss a sum of 1, nor what is impossible."""
    logits = np.random.default_rng(5).normal(size=(16, 1000)).astype(np.float32)
    logits[:, :3] = -np.inf
    log_probs = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    got = apply_noise_floor(log_probs, jnp.zeros(16, jnp.float32))
    np.testing.assert_array_equal(got, log_probs)
    sums = jax.nn.logsumexp(log_probs, axis=-1, keepdims=True)
    assert not np.array_equal(log_probs - sums, log_probs)


def test_noise_floor_never_silences_everything() -> None:
    """All 128,256 about as likely, each under bfloat16's floor: no row becomes NaN, or certain."""
    flat = np.zeros((2, LLAMA_VOCAB), np.float32)
    flat[1, 5] = 1e-3
    log_probs = jax.nn.log_softmax(jnp.asarray(flat), axis=-1)
    got = apply_noise_floor(log_probs, jnp.full(2, 2.0**-7, jnp.float32))
    np.testing.assert_array_equal(got, log_probs)


def random_attention(
    n: list[int], slots: int, junk: float, layers: int = 3, heads: int = 4, *, gaps: bool = False
) -> tuple[AttnStats, list[reference.Attention]]:
    """Statistics of rows with n[b] valid keys in `slots` slots, the first ones or, with gaps, any,
    and what they are measured from."""
    rng = np.random.default_rng(7)
    true = [reference.Attention(2 * rng.normal(size=(layers, heads, m))) for m in n]
    scores = np.full((layers, len(n), heads, slots), junk)
    valid = np.zeros((len(n), slots), bool)
    for b, m in enumerate(n):
        keys = np.sort(rng.permutation(slots)[:m]) if gaps else np.arange(m)
        valid[b, keys] = True
        scores[:, b, :, keys] = true[b].scores.transpose(2, 0, 1)
        true[b].scores = true[b].scores.astype(np.float32).astype(np.float64)
    by_row = jnp.asarray(scores.swapaxes(0, 1), jnp.float32)
    return attention_stats(by_row, jnp.asarray(valid)), true


@pytest.mark.parametrize("junk", [0.0, 1e30, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("slots", [40, 512])
@pytest.mark.parametrize("gaps", [False, True])
def test_attention_statistics_against_float64(junk: float, slots: int, gaps: bool) -> None:
    """Each row over its own keys, wherever they lie, whatever the other slots hold and however many
    there are."""
    n = [1, 2, 7, 40]
    stats, true = random_attention(n, slots, junk, gaps=gaps)
    np.testing.assert_array_equal(stats.keys, n)
    for b, attention in enumerate(true):
        for field in ("entropy", "varentropy", "divergence", "interaction"):
            got = np.asarray(getattr(stats, field)[b])
            np.testing.assert_allclose(
                got, getattr(attention, field), rtol=2e-5, atol=2e-5, err_msg=f"{field}[{b}]"
            )


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


@pytest.mark.parametrize(
    "layer_weights",
    [[1, 1, 1], [0, 0, 1], [1, 0, 0], [1, 2, 5]],
    ids=["all layers", "the last", "the first", "uneven"],
)
def test_attention_metrics_against_float64(layer_weights: list[int]) -> None:
    n = [1, 2, 7, 40]
    stats, true = random_attention(n, 64, np.nan)
    log_probs = jnp.full((4, 8), -jnp.log(8.0), jnp.float32)
    weights = jnp.broadcast_to(jnp.asarray(layer_weights, jnp.float32), (4, 3))
    metrics = measure(log_probs, stats, weights)
    for b, attention in enumerate(true):
        for name, value in attention.metrics(np.array(layer_weights)).items():
            assert float(getattr(metrics, name)[b]) == pytest.approx(value, abs=3e-5), (name, b)
        assert float(metrics.entropy[b]) == pytest.approx(3.0, abs=1e-5)


def one_layer(scores: list[list[float]]) -> Metrics:
    """The metrics of one row, one layer and these scaled scores [N, n]."""
    stats = attention_stats(
        jnp.asarray([[scores]], jnp.float32), jnp.ones((1, len(scores[0])), bool)
    )
    return measure(jnp.zeros((1, 1), jnp.float32), stats, jnp.ones((1, 1), jnp.float32))


def test_heads_that_look_at_one_key_each_do_not() -> None:
    """Four heads, each on its own key: a_j is 1, the mean 1/4, so half the distance is 3/4."""
    metrics = one_layer((100.0 * np.eye(4)).tolist())
    assert float(metrics.agreement[0]) == pytest.approx(0.25, abs=1e-6)
    assert float(metrics.agreement_published[0]) == pytest.approx(1.5 / 4, abs=1e-6)
    assert float(metrics.attn_entropy[0]) == pytest.approx(0.0, abs=1e-6)
    assert float(metrics.interaction_strength[0]) == pytest.approx(25.0, abs=1e-4)
