"""Findings of studies from rows made by hand: by task and measure, tables, JSON and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropix_jax.lab.comparison import ALL, SCORE, compare
from entropix_jax.lab.digest import KINDS, Digest, SettingDigest, collect_digest
from entropix_jax.lab.findings import Findings, analyse_digest
from entropix_jax.lab.plots import draw_plots
from entropix_jax.lab.record import record_findings
from entropix_jax.lab.statistics import Bootstrap, joint_intervals
from entropix_jax.lab.summary import format_summary
from entropix_jax.lab.tables import flatten_row, write_scores

PREDICTORS = "mean_entropy max_entropy mean_varentropy max_varentropy perplexity".split()
ABOUT = {"description": "", "seeds": "0"}


def digest_with(scores: dict[str, list[float]], **more: Any) -> Digest:
    """Settings by the scores of four items, of two tasks."""
    settings = {}
    for name, values in scores.items():
        several = {(kind, 1): (values, [10.0] * 4) for kind in KINDS}
        one = SettingDigest(name, name, {}, several, rows=4, **more)
        one.row_scores, one.row_items = list(values), [0, 1, 2, 3]
        one.predictors = {key: [1.0, 2.0, 3.0, 4.0] for key in PREDICTORS}
        settings[name] = one
    return Digest(["a", "b"], [0, 0, 0, 1], settings, {"a": [], "b": []})


def test_ids_that_no_file_can_hold_are_escaped(tmp_path: Path) -> None:
    """An item's id may be any text of JSON."""
    row = dict.fromkeys(("setting", "seed", "score", "tokens", "forwards", "finish_reason"), 1)
    rows: Any = [{**row, "task": "t", "item": "\ud800", "measures": {"a": (1.0, 3.0)}}]
    write_scores(rows, tmp_path / "scores.csv")
    written = (tmp_path / "scores.csv").read_text().splitlines()
    assert written[1] == "t,\\ud800,1,1,1,1,1,1,a=1/3"


def test_findings() -> None:
    digest = digest_with({"base": [1, 1, 0, 0], "other": [1, 1, 1, 1]})
    found = analyse_digest(digest, ["base"], {"other": "base"}, (1,), ["base", "other"])
    base, other = found.lines
    assert base.over_baseline is base.over_base is base.at_equal_cost is None
    assert other.over_base is not None
    assert other.over_baseline is not None
    assert [other.over_base.value, other.over_baseline.value] == pytest.approx([2 / 3, 2 / 3])
    assert found.predictors["base", "all"]["mean_entropy"].value == 1.0
    # Of what is all right, or all wrong, as in the second task, there is nothing to predict.
    assert {*found.predictors} == {("base", "all"), ("base", "a")}
    assert {*found.bins} == {"base"}
    page = format_summary(found, ABOUT)
    assert "| other | 1.000 [1.000, 1.000] | 1.000 [1.000, 1.000] | 1.000 [" in page
    assert "| other | 1.000 [1.000, 1.000] | 10.0 | +0.667 [" in page


@pytest.mark.parametrize("where", ["base", "other"])
def test_a_task_without_a_score_leaves_the_others_theirs(where: str) -> None:
    scores = {"base": [1.0, 1, 0, 0], "other": [1.0, 0, 1, 1]}
    scores[where][2] = math.nan
    found = analyse_digest(digest_with(scores), ["base"], {}, (1,), ["base"])
    assert [line.score.value for line in found.lines] == [0.0, 1.0]
    assert found.comparison.overall is found.comparison.tasks[1]
    scores[where][3] = math.nan
    found = analyse_digest(digest_with(scores), ["base"], {}, (1,), ["base"])
    assert not found.lines
    assert not found.predictors


# Rows

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
        "retracted": 0,
        "finish_reason": "end",
        "score": score if task in SCORED else None,
        "answer": f"{score}" if VOTES[task] else " ".join(words),
        "text": " ".join(words),
        "tokens": len(words),
        "forwards": len(words) + place,
        "regimes": {"lelv": len(words)},
        "actions": {"sample": len(words)},
        "perplexity": float(1 + rng.random()),
        "distinct_1": len({*words}) / len(words),
        "distinct_2": 1.0,
        "repetition": float(rng.random()),
        **{key: float(rng.random()) for key in PREDICTORS[:-1]},
        "confidence_lows": [(float(rng.random()), 1)],
        "timings": {"seconds": 0.5},
        **({"measures": own[task]} if task in own else {}),  # older files have none
    }


@pytest.fixture(scope="module")
def digest() -> Digest:
    return collect_digest(rows(), VOTES, sizes=(1, 3))


@pytest.fixture(scope="module")
def findings(digest: Digest) -> Findings:
    return analyse_digest(digest, ("plain", "wide"), {}, (1, 3), ["plain"])


def of(task: str, setting: str) -> list[dict[str, Any]]:
    return [one for one in rows() if (one["task"], one["setting"]) == (task, setting)]


def by_item(task: str, setting: str) -> list[list[dict[str, Any]]]:
    found = of(task, setting)
    return [[one for one in found if one["item"] == str(item)] for item in range(ITEMS)]


def test_measures_are_parts_over_wholes(digest: Digest) -> None:
    items = digest.items(["tales"])
    assert items == [*range(2 * ITEMS, 3 * ITEMS)]
    for setting in SETTINGS:
        own, found = of("tales", setting), digest.settings[setting]
        tokens = sum(one["tokens"] for one in own)
        odd = sum(one["measures"]["odd_words"][0] for one in own)
        assert found.mean("odd_words") == found.mean("odd_words", items) == odd / tokens
        logs = [one["tokens"] * math.log(one["perplexity"]) for one in own]
        assert found.mean("logprob", items) == pytest.approx(-sum(logs) / tokens)
        repetition = np.mean([one["repetition"] for one in own])
        assert found.mean("repetition", items) == pytest.approx(repetition)
        assert found.mean("seconds", items) == pytest.approx(0.5 * len(own) / tokens)
        assert found.mean("forwards", items) == np.mean([one["forwards"] for one in own])
        parts, wholes = found.measure("odd_words", items)
        assert [*wholes] == [sum(o["tokens"] for o in group) for group in by_item("tales", setting)]
        assert parts.sum() == odd
        assert math.isnan(found.mean("odd_words", digest.items(["sums"])))
    assert digest.own == {"sums": [], "rules": ["kept"], "tales": ["odd_words"]}
    assert digest.free == {"rules", "tales"}
    assert digest.scored() == [*SCORED]
    # A task's own measure comes before another of its name.
    renamed = [{**one, "measures": {"repetition": [1, 4]}} for one in of("tales", "plain")]
    again = collect_digest(renamed, VOTES, sizes=(1,)).settings["plain"]
    assert again.mean("repetition") == 0.25


def test_several_samples(digest: Digest) -> None:
    """Votes only where they mean something; a choice everywhere. All of three samples are one set,
    whoever begins, except for ties."""
    for setting in SETTINGS:
        found = digest.settings[setting]
        for number, task in enumerate(SCORED):
            groups = by_item(task, setting)
            here = slice(number * ITEMS, (number + 1) * ITEMS)
            single = [np.mean([one["score"] for one in group]) for group in groups]
            best = [max(one["score"] for one in group) for group in groups]
            votes = [float(np.mean([one["score"] for one in group]) > 0.5) for group in groups]
            likely = [min(group, key=lambda o: o["perplexity"])["score"] for group in groups]
            sure = [max(group, key=lambda o: o["confidence_lows"])["score"] for group in groups]
            cost = [sum(one["forwards"] for one in group) for group in groups]
            for kind, wanted in (("best", best), ("likeliest", likely), ("surest", sure)):
                assert [*found.score(3, kind)[here]] == wanted
                assert [*found.cost(3, kind)[here]] == cost
            assert [*found.score(3)[here]] == pytest.approx(votes if VOTES[task] else single)
            for kind in KINDS:
                assert [*found.score(1, kind)[here]] == pytest.approx(single)
        assert np.isnan(found.score(3, "best")[2 * ITEMS :]).all()


def test_differences_from_two_baselines(digest: Digest) -> None:
    """Of a task without a score all measures and settings are one family."""
    comparison = compare(digest, ("plain", "wide"))
    sums, rules, tales = comparison.tasks
    assert comparison.overall is not None
    assert [family.task for family in comparison.scored] == [ALL, *SCORED]
    assert sums.columns == rules.columns == comparison.overall.columns == (SCORE,)
    assert rules.further[0] == "kept"
    assert {"odd_words", "logprob", "repetition"} <= {*tales.columns}
    assert not tales.further

    def resampled(setting: str, column: str) -> tuple[float, np.ndarray]:
        parts, wholes = digest.settings[setting].measure(column, digest.items(["tales"]))
        return Bootstrap([0] * ITEMS).ratio(parts, wholes)

    for baseline, others in (("plain", ("sharp", "wide")), ("wide", ("plain", "sharp"))):
        values, each = [], []
        for setting in others:
            for column in tales.columns:
                (own, resamples), (base, of_base) = (
                    resampled(name, column) for name in (setting, baseline)
                )
                values.append(own - base)
                each.append(resamples - of_base)
        wanted = joint_intervals(values, np.stack(each))
        assert [*tales.over[baseline].values()] == wanted
        assert [*tales.over[baseline]] == [(s, c) for s in others for c in tales.columns]
    scores = {name: digest.settings[name].score() for name in SETTINGS}
    over = comparison.overall.over["plain"]["wide", SCORE]
    means = [scores[name][: 2 * ITEMS].mean() for name in ("wide", "plain")]
    assert over.value == pytest.approx(means[0] - means[1])


def tables(page: str, name: str) -> list[list[list[str]]]:
    """The tables of a section, with their headings."""
    text = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return [[line.strip("| ").split(" | ") for line in block.splitlines()] for block in blocks]


def test_the_page(findings: Findings) -> None:
    page = format_summary(findings, ABOUT)
    headings = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    wanted = ["Tasks", "Differences from plain", "Differences from wide", "Scores"]
    assert headings[:5] == [*wanted, "Several samples"]
    scores, rules, tales = tables(page, "Tasks")
    assert scores[0] == ["setting", ALL, *SCORED]
    assert [line[0] for line in scores[2:]] == [*SETTINGS]
    assert rules[0][:2] == ["setting", "kept"]
    assert tales[0][:3] == ["setting", "odd words", "ln p per token"]
    value = findings.comparison.tasks[2].values["sharp", "odd_words"]
    assert tales[3][1] == str(value)
    differences, of_tales = tables(page, "Differences from wide")
    assert [line[0] for line in differences[2:]] == ["plain", "sharp"]
    over = findings.comparison.tasks[2].over["wide"]["plain", "odd_words"]
    assert over.verdict == "lower"
    assert of_tales[2][1] == (f"{over.value:+.3f} [{over.low:+.3f}, {over.high:+.3f}] **lower**")
    everything, sums, rules = tables(page, "Several samples")
    assert len(everything) == 2 + len(SETTINGS) * len(KINDS)
    assert sums[0] == ["setting", *KINDS]
    assert rules[0] == ["setting", "best", "likeliest", "surest"]  # no votes


def test_the_record(findings: Findings) -> None:
    """It is JSON, and has the numbers of the page."""
    found = json.loads(json.dumps(record_findings(findings), allow_nan=False))
    assert found["baselines"] == ["plain", "wide"]
    assert [task["task"] for task in found["tasks"]] == [ALL, *SCORED, "tales"]
    tales = found["tasks"][-1]
    assert (tales["items"], tales["comparisons"]) == (ITEMS, 2 * len(tales["compared_by"]))
    sharp = tales["settings"]["sharp"]
    over = findings.comparison.tasks[2].over["wide"]["sharp", "odd_words"]
    assert sharp["over"]["wide"]["odd_words"] == {
        **{key: pytest.approx(getattr(over, key), abs=1e-6) for key in ("value", "low", "high")},
        "verdict": over.verdict,
    }
    assert {*tales["settings"]["plain"]["over"]} == {"wide"}
    assert sharp["forwards"] == pytest.approx(
        np.mean([r["forwards"] for r in of("tales", "sharp")])
    )
    (cost, _), (_, three) = findings.several_by_task["sums"]["wide", "best"]
    one, last = found["several_samples"]["tasks"]["sums"]["wide"]["best"]
    assert one["forwards"] == pytest.approx(cost, abs=1e-6)
    assert last["score"]["value"] == pytest.approx(three.value, abs=1e-6)
    assert {*found["at_equal_forwards"]} == {"sharp", "wide"}
    assert {entry["task"] for entry in found["predictors"]} == {"all", *SCORED}


def test_texts_without_tokens() -> None:
    """They have no measures: where all of a setting are empty, nothing is told of them."""
    none = {"tokens": 0, "forwards": 0, "text": "", "answer": None, "confidence_lows": []}
    kept = "phase task item setting sampler varied seed score retracted finish_reason timings"
    empty = [
        {**{key: one[key] for key in kept.split()}, **none, "regimes": {}, "actions": {}}
        if one["setting"] == "wide" or one["item"] in "01"
        else one
        for one in rows()
    ]
    digest = collect_digest(empty, VOTES, sizes=(1, 3))
    found = analyse_digest(digest, ["plain"], {}, (1, 3), ["plain"])
    tales = found.comparison.tasks[2]
    assert math.isnan(tales.values["wide", "odd_words"].value)
    assert tales.values["sharp", "odd_words"].low > 0
    over = tales.over["plain"]
    assert math.isnan(over["wide", "odd_words"].low)
    assert over["sharp", "odd_words"].low < over["sharp", "odd_words"].value
    record = record_findings(found)
    assert record["tasks"][-1]["settings"]["wide"]["over"]["plain"]["logprob"]["verdict"] is None
    assert "nan" not in json.dumps(record, allow_nan=False)
    assert tables(format_summary(found, ABOUT), "Differences from plain")[1][-1] == ["wide"]


def test_measures_in_the_tables() -> None:
    first = next(rows())
    assert flatten_row(first, [], ["kept"])["measure_kept"] is None
    second = {**first, "measures": {"kept": [1, 2]}}
    cells = flatten_row(second, [], ["kept"])
    assert (cells["measure_kept"], cells["measure_kept_of"]) == (1.0, 2.0)


def test_plots(findings: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they show, and that both kinds of file are there."""
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float]] = []
    original = Axes.errorbar

    def errorbar(self: Axes, x: float, y: float, *args: Any, **more: Any) -> Any:
        drawn.append((x, y))
        return original(self, x, y, *args, **more)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    names = draw_plots(findings, tmp_path)
    assert names[:4] == ["scores", "differences", "differences-2", "quality"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
    }
    scored, overall = findings.comparison.scored, findings.comparison.overall
    assert overall is not None
    forest = [
        (family.over[baseline][name, SCORE].value, place)
        for baseline, others in (("plain", SETTINGS[1:]), ("wide", SETTINGS[:2]))
        for family in scored
        for place, name in enumerate(others)
    ]
    values = findings.comparison.tasks[2].values
    quality = [
        (values[name, "repetition"].value, overall.values[name, SCORE].value) for name in SETTINGS
    ]
    assert drawn[len(SETTINGS) :][: len(forest) + 3] == forest + quality
