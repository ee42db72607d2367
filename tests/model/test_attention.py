"""Attention alone: branches of one prefix, with grouped heads and slots that must not count."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.attention import attend_branches
from tests.support import reference

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
