"""Random rows of a random model."""

from __future__ import annotations

from typing import Any

import numpy as np

from entropix_jax.names import SERVED, THRESHOLDS
from entropix_jax.sampler.settings import MAX_WIDTH
from tests.support.samplers import ARMS, CAPACITY, LITERAL, RULES, Job, params_of, tiny_model

CONFIG, PARAMS = MODEL = tiny_model()


NATURAL = ("argmax", "inject", "branch", "backspace", "adaptive", "resample", "argmax")  # by SERVED


def random_job(rng: np.random.Generator, row_id: str) -> Job:
    """A row of any length, under bounds that share out what this model's distributions are like."""
    prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, 26)).tolist()
    longest = CAPACITY - len(prompt)
    budget = longest if rng.random() < 0.1 else int(rng.integers(1, min(longest, 32) + 1))
    changes = {**random_bounds(rng), **random_settings(rng)}
    host = {"encode": encode_numbers, "token_texts": token_texts}
    sampler = params_of(LITERAL, changes, **host)
    return Job(prompt, sampler, budget=budget, seed=int(rng.integers(3)), row_id=row_id)


def token_texts() -> list[str]:
    """A third of the tokens are words, a third end sentences, and the rest are parts of words."""
    return [(" word", ".", "s", "\n", " a", "x")[i % 6] for i in range(CONFIG.vocab_size)]


def encode_numbers(text: str) -> list[int]:
    """Returns the token ids in a text, without its words."""
    return [int(token) for token in text.split() if token.isdigit()]


def random_bounds(rng: np.random.Generator) -> dict[str, Any]:
    h1, h2 = np.sort(rng.uniform(0.5, 3.5, 2)).round(3)
    u1, u2 = np.sort(rng.uniform(1.0, 4.5, 2)).round(3)
    bounds = {
        "lelv": ["entropy < h1", "varentropy < u1"],
        "helv": ["entropy > h1", "varentropy < u2"],
        "lehv": ["entropy < h2", "varentropy > u2"],
        "hehv": ["entropy > h2", "varentropy > u1"],
    }
    thresholds = dict(zip(THRESHOLDS, map(float, (h1, h2, u1, u2)), strict=True))
    if rng.random() < 0.3:
        quantity = str(rng.choice(["agreement", "attn_entropy_norm"]))
        bounds[str(rng.choice([*bounds]))].append(f"{quantity} > {rng.uniform(0.3, 0.7):.3f}")
    arms = {
        f"arms.{regime}": arm if rng.random() < 0.7 else str(rng.choice(ARMS))
        for regime, arm in zip(SERVED, NATURAL, strict=True)
    }
    return {
        **{f"regimes.{box}": bound for box, bound in bounds.items()},
        **{f"thresholds.{name}": value for name, value in thresholds.items()},
        **arms,
    }


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    def often(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.6 else otherwise

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    def text() -> str:
        return " ".join(map(str, rng.integers(0, CONFIG.vocab_size, number(1, 5))))

    thoughts, end = [text() for _ in range(number(0, 3))], text()
    return {
        "thresholds.dynamic": often(True, False),
        "thresholds.rate": often(0.05, 0.3),
        "base.temperature": often(0.8, rng.choice([0.0, 0.4, 1.5, 4.0]).item()),
        "base.top_k": often(27, rng.choice([0, 3, 299]).item()),
        "base.top_p": often(0.9, rng.choice([0.3, 1.0]).item()),
        "base.min_p": often(0.03, rng.choice([0.0, 0.2]).item()),
        "truncation.rule": often("nucleus", str(rng.choice(RULES))),
        "metrics.units": often("bits", "thresholds"),
        "metrics.layers": often("all", "last"),
        "metrics.noise_floor": often(False, True),
        "metrics.attn_entropy": often("normalised", "raw"),
        "draw.bans": often([], rng.integers(0, CONFIG.vocab_size, 5).tolist()),
        "draw.bias": often([], [[token, rng.uniform(-9, 9)] for token in range(number(1, 64))]),
        "repetition.penalty": often(1.0, 1.3),
        "loop.max_period": often(0, number(1, 4)),
        "loop.repeats": 2,
        "loop.heating": often(1.0, 0.0),
        "loop.similarity": often(0.8, 1.0),
        "adaptive.draws": number(1, 16),
        "inject.thought": thoughts,
        "inject.after": often("", [".", "\n"]),
        "inject.earliest": often(0, number(1, 8)),
        "inject.cooldown": number(0, 6),
        "inject.per_row": often(1000, number(0, 3)),
        "inject.until_confident": often(False, True),
        "branch.width": number(1, MAX_WIDTH),
        "branch.depth": number(1, 8),
        "branch.min_p": often(0.1, 0.0),
        "branch.noise": often(0.0, 0.5),
        "branch.rollout_temperature": often(0.0, 0.7),
        "branch.commit_all": often(True, False),
        "branch.per_row": often(1000, number(0, 4)),
        "branch.max_share": often(1000.0, 0.5),
        "backspace.reach": often(1, number(2, 8)),
        "backspace.max_prob": often(1.0, 0.5),
        "backspace.per_position": often(2, number(0, 8)),
        "backspace.per_row": often(1000, number(0, 6)),
        "think_end.text": end,
        "think_end.entropy": 3.0,
        "think_end.patience": often(0, often(0, number(1, 2))),
        "budget_forcing.end": end,
        "budget_forcing.wait": text(),
        "budget_forcing.min_tokens": often(0, 20),
        "budget_forcing.max_tokens": often(0, often(0, number(2, 8))),
    }
