"""The truncation rules, as one switch: which tokens a draw may take.

A rule orders a row's tokens and says how far down that order the draw may go; `sampler.draw` itself
knows no rule. All rules but `typical` order by likelihood, and all but
`nucleus` come down to a number of tokens or a mass of them. Every quantity is one of the
distribution that is drawn from, `p = softmax(logits / temperature)` over the tokens that are
possible at all, and each row is computed alone, whatever the rules of the rows beside it.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import RULES, TruncationSettings

NUCLEUS = RULES.index("nucleus")
MIROSTAT = RULES.index("mirostat")

ZIPF_TOKENS = 100  # m, the likeliest tokens that mirostat measures Zipf's exponent on

_LN2 = math.log(2.0)
_LARGEST = float(jnp.finfo(jnp.float32).max)
# Logits this far below the first are as good as infinitely far, and the sum of a vocabulary of
# their squares is still a float32.
_FARTHEST = 1e15


@struct.dataclass
class Cut:
    """What one row may draw, as a prefix of an order: from the top down, min-p first, then top-k,
    then top-p over what is left. With a leading axis on every field, what each row may draw."""

    order: jax.Array  # float32 [V], descending, ties by the lower id; -inf: never drawn
    temperature: jax.Array  # float32, above 0
    top_k: jax.Array  # int32, in [1, V]
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32, next to the likeliest; 0: off. Only where that one is the first


def truncate(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """What each row may draw by its own rule, `proposal.rule`. The likeliest token alone where the
    temperature is 0, under any rule.

    Args:
        logits: float32 [B, V]; -inf is a token that is never drawn; at least one is finite.
        proposal: fields [B].
        truncation: fields [B]; its `rule` is not read.
        mu: float32 [B], bits, the surprise that `mirostat` allows for; not read by other rules.

    Returns:
        Fields [B], `order` [B, V].
    """
    greedy = proposal.temperature <= 0
    proposal = replace(
        proposal,
        temperature=jnp.where(greedy, 1.0, proposal.temperature),
        top_k=jnp.where(greedy, 1, proposal.top_k),
        rule=jnp.where(greedy, NUCLEUS, proposal.rule),
    )
    rows = (logits, proposal, truncation, mu)
    rules = [_CUTS[name] for name in RULES]
    # `nucleus` leaves its passes over the vocabulary to the draw. What the others cost is paid by
    # the rows that have them: mapped, a switch stays a switch.
    cut: Cut = lax.cond(
        jnp.all(proposal.rule == NUCLEUS),
        lambda: jax.vmap(_nucleus)(*rows),
        lambda: lax.map(lambda row: lax.switch(row[1].rule, rules, *row), rows),
    )
    return cut


def surprise(logits: jax.Array, temperature: jax.Array, tokens: jax.Array) -> jax.Array:
    """The surprise `-log2 p` of drawn `tokens[B]` before any truncation: float32 [B], bits.

    `logits[B, V]` and `temperature[B]` are those that were drawn from. At temperature 0 the token
    was certain: 0.
    """
    greedy = temperature <= 0
    y, _, log_total = _relative(logits, jnp.where(greedy, 1.0, temperature))
    drawn = jnp.take_along_axis(y, tokens[:, None], axis=1)[:, 0]
    return jnp.where(greedy, 0.0, (log_total - drawn) / _LN2)


def mirostat_update(
    mu: jax.Array, surprise: jax.Array, truncation: TruncationSettings
) -> jax.Array:
    """The `mu` of the next draw: `mu - rate * (surprise - target)`, float32 [B], bits (Basu et al.
    2021, algorithm 1, which starts from twice the target)."""
    return mu - truncation.mirostat_rate * (surprise - truncation.mirostat_target)


def _nucleus(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """Min-p, top-k and top-p of the proposal."""
    vocab = logits.shape[-1]
    return Cut(
        order=_by_likelihood(logits),
        temperature=proposal.temperature,
        top_k=jnp.where(proposal.top_k <= 0, vocab, jnp.minimum(proposal.top_k, vocab)),
        top_p=proposal.top_p,
        min_p=proposal.min_p,
    )


def _top_n_sigma(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """`logit >= max - n * sigma`, sigma the standard deviation of the logits (Tang et al. 2024,
    "Top-n-sigma: Not All Logits Are You Need"). A temperature scales both sides alike."""
    gaps = jnp.maximum(logits - jnp.max(logits), -_FARTHEST)
    possible = jnp.where(logits > -jnp.inf, gaps, 0.0)
    # By a power of two, which rounds nothing: squares of small gaps would be 0.
    _, exponent = jnp.frexp(jnp.min(possible))
    spread = jnp.std(jnp.ldexp(possible, -exponent), where=logits > -jnp.inf)
    sigma = jnp.ldexp(spread, exponent)
    kept = jnp.sum(gaps >= -truncation.sigmas * sigma, dtype=jnp.int32)
    return _likeliest(logits, proposal, kept)


def _typical(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """Tokens by how far their information content is from the entropy, `|-ln p - H|`, nearest
    first, a tie's likelier first: as many as make up the mass tau (Meister et al. 2022, "Locally
    Typical Sampling")."""
    y, mean, _ = _relative(logits, proposal.temperature)
    return Cut(
        order=jnp.where(logits > -jnp.inf, _nearness(y - mean), -jnp.inf),  # H + ln p = y - mean
        temperature=proposal.temperature,
        top_k=jnp.int32(logits.shape[-1]),
        top_p=truncation.typical_mass,
        min_p=jnp.float32(0.0),
    )


def _eta(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """`p >= min(epsilon, sqrt(epsilon) * exp(-H))`, H in nats (Hewitt et al. 2022, "Truncation
    Sampling as Language Model Desmoothing")."""
    y, mean, log_total = _relative(logits, proposal.temperature)
    log_epsilon = jnp.log(truncation.eta_epsilon)
    # Both sides' logarithms, with ln Z added: ln p + ln Z = y, and ln Z - H = mean.
    least = jnp.minimum(log_epsilon + log_total, 0.5 * log_epsilon + mean)
    return _likeliest(logits, proposal, jnp.sum(y >= least, dtype=jnp.int32))


def _mirostat(
    logits: jax.Array, proposal: Proposal, truncation: TruncationSettings, mu: jax.Array
) -> Cut:
    """As many tokens as would have a mean surprise of about `mu` if p followed Zipf's law (Basu et
    al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity").

    With `t = ln((i + 1) / i)` and `b = ln(p_i / p_(i+1))` of the m likeliest tokens, the exponent
    is `s = sum t b / sum t^2`; with `epsilon = s - 1` and N possible tokens,
    `k = (epsilon * 2^mu / (1 - N^-epsilon))^(1 / s)`, rounded, from 1 to N. (The authors' program
    takes one token more; their paper does not.)
    """
    size = min(ZIPF_TOKENS, logits.shape[-1])
    # See `truncated_draw` for the barrier.
    likeliest = lax.optimization_barrier(lax.top_k(logits, size)[0])
    there = likeliest[1:] > -jnp.inf
    falls = jnp.where(there, likeliest[:-1] - likeliest[1:], 0.0) / proposal.temperature
    ratios = jnp.where(there, np.log1p(1.0 / np.arange(1, size)).astype(np.float32), 0.0)
    squares = jnp.sum(jnp.square(ratios))
    s = jnp.sum(ratios * falls) / jnp.where(squares > 0, squares, 1.0)
    # A flat top has s = 0, a cold one may have any: what the formula tends to there.
    s = jnp.clip(s, 1e-30, 1e30)
    log_number = jnp.log(jnp.sum(logits > -jnp.inf, dtype=jnp.float32))
    x = (s - 1.0) * log_number
    # epsilon / (1 - N^-epsilon), which is 1 / ln N at epsilon = 0.
    scale = jnp.where(x == 0, 1.0, x / -jnp.expm1(-x)) / log_number
    log_k = (mu * _LN2 + jnp.log(scale)) / s
    k = jnp.round(jnp.exp(jnp.minimum(log_k, log_number)))
    return _likeliest(logits, proposal, k.astype(jnp.int32))


_CUTS: dict[str, Callable[[jax.Array, Proposal, TruncationSettings, jax.Array], Cut]] = {
    "nucleus": _nucleus,
    "top_n_sigma": _top_n_sigma,
    "typical": _typical,
    "eta": _eta,
    "mirostat": _mirostat,
}


def _likeliest(logits: jax.Array, proposal: Proposal, number: jax.Array) -> Cut:
    """The `number` likeliest tokens, at least one, of those that are possible."""
    return Cut(
        order=_by_likelihood(logits),
        temperature=proposal.temperature,
        top_k=jnp.clip(number, 1, logits.shape[-1]),
        top_p=jnp.float32(1.0),
        min_p=jnp.float32(0.0),
    )


def _by_likelihood(logits: jax.Array) -> jax.Array:
    return jnp.where(logits == 0, 0.0, logits)  # -0 and 0 are a tie


def _nearness(deviation: jax.Array) -> jax.Array:
    """An order from the smallest `|deviation|` up, the positive one of a tie first.

    The sign takes the place of the last bit of the distance: of one value are then only tokens
    that are as likely as each other, which the draw counts on.
    """
    distance = jnp.minimum(jnp.abs(deviation), _LARGEST)
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    bits = (bits & ~1) | (deviation < 0).astype(jnp.int32)
    return -lax.bitcast_convert_type(bits, jnp.float32)


def _relative(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, ...]:
    """`y = (logits[..., V] - max) / temperature`, its mean under `p = exp(y) / Z`, and ln Z.

    So `ln p = y - ln Z`, and the entropy is `ln Z - mean`, in nats.
    """
    y = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[..., None]
    mass = jnp.exp(y)
    total = jnp.sum(mass, axis=-1)
    mean = jnp.sum(jnp.where(mass > 0, mass * y, 0.0), axis=-1) / total
    return y, mean, jnp.log(total)
