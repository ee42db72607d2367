"""Reading traces, and pages without a browser. test_report_page.py opens them in a browser."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.engine.trace import TraceWriter
from entropix_jax.errors import UserError
from entropix_jax.names import MEANINGS
from entropix_jax.report import page, reading
from entropix_jax.report.page import run_page, write_report
from entropix_jax.report.reading import TraceReader
from tests.support.commands import Result, one_error, refusal, run_command, short
from tests.support.reports import (
    NASTY,
    SAMPLER,
    STATIC,
    Json,
    Parsed,
    branching,
    footer,
    header,
    lines_of,
    run_of,
    token,
    unpacked,
    write,
)
from tests.support.traces import load_trace, read_trace


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    records = run_of()
    return write(tmp_path / "trace.jsonl", header(prompt=NASTY), *records, footer(records))


# Reading.


def test_a_complete_trace(whole: Path) -> None:
    found = load_trace(whole)
    written = [json.loads(line) for line in whole.read_text("utf-8").split("\n")[:-1]]
    assert [found.header, *found.tokens, found.footer] == written
    assert not found.torn
    reader = TraceReader(whole)
    assert b"".join(raw for raw, _ in reader) == whole.read_bytes()
    assert (reader.tokens, reader.retracted) == ({0: 12}, {0: 1})


def test_a_killed_run(tmp_path: Path) -> None:
    records = [header(), *run_of()]
    line = lines_of([token(15, text="né")])[0].encode()
    path = tmp_path / "trace.jsonl"
    for part in (b"", line[:3], line[:200], line[: line.index("é".encode()) + 1]):
        path.write_bytes("".join(lines_of(records)).encode() + part)
        found = load_trace(path)
        assert found.tokens == [json.loads(text) for text in lines_of(records[1:])]
        assert found.footer is None
        assert found.torn is bool(part)
        text = run_page(path)
        assert "the run was interrupted" in text
        assert ("in a truncated line" in text) is bool(part)
        assert unpacked(text, "trace-0") == "".join(lines_of(records)).encode()


def without(record: Json, name: str) -> Json:
    return {key: value for key, value in record.items() if key != name}


def conditions(**changes: Any) -> Json:
    values = {**SAMPLER.values, **changes}
    return header(sampler_parameters={k: v for k, v in values.items() if v is not None})


def calibrated(quantiles: Json) -> Json:
    return header(calibration={"model": {}, "quantiles": quantiles})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Not a trace, or of another version.
        ([], "empty: not a trace"),
        (["Once upon a time\n"], "line 1: not JSON: not a trace"),
        ([token(3)], "line 1: not a trace: the first line must be a header"),
        (['{"type": "header", "for'], "line 1: truncated within the header"),
        ([header(format_version=2)], "line 1: trace format 2; this version"),
        # A bad header.
        ([without(header(), "model")], "line 1: 'model' is missing"),
        ([header(sampler_parameters={}), token(3)], "lack 'regimes.lelv'"),
        ([conditions(**{"regimes.lehv": ["entropy ~ 3"]})], "'entropy ~ 3': expected QUANTITY"),
        ([conditions(**{"thresholds.h2": None})], "'thresholds.h2' is missing"),
        ([calibrated({"entropy": [0.0, 1.0]})], "'calibration' is malformed"),
        # Bad lines and tokens.
        ([header(), {"type": "x"}], 'line 2: unknown line type "x"'),
        ([header(), token(3), "Killed"], "line 3: not JSON"),
        ([header(), token(3, entropy=float("nan"))], "line 2: NaN is not a number"),
        ([header(), json.dumps(token(3)).replace("27,", "1e999,") + "\n"], "'top_k' is malformed"),
        ([header(), without(token(3), "row")], "line 2: 'row' is missing"),
        ([header(), without(token(3), "row") | {"context": 3}], "line 2: a trace of inspect"),
        ([header(), token(3, entropy=True)], "'entropy' is malformed"),
        ([header(), token(3, top=[[1, 2]])], "'top' is malformed"),
        ([header(), branching(3, branches=[{"tokens": []}])], "'branches' is malformed"),
        ([header(), token(3, regime="none")], 'line 2: unknown regime "none"'),
        # Bad footers.
        ([header(), token(3), footer([token(3)]), token(4)], "line 4: data after the footer"),
        ([header(), token(3), without(footer([]), "timings")], "line 3: 'timings' is missing"),
        ([header(), footer([], rows=[{}])], "line 2: 'rows' is malformed"),
    ],
)
def test_errors_of_traces_contain_the_line(
    content: list[Json | str | bytes], message: str, tmp_path: Path
) -> None:
    """An existing page is not changed."""
    path, output = tmp_path / "trace.jsonl", tmp_path / "page.html"
    lines = [json.dumps(line) + "\n" if isinstance(line, dict) else line for line in content]
    path.write_bytes(b"".join(x.encode() if isinstance(x, str) else x for x in lines))
    output.write_text("before")
    line = refusal(run_command("report", path, "--output", output))
    assert line.startswith(f"error: {path}: ")
    assert message in line
    assert output.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "trace.jsonl"]


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 20_000)
    path = write(tmp_path / "t.jsonl", header(), token(3, text="a" * 20_000))
    with pytest.raises(UserError, match="line 2: the line is too long"):
        load_trace(path)


# The command.


@pytest.mark.parametrize(
    ("trace", "output", "message"),
    [
        ("missing.jsonl", "page.html", "missing.jsonl: no such file"),
        (".", "page.html", "not a regular file: give a trace"),
        ("trace.jsonl", ".", "cannot be written: it is a folder"),
        ("trace.jsonl", "trace.jsonl", "would overwrite its own input"),
        ("trace.jsonl", "/dev/null", "/dev/null: not a regular file"),
        ("pipe", "page.html", "pipe: not a regular file: give a trace"),
        # Errors with advice.
        ("batch", "page.html", "a batch's output has no page: run batch with --trace DIR"),
        ("trace.jsonl", None, "required: --output"),
    ],
)
def test_errors_of_report(trace: str, output: str | None, message: str, whole: Path) -> None:
    folder, before = whole.parent, whole.read_bytes()
    os.mkfifo(folder / "pipe")
    (folder / "batch").write_text('{"id": "a", "line": 1, "digest": "0", "text": "x"}\n')
    names = sorted(folder.iterdir())
    options = [] if output is None else ["--output", folder / output]
    one_error(run_command("report", folder / trace, *options), message)
    assert whole.read_bytes() == before
    assert sorted(folder.iterdir()) == names


def test_scripts_and_python_have_the_same_regime_names() -> None:
    script = (STATIC / "regimes.js").read_text("utf-8")
    found = re.findall(r'(\w+): \{ name: "(\w+)", acronym: "(\w+)"', script)
    assert found == [(regime, name, regime.upper()) for regime, name in MEANINGS.items()]


# The page.


def test_a_page_contains_its_trace(whole: Path) -> None:
    text = run_page(whole)
    assert unpacked(text, "trace-0") == whole.read_bytes()
    facts = json.loads(Parsed(text).scripts["facts"])
    assert facts["prompt"] == NASTY
    assert facts["seed"] == 0
    assert facts["rows"][0]["forwards"] == 99
    box = facts["boxes"][0]
    assert box["regime"] == "lelv"
    assert box["conditions"][0] == {"quantity": "entropy", "sign": "<", "name": "h1"}
    assert facts["percentiles"]["thresholds.h1"] == "30%"
    assert len(facts["calibration"]["quantiles"]["entropy"]) == 101


HOSTILE = "</script><script>alert(1)</script>'\"><img src=x onerror=alert(1)>"


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each text. The path of a key ends in `...`."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str):
                yield (*path, key, ...)
            yield from strings(inner, (*path, key))


def hostile(value: Any, path: tuple[Any, ...]) -> Any:
    """Returns the value with the text or key at a path replaced."""
    if not path:
        return HOSTILE
    key, *rest = path
    if rest == [...]:
        return {HOSTILE if k == key else k: v for k, v in value.items()}
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = hostile(value[key], tuple(rest))
    return changed


def test_texts_are_escaped_in_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces each text and key of a trace. The page contains only elements of a plain page."""
    monkeypatch.setattr(page, "plotly_source", bytes)
    monkeypatch.setattr(page, "script", str)
    records = [token(3), branching(4), token(5, retracted=True), token(5)]
    lines = [header(), *records, footer(records)]

    def page_of(*lines: Json) -> str:
        return run_page(write(tmp_path / "t.jsonl", *lines))

    tags = [tag for tag, _ in Parsed(page_of(*lines)).tags]
    made = 0
    for number, line in enumerate(lines):
        paths = [*strings(line)]
        # Tests only one of the sampler's many parameters.
        for path in [p for p in paths if p[0] != "sampler_parameters" or "thought" in str(p)]:
            try:
                text = page_of(*lines[:number], hostile(line, path), *lines[number + 1 :])
            except UserError:
                continue
            made += 1
            assert HOSTILE not in text
            new = [tag for tag, _ in Parsed(text).tags]
            assert new.count("script") == tags.count("script"), path
            assert set(new) <= {*tags, "p"}, path  # a banner
    assert made > 30


def test_a_model_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path, output = tmp_path / "t.jsonl", tmp_path / "page.html"
    line = json.dumps(header(model="caf\udce9", prompt="\ud800")) + "\n"
    path.write_text(line + lines_of([token(3)])[0], encoding="utf-8")
    write_report(path, output)
    assert "<dd>caf?</dd>" in output.read_text("utf-8")


def test_a_page_uses_no_network(whole: Path) -> None:
    parsed = Parsed(run_page(whole))
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    (policy,) = (
        attributes["content"]
        for tag, attributes in parsed.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    for source in (parsed.scripts["own"].encode(), unpacked(run_page(whole), "plotly")):
        assert page.digest(source) in policy


def test_the_text_needs_no_script(whole: Path) -> None:
    """A page without its scripts shows the text like in a notebook."""
    text = re.sub(r"<script.*?</script>", "", run_page(whole), flags=re.DOTALL)
    rows = re.findall(r'<span class="(token[^"]*)" data-regime="(\w+)">([^<]*)', text)
    drawn = [(classes, regime) for classes, regime, word in rows if word.startswith(" word")]
    records = load_trace(whole).tokens
    assert [regime for _, regime in drawn] == [r["regime"] for r in records if r["text"] != NASTY]
    assert [name.split()[1:] for name, _ in drawn][2] == ["branched", "branch-start"]


# `--report` of the command that generates.

Command = Callable[..., Result]


def facts_of(output: Path) -> dict[str, Any]:
    facts: dict[str, Any]
    facts = json.loads(Parsed(output.read_text("utf-8")).scripts["facts"])
    return facts


def test_the_report_option(command: Command, tmp_path: Path) -> None:
    """The page has the most likely tokens and the layers. The printed text does not change."""
    output = tmp_path / "page.html"
    options = ("--samples", 2, "--sampler", "temperature")
    result = command(*short("--report", output, *options))
    assert result.status == 0
    assert result.out == command(*short(*options)).out
    *lines, _ = unpacked(output.read_text("utf-8"), "trace-0").split(b"\n")
    records = [json.loads(line) for line in lines]
    assert [records[0]["type"], records[-1]["type"]] == ["header", "footer"]
    assert all(len(record["top"]) == 5 and record["layers"] for record in records[1:-1])
    facts = facts_of(output)
    assert [row["tokens"] for row in facts["rows"]] == [12, 12]
    assert facts["complete"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_report_option_with_a_trace(command: Command, tmp_path: Path) -> None:
    """The page shows the trace, and does not add fields to it."""
    trace, output = tmp_path / "trace.jsonl", tmp_path / "page.html"
    arguments = ("--trace", trace, "--trace-top", 2, "--sampler", "temperature")
    assert command(*short(*arguments, "--report", output)).status == 0
    assert output.read_text("utf-8") == run_page(trace)
    with_page = read_trace(trace)
    assert command(*short(*arguments)).status == 0
    assert with_page[:-1] == read_trace(trace)[:-1]
    assert all(len(token["top"]) == 2 for token in with_page[1:-1])
    assert "layers" not in with_page[1]


def test_an_interrupted_run_has_a_page(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page shows the tokens before Ctrl-C."""
    write = TraceWriter.write
    written = []

    def press(self: TraceWriter, record: dict[str, Any]) -> None:
        written.append(record)
        if len(written) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, record)

    monkeypatch.setattr(TraceWriter, "write", press)
    output = tmp_path / "page.html"
    options = ("--report", output, "--sampler", "temperature")
    assert command(*short(*options, tokens=100)).status == 130
    facts = facts_of(output)
    assert facts["complete"] is True
    (row,) = facts["rows"]
    assert row["ended"] == "stopped"
    assert row["tokens"] == sum(record["type"] == "token" for record in written) < 100
