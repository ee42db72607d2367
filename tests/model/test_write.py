"""Writes to the cache, on a CPU and in the form for a TPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.accelerators.tpu_write import position_axis, write_run, write_token
from entropix_jax.model.cache import KVCache
from entropix_jax.model.write import _copy_runs, copy_runs, write

SHAPES = pytest.mark.parametrize(("positions", "head_dim"), [(300, 64), (24, 16), (40, 128)])
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
on_tpu = {
    True: jax.jit(partial(write_token, mesh_axis="model", interpret=True)),
    False: jax.jit(write_run),
}


@DTYPES
@SHAPES
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_writes_equal_the_tpu_form(positions: int, head_dim: int, tokens: int, dtype: Any) -> None:
    """Rows with no new token, rows past their end, and rows beyond the written ones do not
    change."""
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


@DTYPES
@SHAPES
def test_copy_runs(positions: int, head_dim: int, dtype: Any) -> None:
    """Copies whole rows, one from the middle, and one that ends with the cache, in blocks of 8. The
    last run is beyond `number`, so it is not copied."""
    number, block = 4, 8
    source, target = np.array([0, 2, 6, 4, 5], np.int32), np.array([1, 3, 7, 5, 0], np.int32)
    start = np.array([0, 9, 0, positions - 3, 0], np.int32)
    end = np.array([positions, 16, 3, positions + 5, positions], np.int32)
    rng = np.random.default_rng(2)
    keys, values = (
        tuple(jnp.asarray(rng.normal(size=(8, 2, positions, head_dim)), dtype) for _ in range(2))
        for _ in range(2)
    )
    cache = KVCache(keys, values, jnp.zeros(8, jnp.int32), jnp.dtype(dtype))
    for way in (copy_runs, partial(_copy_runs, axis=position_axis(head_dim))):
        copied = jax.jit(partial(way, block=block))(cache, number, source, target, start, end)
        for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
            expected = np.array(before, np.float32)
            for k in range(number if before.ndim == 4 else 0):
                for first in range(start[k], end[k], block):
                    at = min(first, positions - block) + np.arange(block)
                    expected[target[k], :, at] = expected[source[k], :, at]
            np.testing.assert_array_equal(np.asarray(after, np.float32), expected)
