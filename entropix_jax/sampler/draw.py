"""Random numbers by purpose, and the draw that all arms share.

A random number is a function of the run's seed, the row's id, the position, the attempt at that
position, the stream and the index in it. It does not depend on slot, batch, device or other rows.

Filters decide which tokens may be drawn and how likely each is (`sampler.filters`). The draw is the
inverse of the cumulative distribution, in the order of ids, so it needs neither a sort nor noise.
It sums the masses into a tree and descends it for each uniform number u, to the first token whose
cumulative mass exceeds u times the total.
"""

import hashlib

import chex
import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.prefix import cumulate
from entropix_jax.sampler.settings import MAX_DRAWS

_FAN = 16  # children of a node
STREAM_DRAW, STREAM_CANDIDATE, STREAM_ROLLOUT, STREAM_NOISE, STREAM_XTC, STREAM_OBSERVE = range(6)


def row_key(seed: int, row_id: str) -> np.ndarray:
    """Returns the key of a row: uint32 [2], the first half of SHA-256 over the seed and the row's
    id. Stable across runs, machines and versions."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return np.frombuffer(digest[:8], dtype=">u4").astype(np.uint32)


def uniforms(
    key: jax.Array, position: jax.Array, attempt: jax.Array, stream: jax.Array, count: int
) -> jax.Array:
    """Returns uniform numbers in [0, 1) with 24 random bits, float32 [count].

    The bits are those of the key after the last `fold_in`, so no setting of JAX's generators
    changes them. `key` is uint32 [2]. `position`, `attempt` and `stream` are int32.
    """
    chex.assert_shape((key, position, attempt, stream), [(2,), (), (), ()])
    folded = jax.random.wrap_key_data(key, impl="threefry2x32")
    for part in (position, attempt, stream):
        folded = jax.random.fold_in(folded, part)
    indices = jnp.arange(count, dtype=jnp.int32)
    named = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(folded, i)))(indices)
    return (named[:, 0] >> 8).astype(jnp.float32) * 2.0**-24


def numbers_of_candidates(ctx: Context) -> jax.Array:
    """Returns the uniform numbers for one row's candidates: float32 [MAX_DRAWS].

    Branches share their row's key, so each uses the number at its own index.
    """
    stream = jnp.where(ctx.proposal.num_candidates > 1, STREAM_CANDIDATE, STREAM_DRAW)
    stream = jnp.where(ctx.branch >= 0, STREAM_ROLLOUT, stream)
    numbers = uniforms(ctx.key, ctx.length, ctx.attempt, stream, MAX_DRAWS)
    return jnp.where(ctx.branch >= 0, numbers[jnp.maximum(ctx.branch, 0)], numbers)


def draw_tokens(logits: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws one token of one row for each uniform number: int32 [n], with probabilities
    `softmax(logits)`.

    Args:
        logits: float32 [V], -inf for a token that is never drawn; at least one is finite.
        uniforms: float32 [n] in [0, 1).
    """
    chex.assert_rank((logits, uniforms), 1)
    levels = [jnp.exp(logits - jnp.max(logits))]
    while levels[-1].shape[0] > _FAN:
        masses = jnp.pad(levels[-1], (0, -levels[-1].shape[0] % _FAN))
        levels[-1:] = [masses, jnp.sum(masses.reshape(-1, _FAN), axis=-1)]

    root = cumulate(levels.pop())
    target = uniforms * root[-1]
    node, target = _child(jnp.broadcast_to(root, (*uniforms.shape, *root.shape)), target)
    for masses in reversed(levels):
        sums = cumulate(masses.reshape(-1, _FAN)[node])
        child, target = _child(sums, target)
        node = node * _FAN + child
    return node


def _child(sums: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first child whose cumulative mass, `sums[n, m]`, is above the target, int32 [n],
    and the remaining target, float32 [n]. If rounding leaves none above, it is the last child that
    has a mass."""
    last = jnp.sum(sums < sums[:, -1:], axis=-1, dtype=jnp.int32)
    child = jnp.minimum(jnp.sum(sums <= target[:, None], axis=-1, dtype=jnp.int32), last)
    before = jnp.take_along_axis(sums, jnp.maximum(child - 1, 0)[:, None], axis=1)[:, 0]
    return child, target - jnp.where(child > 0, before, 0.0)
