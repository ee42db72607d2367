"""The parts of a layer, each alone: rotation, and attention over branches of one prefix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.attention import attend_branches
from entropix_jax.model.config import ModelConfig, RopeScaling
from entropix_jax.model.rope import inverse_frequencies, rotate, rotations
from tests.support import reference
from tests.support.models import tiny_config


def llama(factor: float | None, *, head_dim: int = 64, theta: float = 500000.0) -> ModelConfig:
    scaling = factor and RopeScaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    return tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


CASES = {
    "unscaled": llama(None, theta=10000.0),
    "Llama 3": llama(None, head_dim=128),
    "Llama 3.1": llama(8.0, head_dim=128),
    "Llama 3.2": llama(32.0),
}
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def test_scaling_by_hand() -> None:
    """The published configuration's three bands: kept, between, and divided by the factor."""
    plain, scaled = (inverse_frequencies(llama(f)) for f in (None, 32.0))
    for config in CASES.values():
        want = reference.inverse_frequencies(config)
        np.testing.assert_allclose(inverse_frequencies(config), want, rtol=1e-7)
    wavelength = 2 * np.pi / plain.astype(np.float64)
    kept, stretched = wavelength < 2048, wavelength > 8192
    assert kept.sum() == 15
    assert stretched.sum() == 14
    np.testing.assert_array_equal(scaled[kept], plain[kept])
    np.testing.assert_allclose(scaled[stretched], plain[stretched] / 32, rtol=1e-7)
    between = ~kept & ~stretched
    assert np.all(scaled[between] < plain[between])
    assert np.all(scaled[between] > plain[between] / 32)


@cases
def test_angles_to_the_end_of_the_context(config: ModelConfig) -> None:
    """No further off than what rounding the frequency and the product to float32 may cost."""
    positions = np.array([[0, 1, 2, 63, 200, 8191], [8192, 16384, 50001, 99999, 131070, 131071]])
    cos, sin = rotations(config, jnp.asarray(positions, jnp.int32))
    half = config.head_dim // 2
    assert cos.shape == sin.shape == (2, 6, 1, half)
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[:, :, None, None] * reference.inverse_frequencies(config)
    bound = angles * 2.0**-23 + 2.0**-23
    assert np.all(np.abs(np.asarray(cos, np.float64) - np.cos(angles)) <= bound)
    assert np.all(np.abs(np.asarray(sin, np.float64) - np.sin(angles)) <= bound)


@cases
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_is_a_complex_product(config: ModelConfig, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(0)
    positions = np.arange(250, 256)
    x = jnp.asarray(rng.normal(size=(1, 6, 3, config.head_dim)), dtype)
    got = rotate(x, *rotations(config, jnp.asarray(positions[None], jnp.int32)))
    assert got.dtype == x.dtype
    want = reference.rotate(config, np.asarray(x[0], np.float64), positions)
    tolerance = 1e-4 if dtype == jnp.float32 else 2.0**-7
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want, atol=tolerance, rtol=2.0**-7)


# Attention over branches.

H, SLOTS = 8, 24
attend_branches = jax.jit(attend_branches)


def one_head(query, keys, values) -> tuple[np.ndarray, np.ndarray]:
    """The scaled scores [n] of one query over n keys, and the values [H] that they mix."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, keys, values))
    s = k @ q / np.sqrt(H)
    return s, np.exp(reference.log_softmax(s)) @ v


WIDTH, DEPTHS = 3, 4


@pytest.mark.parametrize("junk", [0.0, 1e30, np.nan, np.inf])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("depth", [0, 2, DEPTHS - 1])
def test_branches_against_float64(heads: int, kv_heads: int, junk: float, depth: int) -> None:
    """Each branch sees its row's prefix, its own suffix up to its new token, and nothing else."""
    rng = np.random.default_rng(heads + kv_heads + depth)
    lengths = [1, 9, SLOTS]
    queries = rng.normal(size=(3, WIDTH, heads, H))
    prefixes = 2 * rng.normal(size=(2, 3, kv_heads, SLOTS, H))
    suffixes = 2 * rng.normal(size=(2, 3, WIDTH, kv_heads, DEPTHS, H))
    for b in range(3):
        prefixes[:, b, :, lengths[b] :] = junk
    # A suffix starts as zeros: what is not yet written is finite.
    suffixes[..., depth + 1 :, :] = 1e30 if junk else 0.0
    q = jnp.asarray(queries, jnp.float32)
    k, v = jnp.asarray(prefixes, jnp.float32)
    own_k, own_v = jnp.asarray(suffixes, jnp.float32)
    length = jnp.asarray(lengths, jnp.int32)
    mixed, scores, visible = attend_branches(q, (k, v), (own_k, own_v), length, jnp.int32(depth))
    assert mixed.shape == (3, WIDTH, heads * H)
    assert scores.shape == (3, heads, WIDTH, SLOTS + DEPTHS)
    for b in range(3):
        seen = [*range(lengths[b]), *range(SLOTS, SLOTS + depth + 1)]
        np.testing.assert_array_equal(np.flatnonzero(visible[b]), seen)
        for w in range(WIDTH):
            for head in range(heads):
                group = head * kv_heads // heads
                keys, values = (
                    np.concatenate([x[b, group, : lengths[b]], own[b, w, group, : depth + 1]])
                    for x, own in ((k, own_k), (v, own_v))
                )
                s, want = one_head(q[b, w, head], keys, values)
                np.testing.assert_allclose(scores[b, head, w, np.array(seen)], s, atol=1e-5)
                got = mixed[b, w, head * H : (head + 1) * H]
                np.testing.assert_allclose(got, want, atol=1e-5)
