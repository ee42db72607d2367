"""The page of a study: what is refused, whether its numbers are the study's, how it is used."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropix_jax import evaluate
from entropix_jax.names import FINDINGS_FORMAT, REGIMES
from entropix_jax.report import study as report_study
from entropix_jax.report.study import study_page
from tests.browsing import (
    Watched,
    all_in_sight,
    frames,
    nothing_is_cut_off,
    opened_in_time,
    reloaded,
    texts_stand_out,
    watched_page,
)
from tests.test_report import NASTY, Parsed, unpacked
from tests.test_report_compare import refused, report

Json = dict[str, Any]
COMMITTED = Path(__file__).parents[1] / "configs" / "ablations" / "study"
OPTIONS = ["--task", "sums", "facts", "--sampler", "temperature", "greedy", "entropix"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study, as the command leaves it."""
    found = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entropix_jax.studies.study._TRUTH_TEXTS", 2)
        options = [*OPTIONS, "--items", "8", "--seeds", "2", "--output", str(found)]
        assert evaluate.main(options) == 0
    return found


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def findings_of(folder: Path) -> Json:
    found: Json = json.loads((folder / "findings.json").read_text())
    return found


# What is refused, and what is embedded: without a browser.


def test_findings_are_the_studys_results(folder: Path) -> None:
    """Item by item, against the table, in float64."""
    rows, found = rows_of(folder), findings_of(folder)
    assert [one["name"] for one in found["settings"]] == ["temperature", "greedy", "entropix"]
    assert len(found["items"]) == 16
    for one in found["settings"]:
        own = [row for row in rows if row["setting"] == one["name"]]
        for i, item in enumerate(found["items"]):
            there = [r for r in own if (r["task"], r["item"]) == (item["task"], item["item"])]
            assert len(there) == 2
            assert one["scores"][i] == np.mean([float(r["score"]) for r in there])
            assert one["forwards"][i] == np.mean([float(r["forwards"]) for r in there])
        tasks = np.array([item["task"] for item in found["items"]])
        scores = np.array(one["scores"])
        means = [scores[tasks == task].mean() for task in found["tasks"]]
        assert one["line"]["by_task"] == means
        assert one["line"]["score"]["value"] == pytest.approx(np.mean(means), rel=1e-12)
        assert one["line"]["score"]["low"] <= one["line"]["score"]["value"]
        assert one["tokens"] == sum(int(r["tokens"]) for r in own)
        for regime in REGIMES:
            assert one["regimes"].get(regime, 0) == sum(int(r[f"regime_{regime}"]) for r in own)
    text = (folder / "summary.md").read_text()
    for one in found["settings"]:
        score = one["line"]["score"]
        told = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
        assert f"| {one['name']} | {told} |" in text
    assert found["format_version"] == FINDINGS_FORMAT


def test_the_committed_study_has_a_page() -> None:
    """Which says that the answers are not there."""
    page = study_page(COMMITTED)
    assert len(page) < 8_000_000
    assert "the folder has no results.csv" in page
    held = json.loads(unpacked(page, "figures"))
    assert {k: held[k] for k in findings_of(COMMITTED)} == findings_of(COMMITTED)
    text = (COMMITTED / "summary.md").read_text()
    for one in held["settings"]:
        score = one["line"]["score"]
        told = f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"
        assert f"| {one['name']} | {told} |" in text


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def change_findings(folder: Path, work: Callable[[Json], object]) -> None:
    found = findings_of(folder)
    work(found)
    (folder / "findings.json").write_text(json.dumps(found))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no study.json": (lambda f: (f / "study.json").unlink(), "no study.json: not the folder of"),
    "no findings": (
        lambda f: (f / "findings.json").unlink(),
        "no findings.json: an earlier version made this study: the same command writes it",
    ),
    "an empty file": (
        lambda f: (f / "study.json").write_text(""),
        "study.json: not JSON",
    ),
    "half a file": (
        lambda f: (f / "findings.json").write_text('{\n"tasks": ['),
        "findings.json: line 2: not JSON",
    ),
    "a list": (
        lambda f: (f / "findings.json").write_text("[]"),
        "findings.json: not a JSON object",
    ),
    "NaN": (
        lambda f: change(f / "findings.json", '"forwards": [', '"forwards": [NaN, '),
        "findings.json: NaN is no number",
    ),
    "a later format": (
        lambda f: change(f / "findings.json", '"format_version": 1', '"format_version": 2'),
        "findings.json: of format 2, this version reads 1",
    ),
    "a setting without a name": (
        lambda f: change(f / "findings.json", '"name": "greedy"', '"nome": "greedy"'),
        "findings.json: 'settings[1].name' is missing",
    ),
    "a number of a wrong type": (
        lambda f: change(f / "findings.json", '"rows": 32', '"rows": "32"'),
        "findings.json: 'settings[0].rows' is not an integer",
    ),
    "a score too many": (
        lambda f: change(f / "findings.json", '"scores": [', '"scores": [0.5, '),
        "findings.json: settings[0].scores: not one for each of the items",
    ),
    "an unknown regime": (
        lambda f: change(f / "findings.json", '"regimes": {"lelv"', '"regimes": {"none"'),
        'findings.json: settings[0].regimes: no regime "none"',
    ),
    "a description of a wrong type": (
        lambda f: change(f / "study.json", '"description": ', '"description": 5, "other": '),
        "study.json: 'description' is not text",
    ),
    "a score missing": (
        lambda f: change_findings(f, lambda found: found["settings"][1].update(line=None)),
        "findings.json: settings[1].line: null, where other settings have one",
    ),
    "a task's score missing": (
        lambda f: change_findings(f, lambda found: found["settings"][1]["line"]["by_task"].pop()),
        "findings.json: settings[1].line.by_task: not one for each of the tasks",
    ),
    "votes of other sizes": (
        lambda f: change_findings(f, lambda found: found["settings"][1]["line"]["votes"].pop()),
        "findings.json: settings[1].line.votes: not as those of settings[0]",
    ),
    "a predictor of a wrong type": (
        lambda f: change_findings(
            f, lambda found: found["predictors"][0]["auroc"].update(perplexity=0.5)
        ),
        "findings.json: 'predictors[0].auroc.perplexity' is not an object",
    ),
    "an item twice": (
        lambda f: change_findings(
            f, lambda found: found["items"].__setitem__(1, dict(found["items"][0]))
        ),
        "findings.json: items: one stands there twice",
    ),
    "another predictor": (
        lambda f: change_findings(f, lambda found: found["predictors"][1]["auroc"].popitem()),
        "findings.json: predictors[1].auroc: not of the same measures as predictors[0]",
    ),
    "a bin without bounds": (
        lambda f: change_findings(f, lambda found: found["reliability"][0]["bins"][0].pop("low")),
        "findings.json: 'reliability[0].bins[0].low' is missing",
    ),
    "parameters of another study": (
        lambda f: change(f / "study.json", '"greedy": {', '"other": {'),
        'study.json: lacks setting "greedy"',
    ),
    "another table": (
        lambda f: (f / "results.csv").write_text("a,b\n1,2\n"),
        "results.csv: line 1: no column 'answer'",
    ),
    "a table that is cut off": (
        lambda f: (f / "results.csv").write_bytes((f / "results.csv").read_bytes()[:-40]),
        "results.csv: line 97: ",
    ),
    "a table of other items": (
        lambda f: change(f / "results.csv", "sums-test-1,", "sums-test-99,"),
        'results.csv: line 2: "sums-test-99" is not in findings.json',
    ),
    "a seed that is none": (
        lambda f: change(
            f / "results.csv", "temperature,temperature,0,", "temperature,temperature,x,"
        ),
        "results.csv: line 2: a number is none",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_is_said_with_its_place(
    name: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGED[name]
    damage(copied)
    line = refused(capsys, tmp_path, copied)
    assert line.startswith(f"error: {copied}")
    assert message in line


def test_a_study_stands_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "only traces can be put side by side" in refused(capsys, tmp_path, folder, folder)
    line = refused(capsys, tmp_path, folder / "test.jsonl")
    assert f"line 1: a row of a study: give its folder, {folder}" in line
    assert "not a trace, a batch's output" in refused(capsys, tmp_path, folder / "results.csv")
    output = tmp_path / "page.html"
    for name in ("study.json", "findings.json"):
        assert report(folder / name, "--output", output) == 0  # its folder is meant
        assert output.read_text("utf-8") == study_page(folder)
        output.unlink()


def test_texts_are_left_out_where_they_are_too_much(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = study_page(folder)
    assert capsys.readouterr().err == ""
    rows = rows_of(folder)
    held = [json.loads(line) for line in unpacked(page, "answers").decode().splitlines()]
    assert Counter(row[-1] for one in held for row in one["rows"]) == Counter(
        row["text"] for row in rows
    )
    monkeypatch.setattr(report_study, "MOST_BYTES", 1)
    page = study_page(folder)
    assert "note: the texts of the answers would make the page too large" in capsys.readouterr().err
    held = [json.loads(line) for line in unpacked(page, "answers").decode().splitlines()]
    assert all(len(row) == 8 for one in held for row in one["rows"])


def test_nothing_breaks_out_of_the_page_of_a_study(copied: Path) -> None:
    def tags(text: str) -> list[str]:
        about = json.loads((copied / "study.json").read_text())
        about |= {"description": text, "model": text, "commit": text}
        (copied / "study.json").write_text(json.dumps(about))
        page = study_page(copied)
        assert text == "plain" or text not in page
        return [tag for tag, _ in Parsed(page).tags]

    assert tags(NASTY) == tags("plain")


# In a browser.


@pytest.fixture(scope="module")
def opened(browser: Any, folder: Path) -> Iterator[Any]:
    output = folder.parent / "page.html"
    assert report(folder, "--output", output) == 0
    with watched_page(browser, output) as page:
        yield page


@pytest.fixture
def page(opened: Any) -> Any:
    return reloaded(opened)


def table(page: Any, box: str) -> dict[str, dict[str, float]]:
    """The numbers of a table's page, by row and column."""
    return page.evaluate(
        """(box) => {
            const keys = [...document.querySelectorAll(`#${box} thead th`)]
                .map((node) => node.dataset.key);
            const rows = [...document.querySelectorAll(`#${box} tr[data-row]`)];
            return Object.fromEntries(rows.map((row) => [row.dataset.row,
                Object.fromEntries([...row.cells].map((cell, i) =>
                    [keys[i], Number(cell.querySelector("data")?.value ?? NaN)]))]));
        }""",
        box,
    )


def test_the_table_has_the_studys_figures(page: Any, folder: Path) -> None:
    found = findings_of(folder)
    shown = table(page, "settings")
    assert list(shown) == [one["name"] for one in found["settings"]]
    for one in found["settings"]:
        line, cells = one["line"], shown[one["name"]]
        assert cells["score"] == line["score"]["value"]
        assert cells["forwards"] == line["forwards"]
        if line["over_baseline"]:
            assert cells["over-baseline"] == line["over_baseline"]["value"]
    for view, key, value in (
        ("tasks", "task-0", lambda one: one["line"]["by_task"][0]),
        ("tasks", "task-1", lambda one: one["line"]["by_task"][1]),
        ("regimes", "mid", lambda one: one["regimes"]["mid"] / one["tokens"]),
        ("actions", "sample", lambda one: one["actions"].get("sample", 0) / one["tokens"]),
        ("texts", "perplexity", lambda one: one["perplexity"]),
    ):
        page.locator("#view").select_option(label=view)
        shown = table(page, "settings")
        for one in found["settings"]:
            assert shown[one["name"]][key] == value(one)


def test_the_pictures_have_the_studys_figures(page: Any, folder: Path) -> None:
    found = findings_of(folder)
    lines = [one["line"] for one in found["settings"]]

    def data(box: str) -> list[Json]:
        plain = "document.getElementById('{}').data.map((t) => JSON.parse(JSON.stringify(t)))"
        return page.evaluate(plain.format(box))

    (points,) = data("intervals")
    assert points["x"] == [line["score"]["value"] for line in lines]
    highs = np.array(points["x"]) + points["error_x"]["array"]
    np.testing.assert_allclose(highs, [line["score"]["high"] for line in lines], rtol=1e-15)
    page.locator("#measure").select_option(label="over temperature")
    (points,) = data("intervals")
    assert points["x"] == [line["over_baseline"]["value"] for line in lines[1:]]
    costs = data("costs")
    assert [t["x"][0] for t in costs] == [line["forwards"] for line in lines]
    assert [t["y"][0] for t in costs] == [line["score"]["value"] for line in lines]
    symbols = [t["marker"]["symbol"] for t in costs]
    assert len(set(symbols)) == len(symbols)
    groups = data("predictors")
    expected = [one for one in found["predictors"] if one["task"] == "all"]
    assert [g["name"] for g in groups] == [one["setting"] for one in expected]
    for group, one in zip(groups, expected, strict=True):
        assert group["x"] == [auroc["value"] for auroc in one["auroc"].values()]
    for curve, one in zip(data("reliability"), found["reliability"], strict=True):
        assert curve["y"] == [b["right"] for b in one["bins"]]
    bars = data("truth")
    assert bars[0]["y"] == [one["true_entropy"] for one in found["truth"]]
    assert bars[1]["y"] == [one["model_entropy"] for one in found["truth"]]


def test_settings_are_sorted_and_filtered(page: Any, folder: Path) -> None:
    page.locator("#settings th[data-key='forwards'] button").focus()
    page.keyboard.press("Enter")
    lines = {one["name"]: one["line"] for one in findings_of(folder)["settings"]}
    expected = sorted(lines, key=lambda name: -lines[name]["forwards"])
    assert list(table(page, "settings")) == expected
    page.locator("#filters-search").fill("greedy")
    frames(page)
    assert list(table(page, "settings")) == ["greedy"]
    assert page.locator("#count").inner_text() == "1 of 3 settings."
    assert page.evaluate("document.getElementById('intervals').data[0].x.length") == 1
    assert page.locator("#regimes tr").count() == 1
    assert page.locator("#items thead th").count() == 4


def test_a_setting_opens_with_all_its_parameters(page: Any, folder: Path) -> None:
    about = json.loads((folder / "study.json").read_text())["settings"]
    page.locator("#settings .link").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator("#opened-name").inner_text() == "entropix"
    own, base = about["entropix"]["parameters"], about["temperature"]["parameters"]
    keys = page.evaluate(
        "[...document.querySelectorAll('#parameters tr')].map((r) => r.dataset.key)"
    )
    assert keys == sorted(own)
    page.locator("#only-differing").check()
    keys = page.evaluate(
        "[...document.querySelectorAll('#parameters tr')].map((r) => r.dataset.key)"
    )
    assert keys == [key for key in sorted(own) if own[key] != base.get(key)]
    page.locator("[aria-label='Search the keys']").fill("arms.mid")
    assert page.locator("#parameters tr").inner_text().split() == [
        *("arms.mid", "adaptive", "(temperature:", "sample)")
    ]


def test_items_by_settings(page: Any, folder: Path) -> None:
    found = findings_of(folder)
    shown = table(page, "items")
    assert list(shown) == [item["item"] for item in found["items"]]
    for i, cells in enumerate(shown.values()):
        scores = [one["scores"][i] for one in found["settings"]]
        assert [cells[f"setting-{k}"] for k in range(3)] == scores
        assert cells["mean"] == pytest.approx(np.mean(scores), rel=1e-12)
    differing = [
        item["item"]
        for i, item in enumerate(found["items"])
        if len({one["scores"][i] for one in found["settings"]}) > 1
    ]
    assert 0 < len(differing) < 16
    label = f"settings differ ({len(differing)})"
    page.locator("#item-filters-kind").select_option(label=label)
    frames(page)
    assert list(table(page, "items")) == differing


def test_an_item_opens_with_its_answers(page: Any, folder: Path) -> None:
    rows = [row for row in rows_of(folder) if row["item"] == "sums-test-6"]
    page.locator("#items tr[data-row='sums-test-6'] .link").click()
    assert page.locator("#expected b").inner_text() == rows[0]["expected"]
    found = page.evaluate(
        """[...document.querySelectorAll(".answers")].flatMap((box) =>
            [...box.querySelectorAll(".answer")].map((node) => [box.dataset.setting,
                Number(node.querySelector("data").value),
                node.querySelector(".given").textContent,
                node.querySelector("pre").textContent]))"""
    )
    assert found == [
        [r["setting"], float(r["score"]), r["answer"] or "no answer", r["text"]] for r in rows
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_how_it_looks(
    watched: Callable[..., Watched], tmp_path: Path, folder: Path, scheme: str
) -> None:
    output = tmp_path / "page.html"
    assert report(folder, "--output", output) == 0
    for width in (1440, 400):
        page = watched(width, scheme=scheme).open(output)
        nothing_is_cut_off(page, width)
    texts_stand_out(page, ".grid .link, .about, .filter label, .shares li, .mark, .interval .muted")
    page.locator("#items .link").first.click()
    frames(page)
    assert abs(page.locator("#opened").bounding_box()["y"]) < 20  # it is brought to the reader


def test_the_committed_study_in_a_browser(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """Votes, tuning and eighteen settings; no answers. It opens in two seconds."""
    output = tmp_path / "page.html"
    assert report(COMMITTED, "--output", output) == 0
    page = opened_in_time(watched, output).page
    found = findings_of(COMMITTED)
    assert page.locator("#tuned tr").count() == len(found["tuned"])
    curve = page.evaluate("document.getElementById('costs').data[1].y")
    (base,) = (one for one in found["settings"] if one["name"] == found["baseline"])
    assert curve == [vote["score"]["value"] for vote in base["line"]["votes"]]
    page.locator("#view").select_option(label="self-consistency")
    shown = table(page, "settings")[found["baseline"]]
    assert shown["vote-5"] == base["line"]["votes"][-1]["score"]["value"]
    all_in_sight(page, "#settings .scroll")
    page.locator("#items .link").first.click()
    assert "The answers are not here" in page.locator("#opened").inner_text()


def test_names_beside_a_picture_are_not_cut_off(
    watched: Callable[..., Watched], tmp_path: Path
) -> None:
    output = tmp_path / "page.html"
    assert report(COMMITTED, "--output", output) == 0
    for width in (400, 1440):
        page = watched(width).open(output)
        lefts = page.evaluate(
            """[...document.querySelectorAll("#intervals .ytick text")].map((node) =>
                node.getBoundingClientRect().left)"""
        )
        assert len(lefts) == 18
        assert min(lefts) >= page.locator("#intervals").bounding_box()["x"]


def test_what_a_value_does(watched: Callable[..., Watched], copied: Path, tmp_path: Path) -> None:
    found = findings_of(copied)
    for value, one in zip((0.5, 1.5, 1.0), found["settings"], strict=True):
        one["varied"] = {"base.temperature": value, "arms.mid": "sample"}
    (copied / "findings.json").write_text(json.dumps(found))
    output = tmp_path / "page.html"
    assert report(copied, "--output", output) == 0
    page = watched().open(output)
    assert page.locator("#key option").all_inner_texts() == ["base.temperature"]
    x, y = page.evaluate("(({x, y}) => [x, y])(document.getElementById('response').data[0])")
    assert x == [0.5, 1.5, 1.0]
    assert y == [one["line"]["score"]["value"] for one in found["settings"]]


def test_a_study_without_scores(
    watched: Callable[..., Watched], copied: Path, tmp_path: Path
) -> None:
    """Prompts alone: no answer is right or wrong."""
    found = findings_of(copied)
    for one in found["settings"]:
        one |= {"line": None, "scores": [None] * len(found["items"])}
    found |= {"predictors": [], "reliability": [], "truth": []}
    (copied / "findings.json").write_text(json.dumps(found))
    output = tmp_path / "page.html"
    assert report(copied, "--output", output) == 0
    page = watched().open(output)
    assert page.locator("#intervals, #costs, #predictors, #truth").count() == 0
    assert page.locator("#view option").first.inner_text() == "regimes"
    assert table(page, "items")["sums-test-1"]["setting-0"] == found["settings"][0]["forwards"][0]


def test_hostile_names(watched: Callable[..., Watched], copied: Path, tmp_path: Path) -> None:
    for name in ("study.json", "findings.json"):
        content = json.loads((copied / name).read_text())
        text = json.dumps(content).replace('"greedy"', json.dumps(NASTY))
        (copied / name).write_text(text.replace('sums-test-1"', json.dumps(NASTY)[1:]))
    (copied / "results.csv").unlink()
    output = tmp_path / "page.html"
    assert report(copied, "--output", output) == 0
    one = watched()
    page = one.open(output)
    page.locator("#settings .link").nth(1).click()
    assert page.locator("#opened-name").text_content().startswith("<script>alert")
    page.locator("#items .link").first.click()
    frames(page)
    assert one.requests == [output.as_uri()]
    assert page.locator("img, svg image[href^=http], main script").count() == 0
