"""Formulas of one step in float64: metrics, regimes, proposals of the arms, filters, truncation.

Every function reads the recorded settings `v`, by dotted key. `slack` is the rounding error that a
comparison allows. With -slack a rule keeps the tokens that might be removed, with +slack it removes
the tokens that might be kept. Papers are named in docs/samplers.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropix_jax.names import BOXES, THRESHOLDS, read_condition
from entropix_jax.replay.threefry import Key, uniforms

Settings = Mapping[str, Any]
Metrics = Mapping[str, float]
Logits = np.ndarray

LN2 = math.log(2.0)
LONGEST_MATCH, LOOP_WINDOW, ZIPF_TOKENS = 64, 256, 100
FARTHEST = 1e15  # nats between logits, so that squares stay within float32
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class Proposal:
    """How a token is to be drawn. `top_k` has several values where rounding decides."""

    action: str
    temperature: float
    top_k: tuple[int, ...]
    top_p: float
    min_p: float
    candidates: int = 1


@dataclass(frozen=True)
class Place:
    """A row, or a branch, before its next token."""

    v: Settings
    key: Key
    tokens: Sequence[int]  # prompt included
    generated: int
    log_probs: np.ndarray  # nats, of the model
    bans: Sequence[int]  # tokens retracted at this position, one per attempt
    branch: int  # -1: the row itself
    states: Mapping[str, float]
    breakers: Sequence[Sequence[int]]  # of `dry`
    epsilon: float  # machine epsilon of the logits

    def uniforms(self, stream: str, count: int) -> np.ndarray:
        """Returns the random numbers of this position and attempt."""
        return uniforms(self.key, len(self.tokens), len(self.bans), stream, count)

    @property
    def audible(self) -> np.ndarray:
        """The tokens above the noise floor (document 004), all if there is none: bool [V]."""
        floor = math.log(self.epsilon) - 0.5 * math.log(self.log_probs.size)
        above = self.log_probs >= (floor if self.v["metrics.noise_floor"] else -math.inf)
        return above if above.any() else np.ones_like(above)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Returns log-probabilities in nats."""
    shifted = np.asarray(logits, np.float64) - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


def entropies(log_probs: np.ndarray) -> tuple[float, float]:
    """Returns entropy (bits) and varentropy (bits^2)."""
    p = np.exp(log_probs)
    bits = np.where(p > 0, log_probs / LN2, 0.0)
    entropy = -float(p @ bits)
    return entropy, float(p @ (bits + entropy) ** 2)


def measure(place: Place, attention: Any) -> dict[str, float]:
    """Returns the recorded metrics of a distribution and of the attention of the last position."""
    v, log_probs, keys = place.v, place.log_probs, len(place.tokens)
    entropy, varentropy = entropies(log_softmax(np.where(place.audible, log_probs, -np.inf)))
    layers, heads = v["metrics.layers"], np.asarray(attention.entropy, np.float64)
    one_hot = np.arange(len(heads)) == len(heads) - 1
    weights = np.array(layers) if isinstance(layers, list) else one_hot | (layers == "all")
    parts = heads.mean(1), heads.var(1), attention.divergence, attention.interaction
    mean, variance, divergence, interaction = (weights @ part / weights.sum() for part in parts)
    most = np.sort(log_probs)[::-1][: v["confidence.likeliest"]]
    return {
        "entropy": entropy,
        "varentropy": varentropy,
        "attn_entropy": float(mean),
        "attn_entropy_norm": float(mean / math.log2(max(keys, 2))),
        "attn_varentropy": float(variance),
        "agreement": float(1 - divergence / 2),
        "agreement_published": float(divergence / keys),
        "interaction_strength": float(interaction),
        "token_confidence": float(-most.mean()),
        "self_certainty": float(-log_probs.mean() - math.log(log_probs.size)),
        "max_prob": float(np.exp(most[0])),
    }


def view(v: Settings, logits: np.ndarray) -> tuple[float, float] | None:
    """Returns entropy and varentropy of the distribution that `view` selects, None without one."""
    if v["view.likeliest"] > 0:
        logits = np.sort(logits)[::-1][: v["view.likeliest"]]
    elif v["view.temperature"] == 1.0:
        return None
    return entropies(log_softmax(np.asarray(logits, np.float64) / v["view.temperature"]))


def thresholds(v: Settings, drift: np.ndarray) -> np.ndarray:
    """Returns h1, h2 (bits), u1, u2 (bits^2), float32, with the log ratios `drift`."""
    given = np.array([v.get(f"thresholds.{name}", 0.0) for name in THRESHOLDS], np.float32)
    h1, h2, u1, u2 = given * np.exp(drift)
    return np.array([h1, max(h1, h2), u1, max(u1, u2)], np.float32)


def regimes(v: Settings, point: Metrics, bounds: np.ndarray, slack: float) -> list[str]:
    """Returns the regime of a point, then those that it may have within the slack."""
    found = []
    for box in BOXES:
        depth = math.inf  # how far inside the point is
        for quantity, sign, bound in map(read_condition, v[f"regimes.{box}"]):
            named = bounds[THRESHOLDS.index(bound)] if bound in THRESHOLDS else bound
            distance = float(np.float32(point[quantity])) - float(np.float32(named))
            inside = (distance if sign == ">" else -distance) / (1 + abs(float(named)))
            depth = min(depth, -math.inf if math.isnan(inside) else inside)
        if depth > -slack:
            found.append((box, depth > 0))
        if depth > slack:
            break
    else:
        found.append(("mid", True))
    exact = next(box for box, inside in found if inside)
    return [exact, *(box for box, _ in found if box != exact)]


def count_rounds(v: Settings, tokens: Sequence[int], generated: int) -> int:
    """Returns the rounds of the loop guard: 1 once the text ends in `repeats` similar copies."""
    if v["loop.repeats"] < 2:
        return 0
    text, rounds = np.array(tokens), 0
    for period in range(1, min(v["loop.max_period"], generated - 1) + 1):
        size = min(LOOP_WINDOW, generated - period)
        same = (text[period:] == text[:-period])[::-1][:size]
        counts = np.arange(1, size + 1, dtype=np.float32)
        enough = np.cumsum(same) >= np.float32(v["loop.similarity"]) * counts
        longest = int(counts[enough].max(initial=0))
        rounds = max(rounds, 2 + longest // period - v["loop.repeats"])
    return rounds


# Arms


def as_configured(
    v: Settings, metrics: Metrics, bounds: Sequence[float] | np.ndarray, vocab_size: int
) -> dict[str, float]:
    """Returns the metrics as the arms read them, with the thresholds h2 and u2."""
    entropy = {"normalised": "attn_entropy_norm", "raw": "attn_entropy"}[v["metrics.attn_entropy"]]
    agreement = {"published": "agreement_published", "corrected": "agreement"}
    own = {
        "attn_entropy": metrics[entropy],
        "agreement": metrics[agreement[v["metrics.agreement"]]],
    }
    return {**metrics, **own, "h2": float(bounds[1]), "u2": float(bounds[3]), "vocab": vocab_size}


def draw(v: Settings, action: str, **changes: Any) -> Proposal:
    """Returns a proposal with the base values of everything but the changes."""
    base: dict[str, Any] = {name: v[f"base.{name}"] for name in PARAMETERS}
    base = {**base, "top_k": (v["base.top_k"],), **changes}
    return Proposal(action, **{**base, "temperature": max(base["temperature"], 0.0)})


def scaled_top_k(
    v: Settings, factor: float, whole: Callable[[float], float], low: int, high: int = 2**31 - 1
) -> tuple[int, ...]:
    """Returns the base top-k times a factor, as integers within rounding; 0 if top-k is off."""
    scaled = (whole(v["base.top_k"] * factor * (1 + e)) for e in (0.0, -1e-5, 1e-5))
    values = (int(np.clip(np.clip(k, 0, 2**30), low, high)) for k in scaled)
    return tuple(dict.fromkeys(values)) if v["base.top_k"] else (0,)


def inject(v: Settings, m: Metrics, may: bool) -> Proposal:
    """Thought, or a hot draw (documents 000 and 001)."""
    scale = v["inject.temperature_scale"] + v["inject.temperature_attn_entropy"] * m["attn_entropy"]
    hot = min(v["inject.temperature_max"], v["base.temperature"] * scale)
    return draw(v, "inject" if may else "sample", temperature=hot)


def explore(v: Settings, m: Metrics) -> Proposal:
    """Draw that is warmer with the interaction strength (documents 000 and 001)."""
    scale = v["explore.temperature_scale"]
    scale += v["explore.temperature_interaction"] * m["interaction_strength"]
    wide = 1 + v["explore.top_k_disagreement"] * (1 - m["agreement"])
    top_k = scaled_top_k(v, wide, math.floor, v["explore.top_k_min"])
    hot = min(v["explore.temperature_max"], v["base.temperature"] * scale)
    return draw(v, "explore", temperature=hot, top_k=top_k)


def branch(v: Settings, m: Metrics, may: bool) -> Proposal:
    """Fork (documents 002 and 004), or `explore` without budget."""
    own = {name: v[f"branch.{name}"] for name in ("temperature", "top_p", "min_p")}
    width = v["base.top_k"] if v["branch.sampled"] else v["branch.width"]
    return draw(v, "branch", **own, top_k=(width,)) if may else explore(v, m)


def clarify(v: Settings, may: bool) -> Proposal:
    """Fork into sampled continuations, or a draw."""
    return draw(v, "clarify", temperature=v["clarify.temperature"]) if may else draw(v, "sample")


def resample(v: Settings, m: Metrics) -> Proposal:
    """Hot draw from a nucleus that narrows with the attention entropy (documents 000 and 001)."""
    scale = v["resample.temperature_scale"]
    scale += v["resample.temperature_attn_varentropy"] * m["attn_varentropy"]
    top_p = v["base.top_p"] - v["resample.top_p_attn_entropy"] * m["attn_entropy"]
    hot = max(v["resample.temperature_min"], v["base.temperature"] * scale)
    return draw(v, "resample", temperature=hot, top_p=max(v["resample.top_p_min"], top_p))


def uncertainty(v: Settings, m: Metrics) -> tuple[float, float]:
    """Returns h and u in the units of `adaptive`, each at most `adaptive.most`."""
    h2, u2 = (m[name] if v["metrics.units"] == "thresholds" else 1.0 for name in ("h2", "u2"))
    most = v["adaptive.most"]
    return min(m["entropy"] / max(h2, 1e-6), most), min(m["varentropy"] / max(u2, 1e-6), most)


def adaptive(v: Settings, m: Metrics) -> Proposal:
    """Best of several draws (documents 000 and 001)."""
    own = {key.partition(".")[2]: value for key, value in v.items() if key.startswith("adaptive.")}
    of_logits, of_heads = sum(uncertainty(v, m)), m["attn_entropy"] + m["attn_varentropy"]
    warm = 1 + own["temperature_logits"] * of_logits + own["temperature_attn"] * of_heads
    warm -= own["temperature_agreement"] * m["agreement"]
    wide = 1 + own["top_k_interaction"] * m["interaction_strength"]
    wide -= own["top_k_agreement"] * m["agreement"]
    top_p = v["base.top_p"] * (1 + own["top_p_attn_varentropy"] * m["attn_varentropy"])
    min_p = v["base.min_p"] * (1 - own["min_p_logits"] * of_logits)
    return draw(
        v,
        "adaptive",
        temperature=v["base.temperature"] * warm,
        top_k=scaled_top_k(v, wide, np.round, own["top_k_min"], own["top_k_max"]),
        top_p=float(np.clip(top_p, own["top_p_min"], 1.0)),
        min_p=min(max(min_p, own["min_p_min"]), own["min_p_max"]),
        candidates=own["draws"],
    )


def update_means(means: np.ndarray, m: Metrics, generated: int) -> np.ndarray:
    """Returns the exponential means that P(wrong) follows from, over about 8 tokens."""
    values = np.array([m[name] for name in ("entropy", "varentropy", "max_prob", "agreement")])
    return np.asarray(means + max(2 / 9, 1 / (generated + 1)) * (values - means))


def p_wrong(table: Sequence[Sequence[float]], means: np.ndarray) -> float:
    """Returns P(wrong): linear between the knots of a table, [weights, knot, knot, ...]."""
    weights, *knots = table
    return float(np.interp(np.dot(weights, [*means, 1.0]), *np.transpose(knots)))


def confidence(v: Settings, m: Metrics) -> float:
    """Returns the documents' confidence score."""
    entropy, varentropy = uncertainty(v, m)
    return float(
        v["adaptive.confidence_entropy"] * (1 - entropy)
        + v["adaptive.confidence_attn_entropy"] * (1 - m["attn_entropy"])
        + v["adaptive.confidence_varentropy"] * (1 - varentropy)
        + v["adaptive.confidence_attn_varentropy"] * (1 - m["attn_varentropy"])
        + v["adaptive.confidence_agreement"] * m["agreement"]
        + v["adaptive.confidence_interaction"] * m["interaction_strength"]
    )


def edt(v: Settings, m: Metrics) -> Proposal:
    """Draw at T0 base^(theta / h), h in nats (Zhang et al. 2024)."""
    nats, theta = m["entropy"] * LN2, v["edt.theta"]
    exponent = theta / nats if nats > 0 else math.inf
    cooling = v["edt.base"] ** exponent if theta > 0 else 1.0
    return draw(v, "sample", temperature=v["base.temperature"] * cooling)


def dynatemp(v: Settings, m: Metrics) -> Proposal:
    """Draw at a temperature that rises with h / log2 V (KoboldCpp)."""
    low, high = v["dynatemp.temperature_min"], v["dynatemp.temperature_max"]
    share = min(max(m["entropy"] / math.log2(max(m["vocab"], 2)), 0.0), 1.0)
    return draw(v, "sample", temperature=low + (high - low) * share ** v["dynatemp.exponent"])


def forking(v: Settings, m: Metrics) -> Proposal:
    """Draw at one of two temperatures (Wang et al. 2025)."""
    high = np.float32(m["entropy"]) > np.float32(v["forking.threshold"])
    name = "temperature_high" if high else "temperature_low"
    return draw(v, "sample", temperature=v[f"forking.{name}"])


# Each takes settings, metrics, and the actions that the row may take.
ARMS: dict[str, Callable[[Settings, Metrics, Mapping[str, bool]], Proposal]] = {
    "argmax": lambda v, m, may: draw(v, "argmax", temperature=0.0),
    "sample": lambda v, m, may: draw(v, "sample"),
    "inject": lambda v, m, may: inject(v, m, may["inject"]),
    "lookup": lambda v, m, may: draw(v, "lookup" if may["lookup"] else "sample"),
    "explore": lambda v, m, may: explore(v, m),
    "branch": lambda v, m, may: branch(v, m, may["branch"]),
    "clarify": lambda v, m, may: clarify(v, may["clarify"]),
    "resample": lambda v, m, may: resample(v, m),
    "backspace": lambda v, m, may: draw(v, "backspace") if may["backspace"] else adaptive(v, m),
    "adaptive": lambda v, m, may: adaptive(v, m),
    "edt": lambda v, m, may: edt(v, m),
    "dynatemp": lambda v, m, may: dynatemp(v, m),
    "forking": lambda v, m, may: forking(v, m),
}

# Filters of logits, float64 [V], before the temperature


def repetition(z: np.ndarray, place: Place) -> np.ndarray:
    """Penalties of Keskar et al. 2019 and of OpenAI's API."""
    v, seen = place.v, [*set(place.tokens)]
    own = np.array(place.tokens[len(place.tokens) - place.generated :], int)
    counts = np.bincount(own, minlength=z.size)
    z, penalty = z.copy(), v["repetition.penalty"]
    cost = v["repetition.frequency"] * counts + v["repetition.presence"] * (counts > 0)
    z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty) - cost[seen]
    return z


def no_repeat_ngram(z: np.ndarray, place: Place) -> np.ndarray:
    """Ban of tokens that complete a repeated n-gram (Paulus et al. 2017)."""
    size, text, z = place.v["no_repeat_ngram.size"], [*place.tokens], z.copy()
    for start in range(len(text) - size + 1 if size else 0):
        if text[start : start + size - 1] == text[len(text) - size + 1 :]:
            z[text[start + size - 1]] = -np.inf
    return z


def dry(z: np.ndarray, place: Place) -> np.ndarray:
    """Penalty that grows with the repetition that a token prolongs (Weidmann 2024)."""
    v, text, z = place.v, np.array(place.tokens), z.copy()
    if not v["dry.multiplier"] > 0:
        return z
    broken = (n for n in range(LONGEST_MATCH) if any(ends_in(text, b, n) for b in place.breakers))
    limit, runs = next(broken, LONGEST_MATCH), dict[int, int]()
    for at in 1 + np.flatnonzero(text[:-1] == text[-1]):  # the token at `at` follows a copy
        distance, token = len(text) - at, int(text[at])
        same = text[:at][::-1][:limit] == text[::-1][:at][:limit]
        run = int(np.argmin([*same, False]))
        run = min(run, min(len(text), v["dry.window"]) - distance)
        if run >= v["dry.allowed_length"] and [token] not in place.breakers:
            runs[token] = max(run, runs.get(token, 0))
    for token, run in runs.items():
        z[token] -= v["dry.multiplier"] * v["dry.base"] ** (run - v["dry.allowed_length"])
    return z


def ends_in(text: Sequence[int] | np.ndarray, end: Sequence[int], before: int = 0) -> bool:
    """Whether a text without its last `before` tokens ends in other tokens, at least one."""
    stop = len(text) - before
    return 0 < len(end) <= stop and [*text[stop - len(end) : stop]] == [*end]


FILTERS = (repetition, no_repeat_ngram, dry)


def penalise(logits: np.ndarray, place: Place) -> np.ndarray:
    """Returns the logits with biases, bans, penalties and the noise floor."""
    v, z = place.v, np.asarray(logits, np.float64).copy()
    for token, bias in v["draw.bias"]:
        z[token] += bias
    z[[*v["draw.bans"], *place.bans]] = -np.inf
    for change in FILTERS:
        z = kept(change(z, place), z)
    raised = [token for token, bias in v["draw.bias"] if bias > 0]
    heard = np.where(place.audible, z, -np.inf)
    if heard.max() > -np.inf:
        heard[raised] = z[raised]
        z = heard
    return z


def kept(changed: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns changed logits, or those before if none is left. No change restores a token."""
    changed = np.where(before > -np.inf, changed, -np.inf)
    return changed if changed.max() > -np.inf else before


# Truncation rules. Each takes logits with the most likely token at 0, and returns the kept tokens:
# a bool [V] or ids.


def nucleus(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """min-p (Nguyen et al. 2024), top-k (Fan et al. 2018), top-p (Holtzman et al. 2020)."""
    passes = (np.exp(z) >= p.min_p * (1 + slack)) & (z > -np.inf)
    mass = np.where(passes, np.exp(z), 0.0)
    order: np.ndarray = np.argsort(-z, kind="stable")[: max(int(np.count_nonzero(passes)), 1)]
    order = order[: p.top_k[0]] if p.top_k[0] > 0 else order
    before = np.cumsum(mass[order]) - mass[order]
    enough = (p.top_p - slack) * float(mass[order].sum()) if p.top_p < 1 else math.inf
    return order[: max(int(np.count_nonzero(before < enough)), 1)]


def top_n_sigma(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Logits within n standard deviations of the highest (Tang et al. 2024)."""
    near = np.maximum(z, -FARTHEST)
    sigma, width = float(np.std(near[z > -np.inf])), float(-near[z > -np.inf].min())
    bound = -place.v["top_n_sigma.sigmas"] * sigma + 0.1 * slack * width
    return np.asarray((near >= bound) & (z > -np.inf) | (z == 0))


def typical(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Tokens whose surprise is nearest to the entropy (Meister et al. 2022)."""
    log_probs, mass = log_softmax(z), place.v["typical.mass"]
    distance = np.abs(log_probs + entropies(log_probs)[0] * LN2 + slack)
    order: np.ndarray = np.lexsort((-log_probs, distance))[: np.count_nonzero(z > -np.inf)]
    reached = np.cumsum(np.exp(log_probs)[order]) >= (mass - slack if mass < 1 else math.inf)
    return order[: int(np.argmax([*reached[:-1], True])) + 1]


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def eta(log_probs: np.ndarray, v: Settings, slack: float) -> float:
    """Hewitt et al. 2022."""
    epsilon = _log(v["eta.epsilon"])
    return min(epsilon, epsilon / 2 - entropies(log_probs)[0] * LN2)


def p_less(log_probs: np.ndarray, v: Settings, slack: float) -> float:
    """Tan et al. 2025."""
    count, least = np.count_nonzero(log_probs > -np.inf), float(np.sum(np.exp(2 * log_probs)))
    if v["p_less.norm"] and count > 1:
        least = (count * least - 1) / (count - 1) + slack * least
    return _log(least)


# The least ln p that a rule keeps.
BOUNDS: dict[str, Callable[[np.ndarray, Settings, float], float]] = {
    "eta": eta,
    "epsilon": lambda log_probs, v, slack: _log(v["epsilon.epsilon"]),  # Hewitt et al. 2022
    "top_a": lambda log_probs, v, slack: _log(v["top_a.factor"]) + 2 * log_probs.max(),  # Peng 2022
    "p_less": p_less,
}


def at_least(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Tokens of at least a probability."""
    log_probs = log_softmax(z)
    bound = BOUNDS[place.v["truncation.rule"]](log_probs, place.v, slack) + slack
    return np.asarray(((log_probs >= bound) | (z == 0)) & (z > -np.inf))


def prefixes(z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens in order, and mass and renormalised entropy (nats) of each prefix."""
    order = np.argsort(-z, kind="stable")[: np.count_nonzero(z > -np.inf)]
    p = np.exp(log_softmax(z)[order])
    mass = np.cumsum(p)
    return order, mass, np.log(mass) - np.cumsum(p * np.log(np.maximum(p, 1e-300))) / mass


def top_h(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Longest prefix with at most a share of the entropy (Potraghloo et al. 2025)."""
    order, _, entropy = prefixes(z)
    bound = place.v["top_h.alpha"] * entropy[-1] - slack
    return order[: max(np.count_nonzero(entropy <= bound), 1)]


def ees(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Longest prefix in entropy equilibrium (Cai et al. 2025)."""
    order, mass, entropy = prefixes(z)
    ends = entropy[1:] < mass[1:] * np.log(np.arange(2, len(order) + 1)) + slack
    return order[: 1 + int(np.argmax([*ends, True]))]


def min_k(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Tokens above the steepest fall (Ding et al. 2026)."""
    order = np.argsort(-z, kind="stable")[: np.count_nonzero(z > -np.inf)]
    falls = np.minimum(-np.diff(z[order]), FARTHEST) / np.arange(1, len(order))
    most = falls.max(initial=0.0) * (1 - abs(slack) / 8)
    steepest = 1 + np.flatnonzero(falls >= most) if falls.size else np.ones(1)
    divided = 1.0 if place.v["base.temperature_last"] else p.temperature or 1.0
    fewest = place.v["min_k.tau"] / max(-z[order[-1]] * divided, 1e-8) * (1 - slack)
    return order[: max(int(steepest[-1 if slack < 0 else 0]), int(min(fewest, z.size)))]


def mirostat(z: np.ndarray, place: Place, p: Proposal, slack: float) -> np.ndarray:
    """Top-k for a mean surprise under Zipf's law (Basu et al. 2021)."""
    order = np.argsort(-z, kind="stable")[: np.count_nonzero(z > -np.inf)]
    falls = -np.diff(z[order[:ZIPF_TOKENS]])
    ratios = np.log1p(1 / np.arange(1, len(falls) + 1))
    s = float(np.clip(ratios @ falls / max(ratios @ ratios, 1e-30), 1e-30, 1e30))
    log_count = math.log(len(order))
    x = (s - 1) * log_count
    scale = 1.0 if x == 0 else x / -math.expm1(-x)
    bits = (2 * place.v["mirostat.target"] + place.states["mirostat"]) * LN2
    log_scale = _log(scale / log_count if log_count else 1.0)
    log_k = (bits + log_scale) / s - slack * (1 + max(1, abs(bits) + abs(log_scale)) / s)
    return order[: max(round(math.exp(min(log_k, log_count))), 1)]


RULES: dict[str, Callable[[np.ndarray, Place, Proposal, float], np.ndarray]] = {
    "nucleus": nucleus,
    "top_n_sigma": top_n_sigma,
    "typical": typical,
    **dict.fromkeys(BOUNDS, at_least),
    "top_h": top_h,
    "ees": ees,
    "min_k": min_k,
    "mirostat": mirostat,
}


def xtc(z: np.ndarray, place: Place, slack: float) -> np.ndarray:
    """Removal of the top choices but the least likely one (Weidmann 2024)."""
    v, p = place.v, np.exp(log_softmax(z))
    if place.uniforms("xtc", 11)[place.branch + 1] >= np.float32(v["xtc.probability"]):
        return z
    top = (p >= v["xtc.threshold"] * (1 - slack)) & (z > -np.inf)
    if top.any():
        top[z.size - 1 - int(np.argmin(np.where(top, p, np.inf)[::-1]))] = False
    return np.where(top, -np.inf, z)


def adaptive_p(z: np.ndarray, place: Place, slack: float) -> np.ndarray:
    """Preference for tokens with a given probability (MrJackSpade 2026)."""
    if place.v["adaptive_p.target"] < 0:
        return z
    aim = min(max(place.v["adaptive_p.target"] - place.states["adaptive_p"], 0.0), 1.0)
    distance = np.abs(np.exp(log_softmax(z)) - aim) / 0.3
    return np.asarray(5 - 10 * distance**2 / (1 + distance))


def learn(
    v: Settings,
    states: Mapping[str, float],
    p: Proposal,
    penalised: Logits,
    given: Logits,
    token: int,
) -> dict[str, float]:
    """Returns the states of `mirostat` and `adaptive_p` after a drawn token."""
    learned = {**states}
    if v["truncation.rule"] == "mirostat":
        greedy = p.temperature <= 0
        divisor = 1.0 if v["base.temperature_last"] or greedy else p.temperature
        bits = 0.0 if greedy else -log_softmax(penalised / divisor)[token] / LN2
        learned["mirostat"] -= v["mirostat.rate"] * (bits - v["mirostat.target"])
    if v["adaptive_p.target"] >= 0:
        excess = math.exp(log_softmax(given)[token]) - v["adaptive_p.target"]
        decay = v["adaptive_p.decay"]
        learned["adaptive_p"] = decay * learned["adaptive_p"] + (1 - decay) * excess
    return learned


def truncate(
    penalised: np.ndarray, place: Place, p: Proposal, slack: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits that a token is drawn from, and those that `adaptive_p` is given."""
    v, greedy = place.v, p.temperature <= 0
    temperature = 1.0 if greedy else p.temperature
    z = penalised - penalised.max()
    if greedy:
        z = np.where(np.arange(z.size) == np.argmax(z), z, -np.inf)
    z = z if v["base.temperature_last"] else z / temperature
    left = np.full_like(z, -np.inf)
    tokens = RULES[v["truncation.rule"]](z, place, p, slack)
    left[tokens] = z[tokens]
    given = kept(xtc(kept(left, z), place, slack), kept(left, z))
    left = kept(adaptive_p(given, place, slack), given)
    return (left - left.max()) / temperature if v["base.temperature_last"] else left, given
