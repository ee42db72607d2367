"""What a row may draw, in float64 by sorting: each truncation rule by its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.sampler import draw
from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import TruncationSettings

TOLERANCE = 1e-5  # of the cumulated mass around p, within which a token may fall either way


LAST = float(np.float32(1 - 2**-24))  # the largest number below 1


LLAMA3 = 128_256


class Oracle:
    """What one row may draw, in float64, by sorting the vocabulary."""

    def __init__(self, logits: np.ndarray, proposal: Proposal, row: int = 0) -> None:
        # Of the proposal's own float32 numbers.
        temperature, top_p, min_p = (
            float(x[row]) for x in (proposal.temperature, proposal.top_p, proposal.min_p)
        )
        top_k = int(proposal.top_k[row])
        logits = logits.astype(np.float64)
        if temperature == 0:
            temperature, top_k = 1.0, 1
        self.order = np.lexsort((np.arange(logits.size), -logits))  # ties to the lower id
        descending = logits[self.order]
        mass = np.exp((descending - descending[0]) / temperature)
        number = int(np.sum((mass >= min_p) & (descending > -np.inf)))
        number = min(number, top_k) if top_k > 0 else number
        self.cumulated = np.cumsum(mass[:number])
        self.mass = mass[:number]
        self.fewest = self.most = number
        if top_p < 1:
            shares = self.cumulated / self.cumulated[-1]
            self.fewest = min(number, 1 + int(np.sum(shares < top_p - TOLERANCE)))
            self.most = min(number, 1 + int(np.sum(shares < top_p + TOLERANCE)))

    def probabilities(self) -> np.ndarray:
        """Of the kept tokens, in order, where rounding leaves no doubt about which they are."""
        assert self.fewest == self.most
        return self.mass[: self.fewest] / self.cumulated[self.fewest - 1]

    def check(self, kept: int, ids: np.ndarray, uniforms: np.ndarray) -> None:
        """Raises where a row kept another set, or drew what it should not."""
        assert self.fewest <= kept <= self.most
        rank = np.empty(self.order.size, np.int64)
        rank[self.order] = np.arange(rank.size)
        drawn = rank[ids]
        assert drawn.max() < kept
        shares = np.concatenate([[0.0], self.cumulated[:kept] / self.cumulated[kept - 1]])
        assert np.all(shares[drawn] <= uniforms + TOLERANCE)
        assert np.all(shares[drawn + 1] >= uniforms - TOLERANCE)


def below_one(uniforms: np.ndarray) -> np.ndarray:
    """Uniform numbers as float32, none of them rounded up to 1."""
    return np.minimum(uniforms.astype(np.float32), np.float32(LAST))


def random_uniforms(rng: np.random.Generator, rows: int, number: int) -> np.ndarray:
    """Uniform numbers, of which the first two of each row are the extreme ones."""
    uniforms = below_one(rng.random((rows, number)))
    uniforms[:, 0], uniforms[:, 1] = 0.0, LAST
    return uniforms


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Flat and peaked rows, a third of them full of ties, a third with impossible tokens."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0, 0.1, 1, 3, 8], size=(rows, 1))
    logits[::3] = np.round(2 * logits[::3]) / 2
    holes = rng.random((rows, vocab)) < rng.choice([0.3, 0.9], size=(rows, 1))
    holes[np.arange(rows), rng.integers(0, vocab, rows)] = False
    holes[np.arange(rows) % 3 != 1] = False
    return np.where(holes, -np.inf, logits).astype(np.float32)


def one_against(rest: float, vocab: int = LLAMA3) -> np.ndarray:
    """One token at 0, all others at `rest`."""
    logits = np.full(vocab, rest)
    logits[7] = 0.0
    return logits


SLACK = 1e-5  # nats: information contents this close to equally far from H may stand either way


# What a row's rule is set to: the field of its number. For mirostat it is mu, no field.
NUMBER = {"top_n_sigma": "sigmas", "typical": "typical_mass", "eta": "eta_epsilon"}


truncated_draw = jax.jit(draw.truncated_draw)


Outcome = tuple[np.ndarray, int, int]


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    mass = np.exp((logits - logits.max()) / temperature)
    return mass / mass.sum()


def entropy(p: np.ndarray) -> float:
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


def top_n_sigma(logits: np.ndarray, temperature: float, sigmas: float) -> Outcome:
    # What is farther than 1e15 is taken for as far, for the sum of the squares to be a float32.
    tempered = np.maximum(logits - logits.max(), -1e15) / temperature
    deviation = np.sqrt(np.mean((tempered - np.mean(tempered)) ** 2))
    threshold = tempered.max() - sigmas * deviation
    error = 1e-6 * np.ptp(tempered)
    fewest, most = (int(np.sum(tempered >= threshold + e)) for e in (error, -error))
    return -logits, max(fewest, 1), most


def typical(logits: np.ndarray, temperature: float, mass: float) -> Outcome:
    p = softmax(logits, temperature)
    content = -np.log(p.max()) - (logits - logits.max()) / temperature  # -ln p, where p is 0 too
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


def eta(logits: np.ndarray, temperature: float, epsilon: float) -> Outcome:
    p = softmax(logits, temperature)
    threshold = min(epsilon, np.sqrt(epsilon) * np.exp(-entropy(p)))
    fewest, most = (int(np.sum(p >= threshold * (1 + e))) for e in (TOLERANCE, -TOLERANCE))
    return -logits, max(fewest, 1), max(most, 1)


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
    if s == 0:  # the limit of a number to the power of 1 / s: 0 or infinite, but at 1
        few, many = 2**mu <= number - 1, 2**mu >= number - 1
        return -logits, 1 if few else number, number if many else 1
    scale = np.log(number) if epsilon == 0 else (1 - float(number) ** -epsilon) / epsilon
    log_k = (mu * np.log(2) - np.log(scale)) / s
    # The logarithm of a scale near 1 is rounded like the 1, not like its own small value.
    error = TOLERANCE * (1 + max(1, abs(mu * np.log(2)) + abs(np.log(scale))) / s)
    fewest, most = (
        int(np.clip(np.round(np.exp(min(log_k + e, 50.0))), 1, number)) for e in (-error, error)
    )
    return -logits, fewest, most


ORACLES: dict[str, Callable[[np.ndarray, float, float], Outcome]] = {
    "top_n_sigma": top_n_sigma,
    "typical": typical,
    "eta": eta,
    "mirostat": mirostat,
}


NUMBERS: dict[str, list[float]] = {
    "top_n_sigma": [0, 0.3, 1, 2.5, 10],
    "typical": [1e-6, 0.2, 0.5, 0.9, 0.95, 0.999, 1],
    "eta": [0, 3e-4, 2e-3, 0.05, 0.9],
    "mirostat": [-2, 0, 1, 3, 6, 12, 30],
}


@dataclass
class Kept:
    """What one row may draw: the possible tokens in the rule's order, and how many it keeps."""

    order: np.ndarray  # their ids
    key: np.ndarray
    mass: np.ndarray
    fewest: int
    most: int
    slack: float  # tokens whose keys are this close may stand either way

    @classmethod
    def of(cls, rule: str, logits: np.ndarray, temperature: float, number: float) -> Kept:
        ids = np.flatnonzero(logits > -np.inf)
        possible = logits[ids].astype(np.float64)
        key, fewest, most = ORACLES[rule](possible, temperature, number)
        places = np.lexsort((ids, -possible, key))
        mass = softmax(possible, temperature)[places]
        slack = 2 * SLACK if rule == "typical" else 0.0
        return cls(ids[places], key[places], mass, fewest, most, slack)

    def check(self, kept: int, ids: np.ndarray, uniforms: np.ndarray) -> bool:
        """Raises where a row kept another set, or drew what it should not. False: the last token
        that is kept and the first that is not may change places, so nothing is said of draws."""
        assert self.fewest <= kept <= self.most
        if kept < self.key.size:
            last, beyond = self.key[kept - 1], self.key[kept]
            near = self.key[(self.key >= last - self.slack) & (self.key <= beyond + self.slack)]
            if 0 < beyond - last <= self.slack or (beyond == last and np.unique(near).size > 1):
                return False
        rank = np.full(self.order.max() + 1, self.order.size)
        rank[self.order] = np.arange(self.order.size)
        drawn = rank[ids]
        assert drawn.max() < kept
        cumulated = np.concatenate([[0.0], np.cumsum(self.mass)])
        key = self.key[drawn]
        # Certainly before a token: clearly lower keys, and of its own key the lower ids.
        own = np.searchsorted(self.key, key, "left"), np.searchsorted(self.key, key, "right")
        before = cumulated[np.searchsorted(self.key, key - self.slack, "left")]
        before = before + (drawn - own[0]) * self.mass[drawn]
        through = cumulated[np.searchsorted(self.key, key + self.slack, "right")]
        through = through - (own[1] - 1 - drawn) * self.mass[drawn]
        assert np.all(before / cumulated[kept] <= uniforms + TOLERANCE)
        assert np.all(through / cumulated[kept] >= uniforms - TOLERANCE)
        return True


def settings_of(rules: Any, numbers: Any) -> tuple[TruncationSettings, jax.Array]:
    """`truncation` and `mu` of rows with these rules and numbers; what is not the row's is NaN."""
    rules, numbers = np.broadcast_arrays(np.atleast_1d(rules), np.atleast_1d(numbers))

    def column(rule: str) -> jax.Array:
        return jnp.asarray(np.where(rules == rule, numbers, np.nan), jnp.float32)

    unused = column("none")
    truncation = TruncationSettings(
        rule=jnp.full(rules.size, -1, jnp.int32),  # the proposal's counts
        **{field: column(rule) for rule, field in NUMBER.items()},
        mirostat_target=unused,
        mirostat_rate=unused,
    )
    return truncation, column("mirostat")
