"""Sweep files: which settings they mean, what is drawn and tuned, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.resources import resource_folder
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.studies.sweep import (
    Setting,
    Sweep,
    find_sweep,
    list_names,
    read_sweep,
    make_tuning,
)
from tests.samplers import calibrated

SHIPPED = sorted(
    path.stem
    for path in (resource_folder("configs") / "ablations").glob("*.toml")
    if path.stem != "ranges"
)
OWN = 'extends = "entropix"\n[base]\ntop_k = 3\n'


def write(folder: Path, text: str | bytes, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(folder: Path, text: str) -> Sweep:
    return read_sweep(write(folder, f'tasks = ["sums"]\n{text}'))


def varied(sweep: Sweep) -> list[Mapping[str, Any]]:
    return [setting.varied for setting in sweep.settings if setting.varied]


def changed(setting: Setting, base: str = "entropix") -> dict[str, Any]:
    """What a setting's sampler has other than a preset."""
    values, own = setting.sampler.values, load_sampler(base).values
    return {key: value for key, value in values.items() if value != own.get(key)}


# The files that come with the package


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sweeps(name: str) -> None:
    sweep = read_sweep(find_sweep(name))
    assert sweep.description
    assert sweep.baseline in list_names(sweep.settings, sweep.tuning)
    assert sweep.tasks
    assert len(sweep.settings) > 1


def test_each_mechanism_is_switched_off_alone() -> None:
    """Against the sampler that it is switched off in, each setting has other values."""
    base, *others = read_sweep(find_sweep("mechanisms")).settings
    assert (base.name, changed(base), base.base) == ("entropix", {}, None)
    assert all(changed(setting) for setting in others)
    assert {setting.base for setting in others} == {"entropix"}


def test_sweeps_are_found() -> None:
    assert SHIPPED == ["mechanisms", "presets", "study", "thresholds"]
    assert find_sweep("here/mine.toml") == Path("here/mine.toml")
    with pytest.raises(UserError, match=r"no sweep 'mechanism' .*did you mean 'mechanisms'"):
        find_sweep("mechanism")
    with pytest.raises(UserError, match="no sweep 'ranges'"):
        find_sweep("ranges")


# Settings


def test_what_is_not_said(tmp_path: Path) -> None:
    sweep = read(tmp_path, "")
    assert (sweep.items, sweep.seeds, sweep.split) == (100, (0,), "test")
    assert (sweep.prompts, sweep.max_new_tokens, sweep.tuning) == (None, None, None)
    (setting,) = sweep.settings
    assert (setting.name, setting.sampler.name, sweep.baseline) == ("entropix",) * 3


def test_a_grid_is_a_product(tmp_path: Path) -> None:
    """The last key changes fastest; tables and dotted keys say the same."""
    text = '[grid]\n"base.top_k" = [5, 10]\n[grid.thresholds]\nh1 = [0.1, 0.2, 0.3]\n'
    sweep = read(tmp_path, text)
    points = list(itertools.product([5, 10], [0.1, 0.2, 0.3]))
    assert varied(sweep) == [{"base.top_k": k, "thresholds.h1": h} for k, h in points]
    assert [setting.name for setting in sweep.settings] == [
        "entropix",
        *(f"base.top_k={k} thresholds.h1={h}" for k, h in points),
    ]
    for setting in sweep.settings[1:]:
        assert setting.sampler.changes == setting.varied
    lists = read(tmp_path, '[grid]\n"metrics.layers" = ["last", [0, 1, 1, 1]]\n')
    names = ["entropix", "metrics.layers=last", "metrics.layers=0,1,1,1"]
    assert [setting.name for setting in lists.settings] == names


RANDOM = """[random]
settings = 300
seed = {seed}
[random.over]
"base.temperature" = {{ from = 0.02, to = 2.0, scale = "log" }}
"base.min_p" = {{ from = 0.1, to = 0.5 }}
"base.top_k" = {{ from = 2, to = 5 }}
"arms.lehv" = ["branch", "explore"]
"""


def test_random_draws(tmp_path: Path) -> None:
    first, again, other = (varied(read(tmp_path, RANDOM.format(seed=seed))) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 300
    assert len({tuple(point.values()) for point in first}) == 300
    columns = {key: [point[key] for point in first] for key in first[0]}
    assert {*columns["arms.lehv"]} == {"branch", "explore"}
    assert {*columns["base.top_k"]} == {2, 3, 4, 5}
    assert {type(value) for value in columns["base.top_k"]} == {int}
    for key, low, high in (("base.temperature", 0.02, 2.0), ("base.min_p", 0.1, 0.5)):
        assert low <= min(columns[key]) < max(columns[key]) <= high
    # Half of a logarithmic range lies below the geometric mean of its ends.
    below = sum(value < 0.2 for value in columns["base.temperature"])
    assert below == pytest.approx(150, abs=4 * math.sqrt(300) / 2)
    below = sum(value < 0.3 for value in columns["base.min_p"])
    assert below == pytest.approx(150, abs=4 * math.sqrt(300) / 2)


def test_a_rounded_draw_stays_in_its_range(tmp_path: Path) -> None:
    over = '"base.top_p" = { from = 0.99996, to = 0.99999 }\n'
    (point,) = varied(read(tmp_path, f"[random]\nsettings = 1\n[random.over]\n{over}"))
    assert 0.99996 <= point["base.top_p"] <= 0.99999
    over = '"base.top_k" = { from = 1.6, to = 3.4 }\n'
    points = varied(read(tmp_path, f"[random]\nsettings = 2\n[random.over]\n{over}"))
    assert sorted(point["base.top_k"] for point in points) == [2, 3]


def test_whether_numbers_are_whole_is_the_keys_affair(tmp_path: Path) -> None:
    """TOML writes a temperature of 1.0 as 1, too."""
    over = '"base.temperature" = { from = 0.2, to = 2.4 }\n"base.top_k" = { from = 1, to = 90 }\n'
    text = f"[random]\nsettings = 9\n[random.over]\n{over}"
    for written in ("1", "1.0"):
        points = varied(read(tmp_path, f"[set]\n'base.temperature' = {written}\n{text}"))
        assert len({point["base.temperature"] for point in points}) == 9
        assert all(isinstance(point["base.temperature"], float) for point in points)
        assert all(isinstance(point["base.top_k"], int) for point in points)


def test_what_does_not_go_together_is_drawn_anew(tmp_path: Path) -> None:
    both = '"thresholds.h1" = { from = 0, to = 4 }\n"thresholds.h2" = { from = 0, to = 4 }\n'
    points = varied(read(tmp_path, f"[random]\nsettings = 50\n[random.over]\n{both}"))
    assert len(points) == 50
    assert all(point["thresholds.h1"] <= point["thresholds.h2"] for point in points)


def test_draws_go_with_the_models_thresholds(tmp_path: Path) -> None:
    thresholds = {"h1": 0.1, "h2": 2.0, "u1": 0.2, "u2": 0.5}
    write(tmp_path, json.dumps({"thresholds": thresholds}), "calibration.json")
    of_model = partial(calibrated, folder=tmp_path)
    (group,) = make_tuning(
        ["entropix"], settings=40, items=1, seeds=[0], calibrate=of_model
    ).candidates.values()
    own = [calibrated(setting.sampler, tmp_path).values for setting in group]
    assert own[0]["thresholds.u1"] == 0.2
    assert all(values["thresholds.u1"] <= values["thresholds.u2"] == 0.5 for values in own)
    over = "'thresholds.h1' = { from = 0, to = 4 }\n"
    text = f'tasks = ["sums"]\n[random]\nsettings = 40\n[random.over]\n{over}'
    sweep = read_sweep(write(tmp_path, text), of_model)
    assert len(varied(sweep)) == 40
    assert all(point["thresholds.h1"] <= 2.0 for point in varied(sweep))


def test_all_draws_of_a_small_space(tmp_path: Path) -> None:
    over = '[random.over]\n"arms.mid" = ["sample", "argmax"]\n"base.top_k" = [1, 2, 2]\n'
    points = varied(read(tmp_path, f"[random]\nsettings = 4\n{over}"))
    assert len({tuple(point.values()) for point in points}) == 4
    with pytest.raises(UserError, match=r"mine.toml: random.over: 4 draws and no more, of 5"):
        read(tmp_path, f"[random]\nsettings = 5\n{over}")


def test_named_settings(tmp_path: Path) -> None:
    write(tmp_path, OWN, "own.toml")
    sweep = read(
        tmp_path,
        'base = "own.toml"\n[set]\n"branch.depth" = 4\n'
        '[settings.no-branch.arms]\nlehv = "explore"\n'
        '[settings.plain]\nsampler = "temperature"\n"base.temperature" = 0.5\n',
    )
    base, without, plain = sweep.settings
    assert changed(base) == {"base.top_k": 3, "branch.depth": 4}
    assert changed(without) == {"base.top_k": 3, "branch.depth": 4, "arms.lehv": "explore"}
    assert changed(plain, "temperature") == {"branch.depth": 4, "base.temperature": 0.5}
    assert [setting.name for setting in sweep.settings] == ["own", "no-branch", "plain"]
    assert [setting.base for setting in sweep.settings] == [None, "own", None]
    assert not varied(sweep)
    # Without a base that is asked for or changed, the named settings are all there are.
    alone = read(tmp_path, '[settings.greedy]\nsampler = "greedy"\n')
    assert [setting.name for setting in alone.settings] == ["greedy"]
    assert alone.baseline == "greedy"


def test_files_are_named_from_the_sweeps_folder(tmp_path: Path) -> None:
    write(tmp_path, OWN, "own.toml")
    names = ["sums", "gsm8k:a.jsonl,/b.jsonl", "my/task.py:TASK", "my.module:TASK"]
    sweep = read_sweep(write(tmp_path, f"tasks = {names}\nbase = 'own.toml'"))
    assert sweep.tasks == (
        "sums",
        f"gsm8k:{tmp_path}/a.jsonl,/b.jsonl",
        f"{tmp_path}/my/task.py:TASK",
        "my.module:TASK",
    )
    for given, meant in (("in.csv", f"{tmp_path}/in.csv"), ("s3://b/in.csv", "s3://b/in.csv")):
        assert read_sweep(write(tmp_path, f"prompts = '{given}'")).prompts == meant


# Tuning


def test_candidates() -> None:
    """Of each sampler as many, the first as it is; a sampler that has no ranges is its only one."""
    tuning = make_tuning(["greedy", "top-p", "entropix"], settings=5, items=7, seeds=[1, 2])
    assert (tuning.items, tuning.seeds) == (7, (1, 2))
    numbers = {name: len(group) for name, group in tuning.candidates.items()}
    assert numbers == {"greedy": 1, "top-p": 5, "entropix": 5}
    for name, group in tuning.candidates.items():
        assert [setting.name for setting in group] == [
            f"{name} #{number}" for number in range(1, len(group) + 1)
        ]
        assert changed(group[0], name) == {}
        assert all(setting.sampler.name == name for setting in group)
        assert len({str(setting.varied) for setting in group}) == len(group)
    for setting in tuning.candidates["top-p"][1:]:
        assert {*setting.varied} == {"base.temperature", "base.top_p"}
        assert changed(setting, "top-p").keys() <= setting.varied.keys()
        assert 0.2 <= setting.varied["base.temperature"] <= 1.2
        assert 0.5 <= setting.varied["base.top_p"] <= 0.99
    # The candidates of one do not depend on the others, and there may be more of them.
    alone = make_tuning(["top-p"], settings=9, items=7, seeds=[0]).candidates["top-p"]
    assert [one.varied for one in alone[:5]] == [one.varied for one in tuning.candidates["top-p"]]


def test_ranges_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, OWN, "own.toml")
    sweep = read(
        tmp_path,
        '[tuning]\nsamplers = ["own.toml", "greedy", "min-p"]\nsettings = 3\nitems = 2\n'
        "[tuning.over.own.base]\ntop_k = [4, 5]\n[tuning.over.min-p]\n",
    )
    assert sweep.tuning is not None
    groups = sweep.tuning.candidates
    assert [len(group) for group in groups.values()] == [3, 1, 1]
    assert sorted(one.sampler.values["base.top_k"] for one in groups["own"]) == [3, 4, 5]
    assert sweep.settings == ()
    assert sweep.baseline == "own (tuned)"
    assert list_names(sweep.settings, sweep.tuning) == [
        "own (tuned)",
        "greedy",
        "min-p",
    ]


def test_common_changes_are_those_of_tuned_samplers_too(tmp_path: Path) -> None:
    text = "[set]\n'branch.depth' = 2\n[tuning]\nsamplers = ['entropix', 'top-p']\nsettings = 3"
    tuning = read(tmp_path, text).tuning
    assert tuning is not None
    candidates = [one for group in tuning.candidates.values() for one in group]
    assert [one.sampler.values["branch.depth"] for one in candidates] == [2] * 6
    assert not any("branch.depth" in one.varied for one in candidates)


def test_a_file_is_tuned_as_what_it_extends(tmp_path: Path) -> None:
    """As the nearest that has ranges; where all arms are argmax, not at all."""
    write(tmp_path, 'extends = "min-p"\n', "between.toml")
    write(tmp_path, 'extends = "between.toml"\n[base]\nmin_p = 0.3\n', "own.toml")
    write(tmp_path, 'extends = "greedy"\n', "still.toml")
    write(tmp_path, 'extends = "greedy"\n[arms]\nmid = "sample"\n', "some.toml")
    files = ["own.toml", "still.toml", "some.toml"]
    tuning = read(tmp_path, f"[tuning]\nsamplers = {files}\nsettings = 3").tuning
    assert tuning is not None
    assert {name: len(group) for name, group in tuning.candidates.items()} == {
        "own": 3,
        "still": 1,
        "some": 3,
    }
    for name, like in (("own", "min-p"), ("some", "entropix")):
        (_, theirs) = make_tuning([like], settings=2, items=1, seeds=[0]).candidates[like]
        assert all(one.varied.keys() == theirs.varied.keys() for one in tuning.candidates[name][1:])
    # A range of its own stands above those, even an empty one.
    over = "[tuning.over.own]\n'base.top_k' = [5]\n[tuning.over.some]\n"
    tuning = read(tmp_path, f"[tuning]\nsamplers = {files}\nsettings = 2\n{over}").tuning
    assert tuning is not None
    assert [one.varied for one in tuning.candidates["own"]] == [{}, {"base.top_k": 5}]
    assert len(tuning.candidates["some"]) == 1


def test_nothing_to_tune_a_file_over(tmp_path: Path) -> None:
    whole = (resource_folder("configs") / "entropix.toml").read_text()
    write(tmp_path, whole, "alone.toml")
    text = '[tuning]\nsamplers = ["alone.toml"]\n'
    with pytest.raises(UserError, match=r"alone.toml: .*give \[tuning.over.alone\]"):
        read(tmp_path, text)
    assert read(tmp_path, f"{text}[tuning.over.alone]\n'base.top_k' = {[*range(9)]}").tuning


# What is refused

TUNE = '[tuning]\nsamplers = ["top-p"]\n'
OVER = '[random]\n[random.over]\n"base.temperature" = '
BAD: list[tuple[str, str]] = [
    ("task = ['sums']", "no key 'task', did you mean 'tasks'"),
    ("", "give either 'tasks' or 'prompts'"),
    ("tasks = []", "give either 'tasks' or 'prompts'"),
    ("tasks = ['sums']\nprompts = 'p.jsonl'", "give either 'tasks' or 'prompts'"),
    ("tasks = 'sums'", "tasks: must be a list of texts"),
    ("tasks = ['sums', 3]", "tasks: must be a list of texts"),
    ("tasks = ['sums', 'sums']", "tasks: one stands there twice"),
    ("prompts = ['p.jsonl']", "prompts: must be text"),
    ("T\nitems = -1", "items = -1: must be an integer from 0"),
    ("T\nitems = 3000000000", "items = 3000000000: must be an integer from 0 to 2147483647"),
    ("T\nitems = true", "items = True: must be an integer"),
    ("T\nitems = 1.5", "items = 1.5: must be an integer"),
    ("T\nseeds = 3", "seeds: must be a list of integers from 0"),
    ("T\nseeds = []", "seeds: must be a list"),
    ("T\nseeds = [0, -1]", "seeds: must be a list of integers from 0"),
    ("T\nseeds = [true]", "seeds: must be a list of integers"),
    ("T\nseeds = [1, 1]", "seeds: one stands there twice"),
    ("T\nseeds = [9223372036854775808]", "seeds: must be a list of integers from 0 to"),
    ("T\nsplit = 'train'", "split = 'train': must be one of tuning, test"),
    ("T\nmax_new_tokens = 0", "max_new_tokens = 0: must be an integer from 1"),
    ("T\ndescription = 3", "description: must be text"),
    ("T\nbase = 'entropics'", "base: no sampler preset 'entropics'.*did you mean 'entropix'"),
    ("T\nbase = 'no.toml'", "base: .*no.toml: no such file"),
    ("T\nbase = 'mine.toml'", "base: .*mine.toml: no sampler key 'tasks'"),
    ("T\nbaseline = 'entropy'", "baseline = 'entropy': no such setting, did you mean 'entropix'"),
    ("T\nbaseline = 2", "baseline: must be text"),
    ("T\nset = 3", r"set: must be a table, \[set\]"),
    ("T\n[set]\n'base.temprature' = 1", "set: .*'base.temprature', did you mean 'base.temp"),
    ("T\n[set]\n'base.temperature' = 1979-05-27", "set: .*base.temperature = .*be a number"),
    ("T\n[set]\n'base.temperature' = [[1]]", r"base.temperature = \[\[1\]\]: must be a number"),
    ("T\n[set]\n'base.temperature' = {from = 0, to = 1}", "base.temperature = .*be a number"),
    ("T\n[set]\n'base.temperature' = {}", "base.temperature = {}: must be a number"),
    ("T\n[set]\n'thresholds.h1' = 3\n'thresholds.h2' = 2", "set: .*h1 = 3 is above.*h2 = 2"),
    ("T\nsettings = ['greedy']", r"settings: must be a table, \[settings\]"),
    ("T\n[settings]\ngreedy = 'greedy'", r"settings.greedy: must be a table"),
    ("T\n[settings.a]\nsampler = 3", "settings.a.sampler: must be the name of a sampler"),
    ("T\n[settings.a]\nsampler = 'gredy'", "settings.a: no sampler preset 'gredy'.*'greedy'"),
    ("T\n[settings.a]\n'base.top_k' = -1", r"settings.a: .*base.top_k = -1: must lie in"),
    ("T\nbase = 'greedy'\n[settings.greedy]\n", "two settings are called 'greedy'"),
    (f"T\n{TUNE}[settings.'top-p (tuned)']", r"two settings are called 'top-p \(tuned\)'"),
    ("T\n[grid]", "grid: no key to give values of"),
    ("T\n[grid]\n'base.top_k' = 3", "grid: base.top_k: must be a list of values"),
    ("T\n[grid]\n'base.top_k' = []", "grid: base.top_k: must be a list of values"),
    ("T\n[grid]\n'base.top_k' = {from = 1, to = 2}", "grid: base.top_k: must be a list"),
    ("T\n[grid]\n'base.top_k' = [1, 1]", "grid: base.top_k: one value stands there twice"),
    ("T\n[grid]\n'base.topk' = [1]", "grid: .*'base.topk', did you mean 'base.top_k'"),
    ("T\n[grid]\n'base.top_k' = [1.5]", "grid: .*base.top_k = 1.5: must be an integer"),
    ("T\n[grid]\n'thresholds.h1' = [3]\n'thresholds.h2' = [2]", "grid: .*h1 = 3 is above"),
    (
        f"T\n[grid]\n'base.top_k' = {list(range(400))}\n'branch.depth' = {list(range(400))}",
        "grid: 160000 settings, at most 100000 are possible",
    ),
    ("T\n[random]", "random.over: no key to draw values of"),
    ("T\n[random]\nsetings = 3", "random: no key 'setings', did you mean 'settings'"),
    ("T\n[random]\nsettings = 0", "random.settings = 0: must be an integer from 1"),
    ("T\n[random]\nseed = 'x'", "random.seed = 'x': must be an integer from 0"),
    ("T\n[random]\nover = 3", "random.over: must be a table"),
    (f"T\n{OVER}1.0", "random.over: base.temperature: must be a list of values, or { from"),
    (f"T\n{OVER}[]", "random.over: base.temperature: must be a list of values, or"),
    (f"T\n{OVER}[0.5, 'hot']", "random.over: base.temperature = 'hot': must be a number"),
    (f"T\n{OVER}{{ from = 1 }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 1, to = 1 }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 2, to = 1 }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 0, to = 1, scale = 'log' }}", "base.temperature: must be a list"),
    (f"T\n{OVER}{{ from = 1, to = 2, scale = 'ln' }}", "base.temperature: must be a list"),
    (f"T\n{OVER}{{ from = 1, to = 2, step = 1 }}", "base.temperature.from"),
    (f"T\n{OVER}{{ from = nan, to = 1 }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 0, to = inf }}", "base.temperature: must be a list of values, or"),
    (f"T\n{OVER}{{ from = 1, to = 1{'0' * 400} }}", "base.temperature: must be a list"),
    (f"T\n{OVER}{{ from = 1, to = 1e300, scale = 'log' }}", r"temperature = 1e\+300: must lie"),
    (f"T\n{OVER}{{ from = false, to = true }}", "base.temperature: must be a list of values"),
    (f"T\n{OVER}{{ from = 1979-05-27, to = 1980-05-27 }}", "temperature: must be a list"),
    (f"T\n{OVER}{{ from = -1, to = 1 }}", "random.over: base.temperature = -1: must lie in"),
    ("T\n[random.over]\n'base.top_k' = {from = 1.2, to = 1.8}", "base.top_k: no whole number"),
    ("T\n[random.over]\n'arms.mid' = {from = 1, to = 2}", "arms.mid = 1: must be one of argmax"),
    ("T\n[random.over]\n'base.top' = [1]", "random.over: no sampler key 'base.top'"),
    (
        "T\n[random.over]\n'thresholds.h1' = [3, 4]\n'thresholds.h2' = [1, 2]",
        "random.over: 0 draws and no more, of 16: entropix: thresholds.h1 = . is above",
    ),
    ("T\ntuning = 3", r"tuning: must be a table, \[tuning\]"),
    ("T\n[tuning]", "tuning.samplers: must be a list of samplers"),
    ("T\n[tuning]\nsamplers = 'top-p'", "tuning.samplers: must be a list of samplers"),
    ("T\n[tuning]\nsamplers = ['topp']", "tuning: no sampler preset 'topp'.*mean 'top-p'"),
    ("T\n[tuning]\nsamplers = ['top-p', 'top-p']", "tuning: samplers: two are called 'top-p'"),
    (f"T\n{TUNE}setting = 3", "tuning: no key 'setting', did you mean 'settings'"),
    (f"T\n{TUNE}settings = 0", "tuning.settings = 0: must be an integer from 1"),
    (f"T\n{TUNE}items = -1", "tuning.items = -1: must be an integer from 0"),
    (f"T\n{TUNE}seeds = []", "tuning.seeds: must be a list of integers"),
    (f"T\n{TUNE}over = 3", "tuning.over: must be a table"),
    (f"T\n{TUNE}[tuning.over]\ntop-p = 3", "tuning.over.top-p: must be a table"),
    (f"T\n{TUNE}[tuning.over.min-p]\n'base.min_p' = [0.1]", "tuning: over.min-p: not among"),
    (f"T\n{TUNE}[tuning.over.top-p]\n'base.topp' = [1]", "tuning: over.top-p: no sampler key"),
    (f"T\n{TUNE}[tuning.over.top-p]\n'base.top_p' = 1", "tuning: over.top-p: base.top_p: must"),
    (f"T\n{TUNE}[tuning.over.top-p]\n'base.top_p' = [0.5]", "top-p: 1 draws and no more, of 7"),
    (f"T\nsplit = 'tuning'\n{TUNE}", "split = 'tuning': settings are tuned on it"),
    (f"prompts = 'p.jsonl'\n{TUNE}", "tuning: 'prompts' have no answers to tune by"),
    ("tasks = ", "not valid TOML"),
    ("tasks = ['sums']\ntasks = ['facts']", "not valid TOML"),
    ("x = " + "[" * 5000, "not valid TOML"),
    ("x = " + "1" * 5000, "not valid TOML"),
    ("items = 0x" + "f" * 5000, "not valid TOML: Exceeds the limit"),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_sweeps(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text.replace("T\n", "tasks = ['sums']\n", 1))
    with pytest.raises(UserError, match=words) as caught:
        read_sweep(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for path, words in (
        (tmp_path / "no.toml", "no such file"),
        (tmp_path / "folder.toml", "cannot be read"),
        (write(tmp_path, b"description = '\xe9'"), "not UTF-8 at byte 15"),
    ):
        with pytest.raises(UserError) as caught:
            read_sweep(path)
        assert str(caught.value).startswith(f"{path}: {words}")


def test_tables_of_noise(tmp_path: Path) -> None:
    """Whatever stands in the place of whatever: a sweep or a line."""
    rng = random.Random(5)
    values = ["nan", "inf", "-1", "0", "1e400", "[]", "{}", "[[1]]", "''", "'x'", "true"]
    values += ["1979-05-27T07:32:00Z", "[1979-05-27]", "{a = 1}", "{from = 0, to = 1}", "[0.5]"]
    keys = ["items", "seeds", "split", "base", "baseline", "set", "settings", "grid", "random"]
    keys += ["tuning", "tuning.samplers", "tuning.over.top-p", "random.over", "random.over.base"]
    keys += ["grid.base", "grid.'base.top_p'", "settings.a", "settings.a.base", "max_new_tokens"]
    lines = []
    for key, value in itertools.product(keys, values):
        more = rng.choice(["", "[tuning]\nsamplers = ['top-p']\n"])
        try:
            read(tmp_path, f"{key} = {value}\n{more}")
        except UserError as error:
            lines.append(str(error))
    assert 200 < len(lines) < len(keys) * len(values)
    assert all(line.startswith(f"{tmp_path}/mine.toml: ") for line in lines)
