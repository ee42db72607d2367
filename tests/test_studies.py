"""Whole studies through the commands: rows, tables, figures, pictures, ends, and bad input."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from pyarrow import parquet
from tiny.corpus import Comparison, compare
from tiny.tokenizer import build_tokenizer

from entropix_jax import ablate, evaluate
from entropix_jax.batches.output import Store
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.checkpoint import fingerprint
from entropix_jax.commandline import EXIT_OK, EXIT_USAGE
from entropix_jax.decode import decode
from entropix_jax.decode_state import FINISHED_EOS, FINISHED_LENGTH, RUNNING
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel, load
from entropix_jax.preparation import encode_prompt
from entropix_jax.records import Outcome
from entropix_jax.results import Event, Request, Row
from entropix_jax.running import RunningRow, check_request
from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.scoring import score_tokens
from entropix_jax.studies import command as studies_command
from entropix_jax.studies import study, trials
from entropix_jax.studies.plots import draw_plots
from entropix_jax.studies.sweep import read_sweep
from entropix_jax.studies.tables import COLUMNS
from entropix_jax.studies.truth import hold_against_truth
from entropix_jax.tasks.registry import find_task
from entropix_jax.trace import TokenRecord
from entropix_jax.vocabulary import REGIMES
from entropix_jax.world.corpus import encode_row, terminal_ids, write_row
from entropix_jax.world.facts import WORLD_SEED, create
from tests.folders import MAX_POSITIONS, write_model
from tests.models import teacher_forced
from tests.patience import PATIENCE, wait_for
from tests.runs import Spec, calibrated, run_specs
from tests.test_batch import own_cache  # noqa: F401 (a fixture)
from tests.test_main import Json, Result

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "weights" / "tiny")

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")

SWEEP = """description = "A small study"
tasks = ["sums", "facts"]
items = 2
seeds = [0, 1, 5]
max_new_tokens = 14
baseline = "hot"
[settings.hot]
sampler = "temperature"
"base.temperature" = 1.8
[settings.entropix]
sampler = "entropix"
"base.temperature" = 1.8
"adaptive.temperature_logits" = 1.0
[tuning]
samplers = ["top-p"]
settings = 3
items = 1
[tuning.over.top-p]
"base.temperature" = { from = 1.0, to = 3.0 }
"""
SETTINGS = ("hot", "entropix", "top-p (tuned)")
SEEDS = (0, 1, 5)


def run(main: Callable[[Sequence[str]], int], *arguments: object) -> Result:
    """Runs a command in this process. The model's entropy is held against the truth of one text."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_TRUTH_TEXTS", 1)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([str(argument) for argument in arguments])
    assert "Traceback" not in err.getvalue()
    return Result(status, out.getvalue(), err.getvalue())


def refusal(result: Result) -> str:
    """The one line of an error, after the notes of what was begun."""
    assert (result.status, result.out) == (EXIT_USAGE, "")
    *notes, line = result.err.splitlines()
    assert not [note for note in notes if note.startswith("error")]
    assert line.startswith("error: ")
    return line


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_seconds(folder: Path) -> list[dict[str, str]]:
    return [{**row, "seconds": ""} for row in rows_of(folder)]


def page_of(folder: Path) -> str:
    """The summary, but for the commit: somebody may be at work in the repository."""
    text = (folder / "summary.md").read_text()
    return re.sub(r"^- commit: .*$", "", text, flags=re.MULTILINE)


def section(folder: Path, name: str) -> list[list[str]]:
    """The cells of a section's table, without its headings."""
    text = (folder / "summary.md").read_text().partition(f"## {name}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return load("tiny")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished study, beside its sweep."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "mine.toml").write_text(SWEEP)
    result = run(ablate.main, folder / "mine.toml", "--output", folder / "out", "--slots", 8)
    assert result.status == EXIT_OK, result.err
    told = (folder / "out" / "summary.md").read_text().partition("\n![")[0]
    assert result.out == told + "\n"
    named = "model: tiny (a tiny one of an invented world)"
    assert result.err.splitlines()[:2] == [named, "tuning: 6 rows"]
    return folder / "out"


def chosen(done: Path) -> dict[str, Any]:
    """The samplers of the finished study by setting."""
    sweep = read_sweep(done.parent / "mine.toml")
    assert sweep.tuning is not None
    best = section(done, "Tuning")[0][-1]
    (tuned,) = (
        one
        for one in sweep.tuning.candidates["top-p"]
        if best == (", ".join(f"`{k}={v}`" for k, v in one.varied.items()) or "as it is")
    )
    settings = {setting.name: setting.sampler for setting in sweep.settings}
    return {**settings, "top-p (tuned)": tuned.sampler}


# Tables


def test_a_row_for_each_setting_seed_and_item(done: Path) -> None:
    rows = rows_of(done)
    assert [*rows[0]] == [*COLUMNS]
    found = [(row["task"], row["item"], row["setting"], int(row["seed"])) for row in rows]
    assert found == [
        (name, item.id, setting, seed)
        for name in ("sums", "facts")
        for item in list(find_task(name).items("test", chat=True))[:2]
        for setting in SETTINGS
        for seed in SEEDS
    ]
    assert {row["phase"] for row in rows} == {"test"}
    assert {row["sampler"] for row in rows} == {"temperature", "entropix", "top-p"}
    assert len({row["text"] for row in rows}) > 4


def test_both_tables_hold_the_same(done: Path) -> None:
    table = parquet.read_table(done / "results.parquet")
    assert {name: str(table.schema.field(name).type) for name in table.column_names} == {
        name: kind.replace("float64", "double") for name, kind in COLUMNS.items()
    }
    texts = [
        {name: "" if value is None else str(value) for name, value in row.items()}
        for row in table.to_pylist()
    ]
    assert texts == rows_of(done)


def test_the_accounts_add_up(done: Path) -> None:
    scores = set()
    for row in rows_of(done):
        task = find_task(row["task"])
        (item,) = (one for one in task.items("test", chat=True) if one.id == row["item"])
        answer = task.extract(item, row["text"])
        assert row["answer"] == (answer or "")
        assert row["expected"] == item.answer
        assert float(row["score"]) == task.score(item, answer)
        scores.add(float(row["score"]))
        tokens = int(row["tokens"])
        assert 0 < tokens <= 14
        assert tokens == sum(int(row[f"regime_{regime}"]) for regime in REGIMES)
        assert tokens == sum(int(row[f"action_{action}"]) for action in ACTIONS)
        assert int(row["forwards"]) >= tokens - 1
        if row["sampler"] != "entropix":
            assert int(row["forwards"]) == tokens - 1
            assert row["retracted"] == "0"
    assert scores == {0.0, 1.0}


def test_each_row_is_its_generation_alone(done: Path, tiny: LanguageModel) -> None:
    """Of the same sampler, seed and id, as if there were nothing else."""
    samplers = chosen(done)
    for row in rows_of(done)[::2]:
        task = find_task(row["task"])
        (item,) = (one for one in task.items("test", chat=True) if one.id == row["item"])
        request = Spec(encode_prompt(tiny, item.prompt, chat=True), f"{task.name}/{item.id}", 14)
        sampler, seed = samplers[row["setting"]], int(row["seed"])
        (own,) = run_specs(tiny, [request], sampler, seed=seed, turn_end=True).run()
        told = own.to_json()
        assert row["text"] == told["text"]
        assert row["finish_reason"] == told["finish_reason"]
        for name in ("tokens", "forwards", "retracted"):
            assert int(row[name]) == told[name]
        for regime in REGIMES:
            assert int(row[f"regime_{regime}"]) == told["regimes"][regime]
        for action in ACTIONS:
            assert int(row[f"action_{action}"]) == told["actions"].get(action, 0)
        # Other shapes are computed otherwise, in the last digits.
        for column, expected in (
            ("mean_entropy", np.mean([token.entropy for token in own.tokens])),
            ("max_varentropy", max(token.varentropy for token in own.tokens)),
            ("perplexity", np.exp(-np.mean([token.logprob for token in own.tokens]))),
        ):
            assert float(row[column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


# The summary


class Table:
    """The rows of a study as float64 arrays [items, seeds], by setting."""

    def __init__(self, folder: Path) -> None:
        self.rows = rows_of(folder)
        self.tasks = list(dict.fromkeys(row["task"] for row in self.rows))
        items = list(dict.fromkeys((row["task"], row["item"]) for row in self.rows))
        self.strata = np.array([self.tasks.index(task) for task, _ in items])
        self.shape = (len(items), len(SEEDS))

    def of(self, setting: str) -> list[dict[str, str]]:
        return [row for row in self.rows if row["setting"] == setting]

    def array(self, setting: str, column: str) -> np.ndarray:
        return np.array([float(row[column]) for row in self.of(setting)]).reshape(self.shape)

    def vote(self, setting: str) -> np.ndarray:
        """Scores of the majority of all three samples, [items]: each of its three beginnings."""
        scores = []
        for _, rows in groupby(self.of(setting), key=lambda row: row["item"]):
            samples = [(row["answer"], float(row["score"])) for row in rows]
            found = []
            for start in range(3):
                turned = samples[start:] + samples[:start]
                given = [answer for answer, _ in turned if answer]
                best = max(given, key=given.count, default="")
                found.append(dict(samples)[best] if best else 0.0)
            scores.append(np.mean(found))
        return np.array(scores)

    def even(self, values: np.ndarray) -> float:
        return float(np.mean([values[self.strata == task].mean() for task in set(self.strata)]))

    def weights(self) -> np.ndarray:
        """The resamples of the study, [10,000, items]."""
        rng, parts = np.random.default_rng(0), []
        for task in range(len(self.tasks)):
            size = int((self.strata == task).sum())
            drawn = rng.multinomial(size, [1 / size] * size, 10_000)
            parts.append(drawn / size / len(self.tasks))
        return np.concatenate(parts, axis=1)

    def interval(self, values: np.ndarray, sign: str = "") -> str:
        return told(self.even(values), self.weights() @ values, sign)


def told(value: float, found: np.ndarray, sign: str = "") -> str:
    low, high = np.percentile(found, [2.5, 97.5])
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def verdict(text: str) -> str:
    low, high = map(float, re.findall(r"[-+][\d.]+", text)[1:])
    return "higher" if low > 0 else "lower" if high < 0 else "no difference seen"


def test_scores_of_the_summary(done: Path) -> None:
    table = Table(done)
    weights = table.weights()
    base, base_cost = table.array("hot", "score").mean(1), table.array("hot", "forwards").mean(1)
    lines = section(done, "Scores")
    assert [line[0] for line in lines] == [*SETTINGS]
    for name, score, sums, facts, forwards, over, seen, equal, seen_equal in lines:
        own, cost = table.array(name, "score").mean(1), table.array(name, "forwards").mean(1)
        assert score == table.interval(own)
        assert [sums, facts] == [f"{own[table.strata == t].mean():.3f}" for t in (0, 1)]
        assert forwards == f"{cost.mean():.1f}"
        if name == "hot":
            assert (over, seen, equal, seen_equal) == ("",) * 4
            continue
        assert over == table.interval(own - base, "+")
        assert seen == verdict(over)

        def above(weight: np.ndarray, own: np.ndarray = own, cost: np.ndarray = cost) -> float:
            xs = [weight @ base_cost, weight @ (3 * base_cost)]
            at = np.clip((weight @ cost - xs[0]) / (xs[1] - xs[0]), 0, 1)
            ys = [weight @ base, weight @ table.vote("hot")]
            return float(weight @ own - (ys[0] + at * (ys[1] - ys[0])))

        alike = np.full(4, 1 / 4)
        assert equal == told(above(alike), np.array([above(w) for w in weights]), "+")
        assert seen_equal == verdict(equal)


def test_votes_of_the_summary(done: Path) -> None:
    table = Table(done)
    for name, one, three in section(done, "Self-consistency"):
        forwards = table.array(name, "forwards").mean()
        alone = table.interval(table.array(name, "score").mean(1))
        assert one == f"{alone} ({forwards:.0f})"
        assert three == f"{table.interval(table.vote(name))} ({3 * forwards:.0f})"


def test_shares_of_the_summary(done: Path) -> None:
    table = Table(done)

    def share(name: str, column: str) -> str:
        tokens = table.array(name, "tokens").sum()
        return f"{100 * table.array(name, column).sum() / tokens:.1f} %"

    for name, tokens, *shares in section(done, "Regimes"):
        assert int(tokens) == table.array(name, "tokens").sum()
        assert shares == [share(name, f"regime_{regime}") for regime in REGIMES]
    text = (done / "summary.md").read_text().partition("## Actions")[2]
    heading = next(line for line in text.splitlines() if line.startswith("| setting"))
    actions = heading.strip("| ").split(" | ")[1:-2]
    assert {*actions} == {
        action for action in ACTIONS if any(row[f"action_{action}"] != "0" for row in table.rows)
    }
    for name, *shares, taken, cost in section(done, "Actions"):
        assert shares == [share(name, f"action_{action}") for action in actions]
        assert taken == share(name, "retracted")
        tokens_of, forwards = (table.array(name, key).sum() for key in ("tokens", "forwards"))
        assert cost == f"{forwards / tokens_of:.2f}"
    reasons = sorted({row["finish_reason"] for row in table.rows})
    for name, length, *shares, perplexity, one, two, repeated in section(done, "Texts"):
        own = table.of(name)
        assert length == f"{table.array(name, 'tokens').mean():.1f}"
        ends = [sum(row["finish_reason"] == reason for row in own) for reason in reasons]
        assert shares == [f"{100 * number / len(own):.1f} %" for number in ends]
        for told_, column in (
            (perplexity, "perplexity"),
            (one, "distinct_1"),
            (two, "distinct_2"),
            (repeated, "repetition"),
        ):
            known = [float(row[column]) for row in own if row[column]]
            assert told_ == f"{np.mean(known):.3f}"


def test_predictors_of_the_summary(done: Path) -> None:
    """How often a wrong answer's text has the higher value: counted, pair by pair."""
    table = Table(done)
    columns = ["mean_entropy", "max_entropy", "mean_varentropy", "max_varentropy", "perplexity"]
    lines = section(done, "Predictors of error")
    assert lines
    for name, task, *cells in lines:
        part = [task in ("all", table.tasks[number]) for number in table.strata]
        right = table.array(name, "score")[part].ravel() == 1
        for cell, column in zip(cells, columns, strict=True):
            values = table.array(name, column)[part].ravel()
            above = values[~right][:, None] - values[right][None, :]
            assert cell.startswith(f"{np.mean((above > 0) + (above == 0) / 2):.3f} [")
    text = (done / "summary.md").read_text().partition("## Reliability")[2].partition("\n## ")[0]
    for name in {name for name, *_ in lines}:
        block = text.partition(f"`{name}`")[2].partition("\n`")[0]
        found = re.findall(r"^\| [\d.]+ to [\d.]+ \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", block, re.M)
        assert sum(int(number) for _, number, _ in found) == len(table.of(name))
        shares = sum(int(number) * float(share) for _, number, share in found)
        assert shares == pytest.approx(table.array(name, "score").sum(), abs=0.01)


def test_the_tuned_candidate_is_the_best_one(done: Path) -> None:
    lines = [json.loads(line) for line in (done / "tuning.jsonl").read_text().splitlines()]
    assert sorted(line["line"] for line in lines) == [1, 2, 3, 4, 5, 6]
    merits = {}
    for name in ("top-p #1", "top-p #2", "top-p #3"):
        own = [line for line in lines if line["setting"] == name]
        assert sorted(line["task"] for line in own) == ["facts", "sums"]
        assert all("-tuning-" in line["item"] for line in own)
        forwards = -np.mean([line["forwards"] for line in own])
        merits[name] = (np.mean([line["score"] for line in own]), forwards)
    best = max(merits, key=lambda name: merits[name])
    values = next(line["varied"] for line in lines if line["setting"] == best)
    told_values = ", ".join(f"`{k}={v}`" for k, v in values.items()) or "as it is"
    own_score, best_score = merits["top-p #1"][0], merits[best][0]
    expected = ["top-p", "3", f"{own_score:.3f}", f"{best_score:.3f}", told_values]
    assert section(done, "Tuning") == [expected]


def test_what_made_it_is_recorded(done: Path, tiny: LanguageModel) -> None:
    about = json.loads((done / "study.json").read_text())
    assert about["versions"]["jax"] == jax.__version__
    assert about["versions"]["python"] == platform.python_version()
    assert platform.machine() in about["hardware"]
    assert about["seeds"] == [*SEEDS]
    assert about["rows"] == len(rows_of(done)) == 36
    assert {*about} >= {"commit", "model", "precision", "split", "tasks", "description"}
    assert [*about["settings"]] == [*SETTINGS]
    for name, sampler in chosen(done).items():
        values = dict(calibrate_sampler(sampler, tiny).values)
        assert about["settings"][name]["parameters"] == json.loads(json.dumps(values))
        assert about["settings"][name]["sampler"] == sampler.name


@pytest.mark.parametrize(("asked", "told"), [("owner/Model-1B", "owner/Model-1B"), (".", "small")])
def test_the_model_is_called_as_its_user_does(
    small: str,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    told: str,
) -> None:
    """The hub's cache names the folder of a snapshot by a hash."""
    folder = tmp_path / "small"
    shutil.copytree(small, folder)
    monkeypatch.chdir(folder)
    if asked != ".":
        monkeypatch.setattr(studies_command, "resolve_model", lambda model: folder)
    result = run(
        *(evaluate.main, "--task", f"{words}:WORDS", "--sampler", "greedy", "--items", 1),
        *("--seeds", 1, "--max-new-tokens", 2, "--model", asked, "--output", tmp_path / "out"),
    )
    assert result.status == EXIT_OK, result.err
    about = json.loads((tmp_path / "out" / "study.json").read_text())
    assert about["model"] == f"{told} ({fingerprint(folder)})"


# Pictures


def test_pictures(done: Path) -> None:
    names = {"scores", "regimes", "reliability", "truth"}
    files = {path.name for path in (done / "plots").iterdir()}
    assert files == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    for path in (done / "plots").iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    page = (done / "summary.md").read_text()
    assert {*re.findall(r"!\[.*?\]\(plots/(.*?)\.png\)", page)} == names


def test_a_finished_study_runs_nothing_and_is_drawn_alike(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        paths = (path for path in done.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in paths if path.suffix != ".md"}

    def never(*_: object) -> None:
        raise AssertionError("a row is run again")

    before, page = files(), page_of(done)
    before.pop(str(done / "study.json"))  # names the commit
    monkeypatch.setattr(Engine, "run", never)
    assert run(ablate.main, done.parent / "mine.toml", "--output", done).status == EXIT_OK
    after = files()
    after.pop(str(done / "study.json"))
    assert after == before
    assert page_of(done) == page


# Other studies


def write_sweep(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


WORDS = '''"""Tasks of a user's own."""
from entropix_jax.tasks.task import Item, Task


class Words(Task):
    name, chat, max_new_tokens = "words", False, 20
    long = 0  # items that no model reads

    def items(self, split, *, chat):
        for number in range(8):
            prompt = "Berlin " * (200 if number < self.long else number + 1)
            yield Item(f"{split} {number}", prompt, "Berlin")

    def extract(self, item, text):
        return next(iter(text.split()), None)

    def score(self, item, answer):
        return 0.0 if answer is None else len(answer) / 100


class Long(Words):
    name, long = "long", 2


class Number(Words):
    def extract(self, item, text):
        return 5


class Endless(Words):
    def score(self, item, answer):
        return float("inf")


class Scoreless(Words):
    def score(self, item, answer):
        pass


class Unscored(Words):
    def score(self, item, answer):
        return float("nan")


class Texts(Words):
    def score(self, item, answer):
        return "0.5"


class Raises(Words):
    def extract(self, item, text):
        raise ValueError("one\\ntwo")


class Divides(Words):
    def score(self, item, answer):
        return 1 / 0


class Breaks(Words):
    def items(self, split, *, chat):
        yield from list(super().items(split, chat=chat))[:1]
        raise KeyError("gone")


class Lists(Words):
    def items(self, split, *, chat):
        return None


class Tuples(Words):
    def items(self, split, *, chat):
        yield "a", "Berlin", ""


class Sum(Words):
    def items(self, split, *, chat):
        yield Item("a", "1 + 1 =", 2)


class Tokens(Words):
    def items(self, split, *, chat):
        yield Item("a", 5, "")


class Stop(Words):
    stop = "end"


class Same(Words):
    def items(self, split, *, chat):
        yield Item("a", "Berlin", "")
        yield Item("a", "Rome", "")


class Numbered(Words):
    def items(self, split, *, chat):
        yield Item(1, "Berlin", "")


class Empty(Words):
    def items(self, split, *, chat):
        yield Item("a", "Berlin", "")
        yield Item("b", "", "")


class None_(Words):
    def items(self, split, *, chat):
        return iter(())


WORDS, LONG, NUMBER, ENDLESS, SAME = Words(), Long(), Number(), Endless(), Same()
NUMBERED, EMPTY, NONE = Numbered(), Empty(), None_()
SCORELESS, TEXTS, RAISES, DIVIDES, BREAKS = Scoreless(), Texts(), Raises(), Divides(), Breaks()
UNSCORED = Unscored()
LISTS, TUPLES, SUM, TOKENS, STOP = Lists(), Tuples(), Sum(), Tokens(), Stop()
'''


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(WORDS)
    return path


GRID = """tasks = ["own.py:WORDS"]
items = 3
seeds = [0, 4]
max_new_tokens = 6
base = "entropix"
[settings."$a_{$ | b"]
sampler = "greedy"
[grid]
"base.temperature" = [0.5, 1.5]
"arms.mid" = ["adaptive", "sample"]
[tuning]
samplers = ["top-p", "mirostat"]
settings = 2
items = 2
"""


def test_all_settings_share_one_program(words: Path, small: str, tmp_path: Path) -> None:
    """Those that are tuned, too; and the axes of a grid become columns and pictures."""
    jitted: Any = decode
    jax.clear_caches()
    sweep = write_sweep(tmp_path, GRID)
    result = run(ablate.main, sweep, "--output", tmp_path / "out", "--model", small, "--slots", 4)
    assert result.status == EXIT_OK, result.err
    assert jitted._cache_size() == 1
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 3 * 2 * (1 + 1 + 4 + 2)
    assert [*rows[0]] == [*COLUMNS, "arms.mid", "base.temperature"]
    axes = {row["setting"]: (row["base.temperature"], row["arms.mid"]) for row in rows}
    assert axes["base.temperature=1.5 arms.mid=sample"] == ("1.5", "sample")
    assert axes["entropix"] == ("", "")
    pictures = {path.stem for path in (tmp_path / "out" / "plots").glob("*.png")}
    assert {"response-base.temperature", "response-arms.mid", "scores"} <= pictures
    assert "truth" not in pictures  # the task is not of the tiny world
    assert "| $a_{$ \\| b |" in (tmp_path / "out" / "summary.md").read_text()


def test_what_is_too_long_is_a_row_and_wrong(words: Path, small: str, tmp_path: Path) -> None:
    result = run(
        *(evaluate.main, "--task", f"{words}:LONG", "--sampler", "greedy", "min-p", "--seeds", 1),
        *("--items", 4, "--max-new-tokens", 4, "--model", small, "--output", tmp_path / "out"),
        *("--slots", 4),
    )
    assert result.status == EXIT_OK, result.err
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8
    for row in rows:
        if int(row["item"][-1]) < 2:
            assert f"the model {MAX_POSITIONS} positions" in row["error"]
            assert (row["finish_reason"], row["text"], row["answer"]) == ("error", "", "")
            assert [row[name] for name in ("score", "tokens", "forwards")] == ["0.0", "0", "0"]
        else:
            assert row["error"] == ""
    greedy = [float(row["score"]) for row in rows if row["setting"] == "greedy"]
    line = section(tmp_path / "out", "Scores")[0]
    assert line[1].startswith(f"{np.mean(greedy):.3f} [")
    assert section(tmp_path / "out", "Texts")[0][2:4].count("50.0 %") == 2
    # And where all are.
    short = run(
        *(evaluate.main, "--task", f"{words}:LONG", "--items", 2, "--seeds", 3),
        *("--model", small, "--output", tmp_path / "none"),
    )
    assert short.status == EXIT_OK, short.err
    assert {row["error"] != "" for row in rows_of(tmp_path / "none")} == {True}
    assert "0.000 [0.000, 0.000]" in (tmp_path / "none" / "summary.md").read_text()


def test_prompts_without_answers(small: str, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    given: list[Json] = [
        {"prompt": "Once upon"},
        {"id": "chat", "messages": [{"role": "user", "content": "a time"}]},
        {"id": "half \ud800", "prompt": "Adam"},
    ]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in given))
    text = "prompts = 'in.jsonl'\nmax_new_tokens = 4\nseeds = [1]\n"
    text += "[settings.a]\nsampler = 'greedy'\n[settings.b]\nsampler = 'top-p'\n"
    sweep, output = write_sweep(tmp_path, text), tmp_path / "out"
    command = (ablate.main, sweep, "--output", output, "--model", small, "--slots", 4)
    assert "half" in refusal(run(*command))
    prompts.write_text("".join(json.dumps(one) + "\n" for one in given[:2]))
    result = run(*command)
    assert result.status == EXIT_OK, result.err
    rows = rows_of(output)
    assert [row["item"] for row in rows] == ["1", "1", "chat", "chat"]
    assert {(row["task"], row["score"], row["answer"]) for row in rows} == {("prompts", "", "")}
    page = (output / "summary.md").read_text()
    assert "## Scores" not in page
    assert "## Predictors" not in page
    assert [line[0] for line in section(output, "Texts")] == ["a", "b"]
    assert {path.stem for path in (output / "plots").iterdir()} == {"regimes"}
    # What was asked may not change under what came of it.
    before = (output / "test.jsonl").read_bytes()
    changed = [given[0], {"id": "chat", "prompt": "another time"}]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in changed))
    assert "has a result of another record" in refusal(run(*command))
    prompts.write_text(json.dumps(given[0]) + "\n")
    assert "there are fewer items now" in refusal(run(*command))
    assert (output / "test.jsonl").read_bytes() == before
    prompts.write_text("".join(json.dumps(one) + "\n" for one in given[:2]))
    for other in (b"\n", b"{}\n", b'{"line": 0}\n'):
        (output / "test.jsonl").write_bytes(before + other)
        assert "test.jsonl: line 5 is no result of a study" in refusal(run(*command))
    (output / "test.jsonl").write_bytes(before)
    # More of them are taken up.
    prompts.write_text("".join(json.dumps(one) + "\n" for one in (*given[:2], {"prompt": "x"})))
    assert run(*command).status == EXIT_OK
    assert [row["item"] for row in rows_of(output)][4:] == ["3", "3"]
    assert (output / "test.jsonl").read_bytes().startswith(before)


def test_another_sweep_under_the_same_folder(small: str, words: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    text = "tasks = ['own.py:WORDS']\nitems = 1\nmax_new_tokens = 2\nbase = 'greedy'\n"
    command = (ablate.main, tmp_path / "sweep.toml", "--output", output, "--model", small)
    write_sweep(tmp_path, text)
    assert run(*command).status == EXIT_OK
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for change, what in (
        ("[set]\n'base.top_k' = 7", "settings.greedy.base.top_k was 27 and is now 7"),
        ("seeds = [0, 1]", r"seeds was [0] and is now [0, 1]"),
    ):
        write_sweep(tmp_path, text + change)
        line = refusal(run(*command))
        assert f"{output}/test.jsonl: holds another run's results: {what}" in line
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_task_of_ones_own(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the documentation shows."""
    page = (ROOT / "docs/studies.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (code,) = (block for block in shown if "CAPITALS" in block)
    (tmp_path / "my_task.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    result = run(
        *(evaluate.main, "--task", "my_task.py:CAPITALS", "--tune", 2, "--seeds", 1),
        *("--sampler", "greedy", "top-p", "--model", small, "--output", "out"),
    )
    assert result.status == EXIT_OK, result.err
    found = [(row["item"], row["setting"], row["expected"]) for row in rows_of(tmp_path / "out")]
    assert found == [
        (item, setting, answer)
        for item, answer in (("Italy", "Rome"), ("Spain", "Madrid"))
        for setting in ("greedy", "top-p (tuned)")
    ]
    assert [line[:2] for line in section(tmp_path / "out", "Tuning")] == [
        ["greedy", "1"],
        ["top-p", "2"],
    ]


def test_other_code_of_ones_own_is_another_study(small: str, words: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command: list[object] = ["--task", f"{words}:WORDS", "--items", 1, "--seeds", 1]
    command += ["--sampler", "greedy", "--max-new-tokens", 2, "--model", small, "--output", output]
    assert run(evaluate.main, *command).status == EXIT_OK
    assert run(evaluate.main, *command).status == EXIT_OK
    words.write_text(WORDS.replace("/ 100", "/ 50"))
    line = refusal(run(evaluate.main, *command))
    assert "test.jsonl: holds another run's results: task_code" in line


def test_only_code_of_ones_own_is_in_the_identity(done: Path) -> None:
    told = json.loads((done / "test.jsonl.run.json").read_text())["identity"]
    assert told["tasks"] == ["sums", "facts"]
    assert "task_code" not in told


ODD = """from entropix_jax.tasks.task import Item, Task


class Odd(Task):
    name, chat = "odd", False

    def items(self, split, *, chat):
        yield Item("a\\udc80", "Berlin", "b\\udc81")

    def extract(self, item, text):
        return "c\\udc82"


ODD = Odd()
"""


def test_half_a_surrogate_pair_is_an_escape_in_the_tables(small: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    output = tmp_path / "out"
    result = run(
        *(evaluate.main, "--task", tmp_path / "odd.py:ODD", "--seeds", 1, "--max-new-tokens", 2),
        *("--sampler", "greedy", "--model", small, "--output", output),
    )
    assert result.status == EXIT_OK, result.err
    (row,) = parquet.read_table(output / "results.parquet").to_pylist()
    assert (row["item"], row["expected"], row["answer"]) == ("a\\udc80", "b\\udc81", "c\\udc82")
    (in_csv,) = rows_of(output)
    assert all(in_csv[name] == row[name] for name in ("item", "expected", "answer"))


# Bad input

MISTAKES: list[tuple[ModuleType, dict[str, Any], str]] = [
    (evaluate, {"--task": "sum"}, "no task 'sum', did you mean 'sums'"),
    (evaluate, {"--task": "no.py:TASK"}, "task 'no.py:TASK': no file no.py"),
    (evaluate, {"--task": "own.py:NO"}, "own.py has no 'NO'"),
    (evaluate, {"--task": "own.py:NUMBER"}, "item 'test 0': extract gave 5, not text or None"),
    (evaluate, {"--task": "own.py:ENDLESS"}, "item 'test 0': score gave inf, not a finite number"),
    (evaluate, {"--task": "own.py:SCORELESS"}, "item 'test 0': score gave None, not a finite"),
    (
        evaluate,
        {"--task": "own.py:UNSCORED", "--sampler": "top-p", "--tune": 2},
        "item 'tuning 0': score gave nan: samplers cannot be tuned by it",
    ),
    (evaluate, {"--task": "own.py:TEXTS"}, "item 'test 0': score gave '0.5', not a finite number"),
    (
        evaluate,
        {"--task": "own.py:RAISES"},
        "task 'words': item 'test 0': extract failed: ValueError: one two",
    ),
    (evaluate, {"--task": "own.py:DIVIDES"}, "item 'test 0': score failed: ZeroDivisionError: div"),
    (
        evaluate,
        {"--task": "own.py:BREAKS"},
        "task 'words': item 2 of 'test': items failed: KeyError: 'gone'",
    ),
    (evaluate, {"--task": "own.py:LISTS"}, "task 'words': items failed: TypeError: 'NoneType'"),
    (evaluate, {"--task": "own.py:TUPLES"}, "items gave ('a', 'Berlin', ''), not an Item"),
    (evaluate, {"--task": "own.py:SUM"}, "item 'a': the answer must be text, not 2"),
    (evaluate, {"--task": "own.py:TOKENS"}, "item 'a': the prompt must be text or messages, not 5"),
    (evaluate, {"--task": "own.py:STOP"}, "task 'words': stop = 'end': must be a tuple of texts"),
    (evaluate, {"--task": "own.py:SAME"}, "task 'words': item 'a': an item's id must be text, and"),
    (evaluate, {"--task": "own.py:NUMBERED"}, "task 'words': item 1: an item's id must be text"),
    (evaluate, {"--task": "own.py:EMPTY"}, "task 'words': item 'b': the prompt is empty"),
    (evaluate, {"--task": "own.py:NONE"}, "task 'words': no items in its split 'test'"),
    (evaluate, {"--task": ("own.py:WORDS", "own.py:SAME")}, "two tasks are called 'words'"),
    (evaluate, {"--task": "gsm8k:g.jsonl", "--tune": 2}, "tuning needs problems of its own"),
    (evaluate, {"--task": "gsm8k:none.jsonl"}, "none.jsonl: no such file"),
    (evaluate, {"--sampler": "gredy"}, "no sampler preset 'gredy'"),
    (evaluate, {"--sampler": ("own.toml", "./own.toml")}, "two settings are called 'own'"),
    (evaluate, {"--sampler": ("own.toml", "./own.toml"), "--tune": 2}, "two are called 'own'"),
    (evaluate, {"--sampler": "long.toml"}, "setting 'long': sampler 'long': metrics.layers has 7"),
    (evaluate, {"--items": -1}, "--items must be at least 0, not -1"),
    (evaluate, {"--seeds": 0}, "--seeds must be at least 1, not 0"),
    (evaluate, {"--tune": -1}, "--tune must be at least 0, not -1"),
    (evaluate, {"--tune-items": 0}, "--tune-items must be at least 1, not 0"),
    (evaluate, {"--max-new-tokens": 0}, "--max-new-tokens must be at least 1, not 0"),
    (evaluate, {"--slots": 0}, "--slots must be at least 1, not 0"),
    (evaluate, {"--output": "own.py"}, "own.py: cannot be made a folder: File exists"),
    (evaluate, {"--output": "/proc/none"}, "/proc/none: cannot be made a folder"),
    (evaluate, {"--output": "taken"}, "taken/test.jsonl: "),
    (evaluate, {"--model": "no/such/model/folder"}, "no/such/model/folder"),
    (ablate, {"": "own"}, "no sweep 'own'"),
    (ablate, {"": "none.toml"}, "none.toml: no such file"),
    (ablate, {"": "own.toml"}, "own.toml: no key 'extends'"),
    (ablate, {"--slots": 0}, "--slots must be at least 1, not 0"),
    (ablate, {"--items": 3}, "--items"),
]


@pytest.mark.parametrize(("module", "changes", "words_"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_mistakes(
    small: str,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    changes: dict[str, Any],
    words_: str,
) -> None:
    (tmp_path / "own.toml").write_text('extends = "greedy"\n')
    layers = "metrics.layers = [1, 1, 1, 1, 1, 1, 1]"
    (tmp_path / "long.toml").write_text(f'extends = "greedy"\n{layers}\n')
    (tmp_path / "g.jsonl").write_text('{"question": "1 + 1?", "answer": "2\\n#### 2"}\n')
    (tmp_path / "taken" / "test.jsonl").mkdir(parents=True)
    write_sweep(tmp_path, "tasks = ['own.py:WORDS']\nbase = 'greedy'\n")
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"--output": "out", "--model": small, "--slots": 4}
    if module is evaluate:
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
    assert words_ in refusal(run(module.main, *arguments))
    assert not (tmp_path / "out" / "summary.md").exists()


@pytest.mark.parametrize("most", ["None", "'20'", "0", "-3", "2.5", "True"])
def test_an_answer_of_no_length(small: str, words: Path, tmp_path: Path, most: str) -> None:
    code = WORDS.replace("max_new_tokens =", "other =")
    words.write_text(f"{code}Words.max_new_tokens = {most}\n")
    asked: list[object] = ["--task", f"{words}:WORDS", "--sampler", "greedy", "--items", 1]
    asked += ["--seeds", 1, "--model", small, "--output", tmp_path / "out"]
    line = refusal(run(evaluate.main, *asked))
    assert f"task 'words': max_new_tokens = {most}: must be an integer > 0" in line
    # Which is not asked where the command says how long.
    result = run(evaluate.main, *asked, "--max-new-tokens", 2)
    assert result.status == EXIT_OK, result.err


# Ends

LONG_RUN = """tasks = ["own.py:WORDS"]
items = 0
seeds = [0, 1]
max_new_tokens = 20
[settings.entropix]
sampler = "entropix"
[settings.greedy]
sampler = "greedy"
[tuning]
samplers = ["top-p"]
settings = 2
items = 8
"""


@pytest.fixture
def whole(small: str, words: Path, tmp_path: Path) -> Path:
    """The folder of a study that nothing interrupted."""
    sweep, output = write_sweep(tmp_path, LONG_RUN), tmp_path / "whole"
    result = run(ablate.main, sweep, "--output", output, "--model", small, "--slots", 4)
    assert result.status == EXIT_OK, result.err
    return output


def same(one: Path, other: Path) -> None:
    assert without_seconds(one) == without_seconds(other)
    assert page_of(one) == page_of(other)
    for path in (one / "plots").iterdir():
        assert path.read_bytes() == (other / "plots" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_an_interrupted_study_goes_on(
    whole: Path,
    small: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
) -> None:
    """Once while it tunes, and once while it tests."""
    write, written = Store.write, 0

    def pressed_at_times(*arguments: Any) -> None:
        nonlocal written
        write(*arguments)
        written += 1
        if written in (5, 30):
            signal.raise_signal(number)

    output = tmp_path / "out"
    own = (tmp_path / "sweep.toml", "--output", output, "--model", small, "--slots", 4)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", pressed_at_times)
        for phase in ("tuning", "test"):
            result = run(ablate.main, *own)
            assert (result.status, result.out) == (status, "")
            assert result.err.endswith("interrupted: the same command goes on from here\n")
            assert f"{phase}: " in result.err
            assert not (output / "summary.md").exists()
    result = run(ablate.main, *own)
    assert result.status == EXIT_OK, result.err
    assert re.search(r"^test: 48 rows, \d+ of them are done already$", result.err, re.M)
    same(output, whole)


def test_a_killed_study_goes_on(
    whole: Path,
    small: str,
    tmp_path: Path,
    own_cache: dict[str, str],  # noqa: F811
) -> None:
    output = tmp_path / "out"
    command = [sys.executable, "-m", "entropix_jax.ablate", "sweep.toml", "--output", "out"]
    command += ["--model", small, "--slots", "4"]
    for file, lines in (("tuning.jsonl", 3), ("test.jsonl", 9)):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own_cache},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            wait_for(output / file, lines, process)
        finally:
            process.kill()
            _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
    assert 9 <= (output / "test.jsonl").read_bytes().count(b"\n") < 48
    result = run(ablate.main, tmp_path / "sweep.toml", "--output", output, *command[6:])
    assert result.status == EXIT_OK, result.err
    same(output, whole)


# A sampler field of one's own


def test_a_sampler_field_of_ones_own(small: str, words: Path, tmp_path: Path) -> None:
    """The three lines that the documentation names, in a copy of the package: a sweep varies it."""
    copy = tmp_path / "copy"
    for name in ("entropix_jax", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    (copy / "weights").symlink_to(ROOT / "weights")
    for file, before, after in (
        (
            "entropix_jax/sampler/params.py",
            "    temperature_logits: jax.Array",
            "    patience: jax.Array = number(0.0, 10.0)\n    temperature_logits: jax.Array",
        ),
        ("configs/entropix.toml", "[adaptive]\n", "[adaptive]\npatience = 1.0\n"),
        (
            "entropix_jax/sampler/arms.py",
            "temperature=base.temperature * warming",
            "temperature=params.adaptive.patience * base.temperature * warming",
        ),
    ):
        text = (copy / file).read_text()
        assert text.count(before) == 1
        (copy / file).write_text(text.replace(before, after))
    arms = "".join(f"'arms.{regime}' = 'adaptive'\n" for regime in REGIMES)
    write_sweep(
        tmp_path,
        "tasks = ['own.py:WORDS']\nitems = 2\nseeds = [0, 1]\nmax_new_tokens = 6\n"
        f"[set]\n{arms}[grid]\n'adaptive.patience' = [0.0, 1.0]\n",
    )
    process = subprocess.run(
        [
            *(sys.executable, "-m", "entropix_jax.ablate", "sweep.toml", "--output", "out"),
            *("--model", small, "--slots", "4"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == EXIT_OK, process.stderr
    texts: dict[str, set[str]] = {}
    for row in rows_of(tmp_path / "out"):
        texts.setdefault(row["adaptive.patience"], set()).add(row["item"] + row["text"])
    # Without patience the likeliest token comes, whatever the seed; with 1.0 nothing has changed.
    assert [len(texts[patience]) for patience in ("", "0.0", "1.0")] == [4, 2, 4]
    assert texts["1.0"] == texts[""]


# GSM8K


WAIT = 0.3  # seconds until the rows, which are there, get their slot


class Reciter:
    """Stands in the place of the engine: each row says what it is told to, token by token."""

    texts: dict[str, str]

    def __init__(self, model: LanguageModel, *, capacity: int, **_: object) -> None:
        self._model, self._capacity = model, capacity
        self.steps, self.used = 1, 1.0

    def check(self, request: Request) -> None:
        check_request(self._model, request, self._capacity)

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        tokenizer = self._model.tokenizer
        waiting = [RunningRow(Row(request), self._model, self._capacity) for request in requests]
        time.sleep(WAIT)
        for row in waiting:
            row.row.started = time.perf_counter()
            ids = tokenizer.encode(self.texts[row.request.row_id], add_bos=False)
            for number, token in enumerate([*ids, row.request.eos_ids[0]], 1):
                finish = FINISHED_LENGTH if number == row.budget else RUNNING
                finish = FINISHED_EOS if number > len(ids) else finish
                tokens = [TokenRecord(**self._record(row, number, token), text="")]
                outcome = Outcome(0, tokens, None, finish, False, (-1, -1))
                yield from row.apply(outcome, lambda: False)
                if not row.running:
                    break

    def stop(self) -> None:
        """It never runs for long."""

    @staticmethod
    def _record(row: RunningRow, number: int, token: int) -> dict[str, Any]:
        names = [field.name for field in fields(TokenRecord)]
        plain = (name for name in names[:-4] if name != "text")  # the last ones may be None
        return {
            **dict.fromkeys(plain, 0.5),
            "row": row.row.number,
            "position": len(row.request.prompt) + number - 1,
            "token_id": token,
            "regime": "mid",
            "action": "sample",
            "logprob": -0.5,
            "forwards": number - 1,
        }


def last_number(solution: str) -> int:
    return int(solution.rpartition("####")[2].replace(",", ""))


# How a solution may be told, and its score. `{work}` is all before the answer `{n}`.
MANNERS = {
    "as it is": (" {work}#### {n}", 1.0),
    "with thousands": (" {work}#### {n:,}", 1.0),
    "with a dollar and a point": (" {work}#### ${n}.00.", 1.0),
    "bold": (" {work}#### **{n}**", 1.0),
    "in words": (" {work}So the answer is {n} apples.", 1.0),
    "corrected": (" {work}#### 77777\nNo, it is\n#### {n}", 1.0),
    "then the next question": (" {work}#### {n}\n\nQuestion: How many?\nAnswer: #### 77777", 1.0),
    "cut by a question": (" {work}\nQuestion: How many?\nAnswer: #### {n}", None),
    "another number": (" {work}#### 77777", 0.0),
    "a number more": (" {work}#### {n}1", 0.0),
    "negative": (" {work}#### -{n}", 0.0),
    "no number": (" I do not know.", 0.0),
    "nothing": ("", 0.0),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with room for more: nothing is computed of it."""
    folder = tmp_path_factory.mktemp("reader") / "tiny"
    shutil.copytree(TINY, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 16384}))
    return str(folder)


def recite(
    folder: Path, problems: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, str]]:
    """Asks the problems of a file, the first in the first manner, and so on."""
    solved = [json.loads(line) for line in problems.read_text("utf-8").splitlines()]
    texts = {}
    for number, problem in enumerate(solved):
        manner, _ = list(MANNERS.values())[number % len(MANNERS)]
        work, n = problem["answer"].rpartition("####")[0], last_number(problem["answer"])
        texts[f"gsm8k/gsm8k-test-{number + 1}"] = manner.format(work=work, n=n)
    monkeypatch.setattr(Reciter, "texts", texts, raising=False)
    monkeypatch.setattr(trials, "Engine", Reciter)
    result = run(
        *(evaluate.main, "--task", f"gsm8k:{problems}", "--sampler", "greedy", "--model", reader),
        *("--items", 0, "--seeds", 1, "--output", folder),
    )
    assert result.status == EXIT_OK, result.err
    rows = rows_of(folder)
    assert len(rows) == len(solved)
    for number, (row, problem) in enumerate(zip(rows, solved, strict=True)):
        name = list(MANNERS)[number % len(MANNERS)]
        assert row["expected"] == str(last_number(problem["answer"]))
        written, score = texts[f"gsm8k/gsm8k-test-{number + 1}"], MANNERS[name][1]
        whole = written.partition("\nQuestion:")[0]
        if row["finish_reason"] == "length":
            assert whole.startswith(row["text"])
            assert row["tokens"] == "512"
            continue
        assert row["text"] == whole
        assert row["finish_reason"] == ("stop" if whole != written else "eos")
        if score is not None:
            assert float(row["score"]) == score, (name, row)
        else:  # the last number of the work
            numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", whole)
            assert float(row["answer"]) == float(numbers[-1].replace(",", ""))
        if name == "no number":
            assert row["answer"] == ""
    scores = [float(row["score"]) for row in rows]
    assert section(folder, "Scores")[0][1].startswith(f"{np.mean(scores):.3f} [")
    return rows


def test_gsm8k_recited(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = tmp_path / "test.jsonl"
    lines = []
    for i in range(2 * len(MANNERS)):
        answer = f"{i} + 1200 = <<{i}+1200={i + 1200}>>{i + 1200}\n#### {i + 1200:,}"
        lines.append(json.dumps({"question": f"What is {i} and 1200?", "answer": answer}))
    problems.write_text("\n".join(lines) + "\n")
    rows = recite(tmp_path / "out", problems, reader, monkeypatch)
    assert {row["finish_reason"] for row in rows} == {"eos", "stop"}
    assert sum(float(row["score"]) for row in rows) == 2 * 8
    assert max(float(row["seconds"]) for row in rows) < WAIT, "a row's time begins with its slot"


def test_all_of_gsm8k_recited(
    tmp_path: Path, reader: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = tmp_path / "test.jsonl"
    lines = (shared_data / "gsm8k_test.jsonl").read_text("utf-8").splitlines()[:130]
    problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
    recite(tmp_path / "out", problems, reader, monkeypatch)


def test_gsm8k_through_the_embedded_model(
    tmp_path: Path, shared_data: Path, small: str, tiny: LanguageModel
) -> None:
    """It has room for eight exemplars and a question; a smaller one says that it has none."""
    problems = shared_data / "gsm8k_test.jsonl"
    own = [
        *("--task", f"gsm8k:{problems}", "--items", 2, "--seeds", 1, "--max-new-tokens", 8),
        *("--sampler", "greedy", "--slots", 2),
    ]
    result = run(evaluate.main, *own, "--output", tmp_path / "tiny")
    assert result.status == EXIT_OK, result.err
    task = find_task(f"gsm8k:{problems}")
    for row, item in zip(rows_of(tmp_path / "tiny"), task.items("test", chat=False), strict=False):
        assert row["error"] == ""
        assert 0 < int(row["tokens"]) <= 8
        assert int(row["forwards"]) == int(row["tokens"]) - 1
        assert float(row["score"]) == float(task.extract(item, row["text"]) == item.answer)
        request = Spec(encode_prompt(tiny, item.prompt, chat=False), f"gsm8k/{item.id}", 8)
        (alone,) = run_specs(tiny, [request], "greedy", stop=task.stop).run()
        assert alone.text == row["text"]
    result = run(evaluate.main, *own, "--output", tmp_path / "small", "--model", small)
    assert result.status == EXIT_OK, result.err
    rows = rows_of(tmp_path / "small")
    assert [row["score"] for row in rows] == ["0.0", "0.0"]
    assert all("tokens, the model 120 positions" in row["error"] for row in rows)


def test_pictures_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("no folder")
    nothing: Any = SimpleNamespace(lines=[], bins={}, truth=[], digest=SimpleNamespace(settings={}))
    with pytest.raises(UserError, match=r"regimes\.png: cannot be written"):
        draw_plots(nothing, tmp_path / "plots")


# The truth


def test_the_models_entropy_against_the_true_one(tiny: LanguageModel) -> None:
    """The same figures as from float64 sums over all the model's predictions."""
    sampler = calibrated(tiny)
    found = hold_against_truth(tiny, sampler, texts=2)
    ids = terminal_ids(build_tokenizer())
    world, rng = create(WORLD_SEED), Random("held against the truth 0")
    parts, regimes = [], []
    for _ in range(2):
        row = write_row(world, rng, 512)
        tokens = encode_row(row, ids)
        logits = np.asarray(
            teacher_forced(tiny.params, tiny.config, np.array([tokens]))[0][0, :-1], np.float64
        )
        top = logits.max(-1, keepdims=True)
        log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        parts.append(compare(row, log_probs, ids))
        regimes += [token.regime for token in score_tokens(tiny, tokens, sampler)]
    whole = Comparison.join(parts)
    assert sum(one.number for one in found) == len(regimes) == 2 * 511
    assert [one.regime for one in found] == [name for name in REGIMES if name in regimes]
    for one in found:
        here = np.array(regimes) == one.regime
        assert one.number == here.sum()
        for own, oracle in (
            (one.true_entropy, whole.true_entropy),
            (one.true_varentropy, whole.true_varentropy),
            (one.model_entropy, whole.model_entropy),
            (one.model_varentropy, whole.model_varentropy),
        ):
            np.testing.assert_allclose(own, oracle[here], atol=1e-3, rtol=0)
        distance = np.abs(whole.model_entropy - whole.true_entropy)[here].mean()
        assert one.entropy_error == pytest.approx(distance, abs=1e-3)
        distance = np.abs(whole.model_varentropy - whole.true_varentropy)[here].mean()
        assert one.varentropy_error == pytest.approx(distance, abs=1e-3)


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_the_truth_is_known_of_no_other_language(small: str, tmp_path: Path, kind: str) -> None:
    """A study of such a model does without it."""
    foreign = tmp_path / "foreign"
    shutil.copytree(small, foreign)
    path = foreign / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocabulary = raw["model"]["vocab"]
    if kind == "BPE":
        others = {f"x{word}": number for word, number in vocabulary.items()}
        raw["model"] |= {"vocab": others, "merges": []}
    else:
        pieces = [[word, -1.0] for word in sorted(vocabulary, key=vocabulary.__getitem__)]
        raw["model"] = {"type": kind, "unk_id": 0, "vocab": pieces}
    path.write_text(json.dumps(raw))
    model = load(str(foreign))
    with pytest.raises(UserError, match="does not speak the tiny world's language") as caught:
        hold_against_truth(model, calibrated(model), texts=1)
    assert str(foreign) in str(caught.value)
    assert "\n" not in str(caught.value)
    result = run(
        *(evaluate.main, "--task", "sums", "--sampler", "greedy", "--items", 1, "--seeds", 1),
        *("--model", foreign, "--max-new-tokens", 2, "--output", tmp_path / "out"),
    )
    assert result.status == EXIT_OK, result.err
    assert "true one" not in (tmp_path / "out" / "summary.md").read_text()
