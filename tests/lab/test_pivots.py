"""Pivot tokens and sampled outcomes of `pivots`, each against a row that runs alone, with forced
tokens and the same random numbers.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.state import Recording
from entropix_jax.lab import prediction
from entropix_jax.lab.strength import fork_strength, permuted_strength
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import Question, read_questions
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import one_error, run_command
from tests.support.runs import run_rows

TOKENS, ITEMS, OUTCOMES = 24, 8, 8
TASKS = ("word-problems", "entropix_jax.lab.tasks.tiny:STORIES")
ARGUMENTS = (
    *("pivots", "--task", *TASKS, "--model", "tiny", "--items", ITEMS, "--tokens", TOKENS),
    *("--outcomes", OUTCOMES, "--precision", "float32"),
)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a complete run."""
    path = tmp_path_factory.mktemp("pivots")
    found = run_command(*ARGUMENTS, "--output", path)
    assert found.status == 0
    assert (path / "summary.md").read_text() == found.out.removesuffix("\n")
    return path


@pytest.fixture(scope="module")
def questions(tiny: LanguageModel) -> dict[str, Question]:
    tasks = [find_task(name) for name in TASKS]
    asked = [q for task in tasks for q in read_questions(tiny, task, "test", ITEMS, TOKENS)]
    return {f"{q.task.name}/{q.item.id}": q for q in asked}


def run_alone(model: LanguageModel, request: Request, given: list[int]) -> Row:
    """Runs a single row whose first tokens are forced."""
    engine = Engine(model, slots=1, capacity=128, recording=Recording(top=2))
    return run_rows(engine, [replace(request, forced=given)])[0]


def ask(question: Question, sampler: CalibratedSampler, name: str = "0", seed: int = 0) -> Request:
    return Request(
        question.prompt,
        sampler,
        TOKENS,
        row_id=name,
        seed=seed,
        eos_ids=question.ends,
        stop=question.task.stop,
    )


def test_labels_and_measures(
    tiny: LanguageModel, folder: Path, questions: dict[str, Question]
) -> None:
    greedy = calibrate_sampler(load_sampler("greedy"), tiny)
    for found in read(folder)[::7]:
        question = questions[found["id"]]
        row = run_alone(tiny, ask(question, greedy), [])
        answer = question.task.extract(question.item, row.text)
        assert found["answer"] == answer
        assert found["index"] == [*range(len(row.tokens))]
        ids = found["token_id"]
        assert ids == [token.token_id for token in row.tokens]
        assert found["entropy"] == pytest.approx([t.entropy for t in row.tokens], abs=1e-4)
        means = np.mean(found["heads"], axis=1)
        np.testing.assert_allclose(means, found["attn_entropy_norm"], atol=1e-3)
        for at in range(0, len(ids), 8):
            top = row.tokens[at].top
            assert top is not None
            assert [found["p1"][at], found["p2"][at]] == pytest.approx([p for *_, p in top], 1e-3)
            given = [*ids[:at], next(i for i, _, _ in top if i != ids[at])]
            other = question.task.extract(
                question.item, run_alone(tiny, ask(question, greedy), given).text
            )
            assert found["pivot"][at] == (other != answer)
            score = question.task.score
            right = score(question.item, answer) < 1 <= score(question.item, other)
            assert found["mistake"][at] == right


def test_outcomes_equal_those_of_single_rows(
    tiny: LanguageModel, folder: Path, questions: dict[str, Question]
) -> None:
    sampler = load_sampler("temperature").with_values({"base.temperature": 1.0})
    own = calibrate_sampler(sampler, tiny)
    checked = 0
    for found in read(folder)[3::8]:
        question = questions[found["id"]]
        forks = [at for at, tokens in enumerate(found["alternatives"]) if tokens]
        for at in forks[:1]:
            for token_id, p, counts in found["alternatives"][at]:
                assert p >= 0.05
                outcomes: Counter[str | None] = Counter()
                for number in range(OUTCOMES):
                    name = f"{found['id']}/{at}/{token_id}/{number}"
                    given = [*found["token_id"][:at], token_id]
                    row = run_alone(tiny, ask(question, own, name), given)
                    outcomes[question.task.extract(question.item, row.text)] += 1
                assert outcomes == dict(counts)
                checked += 1
    assert checked >= 3


def test_strengths_equal_those_of_the_outcomes(folder: Path) -> None:
    several = 0
    for found in read(folder):
        for at, tokens in enumerate(found["alternatives"]):
            if not tokens:
                assert found["strength"][at] == found["permuted"][at] == 0
                continue
            chances = [p for _, p, _ in tokens]
            names = dict.fromkeys(outcome for *_, counts in tokens for outcome, _ in counts)
            table = np.array([[dict(map(tuple, c)).get(n, 0) for n in names] for *_, c in tokens])
            assert (table.sum(axis=1) == OUTCOMES).all()
            assert found["strength"][at] == fork_strength(chances, table / OUTCOMES)
            assert found["permuted"][at] == permuted_strength(chances, table)
            several += 1
    assert several > 20


def test_sampled_strengths_agree_with_the_true_ones(folder: Path) -> None:
    stories = prediction.read_tokens(str(folder / "tokens.jsonl"))["stories"].columns
    chosen = (stories["alternatives"] > 1) & ~np.isnan(stories["true"])
    assert chosen.sum() >= 15
    assert prediction.spearman(stories["strength"][chosen], stories["true"][chosen]) > 0.8
    assert "stories: Spearman's rho with the true F is 0." in (folder / "summary.md").read_text()


def test_a_run_resumes(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "tokens.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:100])
    sidecar = (folder / "tokens.jsonl.run.json").read_bytes()
    (tmp_path / "tokens.jsonl.run.json").write_bytes(sidecar)
    changed = run_command(*ARGUMENTS, "--output", tmp_path, "--seed", 1)
    one_error(changed, "holds another run's results: seed was 0 and is now 1")
    changed = run_command(*ARGUMENTS, "--output", tmp_path, "--sampler", "min-p")
    one_error(changed, "holds another run's results: sampler.base.min_p was 0.0")
    assert run_command(*ARGUMENTS, "--output", tmp_path).status == 0
    *kept, again = read(tmp_path)
    *_, last = read(folder)
    assert kept == read(folder)[:-1]
    assert [[(i, c) for i, _, c in t] for t in again["alternatives"]] == [
        [(i, c) for i, _, c in t] for t in last["alternatives"]
    ]
    assert again["entropy"] == pytest.approx(last["entropy"], abs=1e-4)
    # A finished run does not run again.
    before = path.read_bytes()
    assert run_command(*ARGUMENTS, "--output", tmp_path).status == 0
    assert path.read_bytes() == before


def test_rows_print_the_summary(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are repeated so that there are enough of them for a summary."""
    monkeypatch.setattr(prediction, "_RESAMPLES", 20)
    answers = [each for each in read(folder) if each["task"] == "stories"] * 2
    path = tmp_path / "tokens.jsonl.gz"
    lines = [json.dumps(answer) for answer in (*answers, {"task": "stories", "error": "too long"})]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = run_command("pivots", "--rows", path)
    assert found.status == 0
    assert "| stories | F " in found.out
    assert "base + attention per head" in found.out
    assert "Left out: stories, mistake: positive at 0 of" in found.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "documents"], "task 'documents': free text has no answers to compare"),
        (["--task", "sums", "--items", "-1"], "--items"),
        (["--task", "sums", "--outcomes", "33"], "--outcomes 33: more than the 32 rows"),
        (["--task", "sums", "--sampler", "nothing"], "nothing"),
        ([], "--task must be given"),
        (["--task", "nothing"], "no task 'nothing'"),
        (["--rows", "nowhere.jsonl"], "nowhere.jsonl: cannot be read: no such file"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    found = run_command("pivots", *arguments, "--model", "tiny", "--output", tmp_path / "out")
    one_error(found, message)


def test_other_refusals(tmp_path: Path) -> None:
    one_error(run_command("pivots", "--task", "sums", "--model", "tiny"), "--output must be given")
    for content, message in (
        ('{"task": "sums"}\n', "line 1 is not a result of pivots"),
        ("no JSON\n", "line 1 is not a result of pivots"),
        ('{"task": "sums", "error": "too long"}\n', "no question was answered"),
    ):
        path = tmp_path / "tokens.jsonl"
        path.write_text(content)
        one_error(run_command("pivots", "--rows", path), message)
