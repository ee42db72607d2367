"""Truncation rules that weigh how many of the likeliest tokens to keep: `top_h`, `ees`, `min_k`.

Each looks at a row in order, and the head nearly always settles the number. A row that keeps more
than a thousand tokens is sorted.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.filters import keep_top_k
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.prefix import FARTHEST, count_settled
from entropix_jax.sampler.settings import number


@struct.dataclass
class TopHSettings:
    """`H(q) <= alpha * H(p)`."""

    alpha: jax.Array = number(0.0, 1.0)


@struct.dataclass
class MinKSettings:
    """At least `tau / range` tokens, the range that of the logits."""

    tau: jax.Array = number(0.0, 1e4)


def top_h(logits: jax.Array, ctx: Context) -> jax.Array:
    """As many of the likeliest tokens as have, renormalised, an entropy of at most `alpha * H`
    (Potraghloo et al. 2025, "Top-H Decoding"). The entropy grows with each token."""
    y = logits - jnp.max(logits)
    mass = jnp.exp(y)
    total = jnp.sum(mass)
    entropy = jnp.log(total) - jnp.sum(jnp.where(mass > 0, mass * y, 0.0)) / total
    most = ctx.settings.own["top_h"].alpha * entropy

    def count(first: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, _ = _prefixes(first)
        kept = jnp.sum((entropies <= bound) & (first > -jnp.inf), dtype=jnp.int32)
        return kept, kept < first.size

    return keep_top_k(logits, count_settled(logits, count, most))


def ees(logits: jax.Array, ctx: Context) -> jax.Array:
    """As many of the likeliest tokens, k, as have, renormalised, an entropy of at least `P * ln k`,
    P their mass, and so has every fewer number: entropy equilibrium sampling (Cai et al. 2025,
    "Auxiliary-Hyperparameter-Free Sampling")."""
    total = jnp.sum(jnp.exp(logits - jnp.max(logits)))

    def count(first: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, masses = _prefixes(first)
        k = jnp.arange(1, first.size + 1, dtype=jnp.float32)
        ends = entropies < masses / bound * jnp.log(k)  # the first never does
        ended = jnp.any(ends)
        return jnp.where(ended, jnp.argmax(ends), first.size).astype(jnp.int32), ended

    return keep_top_k(logits, count_settled(logits, count, total))


def min_k(logits: jax.Array, ctx: Context) -> jax.Array:
    """The tokens above the cliff: the k with the largest `(logit_k - logit_(k+1)) / k`, logits in
    order, but at least `tau / range`, for a row so flat that it has none (Ding et al. 2026, "Min-k
    Sampling"). The temperature plays no part."""
    least = jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf))
    divided = jnp.where(ctx.settings.base.temperature_last, 1.0, ctx.proposal.temperature)
    range_ = jnp.maximum((jnp.max(logits) - least) * divided, 1e-8)
    flat = ctx.settings.own["min_k"].tau / range_

    def count(first: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = jnp.maximum(first, bound)
        after = jnp.append(there[1:], bound)  # the last drop is to the least: none is larger
        rank = jnp.arange(1, first.size + 1, dtype=jnp.float32)
        drops = jnp.minimum(there - after, FARTHEST) / rank
        cliff = jnp.argmax(drops).astype(jnp.int32) + 1
        return cliff, (cliff < first.size) | (there[-1] == bound)

    fewest = jnp.minimum(flat, logits.shape[-1]).astype(jnp.int32)
    return keep_top_k(logits, jnp.maximum(count_settled(logits, count, least), fewest))


def _prefixes(first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entropy (nats) of each prefix of logits in order, renormalised, and its mass next to the
    first's: float32 [n] each."""
    y = first - first[0]
    mass = jnp.exp(y)
    masses = jnp.cumsum(mass)
    return jnp.log(masses) - jnp.cumsum(jnp.where(mass > 0, mass * y, 0.0)) / masses, masses


PREFIXES = (
    Mechanism("top_h", settings=TopHSettings, rule=top_h),
    Mechanism("ees", rule=ees),
    Mechanism("min_k", settings=MinKSettings, rule=min_k),
)
