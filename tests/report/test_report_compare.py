"""The page that compares runs: what it refuses, what it shows, how its parts are linked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.cli import generate as main
from entropix_jax.cli import report as command
from entropix_jax.names import REGIMES
from tests.support.browser import (
    Watched,
    each,
    frames,
    plot,
    reloaded,
    watched_page,
)
from tests.support.reports import NASTY, SAMPLER, committed, footer, header, run_of, token, write
from tests.support.traces import Trace, load_trace

Json = dict[str, Any]
Runs = tuple[Path, list[Trace]]
SAMPLERS = {"greedy": "0", "temperature": "1", "entropix": "0"}


def trace_at(path: Path, records: list[Json], **changes: Any) -> Path:
    return write(path, header(**changes), *records, footer(records))


def report(*arguments: str | Path) -> int:
    return command.main([str(argument) for argument in arguments])


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and nothing is written. Within a model the tokens of a prompt decide; another
    model encodes the same prompt differently."""
    one = trace_at(tmp_path / "a.jsonl", run_of())
    other = trace_at(tmp_path / "b.jsonl", run_of(8), prompt="Once more", prompt_tokens=[1, 2, 9])
    chat = trace_at(tmp_path / "c.jsonl", run_of(), prompt_tokens=[9, 1, 2, 3])
    model = trace_at(tmp_path / "d.jsonl", run_of(), prompt_tokens=[9, 1, 2, 3], model="other")
    damaged = tmp_path / "e.jsonl"
    damaged.write_bytes(one.read_bytes().replace(b'"type": "token"', b'"type": "tok"', 1))
    output, before = tmp_path / "page.html", one.read_bytes()
    different = f"{other}: another prompt than {one}: 'Once more', not 'Once': only traces of"
    for inputs, message in (
        ([one, other], f"{different} one prompt can be compared"),
        ([one, chat], "another prompt"),
        ([one, "--compare"], "only one text"),
        ([one, damaged], f'error: {damaged}: line 2: unknown line type "tok"'),
        ([], "no trace is given"),
    ):
        assert report(*inputs, "--output", output) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not output.exists()
    assert report(model, one, "--output", one) == 2
    assert "would take the place of its own source" in capsys.readouterr().err
    assert one.read_bytes() == before
    assert report(one, model, "--output", output) == 0


# In a browser, of real runs.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
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
def shown(browser: Any, runs: Runs) -> Iterator[Any]:
    with watched_page(browser, runs[0]) as page:
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    return reloaded(shown)


def parting(one: Trace, other: Trace) -> int:
    """The first place where two runs have different tokens."""
    ids = zip(*([r["token_id"] for r in committed(t)] for t in (one, other)), strict=False)
    return next(i for i, (a, b) in enumerate(ids) if a != b)


def place(page: Any) -> list[dict[str, float]]:
    """The metrics that are shown for each text, by their names in the trace."""
    value = "Number(cell.querySelector('data')?.value ?? NaN)"
    cells = f"[...node.cells].slice(1).map((cell) => {value})"
    rows = each(page, "#details-body tr[data-field]", f"[node.dataset.field, {cells}]")
    return [{name: cells[i] for name, cells in rows} for i in range(len(rows[0][1]))]


def facts(page: Any) -> dict[str, list[str]]:
    """The table of differences."""
    value = "cell.querySelector('data')?.value ?? cell.textContent"
    cells = f"[...node.cells].slice(1).map((cell) => {value})"
    return dict(each(page, "#facts-table tr[data-fact]", f"[node.dataset.fact, {cells}]"))


def test_the_texts_are_the_runs_and_say_where_they_diverge(page: Any, runs: Runs) -> None:
    traces = runs[1]
    partings = [parting(traces[0], trace) for trace in traces[1:]]
    first = min(partings)
    assert first > 0
    for i, (trace, where) in enumerate(zip(traces, [first, *partings], strict=True)):
        spans = each(page, f"#text-{i} .token", "[node.dataset.regime, [...node.classList]]")
        start = trace.tokens[0]["position"]
        for (regime, classes), record in zip(spans, trace.tokens, strict=True):
            assert regime == record["regime"]
            at = record["position"] - start
            assert ("common" in classes) == (at < first)
            assert ("parts" in classes) == (at == where and record["type"] == "token")
        assert page.locator(f"#text-{i} .parting").count() == 1
        assert f"at token {where + 1}." in page.locator(".side .about").nth(i).inner_text()


def test_all_texts_show_the_selected_place(page: Any, runs: Runs) -> None:
    traces = runs[1]
    for i, source in ((10, 1), (25, 0)):
        at_place = [committed(trace)[i] for trace in traces]
        index = traces[source].tokens.index(at_place[source])
        page.locator(f"#text-{source}-{index}").hover()
        for j, (found, expected) in enumerate(zip(place(page), at_place, strict=True)):
            assert found == {name: expected[name] for name in found}
            assert len(found) == 18
            where = page.locator(f"#text-{j} .selected").get_attribute("data-index")
            assert traces[j].tokens[int(where)] == expected
        frames(page)
        assert plot(page, "series", "layout.shapes[0].x0") == at_place[source]["position"]
        rings = plot(page, "plane", "data.slice(3).map((trace) => trace.customdata[0])")
        assert rings == [[r["entropy"], r["varentropy"]] for r in at_place]


def test_the_table_of_differences(page: Any, runs: Runs) -> None:
    traces, found = runs[1], facts(page)
    assert found["sampler"] == list(SAMPLERS)
    assert found["seed"] == list(SAMPLERS.values())
    rows = [trace.footer["rows"][0] for trace in traces if trace.footer]
    assert found["positions evaluated"] == [str(row["forwards"]) for row in rows]
    for label, name in (("entropy, bits", "entropy"), ("varentropy, bits²", "varentropy")):
        means = [sum(r[name] for r in committed(t)) / len(committed(t)) for t in traces]
        assert [float(value) for value in found[f"mean {label}"]] == pytest.approx(means, rel=1e-12)
    for i, trace in enumerate(traces):
        counts = Counter(r["regime"] for r in committed(trace))
        for regime in REGIMES:
            (label,) = (label for label in found if label.endswith(f"({regime.upper()})"))
            assert float(found[label][i]) == counts[regime] / len(committed(trace))
    values = [trace.header["sampler_parameters"] for trace in traces]
    differing = {k for k in values[0] if len({json.dumps(v.get(k)) for v in values}) > 1}
    assert {key for key in found if "." in key} == differing
    assert found["arms.mid"] == [json.dumps(v["arms.mid"]) for v in values]


def test_hostile_names_and_no_tokens(watched: Callable[..., Watched], tmp_path: Path) -> None:
    records = [token(3 + i, text=NASTY, action=NASTY) for i in range(3)]
    values = {**SAMPLER.values, NASTY: NASTY}
    names: Json = {"prompt": NASTY, "model": NASTY, "backend": NASTY, "versions": {NASTY: NASTY}}
    start = header(sampler=NASTY, sampler_parameters=values, **names)
    one = write(tmp_path / "<img src=x onerror=alert(1)>", start, *records)
    empty = write(tmp_path / "empty.jsonl", header(**names))
    output = tmp_path / "page.html"
    assert report(one, empty, "--output", output) == 0
    opened = watched()
    page = opened.open(output)
    page.locator("#text-0").focus()
    page.keyboard.press("ArrowRight")
    frames(page)
    assert opened.requests == [output.as_uri()]
    assert page.locator("img, svg image[href^=http], main script").count() == 0
    assert facts(page)[NASTY][0] == json.dumps(NASTY, ensure_ascii=False)
    assert page.locator(".side .about").nth(1).inner_text() == "No tokens."


def test_texts_of_one_trace(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """One of them is a prefix of another."""
    rows = [run_of(12, 0), run_of(8, 1), [token(3, row=2, text="!")]]
    path = trace_at(tmp_path / "t.jsonl", [r for row in rows for r in row])
    output = tmp_path / "page.html"
    assert report(path, "--compare", "--output", output) == 0
    page = watched().open(output)
    assert [page.locator(f"#text-{i} .token").count() for i in range(3)] == [13, 9, 1]
    assert page.locator(".side .about").all_inner_texts() == [
        "Differs from the other texts from the start.",
        "A prefix of A: 8 tokens.",
        "Differs from A from the start.",
    ]
    page.locator("#text-0").focus()
    page.keyboard.press("End")
    frames(page)
    assert place(page)[0]["entropy"] == rows[0][-1]["entropy"]
    assert page.locator("#text-2 .selected").count() == 0
    page.locator("#text-2").focus()
    page.keyboard.press("ArrowLeft")  # from past its end to its last token
    assert page.locator("#text-2 .selected").count() == 1
    assert page.locator("#place").inner_text().startswith("Token 1 ")
