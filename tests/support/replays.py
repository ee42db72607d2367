"""Traces to replay: one run with every preset, and alterations of a trace."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Rows
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.model.loading import LanguageModel
from entropix_jax.replay.model import ModelReader
from entropix_jax.replay.state import Reading
from entropix_jax.sampler.presets import load_sampler, preset_names
from tests.support.runs import run_rows
from tests.support.samplers import EVERYTHING

Json = dict[str, Any]

SEED, BUDGET, SLOTS = 5, 24, 8
PROMPT = "Guests: the sky is"
ANYWHERE = {"inject.after": "", "inject.earliest": 0, "inject.per_row": 1000, "start.tokens": 0}
HOT = {"base.temperature": 2.0}
# Settings that no preset has. Each is a preset and its changes.
SPECIAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "everything": ("entropix", EVERYTHING | ANYWHERE),
    "first-tokens": (
        "entropix",
        EVERYTHING | ANYWHERE | {"branch.commit_all": False, "branch.margin": 5.0},
    ),
    "far-back": (
        "entropix",
        EVERYTHING
        | ANYWHERE
        | {"backspace.reach": 8, "backspace.max_prob": 1.0, "backspace.per_position": 8}
        | {"branch.rollout_temperature": 1.5, "branch.noise": 1.0, "branch.processed": True}
        | {"branch.min_p": 0.02, "xtc.probability": 0.5, "base.top_p": 0.9},
    ),
    "dynamic": ("entropix", EVERYTHING | ANYWHERE | {"thresholds.dynamic": True}),
    "phrases": ("temperature", HOT | {"phrases.banned": [".", " a", " is a singer", "\n"]}),
    "thinking": (
        "temperature",
        HOT
        | {"think_end.text": " So the", "think_end.entropy": 3.0, "think_end.patience": 3}
        | {"budget_forcing.end": " end", "budget_forcing.wait": " Wait"}
        | {"budget_forcing.min_tokens": 18, "budget_forcing.max_tokens": 20},
    ),
    "unsure": ("temperature", HOT | {"confidence.threshold": 9.0, "confidence.window": 5}),
    "penalties": (
        "min-p",
        {"base.temperature": 3.0, "base.temperature_last": True, "metrics.noise_floor": True}
        | {"draw.bans": [5, 6, 13], "draw.bias": [[20, 5.0], [21, -100], [22, 1.0]]}
        | {"repetition.penalty": 1.3, "repetition.frequency": 0.2, "repetition.presence": 0.1}
        | {"no_repeat_ngram.size": 3},
    ),
    "loops": (
        "greedy",
        {"loop.max_period": 32, "loop.repeats": 2, "arms.loop": "resample", "loop.heating": 0.5}
        | {"start.tokens": 3, "arms.start": "sample", "draw.bias": [[20, 30.0]]},
    ),
    "layers": (
        "document-000",
        {"metrics.layers": [0.0, 1.0, 0.5, 2.0], "base.temperature": 1.3}
        | {"regimes.lehv": ["entropy > 0.3", "entropy < 1"], "regimes.hehv": ["entropy > 1"]},
    ),
    "view": (
        "eager",
        {"base.temperature": 1.8, "arms.lelv": "branch", "arms.hehv": "backspace"}
        | {"arms.lehv": "adaptive"},
    ),
    "line": (
        "entropix",
        EVERYTHING | ANYWHERE | {"branch.until": "line", "branch.depth": 12, "arms.helv": "branch"},
    ),
    "other-bounds": (
        "entropix",
        EVERYTHING
        | ANYWHERE
        | {"regimes.lelv": ["sequence_varentropy < 0.5"], "arms.lelv": "edt"}
        | {"regimes.helv": ["attn_entropy_norm > 40%"], "arms.mid": "dynatemp"},
    ),
    "stopped": ("temperature", HOT),
    "hooks": ("entropix", EVERYTHING | ANYWHERE | {"branch.margin": 5.0}),
}
NAMES = (*preset_names(), *SPECIAL)


def samplers(model: LanguageModel) -> dict[str, CalibratedSampler]:
    """All presets and special samplers, as parts of one compiled step."""
    loaded = {name: load_sampler(name) for name in preset_names()}
    loaded |= {name: load_sampler(one).with_values(own) for name, (one, own) in SPECIAL.items()}
    found = {name: calibrate_sampler(sampler, model) for name, sampler in loaded.items()}
    every = frozenset().union(*(sampler.parts.used for sampler in found.values()))
    return {name: replace(sampler, others=every) for name, sampler in found.items()}


def record(model: LanguageModel, folder: Path) -> dict[str, Path]:
    """Runs every sampler once, in one batch, and writes a trace of each row."""
    prompt, paths = model.tokenizer.encode(PROMPT, add_bos=True), {}
    engine = Engine(model, slots=SLOTS, capacity=256, recording=Recording(top=2, layers=True))
    wanted = [
        Request(prompt, sampler, BUDGET, name, SEED, model.eos_ids)
        for name, sampler in samplers(model).items()
    ]
    changes: dict[str, Json] = {name: {"eos_ids": ()} for name in SPECIAL}
    changes |= {
        "stopped": {"stop": ["e", "<|im_end|>"], "eos_ids": ()},
        "hooks": {"retrieve": lambda text: " so", "ask": lambda row, texts: 1, "eos_ids": ()},
    }
    for row in run_rows(engine, [replace(one, **changes.get(one.row_id, {})) for one in wanted]):
        name, sampler = row.request.row_id, row.request.sampler
        paths[name] = folder / f"{name}.jsonl"
        Rows([row], header(model, sampler, prompt, seed=SEED, name="tiny")).save_trace(paths[name])
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
    self_certainty max_prob temperature top_p min_p""".split()
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
        name = rng.choice(NUMBERS)
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
        line["layers"][rng.randrange(4)][rng.randrange(6)] += 0.1
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
