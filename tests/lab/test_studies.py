"""Whole studies: rows, tables, summary, plots, tuning, resuming, and bad input."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

from entropix_jax.batch.output import Store
from entropix_jax.cli.options import EXIT_OK
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.decode import decode
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.results import Row
from entropix_jax.engine.search import Search
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.errors import UserError
from entropix_jax.lab.findings import analyse
from entropix_jax.lab.page import format_page
from entropix_jax.lab.results import COLUMNS, read_rows, results_frame, write_rows
from entropix_jax.lab.sweep import Setting, read_sweep
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.tasks.task import Item, Task
from entropix_jax.lab.tasks.writing import Writing
from entropix_jax.lab.trials import TUNING, Trial, make_result, read_questions
from entropix_jax.model import loading
from entropix_jax.model.checkpoint import fingerprint
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Result, refusal
from tests.support.commands import run_command as run
from tests.support.model_folders import MAX_POSITIONS
from tests.support.runs import Spec, run_specs, unrun
from tests.support.samplers import LITERAL

ROOT = Path(__file__).parents[2]

SWEEP = f"""description = "A small study"
tasks = ["sums", "facts"]
items = 2
seeds = [0, 1, 5]
max_new_tokens = 14
baseline = "hot"
[settings.hot]
sampler = "temperature"
"base.temperature" = 1.8
[settings.literal]
sampler = "{LITERAL}"
"base.temperature" = 1.8
"adaptive.temperature_logits" = 1.0
[tuning]
samplers = ["top-p"]
settings = 3
items = {{ sums = 1, facts = 1 }}
[tuning.over.top-p]
"base.temperature" = {{ from = 1.0, to = 3.0 }}
"""
SETTINGS = ("hot", "literal", "top-p (tuned)")
SEEDS = (0, 1, 5)


def succeed(command: str, *arguments: object) -> None:
    result = run(command, *arguments)
    assert result.status == EXIT_OK, result.err


def read_table(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_page(folder: Path) -> str:
    """Returns the summary without the commit, which may change while tests run."""
    return re.sub(r"^- commit: .*$", "", (folder / "summary.md").read_text(), flags=re.MULTILINE)


def section(folder: Path, name: str) -> list[list[str]]:
    """Returns the cells of a section's table, without its headings."""
    text = (folder / "summary.md").read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def write_sweep(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study, next to its sweep file."""
    folder = tmp_path_factory.mktemp("study")
    sweep, output = write_sweep(folder, SWEEP), folder / "out"
    result = run("ablate", sweep, "--output", output, "--slots", 8)
    assert result.status == EXIT_OK, result.err
    assert result.out == (output / "summary.md").read_text().partition("\n![")[0] + "\n"
    assert "tuning: 6 rows" in result.err.splitlines()
    return output


def chosen_samplers(done: Path) -> dict[str, Any]:
    """Returns the samplers of the finished study by setting."""
    sweep = read_sweep(done.parent / "sweep.toml")
    assert sweep.tuning is not None
    best = section(done, "Tuning")[0][-1]
    (tuned,) = (
        setting
        for setting in sweep.tuning.candidates["top-p"]
        if best == (", ".join(f"`{k}={v}`" for k, v in setting.varied.items()) or "unchanged")
    )
    settings = {setting.name: setting.sampler for setting in sweep.settings}
    return {**settings, "top-p (tuned)": tuned.sampler}


# Tables


def test_tables_have_a_row_for_each_setting_seed_and_item(done: Path) -> None:
    rows = read_table(done)
    assert [*rows[0]] == [*COLUMNS]
    assert [(r["phase"], r["task"], r["item"], r["setting"], int(r["seed"])) for r in rows] == [
        ("test", name, item.id, setting, seed)
        for name in ("sums", "facts")
        for item in list(find_task(name).items("test", chat=True))[:2]
        for setting in SETTINGS
        for seed in SEEDS
    ]
    assert {row["sampler"] for row in rows} == {"temperature", "literal", "top-p"}
    assert {float(row["score"]) for row in rows} == {0.0, 1.0}


def test_a_part_of_a_study_has_the_same_rows(done: Path, tmp_path: Path) -> None:
    """Rows do not depend on the number of items, so a reader can reproduce some of them."""
    command = ("ablate", done.parent / "sweep.toml", "--output", tmp_path / "part", "--slots", 8)
    against = tmp_path / "rows.jsonl.xz"
    shutil.copy(done / "rows.jsonl.xz", against)
    result = run(*command, "--items", 1, "--against", against)
    assert (result.status, result.out) == (EXIT_OK, "18 rows compared, 0 differ\n"), result.err
    # Compare again, with one row missing and one changed.
    rows = read_rows(str(against))
    one, other = [name for name in rows if name.startswith("test/sums/")][:2]
    del rows[one]
    write_rows(
        [{**row, "score": 0.5} if row is rows[other] else row for row in rows.values()], against
    )
    result = run(*command, "--items", 1, "--against", against)
    first, second, last = result.out.splitlines()
    assert (first, last) == (f"{one}: missing", "18 rows compared, 2 differ")
    assert re.fullmatch(rf"{re.escape(other)}: score was 0\.5 and is now [01]\.0", second)
    assert result.status == 1


def test_stored_rows_reproduce_the_output(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file of rows reproduces the whole output without a model."""
    monkeypatch.setattr(loading, "load", None)
    shutil.copytree(done, tmp_path / "source")
    whole = b"".join((done / f"{name}.jsonl").read_bytes() for name in ("tuning", "test"))
    (tmp_path / "both.jsonl.gz").write_bytes(gzip.compress(whole))
    sweep = done.parent / "sweep.toml"
    names = ["findings.json", "results.csv", "plots/scores.png"]
    for file in ("source/rows.jsonl.xz", "both.jsonl.gz", "source/test.jsonl"):
        output = tmp_path / "out"
        result = run("ablate", sweep, "--rows", tmp_path / file, "--output", output)
        assert result.status == EXIT_OK, result.err
        tables, own = (
            folder_page.partition("## Tasks")[2] for folder_page in map(read_page, (done, output))
        )
        if file == "source/test.jsonl":  # which has no rows of tuning
            tables = re.sub(r"\n\n## Tuning\n.*?\|\n(?=\n!)", "\n", tables, flags=re.DOTALL)
        assert own == tables
        for name in names:
            assert (output / name).read_bytes() == (done / name).read_bytes(), name


def test_stored_rows_need_no_task_file(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENTROPIX_DATA", raising=False)
    rows = read_rows(str(done / "rows.jsonl.xz")).values()
    names = {"sums": "svamp", "facts": "facts"}
    write_rows([{**row, "task": names[row["task"]]} for row in rows], tmp_path / "rows.jsonl.xz")
    text = SWEEP.replace('"sums"', '"svamp"').replace("sums = 1", "svamp = 1")
    arguments = ("--output", tmp_path / "out", "--rows", tmp_path / "rows.jsonl.xz")
    succeed("ablate", write_sweep(tmp_path, text), *arguments)
    assert [line[0] for line in section(tmp_path / "out", "Scores")] == [*SETTINGS]
    more = write_sweep(tmp_path, text.replace("\nitems = 2", "\nitems = 3"))
    line = refusal(run("ablate", more, *arguments))
    assert "has 2 items of task 'svamp' (test), not 3" in line


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[settings.hot]", "[settings.cold]", "lacks the row 'test/sums/{item}/cold/0' of"),
        ("seeds = [0, 1, 5]", "seeds = [0, 1, 5, 7]", "lacks the row 'test/sums/{item}/hot/7' of"),
        ("seeds = [0, 1, 5]", "seeds = [0, 5]", "has the row 'test/sums/{item}/hot/1', which the"),
        ("\nitems = 2", "\nitems = 3", "has 2 items of task 'sums' (test), not 3"),
        ("\nitems = 2", "\nitems = 1", "has 2 items of task 'sums' (test), not 1"),
        (
            '"sums", "facts"',
            '"sums", "facts", "forks"',
            "has 0 items of task 'forks' (test), not 2",
        ),
        ("settings = 3", "settings = 4", "lacks the row 'tuning/sums/{tuned}/top-p #4/0' of the"),
        ("[tuning]", "[tuning]\nseeds = [0, 1]", "lacks the row 'tuning/sums/{tuned}/top-p #1/1'"),
    ],
)
def test_rows_of_another_study_are_refused(
    done: Path, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    text = SWEEP.replace('baseline = "hot"\n', "")
    assert old in text
    sweep = write_sweep(tmp_path, text.replace(old, new, 1))
    rows = read_rows(str(done / "rows.jsonl.xz")).values()
    items = {row["phase"]: row["item"] for row in reversed(rows) if row["task"] == "sums"}
    arguments = ("--rows", done / "rows.jsonl.xz", "--output", tmp_path / "out")
    line = refusal(run("ablate", sweep, *arguments))
    wanted = reason.format(item=items["test"], tuned=items["tuning"])
    assert f"{done / 'rows.jsonl.xz'}: {wanted}" in line
    assert not (tmp_path / "out").exists()


def test_each_row_equals_its_generation_alone(done: Path, tiny: LanguageModel) -> None:
    samplers = chosen_samplers(done)
    for row in read_table(done)[::4]:
        task = find_task(row["task"])
        (item,) = (one for one in task.items("test", chat=True) if one.id == row["item"])
        request = Spec(encode_prompt(tiny, item.prompt, chat=True), f"{task.name}/{item.id}", 14)
        sampler, seed = samplers[row["setting"]], int(row["seed"])
        (alone,) = run_specs(tiny, [request], sampler, seed=seed, turn_end=True).run()
        answer = task.extract(item, alone.text)
        assert (row["answer"], row["expected"]) == (answer or "", item.answer)
        assert float(row["score"]) == task.score(item, answer)
        expected = alone.to_json()
        wanted = {name: expected[name] for name in ("tokens", "forwards", "retracted")}
        wanted |= {f"regime_{regime}": expected["regimes"][regime] for regime in REGIMES}
        wanted |= {f"action_{action}": expected["actions"].get(action, 0) for action in ACTIONS}
        assert {name: int(row[name]) for name in wanted} == wanted
        assert (row["text"], row["finish_reason"]) == (alone.text, alone.finish_reason)
        # Rounding depends on the shapes.
        for column, value in (
            ("mean_entropy", np.mean([token.entropy for token in alone.tokens])),
            ("max_varentropy", max(token.varentropy for token in alone.tokens)),
            ("perplexity", np.exp(-np.mean([token.logprob for token in alone.tokens]))),
        ):
            assert float(row[column]) == pytest.approx(value, rel=1e-4, abs=1e-6)


# The summary


def test_the_summary_has_the_findings_of_the_rows(done: Path) -> None:
    rows = results_frame([*read_rows(str(done / "test.jsonl")).values()])
    votes = {"sums": True, "facts": True}
    found = analyse(rows, votes, ["hot"], [1, 3], ["hot"], pd.DataFrame())
    _, _, tables = format_page(found, {"description": ""}).partition("## Tasks")
    assert tables in read_page(done)


def test_the_tuned_candidate_is_the_best_one(done: Path) -> None:
    lines = [json.loads(line) for line in (done / "tuning.jsonl").read_text().splitlines()]
    assert sorted(line["line"] for line in lines) == [1, 2, 3, 4, 5, 6]
    merits = {}
    for name in ("top-p #1", "top-p #2", "top-p #3"):
        own = [line for line in lines if line["setting"] == name]
        assert sorted(line["task"] for line in own) == ["facts", "sums"]
        assert all("-tuning-" in line["item"] for line in own)
        cost = np.mean([line["forwards"] for line in own])
        merits[name] = (np.mean([line["score"] for line in own]), -cost)
    best = max(merits, key=lambda name: merits[name])
    values = next(line["varied"] for line in lines if line["setting"] == best)
    shown = ", ".join(f"`{k}={v}`" for k, v in values.items()) or "unchanged"
    scores = [f"{merits[name][0]:.3f}" for name in ("top-p #1", best)]
    assert section(done, "Tuning") == [["top-p", "3", *scores, shown]]


def test_the_environment_and_the_samplers_are_recorded(done: Path, tiny: LanguageModel) -> None:
    about = json.loads((done / "study.json").read_text())
    assert about["versions"]["jax"] == jax.__version__
    assert about["precision"] == {"weights": "float32", "activations": "float32"}
    assert {"commit", "model", "precision", "split", "tasks", "hardware"} <= {*about}
    assert [*about["settings"]] == [*SETTINGS]
    for name, sampler in chosen_samplers(done).items():
        values = dict(calibrate_sampler(sampler, tiny).values)
        assert about["settings"][name]["parameters"] == json.loads(json.dumps(values))
        assert about["settings"][name]["sampler"] == sampler.name


def test_a_finished_study_is_rewritten_without_a_run(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        paths = (path for path in done.rglob("*") if path.is_file())
        named = ("summary.md", "study.json")  # which have the commit
        return {str(path): path.read_bytes() for path in paths if path.name not in named}

    before, page = files(), read_page(done)
    monkeypatch.setattr(Engine, "run", None)
    succeed("ablate", done.parent / "sweep.toml", "--output", done)
    assert files() == before
    assert read_page(done) == page


# A user's own tasks

WORDS = """from entropix_jax.lab.tasks.task import Item, Task


class Words(Task):
    name, chat, max_new_tokens = "words", False, 20

    def items(self, split, *, chat):
        for number in range(8):  # the third is too long for the model
            yield Item(f"{split} {number}", "Berlin " * (200 if number == 2 else 3), "Berlin")

    def extract(self, item, text):
        return next(iter(text.split()), None)

    def score(self, item, answer):
        return 0.0 if answer is None else len(answer) / 100


class Raises(Words):
    def extract(self, item, text):
        raise ValueError("one\\ntwo")


WORDS, RAISES = Words(), Raises()
"""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(WORDS)
    return path


GRID = f"""tasks = ["own.py:WORDS"]
items = 3
seeds = [0, 4]
max_new_tokens = 6
base = "{LITERAL}"
[settings."$a_{{$ | b"]
sampler = "greedy"
[grid]
"base.temperature" = [0.5, 1.5]
"arms.mid" = ["adaptive", "sample"]
[tuning]
samplers = ["top-p", "mirostat"]
settings = 2
items = 2
"""


def test_all_settings_share_their_programs(words: Path, folder: str, tmp_path: Path) -> None:
    """Three programs compile: without lanes, with lanes, and one for tuning, where no row forks.
    The keys of a grid become columns and plots."""
    jitted: Any = decode
    jax.clear_caches()
    output = tmp_path / "out"
    sweep = write_sweep(tmp_path, GRID)
    succeed("ablate", sweep, "--output", output, "--model", folder, "--slots", 4)
    assert jitted._cache_size() == 3
    rows = read_table(output)
    assert len(rows) == 3 * 2 * (1 + 1 + 4 + 2)
    assert [*rows[0]] == [*COLUMNS, "arms.mid", "base.temperature"]
    varied = {row["setting"]: (row["base.temperature"], row["arms.mid"]) for row in rows}
    assert varied["base.temperature=1.5 arms.mid=sample"] == ("1.5", "sample")
    assert varied["literal"] == ("", "")
    plots = {path.stem for path in (output / "plots").glob("*.png")}
    assert {"response-base.temperature", "response-arms.mid", "scores"} <= plots
    assert "| $a_{$ \\| b " in (output / "summary.md").read_text()
    # A prompt that is too long is a wrong answer.
    for row in rows:
        assert (row["item"] == "test 2") == (row["finish_reason"] == "error")
        if row["finish_reason"] == "error":
            assert f"the model has positions for {MAX_POSITIONS}" in row["error"]
            found = [row[name] for name in ("text", "answer", "score", "tokens")]
            assert found == ["", "", "0.0", "0"]
    greedy = [float(row["score"]) for row in rows if row["setting"] == "$a_{$ | b"]
    assert f"{np.mean(greedy):.3f} [" in str(section(output, "Scores"))


def test_prompts_without_answers(folder: str, tmp_path: Path) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out"
    records: list[dict[str, Any]] = [  # in the order of the hashes of their ids
        {"id": "chat", "messages": [{"role": "user", "content": "a time"}]},
        {"id": "1", "prompt": "Once upon"},
    ]

    def write(*given: dict[str, Any]) -> None:
        prompts.write_text("".join(json.dumps(record) + "\n" for record in given))

    text = "tasks = ['writing:in.jsonl']\nmax_new_tokens = 4\nseeds = [1]\n"
    text += "[settings.a]\nsampler = 'greedy'\n[settings.b]\nsampler = 'top-p'\n"
    sweep = write_sweep(tmp_path, text)
    command = ("ablate", sweep, "--output", output, "--model", folder, "--slots", 4)
    write(*records)
    succeed(*command)
    rows = read_table(output)
    assert [row["item"] for row in rows] == ["chat", "chat", "1", "1"]
    assert {(row["task"], row["score"], row["answer"]) for row in rows} == {("writing", "", "")}
    assert not section(output, "Scores") + section(output, "Uncertainty")
    assert [line[0] for line in section(output, "Texts")] == ["a", "b"]
    assert not (output / "plots").exists()

    # Changed or missing prompts, and foreign lines in the results, are refused.
    before = (output / "test.jsonl").read_bytes()
    write(records[0], {"id": "1", "prompt": "another time"})
    assert "has a result of another record" in refusal(run(*command))
    write(records[0])
    assert "there are fewer items now" in refusal(run(*command))
    write(*records)
    (output / "test.jsonl").write_bytes(before + b"{}\n")
    assert "test.jsonl: line 5 is not a result; choose another" in refusal(run(*command))
    (output / "test.jsonl").write_bytes(before)
    # More prompts are added at any place in the order of the rows.
    write(*records, {"prompt": "x"})
    succeed(*command)
    items = sorted(row["item"] for row in read_table(output))
    assert items == ["1", "1", "3", "3", "chat", "chat"]
    assert (output / "test.jsonl").read_bytes().startswith(before)


def test_a_task_may_use_fewer_seeds(folder: str, words: Path, tmp_path: Path) -> None:
    """The task uses the first seeds. Its rows equal those of a study in which it uses all seeds."""
    words.write_text(
        f"{WORDS}\n\nclass Letters(Words):\n    name = 'letters'\n\n\nLETTERS = Letters()\n"
    )
    text = "tasks = ['own.py:WORDS', 'own.py:LETTERS']\nitems = 2\nseeds = [4, 0, 9]\n"
    text += "max_new_tokens = 4\nMOST\n"
    text += "[settings.a]\nsampler = 'temperature'\n[settings.b]\nsampler = 'top-p'\n"

    def study_of(most: str, output: str) -> Result:
        sweep = write_sweep(tmp_path, text.replace("MOST", most))
        options = ("--output", tmp_path / output, "--model", folder, "--slots", 4)
        return run("ablate", sweep, *options)

    fewer, whole = study_of("most_seeds = { letters = 1 }", "out"), study_of("", "whole")
    assert (fewer.status, whole.status) == (EXIT_OK, EXIT_OK), fewer.err + whole.err
    assert "test: 16 rows" in fewer.err.splitlines()
    assert "test: 24 rows" in whole.err.splitlines()
    expected = [
        (task, item, setting, seed)
        for task, seeds in (("words", "409"), ("letters", "4"))
        for item in ("test 0", "test 1")
        for setting in ("a", "b")
        for seed in seeds
    ]
    rows = read_table(tmp_path / "out")
    assert [(r["task"], r["item"], r["setting"], r["seed"]) for r in rows] == expected
    lines, all_ = (
        (tmp_path / at / "results.csv").read_text().splitlines() for at in ("out", "whole")
    )
    assert {*lines} < {*all_}
    about = json.loads((tmp_path / "out" / "study.json").read_text())
    assert (about["rows"], about["seeds"]) == (16, [4, 0, 9])
    assert about["seeds of a task"] == {"letters": 1, "default": 0}
    assert "seeds of a task" not in json.loads((tmp_path / "whole" / "study.json").read_text())
    # A score is the mean over an item's seeds, then items, then tasks.
    scores = section(tmp_path / "out", "Scores")
    for name, told in zip("ab", scores, strict=True):
        own = [
            [float(r["score"]) for r in rows if (r["task"], r["setting"]) == (task, name)]
            for task in ("words", "letters")
        ]
        assert told[1].startswith(f"{np.mean([*map(np.mean, own)]):.3f} [")
    # Votes need several samples of each task.
    assert section(tmp_path / "whole", "Several samples")
    assert not section(tmp_path / "out", "Several samples")
    # Other seeds are another study.
    line = refusal(study_of("most_seeds = { letters = 2 }", "out"))
    assert "holds another run's results: " in line
    assert "most_seeds" in line
    line = refusal(study_of("most_seeds = { letter = 1 }", "new"))
    assert line.endswith("most_seeds.letter: no such task, did you mean 'letters'?")


def test_tasks_with_and_without_a_score(
    folder: str, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tasks with a score are used for tuning. Files are found by their published names, and
    another folder with the same files continues the study."""
    text = "tasks = ['own.py:WORDS', 'writing']\nitems = 2\nmax_new_tokens = 4\n"
    text += "[tuning]\nsamplers = ['top-p']\nsettings = 2\nitems = 2\n"
    sweep, output = write_sweep(tmp_path, text), tmp_path / "out"
    command = ("ablate", sweep, "--output", output, "--model", folder, "--slots", 4)
    monkeypatch.delenv("ENTROPIX_DATA", raising=False)
    assert "task 'writing': no file: give writing:FILE, or --data or" in refusal(run(*command))
    for name in ("one", "two"):
        lines = "id,prompt\n" + "".join(f"p{n},Rome and Bob\n" for n in range(8))
        (tmp_path / name).mkdir()
        (tmp_path / name / "prompts.csv").write_text(lines)
    succeed(*command, "--data", tmp_path / "one")
    before = {name: (output / f"{name}.jsonl").read_bytes() for name in ("tuning", "test")}
    tuning, test = ([*map(json.loads, before[name].splitlines())] for name in before)
    assert {row["task"] for row in tuning} == {"words"}
    assert [row["task"] for row in sorted(test, key=lambda row: row["line"])] == [
        *2 * ["words"],
        *2 * ["writing"],
    ]
    assert all((row["score"] is None) == (row["task"] == "writing") for row in test)
    assert {row["task"]: {*row["measures"]} for row in test} == {
        "words": set(),
        "writing": {"unknown_words", "repeated_4grams"},
    }
    for row in (row for row in test if row["task"] == "writing"):
        measures = Writing(Path()).measures(Item("", "", ""), row["text"])
        assert row["measures"] == {name: [*pair] for name, pair in measures.items()}
    monkeypatch.setattr(Engine, "run", None)
    monkeypatch.setenv("ENTROPIX_DATA", str(tmp_path / "two"))
    succeed(*command)
    assert before == {name: (output / f"{name}.jsonl").read_bytes() for name in before}


def test_a_documented_task_and_the_name_of_the_model(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results contain the given name, since the folder of a hub snapshot is named by a hash."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    blocks = [re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) for page in pages]
    (code,) = (block for page in blocks for block in page if "CAPITALS" in block)
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "resolve_model", lambda model: Path(folder))
    succeed(
        *("evaluate", "--task", "my_task.py:CAPITALS", "--tune", 2, "--seeds", 1),
        *("--sampler", "greedy", "top-p", "--model", "owner/Model-1B", "--output", "out"),
    )
    found = [(row["item"], row["setting"], row["expected"]) for row in read_table(tmp_path / "out")]
    assert found == [
        (item, setting, answer)
        for item, answer in (("Italy", "Rome"), ("Spain", "Madrid"))
        for setting in ("greedy", "top-p (tuned)")
    ]
    tuning = section(tmp_path / "out", "Tuning")
    assert [line[:2] for line in tuning] == [["greedy", "1"], ["top-p", "2"]]
    about = json.loads((tmp_path / "out" / "study.json").read_text())
    assert about["model"] == f"owner/Model-1B ({fingerprint(Path(folder))})"


# Bad input

MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("evaluate", {"--task": "own.py:RAISES"}, "item 'test 0': extract failed: ValueError: one"),
    ("evaluate", {"--task": ("own.py:WORDS", "./own.py:WORDS")}, "two tasks are called 'words'"),
    ("evaluate", {"--task": "gsm8k:g.jsonl", "--tune": 2}, "no items in its split 'tuning'"),
    ("evaluate", {"--task": "writing:w.jsonl", "--tune": 2}, "no score to tune by: writing"),
    ("evaluate", {"--task": "svamp", "--data": "none"}, "none/svamp.json: no such file"),
    ("evaluate", {"--sampler": ("own.toml", "./own.toml")}, "two settings are called 'own'"),
    ("evaluate", {"--sampler": ("own.toml", "./own.toml"), "--tune": 2}, "two are called 'own'"),
    ("evaluate", {"--sampler": "long.toml"}, "setting 'long': sampler 'long': metrics.layers"),
    ("evaluate", {"--items": -1}, "--items must be at least 0, not -1"),
    ("evaluate", {"--output": "own.py"}, "own.py: the folder cannot be created: File exists"),
    ("evaluate", {"--output": "taken"}, "taken/test.jsonl: "),
    ("ablate", {"": "own"}, "no sweep 'own'"),
    ("ablate", {"--items": 0}, "--items must be at least 1, not 0"),
    ("ablate", {"--against": "none.xz"}, "none.xz: cannot be read: no such file"),
    ("ablate", {"--rows": "none.xz"}, "none.xz: no such file"),
    ("ablate", {"--rows": "own.toml"}, "own.toml: line 1 is not a row of a study"),
    ("ablate", {"--rows": "a", "--against": "b"}, "--rows and --against: give one of them"),
    ("ablate", {"--seeds": 3}, "--seeds"),
]


@pytest.fixture
def scene(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with the files that the mistakes refer to."""
    (tmp_path / "own.toml").write_text('extends = "greedy"\n')
    layers = "metrics.layers = [1, 1, 1, 1, 1, 1, 1]"
    (tmp_path / "long.toml").write_text(f'extends = "greedy"\n{layers}\n')
    (tmp_path / "g.jsonl").write_text('{"question": "1 + 1?", "answer": "2\\n#### 2"}\n')
    (tmp_path / "w.jsonl").write_text('{"prompt": "Rome"}\n')
    (tmp_path / "taken" / "test.jsonl").mkdir(parents=True)
    write_sweep(tmp_path, "tasks = ['own.py:WORDS']\nbase = 'greedy'\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "changes", "reason"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_errors_of_studies_are_one_line(
    folder: str, scene: None, name: str, changes: dict[str, Any], reason: str
) -> None:
    given: dict[str, Any] = {"--output": "out", "--model": folder, "--slots": 4}
    if name == "evaluate":
        given |= {"--task": "own.py:WORDS", "--sampler": "greedy", "--items": 2, "--seeds": 1}
        given |= {"--max-new-tokens": 2}
    else:
        given |= {"": "sweep.toml"}
    arguments = [
        word
        for name, value in (given | changes).items()
        for word in (name, *(value if isinstance(value, tuple) else (value,)))
        if word != ""
    ]
    assert reason in refusal(run(name, *arguments))
    assert not Path("out/summary.md").exists()


def made(*items: Any) -> dict[str, Any]:
    return {"items": lambda self, split, *, chat: iter(items)}


def failing(self: Task, split: str, *, chat: bool) -> Iterator[Item]:
    yield Item("a", "Berlin", "")
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"items": lambda self, split, *, chat: None}, "items failed: TypeError: 'NoneType'"),
        ({"items": failing}, "item 2 of 'test': items failed: KeyError: 'gone'"),
        (made(), "no items in its split 'test'"),
        (made(Item("a", "1 +", 2)), "item 'a': the answer must be text, not 2"),  # type: ignore[arg-type]
        (made(Item("a", 5, "")), "item 'a': the prompt must be text or messages, not 5"),  # type: ignore[arg-type]
        (made(Item(1, "Rome", "")), "item 1: an item's id must be text"),  # type: ignore[arg-type]
        (made(*2 * [Item("a", "Rome", "")]), "item 'a': an item's id must be text and unique"),
        ({"stop": "end"}, "stop = 'end': must be a tuple of texts"),
        *(
            ({"max_new_tokens": n}, f"max_new_tokens = {n!r}: must be an integer > 0")
            for n in (None, -3, 2.5, True)
        ),
        ({"extract": lambda *_: 5}, "item 'a': extract returned 5, not text or None"),
        ({"score": lambda *_: float("inf")}, "item 'a': score returned inf, not a finite number"),
        ({"score": lambda *_: float("nan")}, "score returned nan: samplers cannot be tuned by it"),
        ({"score": lambda *_: 1 / 0}, "item 'a': score failed: ZeroDivision"),
        ({"measures": lambda *_: {"x": 2.0}}, "item 'a': measures failed: TypeError"),
        ({"measures": lambda *_: {"x": (1.0, float("inf"))}}, "returned 'x': (1.0, inf), not two"),
        ({"measures": lambda *_: {1: (1.0, 2.0)}}, "measures returned 1: (1.0, 2.0), not two"),
        ({"measures": lambda *_: {"tokens": (1.0, 2.0)}}, "'tokens' is a measure of every text"),
    ],
)
def test_errors_of_a_users_task(tiny: LanguageModel, members: dict[str, Any], reason: str) -> None:
    plain = {"name": "words", "chat": False, "extract": lambda self, item, text: text}
    plain |= made(Item("a", "Berlin", "Berlin"))
    task: Task = type("Words", (Task,), plain | members)()
    setting, search = Setting("greedy", load_sampler("greedy")), Search(unrun())
    (row,) = search.rows = [Row(search.request)]
    row.text, row.finish_reason = "x", "eos"

    def score_all() -> None:
        for question in read_questions(tiny, task, "test", 0):
            make_result(Trial(0, TUNING, question, setting, 0), search, 0.0)

    with pytest.raises(UserError) as caught:
        score_all()
    assert str(caught.value).startswith("task 'words': ")
    assert reason in str(caught.value)
    if "max_new_tokens" in members:  # the command's own limit replaces it
        assert next(read_questions(tiny, task, "test", 0, 2)).max_new_tokens == 2


def test_questions_of_a_part(tiny: LanguageModel) -> None:
    task = find_task("sums")

    def ids(*arguments: Any) -> list[str]:
        return [one.item.id for one in read_questions(tiny, task, "test", *arguments)]

    known = [item.id for item in task.items("test", chat=False)]
    assert (ids(3, None, 2), ids(0, None, 5)) == (known[2:5], known[5:])
    with pytest.raises(UserError, match=r"no items in its split 'test' after the first 9999"):
        ids(1, None, 9999)


# Resuming


def test_an_interrupted_study_continues(
    folder: str, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted once in each phase, it ends with the results of an uninterrupted one."""
    text = "tasks = ['own.py:WORDS']\nitems = 0\nseeds = [0, 1]\nmax_new_tokens = 6\n"
    text += "[settings.hot]\nsampler = 'temperature'\n[settings.greedy]\nsampler = 'greedy'\n"
    text += "[tuning]\nsamplers = ['top-p']\nsettings = 2\nitems = 8\n"
    sweep, whole, output = write_sweep(tmp_path, text), tmp_path / "whole", tmp_path / "out"
    options = ("--model", folder, "--slots", 4)
    succeed("ablate", sweep, "--output", whole, *options)
    write, written = Store.write, 0
    signals = {5: signal.SIGINT, 30: signal.SIGTERM}  # by the number of rows

    def interrupt(*arguments: Any) -> None:
        nonlocal written
        write(*arguments)
        written += 1
        if written in signals:
            signal.raise_signal(signals[written])

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", interrupt)
        for phase, status in (("tuning", 130), ("test", 143)):
            result = run("ablate", sweep, "--output", output, *options)
            assert (result.status, result.out) == (status, "")
            assert f"{phase}: " in result.err
            assert result.err.endswith("interrupted: run the same command again to continue\n")
            assert not (output / "summary.md").exists()
    result = run("ablate", sweep, "--output", output, *options)
    assert result.status == EXIT_OK, result.err
    assert re.search(r"^test: 48 rows, \d+ already done$", result.err, re.M)
    for name in ("results.csv", "rows.jsonl.xz"):
        assert (whole / name).read_bytes() == (output / name).read_bytes()
    assert read_page(whole) == read_page(output)
    for path in (whole / "plots").iterdir():
        assert path.read_bytes() == (output / "plots" / path.name).read_bytes()
    # The folder belongs to that study: no sweep, task's code or precision may change.
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for change, code, precision, reason in (
        ("[set]\n'base.top_k' = 7", WORDS, "float32", "base.top_k was 0 and is now 7"),
        ("", WORDS.replace("/ 100", "/ 50"), "float32", "task_code"),
        ("", WORDS, "bfloat16", 'precision.activations was "float32" and is now "bfloat16"'),
    ):
        write_sweep(tmp_path, text + change)
        words.write_text(code)
        command = ("ablate", sweep, "--output", output, *options, "--precision", precision)
        line = refusal(run(*command))
        assert re.search(f"{output}/tuning.jsonl: holds another run's results: .*{reason}", line)
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
