"""`attend` alone: grouped heads, causality, and slots that must not count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.attention import attend
from tests import reference

H, TOKENS, SLOTS = 8, 5, 24
START, COUNT = [0, 9, 3], [5, 2, 0]  # an empty row, one whose chunk is padded, one that waits
attend = jax.jit(attend)


def case(heads: int, kv_heads: int, junk: float, dtype=jnp.float32):
    """Queries, keys, values, positions and lengths; `junk` in the slots that are not in use."""
    rng = np.random.default_rng(3)
    q = rng.normal(size=(3, TOKENS, heads, H))
    k, v = 2 * rng.normal(size=(2, 3, kv_heads, SLOTS, H))
    for b in range(3):
        k[b, :, START[b] + COUNT[b] :] = junk
        v[b, :, START[b] + COUNT[b] :] = junk
    positions = np.array(START)[:, None] + np.arange(TOKENS)
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    lengths = jnp.asarray(np.add(START, COUNT), jnp.int32)
    return *arrays, jnp.asarray(positions, jnp.int32), lengths


@pytest.mark.parametrize("junk", [0.0, 1e30, np.nan, np.inf])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)], ids=["MHA", "GQA", "MQA"])
def test_against_float64(heads: int, kv_heads: int, junk: float) -> None:
    q, k, v, positions, lengths = case(heads, kv_heads, junk)
    mixed, scores = attend(q, k, v, positions, lengths)
    assert mixed.shape == (3, TOKENS, heads * H)
    assert scores.shape == (3, heads, SLOTS)
    for b in range(3):
        for t in range(COUNT[b]):
            n = START[b] + t + 1
            for head in range(heads):
                group = head * kv_heads // heads
                keys, values = (np.asarray(x[b, group, :n], np.float64) for x in (k, v))
                s = keys @ np.asarray(q[b, t, head], np.float64) / np.sqrt(H)
                want = np.exp(reference.log_softmax(s)) @ values
                if t == COUNT[b] - 1:
                    np.testing.assert_allclose(scores[b, head, :n], s, atol=1e-5)
                got = mixed[b, t, head * H : (head + 1) * H]
                np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_future_is_not_seen() -> None:
    q, k, v, positions, lengths = case(4, 2, 0.0)
    before, _ = attend(q, k, v, positions, lengths)
    k, v = k.at[0, :, 3].add(5.0), v.at[0, :, 3].add(5.0)
    after, _ = attend(q, k, v, positions, lengths)
    np.testing.assert_array_equal(before[0, :3], after[0, :3])
    assert np.all(np.abs(np.asarray(before[0, 3:] - after[0, 3:])).max(axis=-1) > 1e-3)
