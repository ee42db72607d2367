"""The draw that all arms share: the inverse of the cumulative distribution, in the order of ids.

Filters decide which tokens may be drawn, and how likely each is (`sampler.filters`). The draw needs
neither a sort nor noise: it sums the masses into a tree and descends it for each uniform number u,
to the first token whose cumulative mass exceeds u times the total.
"""

import jax
import jax.numpy as jnp

from entropix_jax.sampler.prefix import cumulate

_FAN = 16  # children of a node


def draw_tokens(logits: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Returns one token of one row for each uniform number: int32 [n], each with the probability
    `softmax(logits)`.

    Args:
        logits: float32 [V], -inf for a token that is never drawn; at least one is finite.
        uniforms: float32 [n] in [0, 1).
    """
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
