"""Truncation rules that compare each token with a number of its row: `top_n_sigma`, `typical`,
`eta`, `epsilon`, `top_a` and `p_less`.

`truncation.rule` names the one that a sampler has. See `sampler.truncation` for what they share.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.settings import SamplerSettings, flag, number
from entropix_jax.sampler.truncation import FARTHEST, Cut, likeliest, nucleus, relative

_LARGEST = float(jnp.finfo(jnp.float32).max)


@struct.dataclass
class TopNSigmaSettings:
    """`logit >= max - n * sigma`."""

    sigmas: jax.Array = number(0.0, 1e4)  # n


@struct.dataclass
class TypicalSettings:
    """As many tokens of typical information content as make up a mass."""

    mass: jax.Array = number(1e-6, 1.0)  # tau


@struct.dataclass
class EtaSettings:
    """`p >= min(epsilon, sqrt(epsilon) * exp(-H))`."""

    epsilon: jax.Array = number(0.0, 1.0)


@struct.dataclass
class EpsilonSettings:
    """`p >= epsilon`."""

    epsilon: jax.Array = number(0.0, 1.0)


@struct.dataclass
class TopASettings:
    """`p >= factor * max(p)^2`."""

    factor: jax.Array = number(0.0, 1.0)  # a


@struct.dataclass
class PLessSettings:
    """`p >= sum(p^2)`, or less."""

    norm: jax.Array = flag()  # p-less-norm, which keeps more


def top_n_sigma(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """`logit >= max - n * sigma`, sigma the standard deviation of the logits (Tang et al. 2024,
    "Top-n-sigma: Not All Logits Are You Need"). A temperature scales both sides alike."""
    gaps = jnp.maximum(logits - jnp.max(logits), -FARTHEST)
    possible = jnp.where(logits > -jnp.inf, gaps, 0.0)
    # By a power of two, which rounds nothing: squares of small gaps would be 0.
    _, exponent = jnp.frexp(jnp.min(possible))
    spread = jnp.std(jnp.ldexp(possible, -exponent), where=logits > -jnp.inf)
    sigma = jnp.ldexp(spread, exponent)
    kept = jnp.sum(gaps >= -settings.own["top_n_sigma"].sigmas * sigma, dtype=jnp.int32)
    return likeliest(logits, proposal, kept)


def typical(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """Tokens by how far their information content is from the entropy, `|-ln p - H|`, nearest
    first, a tie's likelier first: as many as make up the mass tau (Meister et al. 2022, "Locally
    Typical Sampling")."""
    y, mean, _ = relative(logits, proposal.temperature)
    return Cut(
        order=jnp.where(logits > -jnp.inf, _nearness(y - mean), -jnp.inf),  # H + ln p = y - mean
        temperature=proposal.temperature,
        top_k=jnp.int32(logits.shape[-1]),
        top_p=settings.own["typical"].mass,
        min_p=jnp.float32(0.0),
    )


def eta(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """`p >= min(epsilon, sqrt(epsilon) * exp(-H))`, H in nats (Hewitt et al. 2022, "Truncation
    Sampling as Language Model Desmoothing")."""
    y, mean, log_total = relative(logits, proposal.temperature)
    log_epsilon = jnp.log(settings.own["eta"].epsilon)
    # Both sides' logarithms, with ln Z added: ln p + ln Z = y, and ln Z - H = mean.
    least = jnp.minimum(log_epsilon + log_total, 0.5 * log_epsilon + mean)
    return likeliest(logits, proposal, jnp.sum(y >= least, dtype=jnp.int32))


def epsilon(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """`p >= epsilon` (Hewitt et al. 2022, "Truncation Sampling as Language Model Desmoothing")."""
    y, _, log_total = relative(logits, proposal.temperature)
    least = jnp.log(settings.own["epsilon"].epsilon) + log_total
    return likeliest(logits, proposal, jnp.sum(y >= least, dtype=jnp.int32))


def top_a(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """`p >= a * max(p)^2` (Peng 2022, in the RWKV language model)."""
    y, _, log_total = relative(logits, proposal.temperature)
    least = jnp.log(settings.own["top_a"].factor) - log_total  # ln max(p) = -ln Z
    return likeliest(logits, proposal, jnp.sum(y >= least, dtype=jnp.int32))


def p_less(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """`p >= sum(p^2)`, the chance that two draws agree (Tan et al. 2025, "p-less Sampling"), or its
    p-less-norm, `p >= (N * sum(p^2) - 1) / (N - 1)` of N possible tokens: 0 where all are alike."""
    y, _, _ = relative(logits, proposal.temperature)
    mass = jnp.exp(y)
    total = jnp.sum(mass)
    least = jnp.sum(jnp.square(mass)) / total  # next to the likeliest, as `mass` is
    others = jnp.maximum(jnp.sum(logits > -jnp.inf, dtype=jnp.float32) - 1.0, 1.0)
    norm = settings.own["p_less"].norm
    least = jnp.where(norm, least - (total - least) / others, least)
    return likeliest(logits, proposal, jnp.sum(mass >= least, dtype=jnp.int32))


def _nearness(deviation: jax.Array) -> jax.Array:
    """An order from the smallest `|deviation|` up, the positive one of a tie first.

    The sign takes the place of the last bit of the distance: of one value are then only tokens
    that are as likely as each other, which the draw counts on.
    """
    distance = jnp.minimum(jnp.abs(deviation), _LARGEST)
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    bits = (bits & ~1) | (deviation < 0).astype(jnp.int32)
    return -lax.bitcast_convert_type(bits, jnp.float32)


RULES = (
    Mechanism("nucleus", cut=nucleus),
    Mechanism("top_n_sigma", settings=TopNSigmaSettings, cut=top_n_sigma),
    Mechanism("typical", settings=TypicalSettings, cut=typical),
    Mechanism("eta", settings=EtaSettings, cut=eta),
    Mechanism("epsilon", settings=EpsilonSettings, cut=epsilon),
    Mechanism("top_a", settings=TopASettings, cut=top_a),
    Mechanism("p_less", settings=PLessSettings, cut=p_less),
)
