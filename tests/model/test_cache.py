"""Writes into the cache, against plain loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.cache import write


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "start", "count"),
    [
        (1, [2], [1]),
        (1, [2], [0]),
        (1, [4], [1]),  # the last slot
        (1, [5], [1]),  # past it: dropped
        (3, [1], [2]),
        (3, [3], [3]),  # the third one is dropped
        (1, [0, 4], [1, 1]),
        (1, [3, 2], [0, 1]),
        (2, [4, 0], [2, 1]),
    ],
)
def test_writes(tokens: int, start: list[int], count: list[int], listed: bool) -> None:
    """Whole slots of the rows in order, or of those that are named; NaN elsewhere stays there."""
    kv_heads, capacity, head_dim, rows = 2, 5, 3, len(start)
    batch = rows + 2 if listed else rows
    named = [batch - 1 - row for row in range(rows)] if listed else list(range(rows))
    slots = np.random.default_rng(0).standard_normal((batch, kv_heads, capacity, head_dim))
    slots = slots.astype(np.float32)
    slots[:, :, 0] = np.nan
    new = np.random.default_rng(1).standard_normal((rows, tokens, kv_heads, head_dim))
    new = new.astype(np.float32)
    wanted = slots.copy()
    for row in range(rows):
        for token in range(count[row]):
            if start[row] + token < capacity:
                wanted[named[row], :, start[row] + token] = new[row, token]
    written = write(
        jnp.asarray(slots),
        jnp.asarray(new),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(count, jnp.int32),
        jnp.asarray(named, jnp.int32) if listed else None,
    )
    np.testing.assert_array_equal(written, wanted)
