"""Metrics of one step: the uncertainty of the next-token distribution and of the attention.

Entropies are in bits, varentropies in bits^2, log-probabilities in nats. All are float32, and rows
are independent.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.settings import MAX_LIKELIEST
from entropix_jax.stats import AttnStats, entropy_and_varentropy, sum_last, top

_SMALLEST = -1e30  # nats; of logits that are 1e38 apart, too, the sums are finite


@struct.dataclass
class Metrics:
    """The inputs of the sampler's decisions; every field float32 [B] (or a scalar, for one row)."""

    entropy: jax.Array  # h = -sum p log2 p, bits
    varentropy: jax.Array  # u = sum p (log2 p + h)^2, bits^2
    attn_entropy: jax.Array  # mean of E over layers and heads, bits
    attn_entropy_norm: jax.Array  # mean of E / log2 max(n, 2), in [0, 1]
    attn_varentropy: jax.Array  # mean over layers of the variance of E across heads, bits^2
    agreement: jax.Array  # 1 - mean total variation of a head from the heads' mean, in [0, 1]
    agreement_published: jax.Array  # mean |a_j - mean a_j| over heads and keys: a disagreement
    interaction_strength: jax.Array  # mean |s| over layers, heads and valid keys


def noise_floor(epsilon: jax.Array, vocab_size: int) -> jax.Array:
    """The log-probability (nats) below which logits of machine epsilon `epsilon` are noise.

    `ln(epsilon) - ln(V)/2`: the rounding errors of the V exponentials add up to `sqrt(V) *
    epsilon`, spread over V tokens (document 004, "Logit noise threshold").
    """
    return jnp.log(epsilon) - 0.5 * math.log(vocab_size)


def apply_noise_floor(log_probs: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Sets `log_probs[B, V]` (nats) below the noise floor to -inf and renormalises the rest.

    `epsilon` is float32 [B]. A row is unchanged where it is 0, and where nothing is above the floor
    (as with bfloat16 and 128,256 tokens that are about equally likely).
    """
    floor = noise_floor(epsilon, log_probs.shape[-1])[:, None]
    above = log_probs >= floor
    kept = jnp.where(above, log_probs, -jnp.inf)
    total = jnp.sum(jnp.exp(kept), axis=-1, keepdims=True)
    return jnp.where((epsilon > 0)[:, None] & (total > 0), kept - jnp.log(total), log_probs)


def measure(log_probs: jax.Array, stats: AttnStats, layer_weights: jax.Array) -> Metrics:
    """Computes all metrics of each row from `log_probs`, float32 [B, V] in nats, and the attention
    of its last position.

    `layer_weights`, float32 [B, L], are traced: the weight of each layer in the means over layers.
    Ones are "all layers"; one-hot on the last is what the published code did.
    """
    entropy, varentropy = entropy_and_varentropy(log_probs)
    weights = layer_weights / jnp.sum(layer_weights, axis=-1, keepdims=True)
    means, variances = jnp.mean(stats.entropy, axis=-1), jnp.var(stats.entropy, axis=-1)
    of_layers = jnp.stack([means, variances, stats.divergence, stats.interaction])
    over_layers = jnp.sum(weights[None] * of_layers, axis=-1)
    attn_entropy, attn_varentropy, divergence, interaction = over_layers
    return Metrics(
        entropy=entropy,
        varentropy=varentropy,
        attn_entropy=attn_entropy,
        attn_entropy_norm=attn_entropy / jnp.log2(jnp.maximum(stats.keys, 2.0)),
        attn_varentropy=attn_varentropy,
        agreement=1.0 - 0.5 * divergence,
        agreement_published=divergence / stats.keys,
        interaction_strength=interaction,
    )


def measure_confidence(
    log_probs: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Token confidence and self-certainty (nats), and the probability of the most likely token, of
    each row's `log_probs[B, V]` (nats, no noise floor): three float32 [B]. All are higher the more
    certain the model is.

    Token confidence is `-mean(ln p)` of the `k[B]` most likely tokens, or of all if there
    are fewer (Fu et al. 2025, "Deep Think with Confidence"). Self-certainty is `-mean(ln(V p))` of
    all, the divergence of p from the uniform distribution (Kang et al. 2025, "Scalable Best-of-N
    Selection for Large Language Models via Self-Certainty").
    """
    vocab = log_probs.shape[-1]
    size = min(MAX_LIKELIEST, vocab)
    log_probs = jnp.maximum(log_probs, _SMALLEST)
    first, _ = top(log_probs, size)
    k = jnp.minimum(k, size)
    counts = jnp.arange(size, dtype=jnp.int32)[None, :] < k[:, None]
    confidence = -jnp.sum(jnp.where(counts, first, 0.0), axis=-1) / k.astype(jnp.float32)
    certainty = -sum_last(log_probs) / vocab - math.log(vocab)
    return confidence, certainty, jnp.exp(first[:, 0])


def spread(moments: jax.Array, value: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the moments of `count` values, int32, from those of all but the last, and their
    variance. Moments are the mean and the summed squared deviation (Welford), float32 [2]."""
    mean, squares = moments
    deviation, n = value - mean, count.astype(jnp.float32)
    mean += deviation / n
    squares += deviation * (value - mean)
    return jnp.stack([mean, squares]), squares / n
