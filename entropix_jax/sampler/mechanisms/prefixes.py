"""Truncation rules that weigh how many of the likeliest tokens to keep: `top_h`, `ees`, `min_k`.

Each looks at a row in order, and the head nearly always settles the number. A row that keeps more
than a thousand tokens is sorted.
"""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.draw import count_settled
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.settings import SamplerSettings, number
from entropix_jax.sampler.truncation import FARTHEST, Cut, likeliest, relative


@struct.dataclass
class TopHSettings:
    """`H(q) <= alpha * H(p)`."""

    alpha: jax.Array = number(0.0, 1.0)


@struct.dataclass
class MinKSettings:
    """At least `tau / range` tokens, the range that of the logits."""

    tau: jax.Array = number(0.0, 1e4)


def top_h(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """As many of the likeliest tokens as have, renormalised, an entropy of at most `alpha * H`
    (Potraghloo et al. 2025, "Top-H Decoding"). The entropy grows with each token."""
    _, mean, log_total = relative(logits, proposal.temperature)
    most = settings.own["top_h"].alpha * (log_total - mean)

    def count(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, _ = _prefixes(first, proposal.temperature)
        kept = jnp.sum((entropies <= most) & (first > -jnp.inf), dtype=jnp.int32)
        return kept, kept < first.size

    return likeliest(logits, proposal, count_settled(logits, count))


def ees(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """As many of the likeliest tokens, k, as have, renormalised, an entropy of at least `P * ln k`,
    P their mass, and so has every fewer number: entropy equilibrium sampling (Cai et al. 2025,
    "Auxiliary-Hyperparameter-Free Sampling")."""
    y, _, _ = relative(logits, proposal.temperature)
    total = jnp.sum(jnp.exp(y))

    def count(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, masses = _prefixes(first, proposal.temperature)
        k = jnp.arange(1, first.size + 1, dtype=jnp.float32)
        ends = entropies < masses / total * jnp.log(k)  # the first never does
        ended = jnp.any(ends)
        return jnp.where(ended, jnp.argmax(ends), first.size).astype(jnp.int32), ended

    return likeliest(logits, proposal, count_settled(logits, count))


def min_k(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """The tokens above the cliff: the k with the largest `(logit_k - logit_(k+1)) / k`, logits in
    order, but at least `tau / range`, for a row so flat that it has none (Ding et al. 2026, "Min-k
    Sampling"). The temperature plays no part."""
    least = jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf))
    flat = settings.own["min_k"].tau / jnp.maximum(jnp.max(logits) - least, 1e-8)

    def count(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        there = jnp.maximum(first, least)
        after = jnp.append(there[1:], least)  # the last drop is to the least: none is larger
        rank = jnp.arange(1, first.size + 1, dtype=jnp.float32)
        drops = jnp.minimum(there - after, FARTHEST) / rank
        cliff = jnp.argmax(drops).astype(jnp.int32) + 1
        return cliff, (cliff < first.size) | (there[-1] == least)

    fewest = jnp.minimum(flat, logits.shape[-1]).astype(jnp.int32)
    return likeliest(logits, proposal, jnp.maximum(count_settled(logits, count), fewest))


def _prefixes(first: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entropy (nats) of each prefix of logits in order, renormalised, and its mass next to the
    first's: float32 [n] each."""
    y = (first - first[0]) / temperature
    mass = jnp.exp(y)
    masses = jnp.cumsum(mass)
    return jnp.log(masses) - jnp.cumsum(jnp.where(mass > 0, mass * y, 0.0)) / masses, masses


PREFIXES = (
    Mechanism("top_h", settings=TopHSettings, cut=top_h),
    Mechanism("ees", cut=ees),
    Mechanism("min_k", settings=MinKSettings, cut=min_k),
)
