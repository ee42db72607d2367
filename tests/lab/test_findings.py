"""Findings of studies from rows made by hand: figures, page, JSON, CSV and plots."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from entropix_jax.errors import UserError
from entropix_jax.lab.findings import ALL, SCORE, Findings, analyse
from entropix_jax.lab.measures import self_bleu
from entropix_jax.lab.page import format_page
from entropix_jax.lab.plots import draw_plots
from entropix_jax.lab.results import (
    find_differences,
    name_trial,
    read_rows,
    results_frame,
    write_results,
    write_rows,
)
from entropix_jax.lab.statistics import Bootstrap, Interval
from entropix_jax.lab.sweep import Comparison

MEASURES = "mean_entropy max_entropy mean_varentropy max_varentropy".split()
RECORDED = Path(__file__).with_name("recorded_page.md")

SETTINGS, SEEDS, ITEMS = ("plain", "sharp", "wide"), (0, 1, 2), 6
VOTES = {"sums": True, "rules": False, "tales": False}
SCORED = ("sums", "rules")


def rows() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(5)
    for task in VOTES:
        for item in range(ITEMS):
            for place, setting in enumerate(SETTINGS):
                for seed in SEEDS:
                    yield row(rng, task, str(item), setting, place, seed)


def row(
    rng: np.random.Generator, task: str, item: str, setting: str, place: int, seed: int
) -> dict[str, Any]:
    words = [f"w{n}" for n in rng.integers(0, 9, int(rng.integers(5, 12)))]
    score = float(rng.random() < 0.3 + 0.3 * place)
    own: dict[str, Any] = {"rules": {"kept": [int(rng.integers(0, 3)), 2]}}
    own["tales"] = {"odd_words": [place + int(rng.integers(0, 2)), len(words)]}
    return {
        "phase": "test",
        "task": task,
        "item": item,
        "setting": setting,
        "sampler": setting,
        "varied": {},
        "seed": seed,
        "expected": "",
        "retracted": place,
        "finish_reason": "length" if item == "0" else "end",
        "score": score if task in SCORED else None,
        "answer": f"{score}" if VOTES[task] else " ".join(words),
        "text": " ".join(words),
        "tokens": len(words),
        "forwards": len(words) + place,
        "regimes": {"lelv": len(words) - place, "mid": place},
        "actions": {"sample": len(words) - seed, "branch": seed},
        "perplexity": float(1 + rng.random()),
        "distinct_1": len({*words}) / len(words),
        "distinct_2": 1.0,
        "repetition": float(rng.random()),
        **{key: float(rng.random()) for key in MEASURES},
        "lowest_group_confidence": float(rng.random()),
        "timings": {"seconds": 0.5},
        **({"measures": own[task]} if task in own else {}),  # older files have none
    }


def analyse_rows(found: list[dict[str, Any]], *comparisons: Comparison) -> Findings:
    """Analyses rows, without the slow evaluation of uncertainty if comparisons are given."""
    watched = [] if comparisons else ["plain", "sharp"]
    frame, baselines, none = results_frame(found), ("plain", "wide"), pd.DataFrame()
    return analyse(frame, VOTES, baselines, (1, 3), watched, none, comparisons)


@pytest.fixture(scope="module")
def findings() -> Findings:
    return analyse_rows([*rows()])


def rows_of(task: str, setting: str) -> list[dict[str, Any]]:
    return [one for one in rows() if (one["task"], one["setting"]) == (task, setting)]


def by_item(task: str, setting: str) -> list[list[dict[str, Any]]]:
    found = rows_of(task, setting)
    return [[one for one in found if one["item"] == str(item)] for item in range(ITEMS)]


def value(findings: Findings, task: str, setting: str, measure: str) -> Interval:
    chosen = findings.values.set_index(["task", "setting", "measure"])["estimate"]
    found: Interval = chosen[task, setting, measure]
    return found


def test_the_page_has_the_recorded_figures(findings: Findings) -> None:
    """Most figures were recorded with an earlier implementation without data frames."""
    assert format_page(findings, {"description": "", "seeds": "0"}) == RECORDED.read_text()


def test_a_tasks_own_measure_replaces_a_general_one() -> None:
    renamed = [{**one, "measures": {"repetition": [1, 4]}} for one in rows()]
    assert value(analyse_rows(renamed), "tales", "plain", "repetition").value == 0.25


def test_findings_are_json(findings: Findings) -> None:
    found = json.loads(json.dumps(findings.to_json(), allow_nan=False))
    assert (found["baselines"], found["sizes"]) == (["plain", "wide"], [1, 3])
    tasks = [ALL, *SCORED, "tales"]
    assert [*dict.fromkeys(one["task"] for one in found["values"])] == tasks
    (one,) = (
        one
        for one in found["values"]
        if (one["task"], one["setting"], one["measure"]) == ("tales", "sharp", "odd_words")
    )
    expected = value(findings, "tales", "sharp", "odd_words")
    assert one["estimate"]["low"] == pytest.approx(expected.low, abs=1e-6)
    assert [one["at_equal_forwards"] is None for one in found["scores"]] == [True, False, False]


@pytest.mark.parametrize("where", ["plain", "sharp"])
def test_a_missing_score_affects_only_its_task(where: str) -> None:
    missing = {"task": "rules", "setting": where, "item": "2", "seed": 1}
    found = [{**one, "score": None} if missing.items() <= one.items() else one for one in rows()]
    findings = analyse_rows(found)
    assert findings.overall == "sums"
    scores = findings.values[findings.values["measure"] == SCORE]
    assert {*scores["task"]} == {"sums"}
    only = analyse_rows([{**one, "score": None} for one in rows()])
    assert only.overall is None
    assert not len(only.scores) + len(only.uncertainty) + len(only.several)


def test_uncertainty_is_evaluated_by_task_and_setting(findings: Findings) -> None:
    """Only the watched settings are evaluated, on tasks with both right and wrong answers."""
    groups = findings.uncertainty.groupby(["task", "setting"], sort=False)
    assert [*groups.groups] == [(task, name) for task in SCORED for name in ("plain", "sharp")]
    measures = [*MEASURES, "lowest_group_confidence", "perplexity", "tokens"]
    assert {tuple(own["measure"]) for _, own in groups} == {tuple(measures)}
    own = groups.get_group(("sums", "sharp"))
    scores = np.array([one["score"] for one in rows_of("sums", "sharp")])
    assert {*own["answers"]} == {len(scores)}
    assert {*own["wrong"]} == {(scores < 1).sum()}
    right = [{**one, "score": 1.0} if one["task"] == "rules" else one for one in rows()]
    assert {*analyse_rows(right).uncertainty["task"]} == {"sums"}
    perfect = [{**one, "max_entropy": 1 - (one["score"] or 0)} for one in rows()]
    found = analyse_rows(perfect).uncertainty.set_index("measure").loc["max_entropy"]
    assert {one.value for one in found["auroc"]} == {1.0}
    assert {round(one.value, 9) for one in found["e_aurc"]} == {0.0}


def test_texts_without_tokens() -> None:
    """Empty texts have no measures. If all texts of a setting are empty, its cells are empty."""
    none = {"tokens": 0, "forwards": 0, "text": "", "answer": None}
    kept = "phase task item setting sampler varied seed score retracted finish_reason timings"
    empty = [
        {**{key: one[key] for key in kept.split()}, **none, "regimes": {}, "actions": {}}
        if one["setting"] == "wide" or one["item"] in "01"
        else one
        for one in rows()
    ]
    findings = analyse_rows(empty)
    assert math.isnan(value(findings, "tales", "wide", "odd_words").value)
    assert value(findings, "tales", "sharp", "odd_words").low > 0
    assert "nan" not in json.dumps(findings.to_json(), allow_nan=False)
    page = format_page(findings, {"description": ""}).partition("## Differences from plain")[2]
    assert any(line.strip("| ") == "wide" for line in page.splitlines())


# A comparison on a curve


def curve_of(cost: str, tasks: tuple[str, ...], margin: float | None = None) -> Comparison:
    return Comparison(
        *("compare.1", cost, ("wide", "plain"), ("sharp",)),
        *((("sharp", "wide"), ("plain", "sharp")), margin, tasks),
    )


@pytest.mark.parametrize("cost", ["forwards", "self_bleu"])
@pytest.mark.parametrize("tasks", [(), ("rules",)])
def test_a_comparison_bootstraps_heights_over_a_curve(cost: str, tasks: tuple[str, ...]) -> None:
    names = tasks or SCORED
    ((_, found),) = analyse_rows([*rows()], curve_of(cost, tasks, 2.0)).comparisons
    assert [*found["setting"]] == ["wide", "plain", "sharp", "sharp - wide", "plain - sharp"]
    assert [*found["place"]][:2] == ["curve", "curve"]
    verdicts = [one.verdict_with(2.0) for one in found["difference"][2:]]
    assert [*found["verdict"]] == ["", "", *verdicts]

    def means(key: str, setting: str) -> Any:
        """Returns a value per item: the mean of its samples, or their self-BLEU."""
        groups = [group for task in names for group in by_item(task, setting)]
        if key == "self_bleu":
            return np.array([self_bleu([one["text"] for one in group]) for group in groups])
        return np.array([np.mean([one[key] for one in group]) for group in groups])

    strata = [task for task in range(len(names)) for _ in range(ITEMS)]
    even = np.full(len(strata), 1 / len(strata))
    weights = np.vstack([even, Bootstrap(strata)._weights])
    at, score = ({name: weights @ means(key, name) for name in SETTINGS} for key in (cost, "score"))

    def height(setting: str, draw: int) -> float:
        curve = sorted((at[name][draw], score[name][draw]) for name in ("plain", "wide"))
        on_curve = np.interp(at[setting][draw], [x for x, _ in curve], [y for _, y in curve])
        return float(score[setting][draw] - on_curve)

    each = np.array(
        [
            [
                height("sharp", draw),
                height("sharp", draw) - height("wide", draw),
                height("plain", draw) - height("sharp", draw),
            ]
            for draw in range(len(weights))
        ]
    )
    value, drawn = each[0], each[1:]
    spread = drawn.std(axis=0)
    critical = np.quantile((np.abs(drawn - value) / spread).max(axis=1), 0.95)
    for one, center, s in zip(found["difference"][2:], value, spread, strict=True):
        expected = (center, center - critical * s, center + critical * s)
        assert (one.value, one.low, one.high) == pytest.approx(expected, abs=1e-9)
    for name in SETTINGS:
        (row,) = found[found["setting"] == name].to_dict("records")
        for key, known in ((cost, at[name]), ("score", score[name])):
            expected = (known[0], *np.quantile(known[1:], [0.025, 0.975]))
            assert (row[key].value, row[key].low, row[key].high) == pytest.approx(expected)


def test_a_comparison_outside_its_curve_is_marked() -> None:
    """The cost of `sharp` lies between the others' costs, and the cost of `plain` below them."""
    between, below = (
        analyse_rows([*rows()], Comparison("compare.1", "forwards", curve, (one,), ((one, other),)))
        for one, other, curve in (
            ("sharp", "plain", ("plain", "wide")),
            ("plain", "sharp", ("sharp", "wide")),
        )
    )
    for findings, places in ((between, ["", ""]), (below, ["below", "below"])):
        ((comparison, found),) = findings.comparisons
        assert [*found["place"]][2:] == places
        page = format_page(findings, {"description": ""})
        section = page.partition("## Comparison 1: at equal forwards")[2].partition("##")[0]
        lines = [line for line in section.splitlines() if line.startswith("|")]
        assert [line.split("|")[2].strip() for line in lines[2:]] == ["curve", "curve", *places]
        (one,) = findings.to_json()["comparisons"]
        assert one["curve"] == comparison.curve
        assert one["found"][2]["difference"]["value"] == pytest.approx(
            found["difference"][2].value, abs=1e-6
        )
        assert one["found"][0]["difference"] is None
    # Clamped to the nearer end of the curve.
    scores = [value(below, ALL, name, SCORE).value for name in ("plain", "sharp")]
    ((_, found),) = below.comparisons
    assert found["difference"][2].value == pytest.approx(scores[0] - scores[1])


# Files


def test_results_as_csv(tmp_path: Path) -> None:
    """An item's id may be any JSON string."""
    found = [{**one, "item": "\ud800", "varied": {"a.b": 1}} for one in rows()][-2:]
    write_results(results_frame(found), tmp_path / "results.csv")
    part, whole = found[0]["measures"]["odd_words"]
    heading, line, _ = (tmp_path / "results.csv").read_text().splitlines()
    assert heading.endswith(",text,a.b,measure_odd_words,measure_odd_words_of")
    assert line.endswith(f",1,{part}.0,{whole}.0")
    write_results(results_frame([{**found[0], "text": "a\rb\nc"}]), tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["a\rb\nc"]


def test_rows_are_read_from_all_their_files(tmp_path: Path) -> None:
    """Rewritten files are equal byte for byte, without timings. Rows are in the order of trials."""
    found = [{**one, "text": "\ud800"} for one in rows()]
    stored = [
        {**one, "id": name_trial(one), "line": line, "digest": "0"}
        for line, one in enumerate(found, 1)
    ]
    text = "".join(json.dumps(one) + "\n" for one in reversed(stored))
    (tmp_path / "test.jsonl").write_text(text)
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    first = read_rows(str(tmp_path / "test.jsonl"))
    assert [*first] == [name_trial(one) for one in found]
    for name in ("test.jsonl", "test.jsonl.gz"):
        write_rows(read_rows(str(tmp_path / name)).values(), tmp_path / f"{name}.xz")
    again = read_rows(str(tmp_path / "test.jsonl.xz"))
    assert [*again.items()] == [*first.items()]
    sizes = {(tmp_path / f"test.jsonl{end}.xz").read_bytes() for end in ("", ".gz")}
    assert len(sizes) == 1
    (row, *_), given = first.values(), found[0]
    assert row["text"] == given["text"]
    assert not {"id", "line", "digest", "timings"} & {*row}
    assert row["perplexity"] == pytest.approx(given["perplexity"], rel=1e-5)


def test_differences_of_rows() -> None:
    """Rounding errors are not differences."""
    found = {name_trial(one): one for one in rows()}
    first, second, third, *_ = found
    near = {**found[first], "perplexity": found[first]["perplexity"] * 1.0001}
    other = {**found[second], "tokens": 99, "score": 0.5}
    assert not [*find_differences({first: near}, found)]
    (line,) = find_differences({first: near, second: other}, found)
    assert line.startswith(f"{second}: ")
    assert "was" in line
    assert [*find_differences({third: found[third]}, {})] == [f"{third}: missing"]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"phase": "test"}', json.dumps({**next(rows()), "tokens": "3"})]
)
def test_invalid_lines_of_rows(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(next(rows())) + f"\n{line}\n")
    with pytest.raises(UserError, match="line 2 is not a row of a study"):
        read_rows(str(path))
    path.write_text((json.dumps(next(rows())) + "\n") * 2)
    with pytest.raises(UserError, match="line 2: has the row 'test/sums/0/plain/0' twice"):
        read_rows(str(path))


def test_plots(findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the plotted values, and the files in both formats."""
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float]] = []
    original = Axes.errorbar

    def errorbar(self: Axes, x: float, y: float, *args: Any, **more: Any) -> Any:
        drawn.append((x, y))
        return original(self, x, y, *args, **more)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    names = draw_plots(findings, tmp_path)
    assert names == ["scores", "differences", "differences-2"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
    }
    over = findings.differences.set_index(["baseline", "task", "setting", "measure"])["estimate"]
    forest = [
        (over[baseline, task, name, SCORE].value, place)
        for baseline, others in (("plain", SETTINGS[1:]), ("wide", SETTINGS[:2]))
        for task in (ALL, *SCORED)
        for place, name in enumerate(others)
    ]
    assert drawn[len(SETTINGS) :] == forest
