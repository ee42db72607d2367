"""What branching means, written down a second time and as plainly as possible.

No cache, no lanes, no batch: each token of each branch recomputes its whole text, and
everything made of the logits is float64 NumPy. Where an outcome hangs on less than a float32 can
tell, the outcome says so in its `ties`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.model.cache import init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params
from entropix_jax.names import BOXES
from entropix_jax.sampler.keys import STREAM_NOISE, STREAM_ROLLOUT, row_key, uniforms
from entropix_jax.sampler.settings import LOOP_WINDOW
from entropix_jax.stats import AttnStats
from tests.support.reference import log_softmax

LENGTH = 64  # tokens that texts are padded to, so that one program serves all

# Closer than this, two implementations may decide differently, and both are right.
LOGIT_TIE = 3e-5  # two logits, of which the larger comes first
MASS_TIE = 1e-5  # a share of a distribution, and what it is compared with
SCORE_TIE = 1e-5  # two scores, or their distance and the margin
METRIC_TIE = 1e-4  # a metric and a bound of a regime


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model makes of a text: the next token's logits, and its last attention."""

    logits: np.ndarray  # [V]
    entropy: np.ndarray  # [L, N] bits
    divergence: np.ndarray  # [L]
    interaction: np.ndarray  # [L]
    keys: int


class Reader:
    """Reads whole texts, each from its first token on, and remembers what it has read."""

    def __init__(self, config: ModelConfig, params: Params) -> None:
        self.config, self.params = config, params
        self._read: dict[tuple[int, ...], Reading] = {}

    def __call__(self, text: Sequence[int]) -> Reading:
        tokens = tuple(text)
        if tokens not in self._read:
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : len(tokens)] = tokens
            count = np.array([len(tokens)], np.int32)
            found = jax.device_get(_read(self.params, padded, count, config=self.config))
            logits, stats = jax.tree.map(lambda x: x[0].astype(np.float64), found)
            of_stats = (stats.entropy, stats.divergence, stats.interaction)
            self._read[tokens] = Reading(logits, *of_stats, keys=len(tokens))
        return self._read[tokens]


@partial(jax.jit, static_argnames="config")
def _read(
    params: Params, tokens: jax.Array, count: jax.Array, *, config: ModelConfig
) -> tuple[jax.Array, AttnStats]:
    cache = init_cache(config, 1, LENGTH, jnp.dtype(jnp.float32))
    hidden, stats, _ = forward(params, config, tokens, count, cache, window=LENGTH)
    return unembed(params, hidden[:, count[0] - 1]), stats


class Ties:
    """Collects what is too close to call."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def check(self, a: Any, b: Any, distance: float, what: str) -> None:
        gaps = np.abs(np.asarray(a) - np.asarray(b))
        if (gaps < distance).any():
            self.found.append(f"{what}: {gaps.min():.1e}")


@dataclass(frozen=True)
class Case:
    """A row in the middle of its text, and what its sampler is set to."""

    text: Sequence[int]
    remaining: int  # tokens that may still be committed
    values: Mapping[str, Any]  # all of a sampler's settings, by their dotted keys
    epsilon: float  # machine epsilon of the logits, for the noise floor
    eos: frozenset[int]
    generated: int = 0  # so many of the text's last tokens were generated
    seed: int = 0
    row_id: str = "0"

    @property
    def key(self) -> np.ndarray:
        return row_key(self.seed, self.row_id)


@dataclass(frozen=True, eq=False)
class Observation:
    """What a distribution says, and the distribution."""

    log_probs: np.ndarray  # [V] nats, of the logits as they are
    heard: np.ndarray  # [V] the same with what lies under the noise floor at -inf
    metrics: Mapping[str, float]
    regime: str
    looping: bool


@dataclass(eq=False)
class Branch:
    """A candidate and what follows it."""

    tokens: list[int]
    before: list[Observation]  # what each token was chosen from
    after: list[Observation]  # what follows each token
    failed: bool = False
    score: float = -np.inf

    @property
    def logprobs(self) -> list[float]:
        pairs = zip(self.before, self.tokens, strict=True)
        return [float(seen.log_probs[token]) for seen, token in pairs]


@dataclass(eq=False)
class Outcome:
    """What one step did to a row."""

    action: str
    seen: Observation
    committed: list[int]
    observations: list[Observation]  # of what each committed token was chosen from
    logprobs: list[float]
    evaluated: int  # tokens that were rolled out
    branches: list[Branch] = field(default_factory=list)
    best: int = 0
    ambiguous: bool = False
    ties: list[str] = field(default_factory=list)


def step(read: Reader, case: Case) -> Outcome:
    """One step of a row whose regimes are served by `branch` and `argmax`. FloatingPointError where
    some logit is no number."""
    ties = Ties()
    reading = read(case.text)
    if not np.isfinite(reading.logits).all():
        raise FloatingPointError(f"logits after {case.text[-1]}")
    seen = observe(reading, case, ties)
    action = case.values["arms.loop" if seen.looping else f"arms.{seen.regime}"]
    if action == "argmax":
        token = int(likeliest_first(modify(reading, seen, case), 1, ties)[0])
        logprobs = [float(seen.log_probs[token])]
        return Outcome("argmax", seen, [token], [seen], logprobs, 0, ties=ties.found)
    assert action == "branch"

    branches = [
        roll_out(read, case, seen, number, token, ties)
        for number, token in enumerate(candidates(reading, seen, case, ties))
    ]
    for branch in branches:
        branch.score = score(branch, case.values)
    scores = [branch.score for branch in branches]
    best = scores.index(max(scores))  # of equals the first, that is, the likelier candidate
    ranked = sorted((s for s in scores if s > -np.inf), reverse=True)
    ambiguous = False
    if len(ranked) > 1:
        ties.check(ranked[0], ranked[1], SCORE_TIE, "scores")
        ties.check(ranked[0] - ranked[1], case.values["branch.margin"], SCORE_TIE, "margin")
        ambiguous = ranked[0] - ranked[1] < case.values["branch.margin"]
    chosen = branches[best]
    count = len(chosen.tokens) if case.values["branch.commit_all"] else 1
    return Outcome(
        action="branch",
        seen=seen,
        committed=chosen.tokens[:count],
        observations=chosen.before[:count],
        logprobs=chosen.logprobs[:count],
        evaluated=sum(len(branch.tokens) for branch in branches),
        branches=branches,
        best=best,
        ambiguous=ambiguous,
        ties=ties.found,
    )


def follow(read: Reader, case: Case) -> list[tuple[Case, Outcome]]:
    """A row step by step, to an end token or the end of its budget: as it stands before each step,
    and what the step does."""
    steps: list[tuple[Case, Outcome]] = []
    while case.remaining > 0 and not (steps and case.text[-1] in case.eos):
        outcome = step(read, case)
        steps.append((case, outcome))
        count = len(outcome.committed)
        case = replace(
            case,
            text=[*case.text, *outcome.committed],
            remaining=case.remaining - count,
            generated=case.generated + count,
        )
    return steps


def candidates(reading: Reading, seen: Observation, case: Case, ties: Ties) -> list[int]:
    """The tokens that branches begin with, likeliest first."""
    values = case.values
    width, temperature = values["branch.width"], values["branch.temperature"]
    min_p, top_p = values["branch.min_p"], values["branch.top_p"]
    z = modify(reading, seen, case)
    if values["branch.noise"] > 0:
        u = np.maximum(uniform_numbers(case.key, len(case.text), STREAM_NOISE, len(z)), 2.0**-25)
        z = z + values["branch.noise"] * -np.log(-np.log(u))
    order = likeliest_first(z, width, ties)
    relative = (z[order] - z[order[0]]) / temperature
    relative = relative[z[order] > -np.inf]
    if min_p > 0:
        ties.check(relative[: width + 1], np.log(min_p), LOGIT_TIE / temperature, "min-p")
        relative = relative[relative >= np.log(min_p)]
    number = len(relative)
    if top_p < 1:
        mass = np.exp(relative) / np.exp(relative).sum()
        reached = np.cumsum(mass)
        ties.check(reached[:width], top_p, MASS_TIE, "top-p")
        number = int((reached < top_p).sum()) + 1
    return [int(i) for i in order[: min(number, width)]]


def roll_out(
    read: Reader, case: Case, seen: Observation, number: int, token: int, ties: Ties
) -> Branch:
    """The `number`-th branch, which begins with `token`."""
    branch = Branch(tokens=[token], before=[seen], after=[])
    while True:
        length = len(branch.tokens)
        here = replace(case, text=[*case.text, *branch.tokens], generated=case.generated + length)
        reading = read(here.text)
        if not np.isfinite(reading.logits).all():
            branch.failed = True
            return branch
        after = observe(reading, here, ties)
        branch.after.append(after)
        if branch.tokens[-1] in case.eos or length == case.values["branch.depth"]:
            return branch
        if length == case.remaining:
            return branch
        if after.regime not in ("lehv", "hehv"):
            return branch
        branch.tokens.append(_continuation(reading, after, here, number, ties))
        branch.before.append(after)


def score(branch: Branch, values: Mapping[str, Any]) -> float:
    """mean(log p) - alpha mean(h) - beta mean(u), h and u of the distribution after each token."""
    if branch.failed:
        return -np.inf
    h = [after.metrics["entropy"] for after in branch.after]
    u = [after.metrics["varentropy"] for after in branch.after]
    alpha, beta = values["branch.entropy_weight"], values["branch.varentropy_weight"]
    return float(np.mean(branch.logprobs) - alpha * np.mean(h) - beta * np.mean(u))


def observe(reading: Reading, case: Case, ties: Ties) -> Observation:
    """Metrics, loop guard and regime."""
    values = case.values
    log_probs = log_softmax(reading.logits)
    heard = log_probs
    if values["metrics.noise_floor"]:
        floor = np.log(case.epsilon) - np.log(len(log_probs)) / 2
        ties.check(log_probs, floor, LOGIT_TIE, "noise floor")
        if (log_probs >= floor).any():
            heard = np.where(log_probs >= floor, log_probs, -np.inf)
            heard = log_softmax(heard)
    metrics = _metrics(reading, heard, values["metrics.layers"])
    looping = is_looping(
        case.text[len(case.text) - case.generated :],
        values["loop.max_period"],
        values["loop.repeats"],
        np.float32(values["loop.similarity"]),
    )
    return Observation(log_probs, heard, metrics, _regime(metrics, values, ties), looping)


def is_looping(
    generated: Sequence[int], max_period: int, repeats: int, similarity: np.float32
) -> bool:
    """Whether the generated tokens end in so many copies of a stretch of a short length, of which
    so large a share is the same; a longer tail counts, too."""
    number = len(generated)
    for period in range(1, max_period + 1 if repeats >= 2 else 0):
        same = [generated[i] == generated[i - period] for i in range(number - 1, period - 1, -1)]
        for length in range(period * (repeats - 1), min(len(same), LOOP_WINDOW) + 1):
            if np.float32(sum(same[:length])) >= similarity * np.float32(length):
                return True
    return False


def modify(reading: Reading, seen: Observation, case: Case) -> np.ndarray:
    """The logits that tokens are chosen by: biases, repetition penalty, bans, noise floor."""
    z = reading.logits.copy()
    raised = []
    for token, bias in case.values["draw.bias"]:
        z[token] += bias
        raised += [token] if bias > 0 else []
    penalty = case.values["repetition.penalty"]
    for token in set(case.text):
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in case.values["draw.bans"]:
        z[token] = -np.inf
    audible = np.where(seen.heard > -np.inf, z, -np.inf)
    if not (audible > -np.inf).any():
        return z
    audible[raised] = z[raised]
    return audible


def likeliest_first(z: np.ndarray, number: int, ties: Ties) -> np.ndarray:
    """All tokens, likeliest first, of equals the lower id; the order of the first `number`
    matters."""
    order = np.argsort(-z, kind="stable")
    first = z[order[: number + 1]]
    first = first[first > -np.inf]
    ties.check(first[:-1], first[1:], LOGIT_TIE, "order")
    return order


def _continuation(reading: Reading, after: Observation, here: Case, number: int, ties: Ties) -> int:
    """The next token of a branch: the likeliest, or a draw with the base values at the rollout's
    temperature."""
    z = modify(reading, after, here)
    values = here.values
    temperature = values["branch.rollout_temperature"]
    if temperature == 0:
        return int(likeliest_first(z, 1, ties)[0])
    u = uniform_numbers(here.key, len(here.text), STREAM_ROLLOUT, 8)[number]
    order = np.argsort(-z, kind="stable")
    order = order[z[order] > -np.inf]
    relative = (z[order] - z[order[0]]) / temperature
    count = len(order)
    if values["base.min_p"] > 0:
        ties.check(relative, np.log(values["base.min_p"]), LOGIT_TIE / temperature, "min-p")
        count = int((relative >= np.log(values["base.min_p"])).sum())
    if values["base.top_k"] > 0:
        count = min(count, values["base.top_k"])
    cumulated = np.cumsum(np.exp(relative[:count]))
    if values["base.top_p"] < 1:
        reached = cumulated / cumulated[-1]
        ties.check(reached[:-1], values["base.top_p"], MASS_TIE, "top-p")
        count = int((reached < values["base.top_p"]).sum()) + 1
    # The mass cumulates by id.
    kept = np.sort(order[:count])
    cumulated = np.cumsum(np.exp((z[kept] - z[order[0]]) / temperature))
    reached = cumulated / cumulated[-1]
    ties.check(reached[:-1], u, MASS_TIE, "draw")
    # The last one may change places with the first that is left out.
    around = z[order[count - 1 : count + 1]]
    ties.check(around[:-1], around[1:], LOGIT_TIE, "order")
    return int(kept[(reached <= u).sum()])


def _metrics(reading: Reading, heard: np.ndarray, layers: str) -> dict[str, float]:
    p = np.exp(heard)
    bits = np.where(p > 0, heard, 0.0) / np.log(2)
    h = -float((p * bits).sum())
    number = len(reading.divergence)
    weights = np.ones(number) / number if layers == "all" else np.eye(number)[-1]
    attn_entropy = float(weights @ reading.entropy.mean(axis=1))
    divergence = float(weights @ reading.divergence)
    return {
        "entropy": h,
        "varentropy": float((p * (bits + h) ** 2).sum()),
        "attn_entropy": attn_entropy,
        "attn_entropy_norm": attn_entropy / float(np.log2(max(reading.keys, 2))),
        "attn_varentropy": float(weights @ reading.entropy.var(axis=1)),
        "agreement": 1 - divergence / 2,
        "agreement_published": divergence / reading.keys,
        "interaction_strength": float(weights @ reading.interaction),
    }


def _regime(metrics: Mapping[str, float], values: Mapping[str, Any], ties: Ties) -> str:
    """The first open box that holds the point."""

    def holds(condition: str) -> bool:
        quantity, sign, text = condition.split()
        value, bound = metrics[quantity], float(text)
        ties.check(value, bound, METRIC_TIE, quantity)
        return value < bound if sign == "<" else value > bound

    for box in BOXES:
        if all(map(holds, values[f"regimes.{box}"])):
            return box
    return "mid"


_uniforms: Callable[..., jax.Array] = jax.jit(uniforms, static_argnums=4)


def uniform_numbers(key: np.ndarray, position: int, stream: int, number: int) -> np.ndarray:
    """Those of the first attempt at a position."""
    args = (np.array([x], np.int32) for x in (position, 0, stream))
    return np.asarray(_uniforms(key[None], *args, number), np.float64)[0]
