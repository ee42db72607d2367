"""Mechanisms of one's own: the example of docs/adding-an-arm.md, and one that ends the row."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import entropix_jax
from entropix_jax.engine.decode import decode
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import BOXES
from entropix_jax.sampler.context import Context, Proposal, draw
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Step
from tests.support.samplers import HOST, LITERAL, Job, generate, tiny_model

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "change_course.py"
MODEL = tiny_model()
# Every step is HEHV, and nothing loops.
LOST = {f"regimes.{box}": ["entropy < -1"] for box in BOXES} | {
    "regimes.hehv": ["entropy > -1"],
    "loop.max_period": 0,
}


def load_example() -> Mechanism:
    mechanism: Mechanism = runpy.run_path(str(EXAMPLE))["CHANGE_COURSE"]
    return mechanism


def end(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    return replace(step, ends=step.ends | acts)


def give_up(ctx: Context) -> Proposal:
    return draw("give_up", ctx, temperature=0.0)


SAMPLER = (
    load_sampler(LITERAL)
    .with_mechanism(load_example())
    .with_mechanism(Mechanism("give_up", give_up, apply=end))
    .with_values({**LOST, "arms.hehv": "change_course", "change_course.words": "abc"})
)


def job_of(row_id: str = "0", **changes: Any) -> Job:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    settings = SAMPLER.with_values(values).settings(**HOST)
    return Job([5, 6, 7], settings, budget=12, row_id=row_id)


JOBS = [
    job_of(),
    job_of("1", change_course__patience=1),
    job_of("2", change_course__patience=5, change_course__words="xy"),
    job_of("3", arms__hehv="give_up"),
]


@pytest.fixture(scope="module")
def rows() -> list[list[Any]]:
    return generate(MODEL, JOBS)


def test_a_text_after_so_many_lost_tokens(rows: list[list[Any]]) -> None:
    told = ["".join(step.action[0] for step in steps) for steps in rows[:3]]
    assert told == ["rrrcccrrrccc", "rcccrcccrccc", "rrrrrccrrrrr"]  # `resample`, `change_course`
    for steps, words in zip(rows, ("abc", "abc", "xy"), strict=False):
        written = [step.token for step in steps if step.action == "change_course"]
        assert written == [*words.encode()] * (len(written) // len(words))


def test_a_mechanism_may_end_its_row(rows: list[list[Any]]) -> None:
    """With the token of the step that acts; the rows beside it go on."""
    (step,) = rows[3]
    assert (step.action, step.position) == ("give_up", 3)
    greedy = job_of(arms__hehv="argmax")
    assert step.token == generate(MODEL, [greedy])[0][0].token
    assert [len(steps) for steps in rows[:3]] == [12, 12, 12]


def test_a_row_is_itself_whatever_runs_beside_it(rows: list[list[Any]]) -> None:
    """And its settings are traced: others compile nothing."""
    jitted: Any = decode
    generate(MODEL, [*JOBS[:3], job_of(change_course__patience=7, change_course__words="")])
    programs = jitted._cache_size()
    generate(MODEL, JOBS)
    assert jitted._cache_size() == programs
    for job, steps in zip(JOBS, rows, strict=True):
        (again,) = generate(MODEL, [job])
        assert [(s.token, s.action) for s in again] == [(s.token, s.action) for s in steps]


def test_as_a_user_sees_it(tiny: LanguageModel, tmp_path: Path) -> None:
    """Its action has its name in results, traces and pages."""
    sampler: Sampler = SAMPLER.with_values({"change_course.words": " is"})
    rows = entropix_jax.generate(tiny, "Tom", sampler, max_new_tokens=8, ignore_eos=True)
    counts = rows[0].to_json()["actions"]
    assert [*counts] == ["resample", "change_course"]
    assert counts["resample"] + counts["change_course"] == 8
    written = [token.token_id for token in rows[0].tokens if token.action == "change_course"]
    ids = tiny.tokenizer.encode_within(" is")
    assert written == [*ids] * (len(written) // len(ids))
    rows.save_report(tmp_path / "run.html")
    assert "change_course" in (tmp_path / "run.html").read_text()
