"""Pivot tokens: each is the greedy answer to a prompt that is longer by what is forced."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import Recording
from entropix_jax.lab.pivots import fit_logistic, predict
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import Question, read_questions
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import one_error, run_command

TOKENS = 24


def answer_to(model: LanguageModel, question: Question, given: list[int]) -> Row:
    """The greedy answer that begins with these tokens."""
    engine = Engine(model, slots=1, capacity=128, recording=Recording(top=2))
    greedy = calibrate_sampler(load_sampler("greedy"), model)
    prompt, left = (*question.prompt, *given), TOKENS - len(given)
    row = Row(Request(prompt, greedy, left, eos_ids=question.ends))
    list(engine.run([row]))
    return row


def test_labels_and_measures(tiny: LanguageModel, tmp_path: Path) -> None:
    arguments = ["pivots", "--task", "word-problems", "--model", "tiny", "--items", 3]
    arguments += ["--tokens", TOKENS, "--precision", "float32", "--output", tmp_path]
    assert run_command(*arguments).status == 0
    results = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    task = find_task("word-problems")
    questions = {q.item.id: q for q in read_questions(tiny, task, "test", 3, TOKENS)}
    for found in results:
        question = questions[found["id"].removeprefix("word-problems/")]
        row = answer_to(tiny, question, [])
        answer = task.extract(question.item, row.text)
        assert found["answer"] == answer
        assert found["entropy"] == pytest.approx([t.entropy for t in row.tokens], abs=1e-4)
        ids = [token.token_id for token in row.tokens]
        for at in range(0, len(ids), 4):
            top = row.tokens[at].top
            assert top is not None
            given = [*ids[:at], next(i for i, _, _ in top if i != ids[at])]
            text = tiny.tokenizer.decode(given)
            if given[-1] not in question.ends:
                text += answer_to(tiny, question, given).text
            other = task.extract(question.item, text)
            assert found["pivot"][at] == (other != answer)
            right = question.item.answer
            assert found["mistake"][at] == (answer != right and other == right)
    # Nothing is run again.
    before = (tmp_path / "tokens.jsonl").read_bytes()
    assert "| word-problems | pivot" in run_command(*arguments).out
    assert (tmp_path / "tokens.jsonl").read_bytes() == before


def test_a_regression_is_at_its_optimum() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 3))
    positive = rng.random(400) < 1 / (1 + np.exp(1 - 2 * x[:, 0] + x[:, 2]))
    weights = fit_logistic(x, positive)
    p = 1 / (1 + np.exp(-x @ weights))
    np.testing.assert_allclose(x.T @ (p - positive) + weights, 0, atol=1e-6)


def test_no_prompt_predicts_its_own_tokens() -> None:
    """What a fold's own labels are does not change its predictions."""
    rng = np.random.default_rng(5)
    x, prompts = np.abs(rng.normal(size=(300, 2))), np.repeat(np.arange(30), 10)
    positive = rng.random(300) < 0.4
    other = np.where(prompts % 10 == 3, ~positive, positive)
    same = prompts % 10 == 3
    np.testing.assert_array_equal(
        predict(x, positive, prompts)[same], predict(x, other, prompts)[same]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "documents"], "task 'documents': free text has no answers to compare"),
        (["--task", "sums", "--items", "-1"], "--items"),
        ([], "--task must be given"),
        (["--task", "nothing"], "no task 'nothing'"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    found = run_command("pivots", *arguments, "--model", "tiny", "--output", tmp_path / "out")
    one_error(found, message)
