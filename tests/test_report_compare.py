"""The page of several runs side by side: what is refused, what it shows, how its parts link."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entropix_jax import main
from entropix_jax.names import REGIMES
from entropix_jax.report import command
from entropix_jax.report.comparing import comparison_page
from entropix_jax.sampler.presets import load_sampler
from tests.browsing import (
    Watched,
    frames,
    nothing_is_cut_off,
    opened_in_time,
    reloaded,
    texts_stand_out,
    watched_page,
)
from tests.test_report import NASTY, footer, header, run_of, token, write
from tests.traces import Trace, load_trace

Json = dict[str, Any]
SAMPLERS = {"greedy": "0", "temperature": "1", "entropix": "0"}


# What is refused, and what is embedded: without a browser.


def trace_at(path: Path, records: list[Json], **changes: Any) -> Path:
    return write(path, header(**changes), *records, footer(records))


def report(*arguments: str | Path) -> int:
    return command.main([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *inputs: str | Path) -> str:
    """The one line in which inputs are refused, and nothing is written."""
    before = sorted(folder.iterdir())
    assert report(*inputs, "--output", folder / "page.html") == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert sorted(folder.iterdir()) == before
    return line


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return trace_at(tmp_path / "a.jsonl", run_of()), trace_at(tmp_path / "b.jsonl", run_of(8))


def test_traces_of_other_prompts(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = trace_at(tmp_path / "c.jsonl", run_of(), prompt="Once more", prompt_tokens=[1, 2, 9])
    line = refused(capsys, tmp_path, *pair, other)
    assert line == (
        f'error: {other}: another prompt than that of {pair[0]}: "Once more", not "Once": give'
        " traces of one prompt"
    )


def test_one_text_put_in_two_ways(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For one model other tokens are another prompt; another model has its own."""
    chat = trace_at(tmp_path / "c.jsonl", run_of(), prompt_tokens=[9, 1, 2, 3])
    assert "another prompt" in refused(capsys, tmp_path, pair[0], chat)
    model = trace_at(tmp_path / "d.jsonl", run_of(), prompt_tokens=[9, 1, 2, 3], model="other")
    assert report(pair[0], model, "--output", tmp_path / "page.html") == 0


def test_what_cannot_be_compared(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "one text alone" in refused(capsys, tmp_path, pair[0], "--compare")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(pair[0].read_bytes().replace(b'"type": "token"', b'"type": "tok"', 1))
    line = refused(capsys, tmp_path, pair[0], damaged)
    assert line == f'error: {damaged}: line 2: no line of a trace has the type "tok"'
    assert "no such file" in refused(capsys, tmp_path, pair[0], tmp_path / "none")
    assert refused(capsys, tmp_path).startswith("error: a trace, a batch's output or a study's")
    before = pair[1].read_bytes()
    assert report(*pair, "--output", pair[1]) == 2
    assert "would take the place of its own source" in capsys.readouterr().err
    assert pair[1].read_bytes() == before


# In a browser, made of real runs.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trace]]:
    """The page of three samplers' runs on one prompt, as the command makes it, and the traces."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [folder / f"{name}.jsonl" for name in SAMPLERS]
    for (sampler, seed), path in zip(SAMPLERS.items(), paths, strict=True):
        options = ["--prompt", "Once", "--max-new-tokens", "60", "--seed", seed]
        options += ["--sampler", sampler, "--trace", str(path), "--trace-top", "3"]
        assert main.main(options) == 0
    assert report(*paths, "--output", folder / "page.html") == 0
    return folder / "page.html", [load_trace(path) for path in paths]


@pytest.fixture(scope="module")
def shown(browser: Any, runs: tuple[Path, list[Trace]]) -> Iterator[Any]:
    with watched_page(browser, runs[0]) as page:
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    return reloaded(shown)


def committed(trace: Trace) -> list[Json]:
    return [record for record in trace.tokens if record["type"] == "token"]


def parting(one: Trace, other: Trace) -> int | None:
    """The first place at which two runs do not have the same token."""
    ids = [[r["token_id"] for r in committed(trace)] for trace in (one, other)]
    most = max(map(len, ids))
    padded = [each + [-1] * (most - len(each)) for each in ids]
    return next((i for i, (a, b) in enumerate(zip(*padded, strict=True)) if a != b), None)


def place(page: Any) -> list[dict[str, float]]:
    """The metrics that are shown for each side, by the trace's own names."""
    return page.evaluate(
        """() => {
            const rows = [...document.querySelectorAll("#details-body tr[data-field]")];
            return [...rows[0].cells].slice(1).map((_, i) => Object.fromEntries(rows.map((row) => [
                row.dataset.field,
                Number(row.cells[i + 1].querySelector("data")?.value ?? NaN)])));
        }"""
    )


def facts(page: Any) -> dict[str, list[str]]:
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#facts-table tr[data-fact]")]
            .map((row) => [row.dataset.fact, [...row.cells].slice(1).map(
                (cell) => cell.querySelector("data")?.value ?? cell.textContent)]))"""
    )


def test_the_texts_are_the_runs_and_say_where_they_part(
    page: Any, runs: tuple[Path, list[Trace]]
) -> None:
    traces = runs[1]
    partings = [parting(traces[0], trace) for trace in traces[1:]]
    assert all(place is not None and place > 0 for place in partings), partings
    first = min(place for place in partings if place is not None)
    for i, trace in enumerate(traces):
        spans = page.evaluate(
            f"""() => [...document.querySelectorAll("#side-{i} .token")].map((node) =>
                [node.dataset.regime, [...node.classList]])"""
        )
        assert [regime for regime, _ in spans] == [r["regime"] for r in trace.tokens]
        start = trace.tokens[0]["position"]
        for (_, classes), record in zip(spans, trace.tokens, strict=True):
            at = record["position"] - start
            where = first if i == 0 else partings[i - 1]
            assert ("common" in classes) == (at < first)
            assert ("parts" in classes) == (at == where and record["type"] == "token")
        assert page.locator(f"#side-{i} .parting").count() == 1
        assert where is not None
        words = page.locator(f".side[data-number='{i}'] .about").inner_text()
        assert f"at token {where + 1};" in words


def test_all_show_what_they_have_at_a_place(page: Any, runs: tuple[Path, list[Trace]]) -> None:
    traces = runs[1]
    for i, source in ((10, 1), (25, 0)):
        record = committed(traces[source])[i]
        index = traces[source].tokens.index(record)
        page.locator(f"#side-{source}-token-{index}").hover()
        found = place(page)
        for j, trace in enumerate(traces):
            expected = committed(trace)[i]
            assert found[j] == {name: expected[name] for name in found[j]}
            assert len(found[j]) == 16
            where = page.locator(f"#side-{j} .selected").get_attribute("data-index")
            assert trace.tokens[int(where)] == expected
        frames(page)
        cursor = page.evaluate("document.getElementById('series').layout.shapes[0].x0")
        assert cursor == record["position"]
        rings = page.evaluate(
            "document.getElementById('plane').data.slice(3).map((t) => [t.x[0], t.y[0]])"
        )
        expected_rings = [committed(trace)[i] for trace in traces]
        assert rings == [[r["entropy"], r["varentropy"]] for r in expected_rings]


def test_keys_lead_all_texts(page: Any, runs: tuple[Path, list[Trace]]) -> None:
    page.locator("#side-1").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        page.keyboard.press(key)
    assert page.locator("#place").inner_text().startswith("Token 3 · held")
    assert page.locator(".token.selected.pinned").count() == 3
    page.locator("#side-0 .token").nth(9).hover()  # held: pointing moves nothing
    assert page.locator("#place").inner_text().startswith("Token 3")
    page.keyboard.press("End")
    last = len(committed(runs[1][1]))
    assert page.locator("#place").inner_text().startswith(f"Token {last}")
    page.keyboard.press("Escape")
    assert page.locator(".token.pinned").count() == 0
    page.keyboard.press("Home")
    words = page.locator("#announcement").text_content()
    assert words.startswith("Token 1. A: ")


def test_facts_and_settings(page: Any, runs: tuple[Path, list[Trace]]) -> None:
    traces = runs[1]
    found = facts(page)
    assert found["sampler"] == list(SAMPLERS)
    assert found["seed"] == list(SAMPLERS.values())
    for name in ("tokens", "forwards"):
        label = {"tokens": "tokens", "forwards": "positions evaluated"}[name]
        rows = [trace.footer["rows"][0] for trace in traces if trace.footer]
        assert found[label] == [str(row[name]) for row in rows]
    for label, name in (
        ("mean entropy, bits", "entropy"),
        ("mean varentropy, bits²", "varentropy"),
    ):
        means = [sum(r[name] for r in committed(t)) / len(committed(t)) for t in traces]
        assert [float(value) for value in found[label]] == pytest.approx(means, rel=1e-12)
    for i, trace in enumerate(traces):
        counts = Counter(r["regime"] for r in committed(trace))
        for regime in REGIMES:
            (label,) = (label for label in found if label.startswith(regime.upper()))
            assert float(found[label][i]) == counts[regime] / len(committed(trace))
    values = [trace.header["sampler_parameters"] for trace in traces]
    differing = {k for k in values[0] if len({json.dumps(v.get(k)) for v in values}) > 1}
    assert {key for key in found if "." in key} == differing
    assert found["arms.mid"] == [json.dumps(v["arms.mid"]) for v in values]


def test_sides_are_put_away_and_fetched(page: Any, runs: tuple[Path, list[Trace]]) -> None:
    buttons = page.locator("#sides button")
    buttons.nth(0).click()
    frames(page)
    assert page.locator(".side:visible").count() == 2
    where = parting(runs[1][1], runs[1][2])
    assert where is not None
    assert page.locator("#side-1 .token.common").count() == sum(
        r["position"] - runs[1][1].tokens[0]["position"] < where for r in runs[1][1].tokens
    )
    assert len(place(page)) == 2
    assert page.evaluate("document.getElementById('series').data.length") == 2
    buttons.nth(1).click()
    buttons.nth(2).click()  # the last one stays
    assert page.locator(".side:visible").count() == 1
    buttons.nth(0).click()
    buttons.nth(1).click()
    frames(page)
    assert page.locator(".side:visible").count() == 3
    lines = page.evaluate("document.getElementById('series').data.map((t) => [t.x, t.y])")
    for (x, y), trace in zip(lines, runs[1], strict=True):
        assert x == [r["position"] for r in committed(trace)]
        assert y == [r["entropy"] for r in committed(trace)]


def test_sides_and_regimes_are_told_apart_without_colour(page: Any) -> None:
    dashes = page.evaluate("document.getElementById('series').data.map((t) => t.line.dash)")
    symbols = page.evaluate(
        "document.getElementById('plane').data.slice(0, 3).map((t) => t.marker.symbol)"
    )
    assert len(set(dashes)) == len(set(symbols)) == 3
    page.locator("#legend button[data-regime=lelv]").click()
    frames(page)
    hidden = page.locator(".text .token.faded").count()
    assert hidden == page.locator(".text .token[data-regime=lelv]").count() > 0


def test_another_measure(page: Any, runs: tuple[Path, list[Trace]]) -> None:
    page.locator("#measure").select_option("agreement")
    frames(page)
    lines = page.evaluate("document.getElementById('series').data.map((t) => t.y)")
    assert lines == [[r["agreement"] for r in committed(trace)] for trace in runs[1]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_how_it_looks(
    watched: Callable[..., Watched], runs: tuple[Path, list[Trace]], scheme: str
) -> None:
    for width in (1440, 400):
        page = watched(width, scheme=scheme).open(runs[0])
        nothing_is_cut_off(page, width)
        tops = [page.locator(f"#side-{i}").bounding_box()["y"] for i in range(2)]
        assert (tops[0] == tops[1]) == (width == 1440)  # columns, or one below the other
    texts_stand_out(page, ".side-badge, #sides .what, .side .about, .text .token.common, .parting")


def test_long_runs_open_in_time(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """Two seconds for three runs of a thousand tokens, pictures included."""
    paths = [
        trace_at(tmp_path / f"{i}.jsonl", run_of(1000), sampler=name)
        for i, name in enumerate(("greedy", "temperature", "<b>entropix &lt; 1</b>"))
    ]
    output = tmp_path / "page.html"
    assert report(*paths, "--output", output) == 0
    page = opened_in_time(watched, output).page
    assert page.locator("#texts .token").count() == 3 * len(run_of(1000))
    legend = page.locator("#series .legendtext").all_text_contents()
    assert legend == ["A greedy", "B temperature", "C <b>entropix &lt; 1</b>"]


def test_texts_of_one_trace(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """Those of several rows, of which one has nothing, and one ends where it would part."""
    rows = [run_of(12, 0), run_of(8, 1), [token(3, row=2, text="!")]]
    records = [r for row in rows for r in row]
    path = trace_at(tmp_path / "t.jsonl", records)
    output = tmp_path / "page.html"
    assert report(path, "--compare", "--output", output) == 0
    page = watched().open(output)
    assert [page.locator(f"#side-{i} .token").count() for i in range(3)] == [13, 9, 1]
    notes = [page.locator(".side .about").nth(i).inner_text() for i in range(3)]
    assert notes[0] == "Parts from the others at once."
    assert notes[1] == "Ends where it would part from A, after 8 tokens."
    assert notes[2] == "Parts from A at once."
    page.locator("#side-0").focus()
    page.keyboard.press("End")
    frames(page)
    assert place(page)[0]["entropy"] == rows[0][-1]["entropy"]
    assert page.locator("#side-2 .selected").count() == 0
    page.locator("#side-2").focus()
    page.keyboard.press("ArrowLeft")  # from past its end to its last token
    assert page.locator("#side-2 .selected").count() == 1
    assert page.locator("#place").inner_text().startswith("Token 1 ")


def test_runs_without_tokens(watched: Callable[..., Watched], tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", header()) for i in range(2)]
    output = tmp_path / "page.html"
    assert report(*paths, "--output", output) == 0
    page = watched().open(output)
    assert page.locator(".side .about").first.inner_text() == "Nothing was generated."
    assert page.locator("body").inner_text().count("this run was interrupted") == 2


def test_hostile_texts(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """As model, sampler, prompt, settings, file name, token, and what ended the run."""
    records = [token(3 + i, text=NASTY, action=NASTY) for i in range(3)]
    values = {**load_sampler("entropix").values, NASTY: NASTY}
    names: Json = {"prompt": NASTY, "model": NASTY, "backend": NASTY, "versions": {NASTY: NASTY}}
    rows = footer(records)["rows"]
    rows[0] |= {"finish_reason": NASTY, "error": NASTY}
    one = header(sampler=NASTY, sampler_parameters=values, **names)
    other = header(**names)
    name = "<img src=x onerror=alert(1)>"
    paths = [
        write(tmp_path / f"{name}{i}.jsonl", start, *records, footer(records, rows=rows))
        for i, start in enumerate((one, other))
    ]
    output = tmp_path / "page.html"
    output.write_text(comparison_page(paths), encoding="utf-8")
    opened = watched()
    page = opened.open(output)
    page.locator("#side-0").focus()
    page.keyboard.press("ArrowRight")
    frames(page)
    assert opened.requests == [output.as_uri()]
    assert page.locator("img, svg image[href^=http], main script").count() == 0
    assert page.locator("#prompt").text_content() == NASTY
    assert facts(page)[NASTY][0] == json.dumps(NASTY, ensure_ascii=False)
