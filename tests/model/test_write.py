"""Tokens are written to the cache where they belong, in whichever way."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.write import write, write_token


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("positions", "head_dim"), [(300, 64), (24, 16), (40, 128)])
def test_a_token_is_written_by_a_kernel(positions: int, head_dim: int, dtype: Any) -> None:
    """The one for TPUs, interpreted. Rows that write nothing, a row past its end and rows beyond
    the written ones keep what they have."""
    start = np.array([0, 5, positions - 1, positions, 17, positions // 2], np.int32)
    count = np.array([1, 0, 1, 1, 1, 1], np.int32)
    rng = np.random.default_rng(1)
    cached = jnp.asarray(rng.normal(size=(8, 2, positions, head_dim)), dtype)
    new = jnp.asarray(rng.normal(size=(6, 1, 2, head_dim)), dtype).at[4].set(jnp.nan)
    ways = write, jax.jit(partial(write_token, interpret=True))
    there, here = (np.asarray(way(cached, new, start, count), np.float32) for way in ways)
    np.testing.assert_array_equal(here, there)
    expected = np.array(cached, np.float32)
    for row in np.flatnonzero(count * (start < positions)):
        expected[row, :, start[row]] = np.asarray(new[row, 0], np.float32)
    np.testing.assert_array_equal(there, expected)
