"""Entropy and varentropy of a distribution, the one formula that logits and attention share."""

import math

import jax
import jax.numpy as jnp

_LN2 = math.log(2.0)


def entropy_and_varentropy(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entropy (bits) and varentropy (bits^2) of `log_probs[..., n]` in nats: two float32 [...].

    `h = -sum p log2 p` and `u = sum p (log2 p + h)^2`, the variance of the information content. A
    term with p = 0 adds 0.
    """
    probs = jnp.exp(log_probs)
    bits = jnp.where(probs > 0, log_probs / _LN2, 0.0)
    entropy = -jnp.sum(probs * bits, axis=-1)
    varentropy = jnp.sum(probs * jnp.square(bits + entropy[..., None]), axis=-1)
    return entropy, varentropy
