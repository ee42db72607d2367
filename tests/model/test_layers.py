"""The rotation of queries and keys, alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.config import ModelConfig, RopeScaling
from entropix_jax.model.rope import inverse_frequencies, rotations
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


@cases
def test_scaling(config: ModelConfig) -> None:
    want = reference.inverse_frequencies(config)
    np.testing.assert_allclose(inverse_frequencies(config), want, rtol=1e-7)


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
