"""Sweep files: settings, random draws, tuning candidates, and errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab import outputs
from entropix_jax.lab.sweep import (
    ByTask,
    Comparison,
    Setting,
    Sweep,
    find_sweep,
    list_names,
    make_sweep,
    read_sweep,
)
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.support.samplers import calibration_of

SHIPPED = sorted((resource_folder("configs") / "ablations").glob("*.toml"))
OWN = 'extends = "entropix"\n[base]\ntop_k = 3\n'


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> Sweep:
    return read_sweep(write(folder, f'tasks = ["sums"]\n{text}'))


def varied(sweep: Sweep) -> list[Mapping[str, Any]]:
    return [setting.varied for setting in sweep.settings if setting.varied]


def changed(setting: Setting, base: str = "entropix") -> dict[str, Any]:
    """Returns the values of a setting's sampler that differ from a preset."""
    values, own = setting.sampler.values, load_sampler(base).values
    return {key: value for key, value in values.items() if value != own.get(key)}


def tune(
    samplers: list[str], calibrate: Any = lambda sampler: sampler, **table: Any
) -> Mapping[str, tuple[Setting, ...]]:
    content = {"tasks": ["sums"], "tuning": {"samplers": samplers, **table}}
    tuning = make_sweep(content, Path(), calibrate).tuning
    assert tuning is not None
    return tuning.candidates


def draws(sampler: str, ranges: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """Returns the values of random draws for tuning."""
    (_, *group) = tune([sampler], settings=number + 1, over={sampler: ranges})[sampler]
    return [setting.varied for setting in group]


# Shipped files


def test_shipped_sweeps() -> None:
    for path in SHIPPED:
        if path.stem != "ranges":
            sweep = read_sweep(find_sweep(path.stem), data="data")
            names = list_names(sweep.settings, sweep.tuning)
            assert sweep.description
            assert sweep.baseline in names
            assert len(names) > 1
    # Each mechanism is disabled separately, and every setting differs from the base.
    base, *others = read_sweep(find_sweep("mechanisms")).settings
    assert (base.name, changed(base)) == ("entropix", {})
    assert all(changed(setting) for setting in others)


# Settings


def test_a_grid_is_a_product(tmp_path: Path) -> None:
    """The last key varies fastest. Tables and dotted keys are equivalent."""
    text = '[grid]\n"base.top_k" = [5, 10]\n[grid.thresholds]\nh1 = [0.1, 0.2, 0.3]\n'
    base, *others = read(tmp_path, text).settings
    points = list(itertools.product([5, 10], [0.1, 0.2, 0.3]))
    wanted = [{"base.top_k": k, "thresholds.h1": h} for k, h in points]
    assert [one.varied for one in others] == [one.sampler.changes for one in others] == wanted
    names = [f"base.top_k={k} thresholds.h1={h}" for k, h in points]
    assert [one.name for one in (base, *others)] == ["entropix", *names]
    lists = read(tmp_path, '[grid]\n"metrics.layers" = ["last", [0, 1, 1, 1]]\n')
    names = ["entropix", "metrics.layers=last", "metrics.layers=0,1,1,1"]
    assert [setting.name for setting in lists.settings] == names


def test_random_draws() -> None:
    ranges = {
        "base.temperature": {"from": 0.02, "to": 2.0, "scale": "log"},
        "base.min_p": {"from": 0.1, "to": 0.5},
        "base.top_k": {"from": 2, "to": 5},
        "arms.lehv": ["branch", "explore"],
    }
    first, again = (draws("entropix", ranges, 300) for _ in range(2))
    assert first == again != draws("band", ranges, 300)
    assert len({tuple(point.values()) for point in first}) == len(first) == 300
    columns = {key: [point[key] for point in first] for key in first[0]}
    assert {*columns["arms.lehv"]} == {"branch", "explore"}
    assert {*columns["base.top_k"]} == {2, 3, 4, 5}
    assert {type(value) for value in columns["base.top_k"]} == {int}
    # Half of a logarithmic range lies below the geometric mean of its ends.
    for key, low, middle, high in (("temperature", 0.02, 0.2, 2.0), ("min_p", 0.1, 0.3, 0.5)):
        values = columns[f"base.{key}"]
        assert low <= min(values) < max(values) <= high
        below = sum(value < middle for value in values)
        assert below == pytest.approx(150, abs=4 * math.sqrt(300) / 2)


def test_invalid_draws_are_repeated() -> None:
    both = {f"thresholds.{name}": {"from": 0, "to": 4} for name in ("h1", "h2")}
    points = draws("entropix", both, 50)
    assert len(points) == 50
    assert all(point["thresholds.h1"] <= point["thresholds.h2"] for point in points)
    # All points of a small space.
    few = {"arms.mid": ["sample", "argmax"], "base.top_k": [1, 2, 2]}
    assert len({tuple(point.values()) for point in draws("entropix", few, 4)}) == 4
    with pytest.raises(UserError, match=r"tuning: over.entropix: only 4 of 5 draws"):
        draws("entropix", few, 5)


def test_draws_are_valid_with_the_tables_of_the_model(tmp_path: Path) -> None:
    """A drawn number may not cross a threshold that is a percentile."""
    tables = calibration_of({0: 0.0, 100: 10.0}, {0: 0.0, 60: 0.5, 100: 25.0})

    def of_model(sampler: Sampler) -> Sampler:
        return sampler.resolve(tables)

    over: dict[str, Any] = {"thresholds.u1": {"from": 0.0, "to": 2.0}}
    fitting, any_ = (
        tune(["entropix"], calibrate, settings=40, over={"entropix": over})["entropix"]
        for calibrate in (of_model, lambda sampler: sampler)
    )
    # u2 is the 60th percentile.
    own = [of_model(setting.sampler).values for setting in fitting]
    assert len(own) == 40
    assert all(values["thresholds.u1"] <= values["thresholds.u2"] == 0.5 for values in own)
    assert max(setting.varied["thresholds.u1"] for setting in any_[1:]) > 0.5
    over = {"thresholds.h1": ["71%", "5%"]}
    with pytest.raises(UserError, match="only 1 of 2 draws"):
        tune(["entropix"], of_model, settings=3, over={"entropix": over})


def test_named_settings(tmp_path: Path) -> None:
    write(tmp_path, OWN, "own.toml")
    sweep = read(
        tmp_path,
        'base = "own.toml"\n[set]\n"branch.depth" = 5\n'
        '[settings.no-branch.arms]\nlehv = "explore"\n'
        '[settings.plain]\nsampler = "temperature"\n"base.temperature" = 0.5\n',
    )
    base, without, plain = sweep.settings
    assert changed(base) == {"base.top_k": 3, "branch.depth": 5}
    assert changed(without) == {"base.top_k": 3, "branch.depth": 5, "arms.lehv": "explore"}
    assert changed(plain, "temperature") == {"branch.depth": 5, "base.temperature": 0.5}
    assert [setting.name for setting in sweep.settings] == ["own", "no-branch", "plain"]
    assert not varied(sweep)
    # Without a base or a change of it, there are only the named settings.
    alone = read(tmp_path, '[settings.greedy]\nsampler = "greedy"\n')
    assert [setting.name for setting in alone.settings] == [alone.baseline] == ["greedy"]
    listed = read(
        tmp_path, 'samplers = ["min-p", "own.toml"]\n[settings.own2]\nsampler = "own.toml"'
    )
    assert [setting.name for setting in listed.settings] == ["min-p", "own", "own2"]
    # More baselines follow the first.
    text = "baselines = ['plain', 'own', 'no-branch']\nbase = 'own.toml'\n"
    assert alone.baselines == ()
    text += "[settings.no-branch]\n'arms.lehv' = 'explore'\n[settings.plain]\nsampler = 'greedy'\n"
    several = read(tmp_path, text)
    assert (several.baseline, several.baselines) == ("own", ("plain", "no-branch"))


def test_files_are_named_from_the_sweeps_folder(tmp_path: Path) -> None:
    write(tmp_path, OWN, "own.toml")
    names = ["sums", "gsm8k:/b.jsonl", "svamp:a,b.json", "my/task.py:TASK"]
    names += ["ifeval", "my.module:TASK"]
    path = write(tmp_path, f"tasks = {names}\nbase = 'own.toml'")
    sweep = read_sweep(path, data="/data")
    assert sweep.tasks == (
        "sums",
        "gsm8k:/b.jsonl",
        f"svamp:{tmp_path}/a,b.json",
        f"{tmp_path}/my/task.py:TASK",
        "ifeval:/data/ifeval.jsonl",
        "my.module:TASK",
    )


@pytest.mark.parametrize("kind", ["", "exec:"])
def test_a_source_of_lookups(tmp_path: Path, kind: str) -> None:
    source = f"{kind}facts.csv"
    assert read(tmp_path, f"lookup = '{source}'").lookup == f"{kind}{tmp_path}/facts.csv"
    assert read(tmp_path, "lookup = 'http://h/x'").lookup == "http://h/x"
    assert read(tmp_path, "").lookup is None


def test_counts_by_task(tmp_path: Path) -> None:
    """Uses the task's own count, else the default. `at_most` limits both."""
    sweep = read(tmp_path, "items = { sums = 7, facts = 0 }\n[max_new_tokens]\nsums = 9\n")
    assert [sweep.items.of(task) for task in ("sums", "facts", "forks")] == [7, 0, 100]
    assert [sweep.max_new_tokens.of(task) for task in ("sums", "facts")] == [9, None]
    part = sweep.items.at_most(3)
    assert [part.of(task) for task in ("sums", "facts", "forks")] == [3, 3, 3]
    assert [sweep.items.at_most(8).of(task) for task in ("sums", "facts", "forks")] == [7, 8, 8]
    assert [ByTask(0).at_most(5), ByTask(5).to_json()] == [ByTask(5), 5]
    assert sweep.items.to_json() == {"sums": 7, "facts": 0, "default": 100}
    assert (sweep.skip.of("sums"), read(tmp_path, "skip = { sums = 2 }").skip.of("sums")) == (0, 2)
    assert [sweep.most_seeds.of(task) for task in ("sums", "facts")] == [0, 0]
    most = read(tmp_path, "seeds = [3, 1, 2]\nmost_seeds = { facts = 1 }\n").most_seeds
    assert [most.of(task) for task in ("sums", "facts")] == [0, 1]
    assert read(tmp_path, "most_seeds = 2\n").most_seeds == ByTask(2)
    sweep.items.check_tasks("items", ["sums", "facts"])
    with pytest.raises(UserError, match=r"items\.facts: no such task"):
        sweep.items.check_tasks("items", ["sums", "forks"])
    bad = (("items", "-1"), ("items", "true"), ("max_new_tokens", "0"), ("most_seeds", "-1"))
    for key, number in bad:
        with pytest.raises(UserError, match=rf"{key}\.sums = .*: must be an integer"):
            read(tmp_path, f"{key} = {{ sums = {number} }}")


def test_comparisons(tmp_path: Path) -> None:
    """By default, all settings outside the curve are compared, including tuned ones."""
    text = "samplers = ['greedy', 'min-p', 'top-p']\n[tuning]\nsamplers = ['mirostat']\n"
    table = "[[compare]]\nby = 'forwards'\ncurve = ['min-p', 'greedy']\n"
    own = "settings = ['top-p']\npairs = [['greedy', 'top-p']]\nmargin = 0.03\ntasks = ['sums']\n"
    first, second = read(tmp_path, f"{text}{table}{table}{own}").comparisons
    curve = ("min-p", "greedy")
    assert first == Comparison("compare.1", "forwards", curve, ("top-p", "mirostat (tuned)"))
    wanted = ("top-p",), (("greedy", "top-p"),), 0.03, ("sums",)
    assert second == Comparison("compare.2", "forwards", curve, *wanted)
    assert read(tmp_path, text).comparisons == ()


# Tuning


def test_candidates() -> None:
    """Samplers have equally many candidates, the first unchanged, or only one without ranges."""
    candidates = tune(["greedy", "top-p", "entropix"], settings=5)
    numbers = {name: len(group) for name, group in candidates.items()}
    assert numbers == {"greedy": 1, "top-p": 5, "entropix": 5}
    for name, group in candidates.items():
        names = [f"{name} #{number}" for number in range(1, len(group) + 1)]
        assert [setting.name for setting in group] == names
        assert changed(group[0], name) == {}
        assert len({str(setting.varied) for setting in group}) == len(group)
    for setting in candidates["top-p"][1:]:
        assert {*setting.varied} == {"base.temperature", "base.top_p"}
        assert 0.2 <= setting.varied["base.temperature"] <= 1.2
        assert 0.5 <= setting.varied["base.top_p"] <= 0.99
    # A sampler's candidates do not depend on other samplers or on their number.
    alone = tune(["top-p"], settings=9)["top-p"]
    assert [one.varied for one in alone[:5]] == [one.varied for one in candidates["top-p"]]


def test_a_file_is_tuned_like_its_base(tmp_path: Path) -> None:
    """A file uses the ranges of its nearest base. If all arms are argmax, it is not tuned."""
    write(tmp_path, 'extends = "min-p"\n', "between.toml")
    write(tmp_path, 'extends = "between.toml"\n[base]\nmin_p = 0.3\n', "own.toml")
    write(tmp_path, 'extends = "greedy"\n', "still.toml")
    write(tmp_path, 'extends = "greedy"\n[arms]\nmid = "sample"\n', "some.toml")
    files = ["own.toml", "still.toml", "some.toml"]
    tuning = read(tmp_path, f"[tuning]\nsamplers = {files}\nsettings = 3").tuning
    assert tuning is not None
    numbers = {name: len(group) for name, group in tuning.candidates.items()}
    assert numbers == {"own": 3, "still": 1, "some": 3}
    for name, like in (("own", "min-p"), ("some", "entropix")):
        (_, theirs) = tune([like], settings=2)[like]
        assert all(one.varied.keys() == theirs.varied.keys() for one in tuning.candidates[name][1:])


# Errors

TUNE = '[tuning]\nsamplers = ["top-p"]\n'
MANY = list(range(400))
BY = "T\nsamplers = ['greedy', 'min-p', 'top-p']\n[[compare]]\nby = 'forwards'\n"
CURVE = f"{BY}curve = ['greedy', 'min-p']"
OVER = f'{TUNE}[tuning.over.top-p]\n"base.temperature" = '
BAD: list[tuple[str, str]] = [
    ("task = ['sums']", "no key 'task', did you mean 'tasks'"),
    ("", "tasks: must name a task"),
    ("tasks = 'sums'", "tasks: must be a list of texts"),
    ("tasks = ['sums', 'sums']", "tasks: has a value twice"),
    ("T\nitems = -1", "items = -1: must be an integer from 0"),
    ("T\nitems = 3000000000", "items = 3000000000: must be an integer from 0 to 2147483647"),
    ("T\nsplit = 'train'", "split = 'train': must be one of tuning, test"),
    ("T\nbase = 'entropics'", "base: no sampler preset 'entropics'.*did you mean 'entropix'"),
    ("T\nbaseline = 'entropy'", "baseline = 'entropy': no such setting, did you mean 'entropix'"),
    ("T\nbaselines = ['entropy']", "baselines = 'entropy': no such setting, did you mean 'entro"),
    ("T\nbaselines = 'greedy'", "baselines: must be a list of texts"),
    ("T\n[set]\n'base.temprature' = 1", "set: .*'base.temprature', did you mean 'base.temp"),
    ("T\n[set]\n'thresholds.h1' = 3\n'thresholds.h2' = 2", "set: .*h1 = 3 is above.*h2 = 2"),
    ("T\n[settings.a]\n'base.top_k' = -1", r"settings.a: .*base.top_k = -1: must be an integer in"),
    ("T\nbase = 'greedy'\n[settings.greedy]\n", "two settings are called 'greedy'"),
    (f"T\n{TUNE}[settings.'top-p (tuned)']", r"two settings are called 'top-p \(tuned\)'"),
    ("T\n[grid]", "grid: has no keys"),
    (f"T\n[grid]\n'base.top_k' = {MANY}\n'branch.depth' = {MANY}", "grid: 160000 settings: at"),
    (f"T\n{OVER}{{ from = 2, to = 1 }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 0, to = 1, scale = 'log' }}", "base.temperature: must be a list"),
    (f"T\n{OVER}{{ from = 1, to = 1{'0' * 400} }}", "base.temperature: must be a list"),
    (f"T\n{OVER}{{ from = 1, to = 1e300, scale = 'log' }}", r"temperature = 1e\+300: must be a"),
    (f"T\n{TUNE}[tuning.over.top-p]\n'base.top_k' = {{from = 1.2, to = 1.8}}", "top_k: no integer"),
    (
        f"T\n{TUNE}[tuning.over.top-p]\n'thresholds.h1' = [3, 4]\n'thresholds.h2' = [1, 2]",
        "over.top-p: only 0 of 7 draws: top-p: thresholds.h1 = . is above",
    ),
    ("T\n[tuning]", "tuning.samplers: must be a list of samplers"),
    ("T\n[tuning]\nsamplers = ['top-p', 'top-p']", "tuning.samplers: has a value twice"),
    (f"T\n{TUNE}[tuning.over.min-p]\n'base.min_p' = [0.1]", "tuning: over.min-p: not one"),
    (f"T\nsplit = 'tuning'\n{TUNE}", "split = 'tuning' is used for tuning"),
    ("tasks = ", "not valid TOML"),
    ("T\ncompare = 3", r"compare: must be an array of tables, \[\[compare\]\]"),
    ("T\n[compare]", r"compare: must be an array of tables, \[\[compare\]\]"),
    ("T\ncompare = [3]", r"compare.1: must be a table"),
    ("T\n[[compare]]\ncost = 1", "compare.1: no key 'cost'"),
    ("T\n[[compare]]", "compare.1.by = None: must be one of self_bleu, forwards"),
    (f"{BY}", "compare.1.curve: must have at least two settings"),
    (f"{CURVE[:-1]}, 'mni-p']", "compare.1.curve = 'mni-p': no such setting, did you mean 'min-p'"),
    (f"{CURVE}\nsettings = ['entropix']", "compare.1.settings = 'entropix': no such setting"),
    (f"{CURVE}\nsettings = []", "compare.1.settings: must name a setting to compare"),
    (f"{CURVE}\npairs = [['top-p']]", "compare.1.pairs: must be a list of pairs of settings"),
    (f"{CURVE}\npairs = [['top-p', 'x']]", "compare.1.pairs = 'x': no such setting"),
    (f"{CURVE}\nmargin = 0", "compare.1.margin = 0: must be a number between 0 and 1000"),
    (f"{CURVE}\nmargin = true", "compare.1.margin = True: must be a number between 0 and 1000"),
    (f"{CURVE}\ntasks = 'sums'", "compare.1.tasks: must be a list of texts"),
    ("T\nsettings_of = '../a.toml'", "settings_of = '../a.toml': must be the name of a sweep file"),
    ("T\nsettings_of = 'missing.toml'", "missing.toml"),
]


def test_settings_of_another_sweep(tmp_path: Path) -> None:
    """The file's own settings override them, and all other keys are its own."""
    shared = "tasks = ['facts']\n[settings.a]\n'base.top_k' = 5\n[settings.b]\n'base.top_k' = 6\n"
    (tmp_path / "shared.toml").write_text(shared)
    path = write(
        tmp_path, "tasks = ['sums']\nsettings_of = 'shared.toml'\n[settings.b]\n'base.top_k' = 7"
    )
    sweep = read_sweep(path)
    found = {setting.name: setting.sampler.values["base.top_k"] for setting in sweep.settings}
    assert found == {"entropix": 0, "a": 5, "b": 7}
    assert sweep.tasks == ("sums",)


@pytest.mark.parametrize(("text", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_sweeps(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text.replace("T\n", "tasks = ['sums']\n", 1))
    with pytest.raises(UserError, match=words) as caught:
        read_sweep(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("by", "text", "words"),
    [
        ("forwards", "tasks = ['sum']", "compare.1.tasks = 'sum': no such task, did you mean"),
        ("forwards", "tasks = ['writing']", "compare.1.tasks = 'writing': has no score"),
        ("self_bleu", "", "compare.1.by = 'self_bleu': task 'facts' has one seed: needs two"),
        ("self_bleu", "tasks = ['facts']", "compare.1.by = 'self_bleu': task 'facts' has one seed"),
        ("self_bleu", "tasks = ['sums']", ""),
        ("forwards", "", ""),
    ],
)
def test_tasks_of_a_comparison(tmp_path: Path, by: str, text: str, words: str) -> None:
    path = write(
        tmp_path,
        "tasks = ['sums', 'facts', 'writing:p.csv']\nseeds = [0, 1]\nmost_seeds = { facts = 1 }\n"
        "samplers = ['greedy', 'min-p', 'top-p']\n"
        f"[[compare]]\nby = '{by}'\ncurve = ['greedy', 'min-p']\n{text}\n",
    )
    if not words:
        assert len(outputs.find_tasks(read_sweep(path))) == 3
        return
    with pytest.raises(UserError, match=words):
        outputs.find_tasks(read_sweep(path))


def test_a_comparison_needs_a_score(tmp_path: Path) -> None:
    text = f"tasks = ['writing:p.csv']\n{CURVE.partition(chr(10))[2]}"
    with pytest.raises(UserError, match=r"compare\.1: no score to compare: writing has none"):
        outputs.find_tasks(read_sweep(write(tmp_path, text)))
