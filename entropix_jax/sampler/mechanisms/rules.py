"""Truncation rules that compare each token with a number of its row: `top_n_sigma`, `typical`,
`eta`, `epsilon`, `top_a` and `p_less`.

`truncation.rule` names the one that a sampler has. Each is given one row's logits divided by the
temperature, `p = softmax(logits)`, with the likeliest at 0.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.context import Context
from entropix_jax.sampler.filters import NUCLEUS, nucleus
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.prefix import FARTHEST, head_of, shortest
from entropix_jax.sampler.settings import flag, number

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


def top_n_sigma(logits: jax.Array, ctx: Context) -> jax.Array:
    """`logit >= max - n * sigma`, sigma the standard deviation of the logits (Tang et al. 2024,
    "Top-n-sigma: Not All Logits Are You Need"). A temperature scales both sides alike."""
    gaps = jnp.maximum(logits - jnp.max(logits), -FARTHEST)
    possible = jnp.where(logits > -jnp.inf, gaps, 0.0)
    # By a power of two, which rounds nothing: squares of small gaps would be 0.
    _, exponent = jnp.frexp(jnp.min(possible))
    spread = jnp.std(jnp.ldexp(possible, -exponent), where=logits > -jnp.inf)
    sigma = jnp.ldexp(spread, exponent)
    return _where(gaps >= -ctx.settings.own["top_n_sigma"].sigmas * sigma, logits)


def typical(logits: jax.Array, ctx: Context) -> jax.Array:
    """Tokens by how far their information content is from the entropy, `|-ln p - H|`, nearest
    first, a tie's likelier first: as many as make up the mass tau (Meister et al. 2022, "Locally
    Typical Sampling")."""
    log_probs, mass = jax.nn.log_softmax(logits), ctx.settings.own["typical"].mass
    entropy = _entropy(log_probs)
    order = jnp.where(logits > -jnp.inf, _nearness(log_probs + entropy), -jnp.inf)
    # The weights are p * exp(H), which follows from the order.
    total = jnp.exp(entropy)
    nearest = shortest(order, head_of(order), _weigh_near, mass * total, total)
    return jnp.where(nearest.holds(order), logits, -jnp.inf)


def eta(logits: jax.Array, ctx: Context) -> jax.Array:
    """`p >= min(epsilon, sqrt(epsilon) * exp(-H))`, H in nats (Hewitt et al. 2022, "Truncation
    Sampling as Language Model Desmoothing")."""
    log_probs = jax.nn.log_softmax(logits)
    log_epsilon = jnp.log(ctx.settings.own["eta"].epsilon)
    least = jnp.minimum(log_epsilon, 0.5 * log_epsilon - _entropy(log_probs))
    return _where(log_probs >= least, logits)


def epsilon(logits: jax.Array, ctx: Context) -> jax.Array:
    """`p >= epsilon` (Hewitt et al. 2022, "Truncation Sampling as Language Model Desmoothing")."""
    least = jnp.log(ctx.settings.own["epsilon"].epsilon)
    return _where(jax.nn.log_softmax(logits) >= least, logits)


def top_a(logits: jax.Array, ctx: Context) -> jax.Array:
    """`p >= a * max(p)^2` (Peng 2022, in the RWKV language model)."""
    log_probs = jax.nn.log_softmax(logits)
    least = jnp.log(ctx.settings.own["top_a"].factor) + 2.0 * jnp.max(log_probs)
    return _where(log_probs >= least, logits)


def p_less(logits: jax.Array, ctx: Context) -> jax.Array:
    """`p >= sum(p^2)`, the chance that two draws agree (Tan et al. 2025, "p-less Sampling"), or its
    p-less-norm, `p >= (N * sum(p^2) - 1) / (N - 1)` of N possible tokens: 0 where all are alike."""
    mass = jnp.exp(logits - jnp.max(logits))
    total = jnp.sum(mass)
    least = jnp.sum(jnp.square(mass)) / total  # next to the likeliest, as `mass` is
    others = jnp.maximum(jnp.sum(logits > -jnp.inf, dtype=jnp.float32) - 1.0, 1.0)
    norm = ctx.settings.own["p_less"].norm
    least = jnp.where(norm, least - (total - least) / others, least)
    return _where(mass >= least, logits)


def _where(left: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the logits with -inf for tokens that are not left; the likeliest always are."""
    return jnp.where(left | (logits >= jnp.max(logits)), logits, -jnp.inf)


def _entropy(log_probs: jax.Array) -> jax.Array:
    """Returns the entropy of a distribution, nats."""
    terms = jnp.exp(log_probs) * jnp.maximum(log_probs, -FARTHEST)
    return -jnp.sum(terms)


def _nearness(deviation: jax.Array) -> jax.Array:
    """Returns an order from the smallest `|deviation|` up, the positive one of a tie first.

    The sign takes the place of the last bit of the distance: of one value are then only tokens
    that are as likely as each other, which `shortest` counts on.
    """
    distance = jnp.minimum(jnp.abs(deviation), _LARGEST)
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    bits = (bits & ~1) | (deviation < 0).astype(jnp.int32)
    return -lax.bitcast_convert_type(bits, jnp.float32)


def _weigh_near(order: jax.Array) -> jax.Array:
    """Returns exp of the deviations that `_nearness` was given, up to rounding; 0 for -inf."""
    bits = lax.bitcast_convert_type(-order, jnp.int32)
    distance = lax.bitcast_convert_type(bits & ~1, jnp.float32)
    return jnp.exp(jnp.where((bits & 1 == 1) | (order == -jnp.inf), -distance, distance))


RULES = (
    Mechanism(NUCLEUS, rule=nucleus),
    Mechanism("top_n_sigma", settings=TopNSigmaSettings, rule=top_n_sigma),
    Mechanism("typical", settings=TypicalSettings, rule=typical),
    Mechanism("eta", settings=EtaSettings, rule=eta),
    Mechanism("epsilon", settings=EpsilonSettings, rule=epsilon),
    Mechanism("top_a", settings=TopASettings, rule=top_a),
    Mechanism("p_less", settings=PLessSettings, rule=p_less),
)
