"""Every run ends, for any bounds and any budgets of the arms."""

from collections.abc import Mapping, Sequence
from itertools import product, repeat
from typing import Any

import pytest

from entropix_jax.engine.state import LENGTH, RUNNING
from entropix_jax.model.loading import load
from entropix_jax.names import BOXES, REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.state import MAX_ATTEMPTS
from tests.support.model_folders import token_ids
from tests.support.runs import Spec, run_specs
from tests.support.samplers import ARMS, BATCH, LITERAL, Job, Line, generate, params_of, tiny_model

MODEL = tiny_model()
HUGE = 10**6
ENDLESS: Mapping[str, Any] = {
    "inject.per_row": HUGE,
    "inject.cooldown": 0,
    "branch.per_row": HUGE,
    "branch.depth": 3,
    "backspace.max_prob": 1.0,
    "backspace.per_row": HUGE,
    "backspace.per_position": MAX_ATTEMPTS,
    "loop.max_period": 0,
}


def everywhere(regime: str) -> dict[str, Any]:
    """Returns bounds under which every distribution has the same regime."""
    bounds = {f"regimes.{box}": ["entropy < -1"] for box in BOXES}
    return bounds if regime == "mid" else {**bounds, f"regimes.{regime}": ["entropy > -1"]}


def job_of(regime: str, budget: int = 20, **changes: Any) -> Job:
    settings = {**ENDLESS, **everywhere(regime)}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return Job([5, 6, 7], params_of(LITERAL, settings), budget=budget)


def run(jobs: Sequence[Job]) -> list[list[Line]]:
    """Runs batches of ten rows, and checks that each uses its budget."""
    rows: list[list[Line]] = []
    for first in range(0, len(jobs), BATCH):
        rows += generate(MODEL, jobs[first : first + BATCH], chunks=repeat(32))
    for job, lines in zip(jobs, rows, strict=True):
        retractions = actions_of(lines).count("backspace")
        assert sum(len(line.tokens) for line in lines) == job.budget + retractions
        assert [line.status for line in lines] == [RUNNING] * (len(lines) - 1) + [LENGTH]
        last = lines[-1]
        assert last.position + len(last.tokens) == len(job.prompt) + job.budget
    return rows


def actions_of(lines: Sequence[Line]) -> list[str]:
    return [line.action for line in lines]


@pytest.mark.parametrize("regime", REGIMES)
def test_any_arm_in_any_regime(regime: str) -> None:
    """Runs every arm in every regime, with and without a loop guard that triggers everywhere."""
    guards: list[dict[str, Any]] = [{}, {"loop__max_period": 4, "loop__repeats": 2}]
    arms = [*product(ARMS, guards)]
    jobs = [
        job_of(regime, inject__thought="ab", **{f"arms__{regime}": arm}, **guard)
        for arm, guard in arms
    ]
    for (arm, guard), lines in zip(arms, run(jobs), strict=True):
        if not guard:
            expected = arm if arm in ACTIONS else "sample"
            assert expected in actions_of(lines)


# With answers from the host


@pytest.mark.parametrize("thought", ["", "ab"])
@pytest.mark.parametrize("text", ["", "x", "a text that does not fit " * 20])
def test_retrieve_is_called_once_per_position(folder: str, text: str, thought: str) -> None:
    asked: list[str] = []

    def retrieve(said: str) -> str:
        asked.append(said)
        return text

    settings = {**ENDLESS, **everywhere("helv"), "inject.thought": thought}
    sampler = load_sampler(LITERAL).with_values({**settings})
    wanted = Spec([token_ids()["<|begin_of_text|>"], 60, 61], "0", 20)
    (row,) = run_specs(load(folder), [wanted], sampler, ignore_eos=True, retrieve=retrieve).run()
    assert (len(row.tokens), row.finish_reason) == (20, "length")
    assert 5 <= len(asked) <= 20
    assert len({*asked}) == len(asked), "once at a position"
