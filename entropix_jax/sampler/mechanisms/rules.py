"""Truncation rules other than `nucleus`. `truncation.rule` selects one.

Each is a filter of one row's logits, divided by the temperature, with the most likely token at 0;
`p = softmax(logits)`. The first six compare each token with a bound. The others keep the top k. The
first `HEAD` tokens nearly always determine k. A row that keeps more than a thousand is sorted.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entropix_jax.sampler.context import Context, if_needed
from entropix_jax.sampler.filters import NUCLEUS, nucleus
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.prefix import HEAD, first_k, head_of, shortest
from entropix_jax.sampler.settings import flag, number, section
from entropix_jax.sampler.state import DrawnToken
from entropix_jax.stats import LN2, flipped, sortable, top

# Logits this far below the first are as good as infinitely far, and the sum of a vocabulary of
# their squares is still a float32.
FARTHEST = 1e15
ZIPF_TOKENS = 100  # m, the most likely tokens that Zipf's exponent is measured on
_LARGEST = float(jnp.finfo(jnp.float32).max)


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
    """Keeps the tokens whose information content is nearest to the entropy, by `|-ln p - H|` and on
    a tie the more likely first, until they make up the mass tau (Meister et al. 2022, "Locally
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
    p-less-norm, `p >= (N * sum(p^2) - 1) / (N - 1)` for N possible tokens: 0 if all are equally
    likely."""
    mass = jnp.exp(logits - jnp.max(logits))
    total = jnp.sum(mass)
    least = jnp.sum(jnp.square(mass)) / total  # relative to the most likely token, as `mass` is
    others = jnp.maximum(jnp.sum(logits > -jnp.inf, dtype=jnp.float32) - 1.0, 1.0)
    norm = ctx.settings.own["p_less"].norm
    least = jnp.where(norm, least - (total - least) / others, least)
    return _where(mass >= least, logits)


def top_h(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps the longest prefix whose renormalised entropy is at most `alpha * H` (Potraghloo et al.
    2025, "Top-H Decoding"). The entropy grows with each token."""
    y = logits - jnp.max(logits)
    mass = jnp.exp(y)
    total = jnp.sum(mass)
    entropy = jnp.log(total) - jnp.sum(jnp.where(mass > 0, mass * y, 0.0)) / total
    most = ctx.settings.own["top_h"].alpha * entropy

    def count(first: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, _ = _prefixes(first)
        kept = jnp.sum((entropies <= bound) & (first > -jnp.inf), dtype=jnp.int32)
        return kept, kept < first.size

    return keep_top_k(logits, _count_settled(logits, count, most))


def ees(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps the longest prefix such that it and all shorter ones, of k tokens and mass P, have a
    renormalised entropy of at least `P * ln k`: entropy equilibrium sampling (Cai et al. 2025,
    "Auxiliary-Hyperparameter-Free Sampling")."""
    total = jnp.sum(jnp.exp(logits - jnp.max(logits)))

    def count(first: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        entropies, masses = _prefixes(first)
        k = jnp.arange(1, first.size + 1, dtype=jnp.float32)
        ends = entropies < masses / bound * jnp.log(k)  # the first never does
        ended = jnp.any(ends)
        return jnp.where(ended, jnp.argmax(ends), first.size).astype(jnp.int32), ended

    return keep_top_k(logits, _count_settled(logits, count, total))


def min_k(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps the top k tokens, k where `(logit_k - logit_(k+1)) / k` of the sorted logits is
    largest, but at least `tau / range`, for flat rows (Ding et al. 2026, "Min-k Sampling").
    Independent of the temperature."""
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
    return keep_top_k(logits, jnp.maximum(_count_settled(logits, count, least), fewest))


def mirostat(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps as many tokens as would have a mean surprise of about `mu` if p followed Zipf's law
    (Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
    Perplexity"). `mu` starts at twice the target, and each drawn token moves it (algorithm 1) to
    `mu - rate * (surprise - target)`. The state is `mu - 2 * target`, float32, bits.

    With `t = ln((i + 1) / i)` and `b = ln(p_i / p_(i+1))` of the m most likely tokens, the exponent
    is `s = sum t b / sum t^2`; with `epsilon = s - 1` and N possible tokens,
    `k = (epsilon * 2^mu / (1 - N^-epsilon))^(1 / s)`, rounded, from 1 to N. (The authors' program
    takes one token more; their paper does not.)
    """
    mu = 2.0 * ctx.settings.own["mirostat"].target + ctx.states["mirostat"]
    size = min(ZIPF_TOKENS, logits.shape[-1])
    first, _ = top(logits, size)
    there = first[1:] > -jnp.inf
    falls = jnp.where(there, first[:-1] - first[1:], 0.0)
    ratios = jnp.where(there, np.log1p(1.0 / np.arange(1, size)).astype(np.float32), 0.0)
    squares = jnp.sum(jnp.square(ratios))
    s = jnp.sum(ratios * falls) / jnp.where(squares > 0, squares, 1.0)
    # A flat top has s = 0, a cold one may have any: what the formula tends to there.
    s = jnp.clip(s, 1e-30, 1e30)
    log_number = jnp.log(jnp.sum(logits > -jnp.inf, dtype=jnp.float32))
    x = (s - 1.0) * log_number
    # epsilon / (1 - N^-epsilon), which is 1 / ln N at epsilon = 0.
    scale = jnp.where(x == 0, 1.0, x / -jnp.expm1(-x)) / log_number
    log_k = (mu * LN2 + jnp.log(scale)) / s
    k = jnp.round(jnp.exp(jnp.minimum(log_k, log_number)))
    return keep_top_k(logits, k.astype(jnp.int32))


def learn_surprise(drawn: DrawnToken, ctx: Context) -> jax.Array:
    """Moves `mu` by the token's surprise `-log2 p` before truncation, if this rule drew the token.
    At temperature 0 the surprise is 0."""
    own, learnt = ctx.settings.own["mirostat"], ctx.states["mirostat"]
    drawn_at = ctx.proposal.temperature
    # The distribution that was cut is at temperature 1 where the temperature comes last.
    divisor = jnp.where((drawn_at <= 0) | ctx.settings.base.temperature_last, 1.0, drawn_at)
    log_probs = jax.nn.log_softmax((drawn.logits - jnp.max(drawn.logits)) / divisor)
    bits = jnp.where(drawn_at <= 0, 0.0, -log_probs[drawn.token] / LN2)
    acts = ctx.settings.rule == ctx.parts.action("mirostat")
    return jnp.where(acts, learnt - own.rate * (bits - own.target), learnt)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Returns one row's logits with all but the `k` highest, at least one, at -inf."""
    kept = first_k(logits, head_of(logits), jnp.maximum(k, 1).astype(jnp.float32))
    return jnp.where(kept.holds(logits), logits, -jnp.inf)


def _count_settled(
    logits: jax.Array,
    count: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    bound: jax.Array,
) -> jax.Array:
    """Returns the number of tokens that `count(first, bound)` finds, int32.

    Calls it with the first 64 of one row's logits [V] in descending order, then 1,024, then all,
    until the bool that it returns next to the int32 is True. `bound` is its own, float32.
    """

    def look(logits: jax.Array, bound: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        if size < logits.shape[0] or size <= HEAD:
            return count(top(logits, size)[0], bound)
        # As integers all of them are sorted ten times as fast on a CPU.
        ordered = lax.sort(sortable(-logits), is_stable=False)
        return count(-lax.bitcast_convert_type(flipped(ordered), jnp.float32), bound)

    first, *wider = sorted({min(size, logits.shape[0]) for size in (HEAD, 16 * HEAD, 2**31)})
    found = look(logits, bound, first)
    for size in wider:
        found = if_needed(~found[1], partial(look, size=size), found, logits, bound)
    return found[0]


def _prefixes(first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The entropy (nats) of each prefix of logits in order, renormalised, and its mass next to the
    first's: float32 [n] each."""
    y = first - first[0]
    mass = jnp.exp(y)
    masses = jnp.cumsum(mass)
    return jnp.log(masses) - jnp.cumsum(jnp.where(mass > 0, mass * y, 0.0)) / masses, masses


def _where(kept: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the logits with -inf for tokens that are not kept. The most likely one always is."""
    return jnp.where(kept | (logits >= jnp.max(logits)), logits, -jnp.inf)


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
    """Returns exp of the arguments of `_nearness`, up to rounding; 0 for -inf."""
    bits = lax.bitcast_convert_type(-order, jnp.int32)
    distance = lax.bitcast_convert_type(bits & ~1, jnp.float32)
    return jnp.exp(jnp.where((bits & 1 == 1) | (order == -jnp.inf), -distance, distance))


RULES = (
    Mechanism(NUCLEUS, rule=nucleus),
    Mechanism("top_n_sigma", settings=section(sigmas=number(0.0, 1e4)), rule=top_n_sigma),
    Mechanism("typical", settings=section(mass=number(1e-6, 1.0)), rule=typical),
    Mechanism("eta", settings=section(epsilon=number(0.0, 1.0)), rule=eta),
    Mechanism("epsilon", settings=section(epsilon=number(0.0, 1.0)), rule=epsilon),
    Mechanism("top_a", settings=section(factor=number(0.0, 1.0)), rule=top_a),
    Mechanism("p_less", settings=section(norm=flag()), rule=p_less),
    Mechanism("top_h", settings=section(alpha=number(0.0, 1.0)), rule=top_h),
    Mechanism("ees", rule=ees),
    Mechanism("min_k", settings=section(tau=number(0.0, 1e4)), rule=min_k),
    Mechanism(
        "mirostat",
        settings=section(target=number(0.0, 100.0), rate=number(0.0, 100.0)),  # tau, bits; eta
        init=lambda: jnp.float32(0.0),
        rule=mirostat,
        learn=learn_surprise,
    ),
)
