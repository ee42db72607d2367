"""What the model tells of its uncertainty besides the logits, and the formula that both share."""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

_LN2 = math.log(2.0)
_LANES = 128  # of a TPU's registers; any vector of a CPU's divides it


@struct.dataclass
class AttnStats:
    """Statistics of the attention of each row's last position, over its `n` valid keys only.

    With scaled scores `s` and weights `a = softmax(s)` of one head over those keys:
    """

    entropy: jax.Array  # [B, L, N] bits: E = -sum a log2 a
    varentropy: jax.Array  # [B, L, N] bits^2: sum a (log2 a + E)^2
    divergence: jax.Array  # [B, L] mean over heads of sum_j |a_j - mean over heads of a_j|
    interaction: jax.Array  # [B, L] mean of |s| over heads and valid keys
    keys: jax.Array  # float32 [B], n
    # Bool [B, T, 1+2L], where it is asked for: whether a new token's activations are finite, those
    # of the embedding, and of each layer its queries, keys and values and what it adds up to. True
    # for padding.
    sound: jax.Array | None = None


def entropy_and_varentropy(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Entropy (bits) and varentropy (bits^2) of `log_probs[..., n]` in nats: two float32 [...].

    `h = -sum p log2 p` and `u = sum p (log2 p + h)^2`, the variance of the information content. A
    term with p = 0 adds 0.
    """
    probs = jnp.exp(log_probs)
    bits = jnp.where(probs > 0, log_probs / _LN2, 0.0)
    entropy = -sum_last(probs * bits)
    varentropy = sum_last(probs * jnp.square(bits + entropy[..., None]))
    return entropy, varentropy


def sum_last(x: jax.Array) -> jax.Array:
    """The sum over the last axis, [..., n] to [...]: 128 sums side by side, then theirs.

    XLA's CPU backend adds up a last axis one number after the other, and so takes 3 to 7 times as
    long over a long one. More zeros at the end change nothing, to the last digit.
    """
    lanes = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _LANES)])
    lanes = jnp.sum(lanes.reshape(*x.shape[:-1], -1, _LANES), axis=-2)
    return jnp.sum(lax.optimization_barrier(lanes), axis=-1)  # else XLA makes one sum of the two
