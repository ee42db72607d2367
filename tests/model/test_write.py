"""Tokens are written to the cache where they belong, in whichever way."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.write import write, write_run, write_token

SHAPES = pytest.mark.parametrize(("positions", "head_dim"), [(300, 64), (24, 16), (40, 128)])
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
on_tpu = {
    True: jax.jit(partial(write_token, interpret=True)),
    False: jax.jit(write_run),
}


@DTYPES
@SHAPES
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_as_on_a_tpu(positions: int, head_dim: int, tokens: int, dtype: Any) -> None:
    """Rows that write nothing, past their end, and rows beyond the written ones keep what they
    have."""
    start = np.array([0, 5, positions - 1, positions, 17, positions // 2], np.int32)
    count = np.array([1, 0, tokens, 1, tokens, (tokens + 1) // 2], np.int32)
    rng = np.random.default_rng(1)
    cached = jnp.asarray(rng.normal(size=(8, 2, positions, head_dim)), dtype)
    new = jnp.asarray(rng.normal(size=(6, tokens, 2, head_dim)), dtype).at[4, 0].set(jnp.nan)
    expected = np.array(cached, np.float32)
    for row in range(6):
        for i in range(min(count[row], positions - start[row])):
            expected[row, :, start[row] + i] = np.asarray(new[row, i], np.float32)
    for way in (write, on_tpu[tokens == 1]):
        written = way(cached, new, start, count)
        assert written.dtype == dtype
        np.testing.assert_array_equal(np.asarray(written, np.float32), expected)
