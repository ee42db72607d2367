"""The page of a batch: what is refused, what it shows, how it sorts, filters and opens."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entropix_jax import batch
from entropix_jax.names import REGIMES
from entropix_jax.report import records
from entropix_jax.report.records import batch_page
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
PROMPTS = ("Guests:", "Once", "<script>alert('1')</script>\"'&", "The sum of 3 and 4 is")


def result(line: int, **changes: Any) -> Json:
    """A record's result whose numbers differ from those of any other line."""
    draw = random.Random(line)
    counts = {regime: draw.randint(0, 9) for regime in REGIMES}
    fields: Json = {
        "id": f"r{line}",
        "line": line,
        "digest": f"{line:015x}",
        "text": f" word{line} and more",
        "finish_reason": draw.choice(["eos", "length"]),
        "tokens": sum(counts.values()),
        "regimes": counts,
        "actions": {"sample": sum(counts.values())},
        "retracted": 0,
        "forwards": sum(counts.values()) + draw.randint(0, 20),
        "mean_entropy": draw.uniform(0, 4),
        "mean_varentropy": draw.uniform(0, 4),
        "token_ids": [draw.randrange(1000) for _ in range(sum(counts.values()))],
        "timings": {"seconds": round(draw.uniform(0, 5), 4), "first_token": 0.01},
    }
    return fields | changes


def write_all(path: Path, *results: Json | str | bytes) -> Path:
    parts = [json.dumps(r) + "\n" if isinstance(r, dict) else r for r in results]
    path.write_bytes(b"".join(p.encode() if isinstance(p, str) else p for p in parts))
    return path


def held(page: str) -> list[Json]:
    """The records that a page holds."""
    return [json.loads(line) for line in unpacked(page, "results").decode().splitlines()]


# What is refused, and what is embedded: without a browser.


DAMAGED: dict[str, tuple[list[Json | str | bytes], str]] = {
    "damage in the middle": ([result(1), '{"id": "r\n', result(3)], "line 2: not JSON"),
    "bytes": ([result(1), b'{"id": "\xff"}\n'], "line 2: not UTF-8"),
    "a list": ([result(1), "[1]\n"], "line 2: not a JSON object"),
    "a blank line": ([result(1), "\n", result(3)], "line 2: not JSON"),
    "other JSON": ([result(1), {"id": "x"}], "line 2: not the result of a record: no 'id', 'line'"),
    "neither text nor error": (
        [{"id": "a", "line": 1, "digest": "0"}],
        "line 1: 'error' is missing",
    ),
    "no tokens": ([{**result(1), "tokens": "3"}], "line 1: 'tokens' is not an integer"),
    "a line of a wrong type": ([{**result(1), "line": 1.5}], "line 1: 'line' is not an integer"),
    "an id of a wrong type": ([{**result(1), "id": 7}], "line 1: 'id' is not text"),
    "an unknown regime": ([{**result(1), "regimes": {"none": 1}}], 'line 1: no regime "none"'),
    "a count of a wrong type": (
        [{**result(1), "regimes": {"lelv": True}}],
        "line 1: 'regimes.lelv' is not an integer",
    ),
    "NaN": ([{**result(1), "mean_entropy": float("nan")}], "line 1: NaN is no number"),
    "a time of a wrong type": (
        [{**result(1), "timings": {"seconds": None}}],
        "line 1: 'timings.seconds' is not a number",
    ),
    "an end of a wrong type": (
        [{"id": "a", "line": 1, "digest": "0", "error": "e", "finish_reason": ["error"]}],
        "line 1: 'finish_reason' is not text",
    ),
    "token ids of a wrong type": (
        [{**result(1), "token_ids": "1 2"}],
        "line 1: 'token_ids' is not a list",
    ),
    "another text at the end": ([result(1), "Killed"], "line 2: not JSON"),
    "half a line alone": (['{"id": "r1", "line": 1'], "line 1: cut off: no result is left"),
    "a study's rows": (
        [{**result(1), "phase": "test", "setting": "greedy"}],
        "line 1: a row of a study: give its folder, ",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_is_said_with_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = DAMAGED[name]
    path = write_all(tmp_path / "out.jsonl", *content)
    line = refused(capsys, tmp_path, path)
    assert line.startswith(f"error: {path}: ")
    assert message in line


def test_a_description_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_all(tmp_path / "out.jsonl", result(1))
    (tmp_path / "out.jsonl.run.json").write_text("[]")
    assert "out.jsonl.run.json: not the description of a run" in refused(capsys, tmp_path, path)
    assert "only traces can be put side by side" in refused(capsys, tmp_path, path, path)
    for content, place in (
        ({"identity": {"sampler": 5}}, "'identity.sampler' is not an object"),
        ({"identity": {}, "samplers": {"greedy": {}}}, "'samplers.greedy' is not text"),
        ({"identity": {}, "earlier": 3}, "earlier is not a list"),
    ):
        (tmp_path / "out.jsonl.run.json").write_text(json.dumps({"format_version": 1} | content))
        line = refused(capsys, tmp_path, path)
        assert line == f"error: {path}.run.json: {place}"


def test_a_page_holds_all_that_was_written(tmp_path: Path) -> None:
    """Under any name; and but for a last line that was cut off."""
    results = [result(1), result(2, id=None), {"id": "x", "line": 3, "digest": "0", "error": "e"}]
    path = write_all(tmp_path / "trace", *results, '{"id": "r4", "li')
    found = held(batch_page(path))
    assert [{k: v for k, v in r.items() if k in results[i]} for i, r in enumerate(found)] == results
    assert {r["sampler"] for r in found} == {records.OWN_SAMPLER}
    facts = json.loads(Parsed(batch_page(path)).scripts["facts"])
    assert facts["torn"]


def test_ten_thousand_records_are_a_page_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most 8 MB; and what does not fit so goes without token ids, then is told of."""
    path = write_all(tmp_path / "out.jsonl", *(result(i + 1) for i in range(10_000)))
    page = batch_page(path)
    assert len(page.encode()) < 8_000_000
    assert "token_ids" in held(page)[0]
    monkeypatch.setattr(records, "MOST_BYTES", len(page) - 1)
    assert held(batch_page(path))[0].keys() == held(page)[0].keys() - {"token_ids"}
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(records, "MOST_BYTES", 1)
    batch_page(path)
    assert "note: the page has 3 MB: 10000 records of " in capsys.readouterr().err


def test_nothing_breaks_out_of_the_page_of_a_batch(tmp_path: Path) -> None:
    def tags(text: str) -> list[str]:
        path = write_all(tmp_path / "o.jsonl", result(1, id=text, text=text, error=text))
        page = batch_page(path)
        assert text == "plain" or text not in page
        return [tag for tag, _ in Parsed(page).tags]

    assert tags(NASTY) == tags("plain")


# In a browser, made of a real batch.


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Json], list[Json]]:
    """A batch's page, what was asked, and what was written."""
    folder = tmp_path_factory.mktemp("batch")
    asked: list[Json] = [
        {"id": f"p{i}", "prompt": PROMPTS[i % 4], "seed": i}
        | ({"sampler": "greedy"} if i % 3 == 0 else {})
        for i in range(40)
    ]
    asked.append({"id": "bad", "prompt": ""})
    write_all(folder / "in.jsonl", *asked)
    output = folder / "out.jsonl"
    options = ["--input", str(folder / "in.jsonl"), "--output", str(output)]
    options += ["--sampler", "temperature", "--max-new-tokens", "20", "--slots", "8"]
    assert batch.main(options) == 0
    assert report(output, "--output", folder / "page.html") == 0
    written = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    return folder / "page.html", asked, written


@pytest.fixture(scope="module")
def shown(browser: Any, outcome: tuple[Path, list[Json], list[Json]]) -> Iterator[Any]:
    with watched_page(browser, outcome[0]) as page:
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    return reloaded(shown)


def listed(page: Any) -> list[str]:
    """The records of all pages of the table, in its order."""
    names: list[str] = []
    while True:
        names += page.evaluate(
            "[...document.querySelectorAll('#records tr[data-row]')].map((row) => row.dataset.row)"
        )
        following = page.locator("#records [aria-label='next page']")
        if not following.is_visible() or following.is_disabled():
            return names
        following.click()


def sort_by(page: Any, key: str) -> str | None:
    page.locator(f"#records th[data-key='{key}'] button").click()
    return page.locator(f"#records th[data-key='{key}']").get_attribute("aria-sort")


def test_the_table_sorts(page: Any, outcome: tuple[Path, list[Json], list[Json]]) -> None:
    written = outcome[2]
    assert listed(page) == [r["id"] for r in written]
    for key, name in (("tokens", "tokens"), ("mean_entropy", "mean_entropy")):
        there = [r for r in written if name in r]
        gone = [r["id"] for r in written if name not in r]
        for down in (True, False):
            assert sort_by(page, key) == ("descending" if down else "ascending")
            expected = sorted(there, key=lambda r: -r[name] if down else r[name])
            assert listed(page) == [r["id"] for r in expected] + gone
        assert sort_by(page, key) is None
        assert listed(page) == [r["id"] for r in written]


def test_all_numbers_of_a_record_are_the_outputs(
    page: Any, outcome: tuple[Path, list[Json], list[Json]]
) -> None:
    _, asked, written = outcome
    prompts = {r["id"]: r["prompt"] for r in asked}
    for i, record in enumerate(written[:6]):
        page.locator("#records tr[data-row] .link").nth(i).click()
        found = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("#record tr[data-field]")]
                .map((row) => [row.dataset.field, row.querySelector("data")?.value
                    ?? row.cells[1].textContent]))"""
        )
        for name in ("tokens", "forwards", "retracted", "mean_entropy", "mean_varentropy"):
            assert float(found[name]) == record[name]
        assert float(found["seconds"]) == record["timings"]["seconds"]
        assert found["sampler"] == ("greedy" if int(record["id"][1:]) % 3 == 0 else "the run's own")
        assert page.locator("#record-text").text_content() == record["text"]
        assert page.locator("#record-prompt").text_content() == prompts[record["id"]]
        shares = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("#record .shares li")]
                .map((li) => [li.dataset.regime, Number(li.querySelector("data").value)]))"""
        )
        assert shares == {r: record["regimes"][r] / record["tokens"] for r in REGIMES}
        ids = page.locator("#record details pre").text_content()
        assert ids == " ".join(map(str, record["token_ids"]))


def test_it_filters(page: Any, outcome: tuple[Path, list[Json], list[Json]]) -> None:
    _, asked, written = outcome
    prompts = {r["id"]: r["prompt"] for r in asked}
    page.locator("#filters-search").fill("SUM of")
    frames(page)
    assert listed(page) == [
        r["id"] for r in written if "sum of" in f"{prompts[r['id']]}\n{r.get('text')}".lower()
    ]
    page.locator("#filters-search").fill("")
    page.locator("#filters-sampler").select_option(label="greedy (14)")
    frames(page)
    greedy = [r for r in written if r["id"][1:].isdigit() and int(r["id"][1:]) % 3 == 0]
    assert listed(page) == [r["id"] for r in greedy]
    page.locator("[aria-label='at least']").fill("3")
    page.locator("[aria-label='at most']").fill("19")
    frames(page)
    kept = [r for r in greedy if 3 <= r["tokens"] <= 19]
    assert 0 < len(kept) < len(greedy)
    assert listed(page) == [r["id"] for r in kept]
    assert page.locator("#count").inner_text().startswith(f"{len(kept)} of 41 records")
    found = page.evaluate(
        """[...document.querySelectorAll("#samplers data")].map((node) => Number(node.value))"""
    )
    tokens = sum(r["tokens"] for r in kept)
    assert found == pytest.approx(
        [
            len(kept),
            tokens,
            tokens / len(kept),
            sum(r["mean_entropy"] * r["tokens"] for r in kept) / tokens,
            sum(r["forwards"] for r in kept) / tokens,
            sum(r["timings"]["seconds"] for r in kept) / len(kept),
        ],
        rel=1e-12,
    )
    page.locator("#filters-search").fill("nothing has this")
    frames(page)
    assert listed(page) == []
    assert "nothing fits" in page.locator("#records").inner_text()
    page.locator("#filters button").click()
    frames(page)
    assert len(listed(page)) == 41


def test_shares_and_histograms(page: Any, outcome: tuple[Path, list[Json], list[Json]]) -> None:
    written = [r for r in outcome[2] if "text" in r]
    counts = Counter(dict.fromkeys(REGIMES, 0))
    for record in written:
        counts.update(record["regimes"])
    shares = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#shares li")]
            .map((li) => [li.dataset.regime, Number(li.querySelector("data").value)]))"""
    )
    assert shares == {r: counts[r] / sum(counts.values()) for r in REGIMES}
    for key, value in (
        ("tokens", lambda r: r["tokens"]),
        ("mean_entropy", lambda r: r["mean_entropy"]),
        ("per-token", lambda r: r["forwards"] / r["tokens"]),
        ("seconds", lambda r: r["timings"]["seconds"]),
    ):
        parts = page.evaluate(
            f"""document.getElementById("histogram-{key}").data.map((t) =>
                [t.name, t.x, t.xbins, t.marker.pattern.shape])"""
        )
        assert {name for name, *_ in parts} == {"greedy", "the run's own"}
        assert len({shape for *_, shape in parts}) == 2
        for name, values, bins, _ in parts:
            own = [r for r in written if ("sampler_digest" in r) == (name == "greedy")]
            assert values == [value(r) for r in own]
            assert all(bins["start"] <= v < bins["end"] for v in values)


def test_errors_are_listed(page: Any) -> None:
    rows = page.locator("#errors-list tr")
    assert rows.count() == 1
    assert rows.inner_text().split() == ["bad", "41", "'prompt'", "is", "empty"]
    rows.locator("button").click()
    assert page.locator("#record-error").inner_text() == "'prompt' is empty"
    assert page.locator("#records tr.current").get_attribute("data-row") == "bad"


def test_by_the_keyboard(page: Any) -> None:
    page.locator("#records th[data-key='tokens'] button").focus()
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort='descending']").get_attribute("data-key") == "tokens"
    page.locator("#records tr[data-row] .link").nth(2).focus()
    page.keyboard.press("Enter")
    name = page.locator("#records tr[data-row]").nth(2).get_attribute("data-row")
    assert page.locator("#record-name").inner_text() == name
    page.locator("#record [aria-label='next record']").focus()
    page.keyboard.press("Enter")
    name = page.locator("#records tr[data-row]").nth(3).get_attribute("data-row")
    assert page.locator("#record-name").inner_text() == name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_how_it_looks(
    watched: Callable[..., Watched],
    outcome: tuple[Path, list[Json], list[Json]],
    scheme: str,
) -> None:
    for width in (1440, 400):
        page = watched(width, scheme=scheme).open(outcome[0])
        nothing_is_cut_off(page, width)
        if width == 1440:
            all_in_sight(page, "#records .scroll")
    texts_stand_out(page, ".grid .link, .about, .filter label, .shares li, #errors-list td")
    page.locator("#records .link").nth(3).click()
    frames(page)
    assert abs(page.locator("#record").bounding_box()["y"]) < 20  # it is brought to the reader


def test_ten_thousand_records_stay_usable(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """It opens in two seconds, few rows are in the page, and sorting is the work of a moment."""
    path = write_all(tmp_path / "out.jsonl", *(result(i + 1) for i in range(10_000)))
    output = tmp_path / "page.html"
    assert report(path, "--output", output) == 0
    one = opened_in_time(watched, output)
    page = one.page
    assert page.locator("#records tr[data-row]").count() == 25
    busy = one.timed()
    took = []
    for order in ("descending", "ascending", None, "descending"):
        before = busy()
        assert sort_by(page, "mean_entropy") == order
        took.append(busy() - before)
    assert 0 < min(took) < 1
    best = max(range(1, 10_001), key=lambda i: result(i)["mean_entropy"])
    assert page.locator("#records tr[data-row]").first.get_attribute("data-row") == f"r{best}"
    page.locator("#records [aria-label='last page']").click()
    assert "9976 to 10000 of 10000" in page.locator("#records .pager").inner_text()


def test_hostile_records(watched: Callable[..., Watched], tmp_path: Path) -> None:
    path = write_all(
        tmp_path / "out.jsonl",
        result(1, id=NASTY, text=NASTY, finish_reason=NASTY, actions={NASTY: 1}, more={NASTY: 1}),
        {"id": NASTY + "2", "line": 2, "digest": "0", "error": NASTY, "finish_reason": "error"},
    )
    samplers = {"samplers": {}, "identity": {"model": NASTY, "input": NASTY, "sampler": {NASTY: 1}}}
    (tmp_path / "out.jsonl.run.json").write_text(json.dumps(samplers))
    output = tmp_path / "page.html"
    assert report(path, "--output", output) == 0
    opened = watched()
    page = opened.open(output)
    assert page.locator("#record-text").text_content() == NASTY
    page.locator("#records .link").nth(1).click()
    frames(page)
    assert opened.requests == [output.as_uri()]
    assert page.locator("img, main script").count() == 0
