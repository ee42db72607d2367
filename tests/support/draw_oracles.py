"""Float64 oracles of the truncation rules, which sort, and follow the papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.sampler.draw import draw_tokens, uniforms
from entropix_jax.sampler.filters import truncate
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import Proposal
from tests.support.samplers import LITERAL, NAMES, PARTS, contexts_of, params_of

TOLERANCE = 1e-5  # of the cumulated mass around p, within which a token may be kept or dropped
SLACK = 1e-5  # nats: tokens whose distances from H differ by less may be in either order
LAST = float(np.float32(1 - 2**-24))  # the largest number below 1
LLAMA3 = 128_256


@struct.dataclass
class Drawn:
    """Sampled ids, and the truncated logits."""

    ids: jax.Array  # int32 [B, n]
    left: jax.Array  # float32 [B, V], -inf for dropped tokens

    @property
    def kept(self) -> np.ndarray:
        """The number of kept tokens, [B]."""
        return np.sum(np.asarray(self.left) > -np.inf, axis=-1)


def draw_rows(
    logits: jax.Array,
    proposal: Proposal,
    uniforms: jax.Array,
    settings: SamplerSettings,
    parts: Parts = PARTS,
) -> Drawn:
    """Truncates and samples for rows without history."""
    contexts = replace(contexts_of(proposal, settings, logits), parts=parts)
    left = jax.vmap(lambda *row: truncate(*row)[0])(logits, contexts)
    return Drawn(jax.vmap(draw_tokens)(left, uniforms), left)


truncated_draw = jax.jit(draw_rows, static_argnames="parts")


# Rows


def below_one(uniforms: np.ndarray) -> np.ndarray:
    """Converts uniform numbers to float32, without rounding up to 1."""
    return np.minimum(uniforms.astype(np.float32), np.float32(LAST))


_uniforms: Callable[..., jax.Array] = jax.jit(uniforms, static_argnums=4)


def uniform_numbers(
    key: np.ndarray, position: int, stream: int, number: int, attempt: int = 0
) -> np.ndarray:
    """Returns uniform numbers for a position, and an attempt at it: float64 [number]."""
    args = (np.int32(x) for x in (position, attempt, stream))
    return np.asarray(_uniforms(key, *args, number), np.float64)


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Returns flat and peaked rows, a third with ties, a third with logits of -inf."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0, 0.1, 1, 3, 8], size=(rows, 1))
    logits[::3] = np.round(2 * logits[::3]) / 2
    holes = rng.random((rows, vocab)) < rng.choice([0.3, 0.9], size=(rows, 1))
    holes[np.arange(rows), rng.integers(0, vocab, rows)] = False
    holes[np.arange(rows) % 3 != 1] = False
    return np.where(holes, -np.inf, logits).astype(np.float32)


# The field of each rule's parameter. For mirostat the parameter is mu, twice the target. For p_less
# it is a flag, and ees has no parameter.
NUMBER = {
    "top_n_sigma": "sigmas",
    "typical": "mass",
    "eta": "epsilon",
    "epsilon": "epsilon",
    "top_a": "factor",
    "p_less": "norm",
    "top_h": "alpha",
    "min_k": "tau",
    "mirostat": "target",
}


def settings_of(rules: Any, numbers: Any) -> SamplerSettings:
    """Returns settings of rows with these rules and parameters. Those of other rules are NaN."""
    rules, numbers = np.broadcast_arrays(np.atleast_1d(rules), np.atleast_1d(numbers))

    settings = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (rules.size, *np.shape(x))), params_of(LITERAL)
    )
    own = dict(settings.own)
    for rule, field in NUMBER.items():
        given = numbers / 2 if rule == "mirostat" else numbers
        column = jnp.asarray(
            np.where(rules == rule, given, np.nan), getattr(own[rule], field).dtype
        )
        own[rule] = replace(own[rule], **{field: column})
    return replace(settings, own=own, rule=jnp.asarray(np.vectorize(NAMES.index)(rules)))


def nucleus_draw(logits: Any, proposal: Proposal, uniforms: Any) -> Drawn:
    """Truncates by min-p, top-k and top-p, and samples."""
    settings = settings_of(["nucleus"] * logits.shape[0], np.nan)
    return truncated_draw(jnp.asarray(logits), proposal, jnp.asarray(uniforms), settings)


# Oracles. Each receives the finite logits, the temperature and the rule's parameter, and returns
# the sort key of the tokens, lowest first, and the minimum and maximum number of kept tokens, which
# differ only by rounding.

Outcome = tuple[np.ndarray, int, int]


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    mass = np.exp((logits - logits.max()) / temperature)
    return mass / mass.sum()


def entropy(p: np.ndarray) -> float:
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


def top_n_sigma(logits: np.ndarray, temperature: float, sigmas: float) -> Outcome:
    # Distances are at most 1e15, so that the sum of the squares does not overflow float32.
    tempered = np.maximum(logits - logits.max(), -1e15) / temperature
    deviation = np.sqrt(np.mean((tempered - np.mean(tempered)) ** 2))
    threshold = tempered.max() - sigmas * deviation
    error = 1e-6 * np.ptp(tempered)
    fewest, most = (int(np.sum(tempered >= threshold + e)) for e in (error, -error))
    return -logits, max(fewest, 1), most


def typical(logits: np.ndarray, temperature: float, mass: float) -> Outcome:
    p = softmax(logits, temperature)
    content = -np.log(p.max()) - (logits - logits.max()) / temperature  # -ln p, even if p is 0
    distance = np.abs(content - entropy(p))

    def number(shift: float, mass: float) -> int:
        off = np.abs(content - entropy(p) - shift)
        shares = np.cumsum(p[np.lexsort((-p, off))])
        return min(1 + int(np.sum(shares < mass)), p.size)

    if mass >= 1:
        return distance, p.size, p.size
    shifts = (-SLACK, 0.0, SLACK)
    fewest = min(number(shift, mass - TOLERANCE) for shift in shifts)
    return distance, fewest, max(number(shift, mass + TOLERANCE) for shift in shifts)


def at_least(logits: np.ndarray, p: np.ndarray, threshold: float, error: float = 0.0) -> Outcome:
    """Keeps the top tokens and those with `p >= threshold`, up to a rounding error of `error`."""
    error += TOLERANCE * threshold
    first = logits >= logits.max()
    fewest, most = (int(np.sum(first | (p >= threshold + e))) for e in (error, -error))
    return -logits, fewest, most


def eta(logits: np.ndarray, temperature: float, epsilon: float) -> Outcome:
    p = softmax(logits, temperature)
    return at_least(logits, p, min(epsilon, np.sqrt(epsilon) * np.exp(-entropy(p))))


def epsilon(logits: np.ndarray, temperature: float, epsilon: float) -> Outcome:
    return at_least(logits, softmax(logits, temperature), epsilon)


def top_a(logits: np.ndarray, temperature: float, factor: float) -> Outcome:
    p = softmax(logits, temperature)
    return at_least(logits, p, factor * p.max() ** 2)


def p_less(logits: np.ndarray, temperature: float, norm: float) -> Outcome:
    p = softmax(logits, temperature)
    collision = float(np.sum(p**2))
    if not norm or p.size == 1:
        return at_least(logits, p, collision)
    # A small difference of large values if the tokens are about equally likely.
    return at_least(logits, p, (p.size * collision - 1) / (p.size - 1), TOLERANCE * collision)


def prefix_entropies(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the renormalised entropy and the mass of each top-k prefix."""
    p = np.sort(softmax(logits, temperature))[::-1]
    content = p * np.log(np.where(p > 0, p, 1.0))
    mass = np.cumsum(p)
    return np.log(mass) - np.cumsum(content) / mass, mass


def top_h(logits: np.ndarray, temperature: float, alpha: float) -> Outcome:
    entropies, _ = prefix_entropies(logits, temperature)
    bound = alpha * entropies[-1]
    fewest, most = (int(np.sum(entropies <= bound + e)) for e in (-TOLERANCE, TOLERANCE))
    return -logits, max(fewest, 1), max(most, 1)


def ees(logits: np.ndarray, temperature: float, _: float = 0.0) -> Outcome:
    entropies, mass = prefix_entropies(logits, temperature)
    excess = (entropies - mass * np.log(np.arange(1, mass.size + 1)))[1:]
    fewest, most = (1 + int(np.argmax([*(excess < e), True])) for e in (TOLERANCE, -TOLERANCE))
    return -logits, fewest, most


def min_k(logits: np.ndarray, temperature: float, tau: float) -> Outcome:
    row = np.sort(logits)[::-1]
    width = row[0] - row[-1]
    # Distances are at most 1e15.
    falls = np.minimum(row[:-1] - row[1:], 1e15) / np.arange(1, row.size)
    error = 1e-6 * falls.max(initial=0.0)
    cliffs = 1 + np.flatnonzero(falls >= falls.max(initial=0.0) - error)
    cliff = (1, 1) if row.size == 1 else (cliffs[0], cliffs[-1])
    flat = np.floor(tau / max(width, 1e-8) * np.array([1 - TOLERANCE, 1 + TOLERANCE]))
    fewest, most = np.clip(np.maximum(cliff, flat), 1, row.size).astype(int)
    return -logits, int(fewest), int(most)


def zipf_exponent(logits: np.ndarray, temperature: float) -> float:
    top = np.sort(logits)[::-1][:100] / temperature
    i = np.arange(1, top.size)
    t, b = np.log((i + 1) / i), top[:-1] - top[1:]
    return float(np.sum(t * b) / np.sum(t**2)) if top.size > 1 else 0.0


def mirostat(logits: np.ndarray, temperature: float, mu: float) -> Outcome:
    number = logits.size
    s = zipf_exponent(logits, temperature)
    epsilon = s - 1
    if number == 1:
        return -logits, 1, 1
    if s == 0:  # the limit of x ** (1 / s): 0 or infinite, except at 1
        few, many = 2**mu <= number - 1, 2**mu >= number - 1
        return -logits, 1 if few else number, number if many else 1
    scale = np.log(number) if epsilon == 0 else (1 - float(number) ** -epsilon) / epsilon
    log_k = (mu * np.log(2) - np.log(scale)) / s
    # The logarithm of a scale near 1 has the rounding error of 1.
    error = TOLERANCE * (1 + max(1, abs(mu * np.log(2)) + abs(np.log(scale))) / s)
    fewest, most = (
        int(np.clip(np.round(np.exp(min(log_k + e, 50.0))), 1, number)) for e in (-error, error)
    )
    return -logits, fewest, most


def nucleus(
    logits: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float
) -> Outcome:
    mass = np.exp((np.sort(logits)[::-1] - logits.max()) / temperature)
    number = int(np.sum(mass >= min_p))
    number = min(number, int(top_k)) if top_k > 0 else number
    if top_p >= 1:
        return -logits, number, number
    cumulated = np.cumsum(mass[:number])
    shares = cumulated / cumulated[-1]
    fewest, most = (1 + int(np.sum(shares < top_p + e)) for e in (-TOLERANCE, TOLERANCE))
    return -logits, min(number, fewest), min(number, most)


ORACLES: dict[str, Callable[..., Outcome]] = {
    "nucleus": nucleus,
    "top_n_sigma": top_n_sigma,
    "typical": typical,
    "eta": eta,
    "epsilon": epsilon,
    "top_a": top_a,
    "p_less": p_less,
    "top_h": top_h,
    "ees": ees,
    "min_k": min_k,
    "mirostat": mirostat,
}
NUMBERS: dict[str, list[float]] = {
    "top_n_sigma": [0, 0.3, 1, 2.5, 10],
    "typical": [1e-6, 0.2, 0.5, 0.9, 0.95, 0.999, 1],
    "eta": [0, 3e-4, 2e-3, 0.05, 0.9],
    "epsilon": [0, 3e-4, 0.02, 0.9],
    "top_a": [0, 0.02, 0.2, 1],
    "p_less": [0, 1],
    "top_h": [0, 0.1, 0.4, 0.9, 1],
    "ees": [0],
    "min_k": [0, 3, 300],
    "mirostat": [-2, 0, 1, 3, 6, 12, 30],
}


@dataclass
class KeptTokens:
    """The finite tokens of one row in the rule's order, and the number that it keeps."""

    rank: np.ndarray  # of each token of the vocabulary
    key: np.ndarray
    logits: np.ndarray
    mass: np.ndarray
    fewest: int
    most: int
    slack: float  # tokens whose keys are this close may be in either order

    @classmethod
    def of(cls, rule: str, logits: np.ndarray, temperature: float, *numbers: float) -> KeptTokens:
        """Applies a rule's oracle to logits minus their maximum, divided by the temperature in
        float32. Overflow counts as -inf."""
        with np.errstate(over="ignore"):
            gaps = (logits - logits.max()).astype(np.float32) / np.float32(temperature)
        ids = np.flatnonzero(gaps > -np.inf)
        possible = gaps[ids].astype(np.float64)
        # min_k uses the range of the logits before the temperature.
        scale = float(np.float32(temperature)) if rule == "min_k" else 1.0
        key, fewest, most = ORACLES[rule](possible * scale, 1.0, *numbers)
        places = np.lexsort((ids, -possible, key))  # ties: higher logit, then lower id
        rank = np.full(logits.size, ids.size)
        rank[ids[places]] = np.arange(ids.size)
        mass = softmax(possible, 1.0)[places]
        slack = 2 * SLACK if rule == "typical" else 0.0
        return cls(rank, key[places], possible[places], mass, fewest, most, slack)

    @classmethod
    def of_nucleus(cls, logits: np.ndarray, proposal: Proposal) -> KeptTokens:
        """Applies the nucleus oracle to the float32 values of a proposal's first row."""
        columns = (proposal.temperature, proposal.top_k, proposal.top_p, proposal.min_p)
        temperature, top_k, top_p, min_p = (float(column[0]) for column in columns)
        if temperature == 0:
            temperature, top_k = 1.0, 1
        return cls.of("nucleus", logits, temperature, top_k, top_p, min_p)

    def by_id(self, number: int) -> np.ndarray:
        """Returns the ids of the first `number` tokens, in the order of cumulation."""
        return np.sort(np.argsort(self.rank, kind="stable")[:number])

    def drawn(self, numbers: np.ndarray) -> list[int]:
        """Returns the token for each uniform number."""

        def of(number: int) -> list[int]:
            order = self.by_id(number)
            cumulated = np.cumsum(self.mass[self.rank[order]])
            picks = np.searchsorted(cumulated, numbers * cumulated[-1], side="right")
            drawn: list[int] = order[picks].tolist()
            return drawn

        assert of(self.fewest) == of(self.most), "too close to tell"
        return of(self.most)

    @property
    def decided(self) -> bool:
        """Whether the kept tokens do not depend on rounding."""
        gap = np.diff(self.key)[self.most - 1 : self.most]  # empty if all are kept
        return self.fewest == self.most and (not self.slack or bool(np.all(gap > self.slack)))

    def check(self, left: np.ndarray, ids: np.ndarray, uniforms: np.ndarray) -> None:
        """Raises AssertionError if `left`, bool [V], is not a valid kept set, or if `ids` are not
        the tokens for `uniforms`."""
        left = np.asarray(left)
        kept = int(left.sum())
        assert self.fewest <= kept <= self.most
        for token in np.flatnonzero(left != (self.rank < kept)):
            # Tokens whose keys are close to the last one may be kept or dropped.
            assert self.rank[token] < self.key.size
            assert abs(self.key[self.rank[token]] - self.key[kept - 1]) <= self.slack
        assert np.all(left[ids])
        mass = np.where(left, np.append(self.mass, 0.0)[self.rank], 0.0)
        through = np.cumsum(mass) / mass.sum()
        assert np.all(through[ids] - mass[ids] / mass.sum() <= uniforms + TOLERANCE)
        assert np.all(through[ids] >= uniforms - TOLERANCE)
