"""Traces to replay: one run with every preset, and alterations of a trace."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Rows
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import SERVED, THRESHOLDS
from entropix_jax.replay.formulas import ARMS, RULES
from entropix_jax.replay.model import ModelReader
from entropix_jax.replay.state import Reading
from entropix_jax.sampler.files import preset_names
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.state import MAX_ATTEMPTS
from tests.support.samplers import EVERYTHING

Json = dict[str, Any]

SEED, BUDGET, SLOTS, RANDOM = 5, 24, 8, 100
PERIOD = 46  # the id of "."
PROMPTS = ("Guests: the sky is", "Once upon a time", "Mia has 12 apples", "The")
ANYWHERE = {"inject.after": "", "inject.earliest": 0, "inject.per_row": 1000, "start.tokens": 0}
HOT = {"base.temperature": 2.0}
ALL = EVERYTHING | ANYWHERE
FAR_BACK = (
    ALL
    | {"backspace.reach": 8, "backspace.max_prob": 1.0, "backspace.per_position": 8}
    | {"branch.rollout_temperature": 1.5, "branch.noise": 1.0, "branch.processed": True}
    | {"branch.min_p": 0.02, "xtc.probability": 0.5, "base.top_p": 0.9}
)

# One arm in every regime, loops included, with budgets that no row reaches.
ENDLESS = (
    ALL
    | {"lookup.per_row": 10**6, "lookup.cooldown": 1}
    | {"inject.per_row": 10**6, "inject.cooldown": 0, "branch.per_row": 10**6}
    | {"backspace.per_row": 10**6, "backspace.per_position": MAX_ATTEMPTS}
    | {"backspace.max_prob": 1.0, "backspace.reach": 1, "loop.max_period": 4, "loop.repeats": 2}
)

LOOKUP = {"lookup": lambda text: f"{len(text)} letters" if len(text) % 3 else None}


@dataclass(frozen=True)
class Case:
    """A row to replay: a preset with changes, a prompt, a budget, and other fields of a request."""

    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = PROMPTS[0]
    budget: int = BUDGET
    options: Mapping[str, Any] = field(default_factory=dict)


# Settings that no preset has.
SPECIAL: Mapping[str, Case] = {
    "everything": Case("entropix", ALL),
    "first-tokens": Case("entropix", ALL | {"branch.commit_all": False, "branch.margin": 5.0}),
    "far-back": Case("entropix", FAR_BACK),
    "dynamic": Case("entropix", ALL | {"thresholds.dynamic": True}),
    "phrases": Case("temperature", HOT | {"phrases.banned": [".", " a", " is a singer", "\n"]}),
    "thinking": Case(
        "temperature",
        HOT
        | {"think_end.text": " So the", "think_end.entropy": 3.0, "think_end.patience": 3}
        | {"budget_forcing.end": " end", "budget_forcing.wait": " Wait"}
        | {"budget_forcing.min_tokens": 18, "budget_forcing.max_tokens": 20},
    ),
    "unsure": Case("temperature", HOT | {"confidence.threshold": 9.0, "confidence.window": 5}),
    "penalties": Case(
        "min-p",
        {"base.temperature": 3.0, "base.temperature_last": True, "metrics.noise_floor": True}
        | {"draw.bans": [5, 6, 13], "draw.bias": [[20, 5.0], [21, -100], [22, 1.0]]}
        | {"repetition.penalty": 1.3, "repetition.frequency": 0.2, "repetition.presence": 0.1}
        | {"no_repeat_ngram.size": 3},
    ),
    "loops": Case(
        "greedy",
        {"loop.max_period": 32, "loop.repeats": 2, "arms.loop": "resample", "loop.heating": 0.5}
        | {"start.tokens": 3, "arms.start": "sample", "draw.bias": [[20, 30.0]]},
    ),
    "layers": Case(
        "document-000",
        {"metrics.layers": [0.0, 1.0, 0.5, 2.0], "base.temperature": 1.3}
        | {"regimes.lehv": ["entropy > 0.3", "entropy < 1"], "regimes.hehv": ["entropy > 1"]},
    ),
    "view": Case(
        "eager",
        {"base.temperature": 1.8, "arms.lelv": "branch", "arms.hehv": "backspace"}
        | {"arms.lehv": "adaptive"},
    ),
    "line": Case(
        "entropix", ALL | {"branch.until": "line", "branch.depth": 12, "arms.helv": "branch"}
    ),
    "other-bounds": Case(
        "entropix",
        ALL
        | {"regimes.lelv": ["sequence_varentropy < 0.5"], "arms.lelv": "edt"}
        | {"regimes.helv": ["attn_entropy_norm > 40%"], "arms.mid": "dynatemp"},
    ),
    "p-wrong": Case(
        "entropix",
        ALL
        | {"wrong.table": [[0.8, -0.1, -2.0, 3.0, -1.0], [-2, 0.1], [0, 0.3], [1.0, 0.9]]}
        | {"regimes.helv": ["p_wrong < 0.4", "entropy > 0.1"], "regimes.lehv": ["p_wrong > 0.5"]},
    ),
    "stopped": Case("temperature", HOT, options={"stop": ["e", "<|im_end|>"]}),
    "hooks": Case(
        "entropix",
        ALL
        | {"branch.margin": 5.0, "arms.helv": "lookup", "lookup.cooldown": 1, "lookup.per_row": 9},
        options=LOOKUP | {"ask": lambda row, texts: 1},
    ),
    "question": Case(
        "entropix",
        ALL
        | {"arms.helv": "clarify", "arms.hehv": "clarify", "arms.lehv": "clarify"}
        | {"clarify.width": 3, "clarify.least": 0.0, "clarify.length": 4, "clarify.per_row": 3},
        options={"clarify": True},
    ),
    # Branches longer than the blocks of 32 positions in which the cache is copied.
    "deep": Case("adadec", {"branch.depth": 40, "branch.commit_all": True}, budget=100),
    # End tokens: at the end of the budget, in a thought, replaced by ` and`, and of low confidence.
    "eos-last": Case("greedy", budget=3, options={"eos_ids": (PERIOD,)}),
    "eos-in-thought": Case("entropix", ALL, options={"eos_ids": (PERIOD,)}),
    "eos-later": Case(
        "greedy",
        {"budget_forcing.wait": " and", "budget_forcing.min_tokens": 12},
        options={"eos_ids": (PERIOD,)},
    ),
    "unsure-last": Case(
        "temperature", HOT | {"confidence.threshold": 100.0, "confidence.window": 5}, budget=5
    ),
    **{
        f"endless-{arm}": Case(
            "entropix", ENDLESS | {f"arms.{served}": arm for served in SERVED}, options=LOOKUP
        )
        for arm in ("inject", "lookup", "branch", "backspace")
    },
    **{f"far-back-{n}": Case("entropix", FAR_BACK, budget=n) for n in range(1, 9)},
    # Rows that are rarely in doubt, so that they go back far.
    **{
        f"doubt-{n}": Case(
            "temperature",
            {"base.temperature": 1.0, "arms.hehv": "backspace", "backspace.per_position": 8}
            | {"regimes.lelv": ["entropy < -1"], "regimes.hehv": ["entropy > 1.5"]}
            | {"backspace.reach": 8, "backspace.max_prob": 0.3},
            PROMPTS[1],
            budget=50,
        )
        for n in range(6)
    },
    # Each rule, and states that are restored where rows go back.
    **{
        f"back-{rule}": Case(
            "entropix", ALL | {"truncation.rule": rule, "branch.rollout_temperature": 1.0}
        )
        for rule in RULES
    },
    # Stop strings that tokens complete after others were retracted.
    **{
        f"stopped-{stop}": Case("entropix", FAR_BACK, PROMPTS[1], 50, {"stop": ["never", stop]})
        for stop in ("an", "er", "to", "is", "at", "in")
    },
    "back-adaptive-p": Case("entropix", ALL | {"adaptive_p.target": 0.3, "adaptive_p.decay": 0.5}),
    "cntp-hot": Case("cntp", HOT, budget=60),
}


def random_case(seed: int) -> Case:
    """Returns a row with random values of most settings."""
    rng = np.random.default_rng([7, seed])

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    def often(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.7 else otherwise

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    def share(low: float, high: float) -> float:
        return round(float(rng.uniform(low, high)), 3)

    def text() -> str:
        return str(one_of(" and then", ".", " Wait", "\n", " so the", " a", " singer is"))

    bounds = [sorted((share(0.1, 3.5), share(0.1, 3.5))) for _ in range(2)]
    thresholds = dict(zip(THRESHOLDS, itertools.chain(*bounds), strict=True))
    boxes = {
        "lelv": ["entropy < h1", "varentropy < u1"],
        "helv": ["entropy > h1", "varentropy < u2"],
        "lehv": ["entropy < h2", "varentropy > u2"],
        "hehv": ["entropy > h2", "varentropy > u1"],
    }
    quantity = one_of("agreement", "attn_entropy_norm", "sequence_varentropy")
    boxes[one_of(*boxes)] += often([], [f"{quantity} > {share(0.3, 0.7)}"])
    natural = ("argmax", "inject", "branch", "backspace", "adaptive", "resample", "argmax")
    arms = {
        f"arms.{served}": often(arm, one_of(*ARMS))
        for served, arm in zip(SERVED, natural, strict=True)
    }
    scalars = {
        "thresholds.dynamic": one_of(True, False),
        "thresholds.rate": one_of(0.05, 0.3),
        "start.tokens": often(0, number(1, 4)),
        "base.temperature": one_of(0.0, 0.5, 0.8, 1.5, 2.0, 4.0),
        "base.top_k": one_of(0, 27, 3),
        "base.top_p": one_of(0.9, 0.3, 1.0),
        "base.min_p": one_of(0.03, 0.0, 0.2),
        "base.temperature_last": one_of(True, False),
        "truncation.rule": often("nucleus", one_of(*RULES)),
        "metrics.units": one_of("bits", "thresholds"),
        "metrics.layers": one_of("all", "last"),
        "metrics.noise_floor": often(False, True),
        "metrics.attn_entropy": one_of("normalised", "raw"),
        "metrics.agreement": one_of("corrected", "published"),
        "view.temperature": often(1.0, share(0.5, 2.0)),
        "view.likeliest": often(0, number(2, 20)),
        "draw.bans": often([], rng.integers(0, 400, 5).tolist()),
        "draw.bias": often([], [[i, share(-9, 9)] for i in range(number(1, 64))]),
        "repetition.penalty": often(1.0, 1.3),
        "repetition.frequency": often(0.0, 0.3),
        "repetition.presence": often(0.0, 0.3),
        "no_repeat_ngram.size": often(0, number(1, 3)),
        "dry.multiplier": often(0.0, share(0.1, 3.0)),
        "dry.allowed_length": number(1, 3),
        "dry.breakers": often([], [text() for _ in range(2)]),
        "xtc.probability": often(0.0, share(0.1, 1.0)),
        "adaptive_p.target": often(-1.0, share(0.1, 0.6)),
        "mirostat.target": share(1.0, 4.0),
        "mirostat.rate": one_of(0.1, 1.0),
        "loop.max_period": one_of(0, number(1, 4)),
        "loop.repeats": 2,
        "loop.heating": one_of(1.0, 0.0),
        "loop.similarity": one_of(0.8, 1.0),
        "loop.hottest": one_of(1.5, 3.0),
        "adaptive.draws": number(1, 16),
        "inject.thought": [text() for _ in range(number(0, 3))],
        "inject.after": often("", [".", "\n"]),
        "inject.earliest": often(0, number(1, 8)),
        "inject.cooldown": number(0, 6),
        "inject.per_row": often(1000, number(0, 3)),
        "inject.until_confident": one_of(True, False),
        "lookup.earliest": number(0, 3),
        "lookup.cooldown": number(1, 6),
        "lookup.per_row": often(1000, number(0, 3)),
        "lookup.before": often(" [", ""),
        "lookup.most": number(1, 8),
        "branch.width": number(1, 10),
        "branch.depth": number(1, 8),
        "branch.until": often("regime", one_of("punctuation", "line", "depth")),
        "branch.sampled": often(False, True),
        "branch.narrow": 0.1,
        "branch.wide": often(0.0, share(0.5, 3.0)),
        "branch.temperature": one_of(0.4, 1.0, 3.0),
        "branch.min_p": one_of(0.1, 0.0, 0.003),
        "branch.top_p": one_of(1.0, 0.97, 0.8),
        "branch.noise": often(0.0, one_of(0.5, 2.0)),
        "branch.rollout_temperature": one_of(0.0, 0.8, 2.0),
        "branch.processed": one_of(True, False),
        "branch.entropy_weight": one_of(0.0, 0.1, -0.4, 1.3),
        "branch.varentropy_weight": one_of(0.0, 0.1, -0.4, 1.3),
        "branch.margin": one_of(0.0, 0.3, 3.0),
        "branch.commit_all": often(True, False),
        "branch.per_row": often(1000, number(0, 4)),
        "branch.max_share": often(1000.0, 0.7),
        "backspace.reach": one_of(1, number(2, 8), 8),
        "backspace.max_prob": one_of(1.0, 0.5, 0.05),
        "backspace.per_position": one_of(2, number(0, 8), 8),
        "backspace.per_row": often(40, number(0, 12)),
        "think_end.text": text(),
        "think_end.entropy": one_of(0.5, 3.0),
        "think_end.patience": often(0, number(1, 3)),
        "budget_forcing.end": text(),
        "budget_forcing.wait": text(),
        "budget_forcing.min_tokens": often(0, 20),
        "budget_forcing.max_tokens": often(0, number(5, 15)),
        "budget_forcing.times": one_of(1, 2, 100),
        "phrases.banned": often([], [text() for _ in range(3)]),
        "phrases.per_row": often(64, number(0, 2)),
        "confidence.likeliest": number(2, 20),
        "confidence.window": number(1, 9),
        "confidence.threshold": often(0.0, share(2.0, 9.0)),
    }
    return Case(
        "entropix",
        {f"thresholds.{name}": value for name, value in thresholds.items()}
        | {f"regimes.{box}": bound for box, bound in boxes.items()}
        | arms
        | scalars,
        str(one_of(*PROMPTS)),
        often(BUDGET, number(1, 40)),
        {"eos_ids": often((), (PERIOD,))} | often(LOOKUP, {}),
    )


CASES: Mapping[str, Case] = {
    **{name: Case(name) for name in preset_names()},
    **SPECIAL,
    **{f"random-{seed}": random_case(seed) for seed in range(RANDOM)},
}


def record(model: LanguageModel, folder: Path) -> dict[str, Path]:
    """Runs every row once, in one batch and one compiled step, and writes a trace of each."""
    loaded = {
        name: load_sampler(case.preset).with_values(case.changes) for name, case in CASES.items()
    }
    samplers = {name: calibrate_sampler(sampler, model) for name, sampler in loaded.items()}
    every = frozenset().union(*(sampler.parts.used for sampler in samplers.values()))
    engine = Engine(model, slots=SLOTS, capacity=256, recording=Recording(top=2, layers=True))
    requests = []
    for name, case in CASES.items():
        prompt = model.tokenizer.encode(case.prompt, add_bos=True)
        sampler = replace(samplers[name], others=every)
        requests.append(Request(prompt, sampler, case.budget, name, SEED, **case.options))
    rows = [engine.new_row(request) for request in requests]
    shown = dict.fromkeys(CASES, "")
    for event in engine.run(requests):
        shown[event.row.request.row_id] += "".join(piece.text for piece in event.pieces)
    # Emitted text is final.
    assert [*shown.values()] == [row.text for row in rows]
    paths = {}
    for name, row in zip(CASES, rows, strict=True):
        about = header(model, row.request.sampler, row.request.prompt, seed=SEED, name="tiny")
        paths[name] = folder / f"{name}.jsonl"
        Rows([row], about).save_trace(paths[name])
    return paths


class CachedReader(ModelReader):
    """A reader that computes nothing twice, for many replays of similar traces."""

    def __init__(self, model: LanguageModel, capacity: int = 256) -> None:
        super().__init__(model, capacity)
        self._known: dict[tuple[int, tuple[int, ...]], list[Reading]] = {}

    def read(self, tokens: Sequence[int], start: int) -> list[Reading]:
        key = start, tuple(tokens)
        if key not in self._known:
            self._known[key] = super().read(tokens, start)
        return self._known[key]


def _other(value: Any, rng: random.Random, size: int) -> Any:
    """Another value of the same type, farther from it than rounding."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return (value + rng.randrange(1, size)) % size
    if isinstance(value, float):
        return value + rng.choice([-1, 1]) * rng.uniform(0.01, 1.0) * (1 + abs(value))
    return rng.choice([one for one in ("lelv", "helv", "lehv", "hehv", "mid") if one != value])


NUMBERS = """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
    attn_varentropy agreement agreement_published interaction_strength confidence token_confidence
    self_certainty max_prob temperature top_p min_p p_wrong""".split()
COUNTS = ["retracted", "forwards"]


def alter(lines: Sequence[Json], rng: random.Random, size: int) -> tuple[list[Json], int, str]:
    """Changes one value of a trace. Returns the lines, the number of the line in which the replay
    must find it, and what was changed."""
    changed = copy.deepcopy([*lines])
    tokens = [index for index, line in enumerate(changed) if "token_id" in line]
    retracted = [index for index in tokens if changed[index]["type"] == "retracted"]
    forks = [index for index in tokens if changed[index].get("branches")]
    kinds = ["token", "number", "number", "regime", "action", "loop", "count", "forwards", "top_k"]
    kinds += ["text", "finish", "counts", "seed", "prompt", "layers"]
    kinds += ["retracted", "gone"] * bool(retracted) + ["score", "branch", "chosen"] * bool(forks)
    kinds += ["threshold"] * bool(changed[0]["percentiles"])
    kind, at = rng.choice(kinds), rng.choice(tokens)
    line = changed[at]
    if kind == "token":
        line["token_id"] = _other(line["token_id"], rng, size)
    elif kind == "number":
        name = rng.choice([name for name in NUMBERS if name in line])
        line[name], kind = _other(line[name], rng, size), name
    elif kind in ("regime", "loop"):
        line[kind] = _other(line[kind], rng, size)
    elif kind in ("forwards", "top_k"):
        line[kind] += rng.randrange(1, 9)
    elif kind == "action":
        line["action"] = "explore" if line["action"] != "explore" else "sample"
    elif kind == "text":
        line["text"] += "x"
    elif kind == "layers":
        name = rng.choice(["layers", "layers_varentropy"])
        line[name][rng.randrange(4)][rng.randrange(6)] += 0.1
    elif kind in ("retracted", "gone"):
        at = rng.choice(retracted)
        changed[at]["token_id"] = _other(changed[at]["token_id"], rng, size)
        if kind == "gone":
            del changed[at]
    elif kind in ("score", "branch", "chosen"):
        at = rng.choice(forks)
        branch = rng.choice(changed[at]["branches"])
        if kind == "score":
            branch["score"] = _other(branch["score"] or 0.5, rng, size)
        elif kind == "branch":
            place = rng.randrange(len(branch["tokens"]))
            branch["tokens"][place] = _other(branch["tokens"][place], rng, size)
        else:
            branch["chosen"] = not branch["chosen"]
    elif kind in ("seed", "prompt", "threshold"):
        at, head = 0, changed[0]
        key = rng.choice([*head["percentiles"]]) if kind == "threshold" else ""
        if kind == "threshold":
            head["sampler_parameters"][key] = _other(head["sampler_parameters"][key], rng, size)
        elif kind == "seed":
            head["seed"] += 1
        else:
            head["prompt_tokens"][-1] = _other(head["prompt_tokens"][-1], rng, size)
    else:
        at, row = len(changed) - 1, changed[-1]["rows"][0]
        if kind == "finish":
            row["finish_reason"] = "eos" if row["finish_reason"] != "eos" else "length"
        elif kind == "counts":
            name = rng.choice(["retracted", "forwards"])
            row[name], kind = row[name] + 1, name
        else:
            name = rng.choice(["mean_confidence", "tail_confidence", "mean_self_certainty"])
            row[name], kind = row[name] + 0.1, name
    return changed, at + 1, kind


def write(path: Path, lines: Sequence[Json]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path
