"""`lookups`: each answer with a lookup against a row of its own with the same forced tokens."""

from __future__ import annotations

import csv
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.state import Recording
from entropix_jax.host.lookup import open_lookup
from entropix_jax.lab.tasks.reading import first_sentence
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import Question, read_questions
from entropix_jax.lab.world.lexicon import PEOPLE
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Result, one_error, run_command
from tests.support.runs import run_rows
from tests.support.sources import PACKAGE

TOKENS, ITEMS, SAMPLES = 24, 2, 2
REAL = PACKAGE.parent / "configs/ablations/real"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lookups")


@pytest.fixture(scope="module")
def found(folder: Path) -> Result:
    """A run with a table of all people."""
    lines = [f"{name},{name} lives in Rome" for name in PEOPLE]
    (folder / "people.csv").write_text("\n".join(["key,value", *lines]))
    return run_command(
        *("lookups", "--task", "facts", "--lookup", folder / "people.csv", "--model", "tiny"),
        *("--items", ITEMS, "--tokens", TOKENS, "--samples", SAMPLES, "--precision", "float32"),
        *("--before", " [", "--after", "]", "--output", folder / "out"),
    )


def read(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out/rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def run_alone(model: LanguageModel, question: Question, given: list[int], extra: int = 0) -> Row:
    """Runs a single greedy row whose first tokens are forced."""
    engine = Engine(model, slots=1, capacity=128, recording=Recording(top=2))
    greedy = calibrate_sampler(load_sampler("greedy"), model)
    ends, stop = question.ends, question.task.stop
    asked = Request(question.prompt, greedy, TOKENS + extra, eos_ids=ends, stop=stop, forced=given)
    return run_rows(engine, [asked])[0]


def test_a_lookup_equals_forced_tokens(tiny: LanguageModel, folder: Path, found: Result) -> None:
    one_error(found, "all 2 answers are right: P(wrong) needs both outcomes")
    task = find_task("facts")
    questions = {q.item.id: q for q in read_questions(tiny, task, "test", ITEMS, TOKENS)}
    rows = {row["id"].partition("/")[2]: row for row in read(folder) if row["split"] == "test"}
    assert rows.keys() == questions.keys()
    for name, row in rows.items():
        question = questions[name]
        prompt = question.item.prompt[-1]
        assert isinstance(prompt, dict)
        person = next(word for word in prompt["content"].strip("?").split() if word in PEOPLE)
        inserted = tiny.tokenizer.encode_within(f" [{person} lives in Rome]")
        alone = run_alone(tiny, question, [])
        ids, texts = ([getattr(t, key) for t in alone.tokens] for key in ("token_id", "text"))
        assert (row["answer"], row["texts"]) == (alone.text, texts)
        for measure in ("entropy", "varentropy", "max_prob", "agreement"):
            expected = [getattr(token, measure) for token in alone.tokens]
            assert row[measure] == pytest.approx(expected, abs=1e-4)
        assert len(row["lookups"]) == len(ids)
        for at, (score, lowest, text) in enumerate(row["lookups"]):
            changed = run_alone(tiny, question, [*ids[:at], *inserted], len(inserted))
            after = changed.tokens[at + len(inserted) :]
            assert text == f"{''.join(texts[:at])} {''.join(token.text for token in after)}"
            assert score == task.score(question.item, task.extract(question.item, text))
            own = [token.max_prob for token in (*changed.tokens[:at], *after)]
            assert lowest == pytest.approx(min(own), abs=1e-4)


def test_samples_and_tuning_rows(folder: Path, found: Result) -> None:
    assert found.status
    rows = read(folder)
    assert [row["split"] for row in sorted(rows, key=lambda row: row["line"])] == [
        *("tuning", "tuning", "test", "test")
    ]
    for row in rows:
        is_test = row["split"] == "test"
        assert len(row["samples"]) == SAMPLES * is_test
        assert all(text == first_sentence(text) for text in row["samples"])
        assert bool(row["lookups"]) == is_test
    # The stored rows are those of the run, without the keys of its store.
    stored = lzma.decompress((folder / "out/rows.jsonl.xz").read_bytes()).decode().splitlines()
    ids = [json.loads(line)["id"] for line in stored]
    assert ids == [row["id"] for row in sorted(rows, key=lambda row: row["line"])]


def test_a_lookup_of_each_fact_has_its_answer() -> None:
    lookup = open_lookup(str(REAL / "facts.csv"))
    with (REAL / "facts.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 400
    for row in rows:
        assert lookup(row["question"]) == row["value"]
        assert row["answer"].split("|")[0] in row["value"]


def test_facts_are_split_into_halves() -> None:
    task = find_task(f"{REAL / 'questions.py'}:LOOKUP_FACTS")
    halves = [{item.id for item in task.items(split, chat=True)} for split in ("tuning", "test")]
    assert [*map(len, halves)] == [200, 200]
    assert not halves[0] & halves[1]
    for split in ("tuning", "test"):
        for item in task.items(split, chat=True):
            assert task.score(item, task.extract(item, f"It is {item.accepted[-1]}.")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "sums"], "--lookup must be given"),
        (["--lookup", "table.csv"], "--task must be given"),
        (["--task", "sums", "--lookup", "table.csv", "--tokens", 0], "--tokens"),
        (
            ["--task", "sums", "--lookup", "exec:/bin/true"],
            "--lookup exec:/bin/true: must be a table",
        ),
        (["--rows", "nowhere.jsonl"], "nowhere.jsonl: cannot be read: no such file"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    one_error(run_command("lookups", *arguments, "--output", tmp_path / "out"), message)
