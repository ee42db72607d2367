"""Random rows of a random model, played to their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.decode import decode
from entropix_jax.engine.state import RUNNING, BranchLog, DecodeState, Recording, StepRecord
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.settings import RULES
from tests.support.samplers import ARMS, Job, batch_of, params_of, start, tiny_model

CAPACITY = 64


CONFIG, PARAMS = tiny_model()


NATURAL = {
    "lelv": "argmax",
    "helv": "inject",
    "lehv": "branch",
    "hehv": "backspace",
    "mid": "adaptive",
}


def random_job(rng: np.random.Generator, row_id: str) -> Job:
    """A row of any length, under bounds that share out what this model's distributions are like."""
    prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, 26)).tolist()
    longest = CAPACITY - len(prompt)
    budget = longest if rng.random() < 0.1 else int(rng.integers(1, min(longest, 32) + 1))
    return Job(
        prompt,
        params_of(
            "entropix",
            {**random_bounds(rng), **random_settings(rng)},
            encode=lambda text: [int(token) for token in text.split()],
        ),
        budget=budget,
        seed=int(rng.integers(3)),
        row_id=row_id,
    )


def random_bounds(rng: np.random.Generator) -> dict[str, Any]:
    h1, h2 = np.sort(rng.uniform(0.5, 3.5, 2)).round(3)
    u1, u2 = np.sort(rng.uniform(1.0, 4.5, 2)).round(3)
    bounds = {
        "lelv": [f"entropy < {h1}", f"varentropy < {u1}"],
        "helv": [f"entropy > {h1}", f"varentropy < {u2}"],
        "lehv": [f"entropy < {h2}", f"varentropy > {u2}"],
        "hehv": [f"entropy > {h2}", f"varentropy > {u1}"],
    }
    if rng.random() < 0.3:
        quantity, bound = (
            ("agreement", rng.uniform(0.3, 0.7)),
            ("attn_entropy_norm", rng.uniform(0.2, 0.8)),
        )[int(rng.integers(2))]
        bounds[str(rng.choice([*bounds]))].append(f"{quantity} > {bound:.3f}")
    arms = {
        f"arms.{regime}": arm if rng.random() < 0.7 else str(rng.choice(ARMS))
        for regime, arm in NATURAL.items()
    }
    return {f"regimes.{box}": bound for box, bound in bounds.items()} | arms


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    def often(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.6 else otherwise

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    thoughts = [
        " ".join(map(str, rng.integers(0, CONFIG.vocab_size, number(1, 5))))
        for _ in range(number(0, 3))
    ]
    return {
        "base.temperature": often(0.8, rng.choice([0.0, 0.4, 1.5, 4.0]).item()),
        "base.top_k": often(27, rng.choice([0, 3, 299]).item()),
        "base.top_p": often(0.9, rng.choice([0.3, 1.0]).item()),
        "base.min_p": often(0.03, rng.choice([0.0, 0.2]).item()),
        "truncation.rule": often("nucleus", str(rng.choice(RULES))),
        "metrics.layers": often("all", "last"),
        "metrics.noise_floor": often(False, True),
        "metrics.attn_entropy": often("normalised", "raw"),
        "draw.bans": often([], rng.integers(0, CONFIG.vocab_size, 5).tolist()),
        "repetition.penalty": often(1.0, 1.3),
        "loop.max_period": often(0, number(1, 4)),
        "loop.repeats": 2,
        "adaptive.draws": number(1, 16),
        "inject.thought": thoughts,
        "inject.cooldown": number(0, 6),
        "inject.per_row": often(1000, number(0, 3)),
        "inject.until_confident": often(False, True),
        "branch.width": number(1, 8),
        "branch.depth": number(1, 8),
        "branch.min_p": often(0.1, 0.0),
        "branch.noise": often(0.0, 0.5),
        "branch.rollout_temperature": often(0.0, 0.7),
        "branch.commit_all": often(True, False),
        "branch.per_row": often(1000, number(0, 4)),
        "backspace.per_position": often(2, number(0, 8)),
        "backspace.per_row": often(1000, number(0, 6)),
    }


@dataclass
class Line:
    """What one step did to one row."""

    action: str
    entropy: float
    tokens: list[int]  # one, or a branch's
    logprobs: list[float]
    position: int
    forwards: int
    rolled_out: int
    finish: int
    branching: int  # rows that branched in the same step
    exact: tuple[Any, ...]  # all that must be the same wherever the row runs
    numbers: np.ndarray  # and all that may differ by rounding


def play(
    jobs: Sequence[Job],
    ends: Sequence[int],
    chunks: Iterator[int],
    look: Callable[[DecodeState], None] = lambda state: None,
    params: Params = PARAMS,
) -> list[list[Line]]:
    """Runs rows to their ends, some steps at a time, and looks at the state in between."""
    state = start(CONFIG, params, jobs, CAPACITY)
    sampler = batch_of(*(job.sampler for job in jobs))
    lines: list[list[Line]] = [[] for _ in jobs]
    look(state)
    while np.any(state.finish == RUNNING):
        state, records, log = decode(
            params,
            sampler,
            jnp.asarray(ends, jnp.int32),
            state,
            jnp.int32(next(chunks)),
            config=CONFIG,
            window=CAPACITY,
            max_steps=32,
            recording=Recording(),
        )
        records, log = jax.device_get((records, log))
        look(state)
        for step, row in zip(*np.nonzero(records.live), strict=True):
            one = jax.tree.map(lambda x, at=(step, row): x[at], records)
            branching = int(np.sum(records.branch[step] >= 0))
            lines[row].append(line_of(one, log, branching))
    return lines


def line_of(record: StepRecord, log: BranchLog, branching: int) -> Line:
    choice = record.choice
    tokens, logprobs, rolled_out = [int(choice.token)], [float(choice.logprob)], 0
    exact = [record.may_backspace, choice.observation.looping, choice.proposal.top_k]
    floats = jax.tree.leaves(choice)
    if record.branch >= 0:
        branches, count = log.branches, int(log.committed[record.branch])
        entry = jax.tree.map(lambda x: x[record.branch], branches)
        rolled_out = int(entry.length.sum())
        tokens = entry.tokens[entry.best, :count].tolist()
        logprobs = entry.logprobs[:count].tolist()
        exact += [entry.best, entry.ambiguous]
        exact += [path[:n].tolist() for path, n in zip(entry.tokens, entry.length, strict=True)]
        exact += entry.observation.regime[:count].tolist()
        told = (entry.observation, entry.logprobs, log.sequence_varentropy[record.branch])
        floats += [x[:count] for x in jax.tree.leaves(told)] + [entry.score]
    action = ACTIONS[choice.proposal.action]
    regime = REGIMES[choice.observation.regime]
    return Line(
        action=action,
        entropy=float(choice.observation.metrics.entropy),
        tokens=tokens,
        logprobs=logprobs,
        position=int(record.position),
        forwards=int(record.forwards),
        rolled_out=rolled_out,
        finish=int(record.finish),
        branching=branching,
        exact=(action, regime, tokens, record.position, record.forwards, record.finish, *exact),
        numbers=np.concatenate([np.ravel(x) for x in floats if x.dtype == np.float32]),
    )
