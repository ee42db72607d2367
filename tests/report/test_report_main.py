"""`--report` of the command that generates."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.engine.trace import TraceWriter
from entropix_jax.model import loading
from entropix_jax.report.page import run_page
from tests.support.commands import Result, one_error, short
from tests.support.model_folders import poisoned, write_model
from tests.support.reports import Parsed, unpacked
from tests.support.traces import read_trace

Command = Callable[..., Result]


def facts_of(output: Path) -> dict[str, Any]:
    facts: dict[str, Any]
    (facts,) = json.loads(Parsed(output.read_text("utf-8")).scripts["traces"])
    return facts


def test_a_page_at_the_end_of_a_run(command: Command, tmp_path: Path) -> None:
    """Of its own: with the likeliest tokens and the layers; the text is printed as ever."""
    output = tmp_path / "page.html"
    result = command(*short("--report", output, "--samples", 2))
    assert result.status == 0
    assert result.out == command(*short("--samples", 2)).out
    *lines, _ = unpacked(output.read_text("utf-8"), "trace-0").split(b"\n")
    records = [json.loads(line) for line in lines]
    assert [records[0]["type"], records[-1]["type"]] == ["header", "footer"]
    assert all(len(record["top"]) == 5 and record["layers"] for record in records[1:-1])
    facts = facts_of(output)
    assert [row["tokens"] for row in facts["rows"]] == [12, 12]
    assert facts["complete"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_page_of_a_trace_that_is_kept(command: Command, tmp_path: Path) -> None:
    """It shows what the trace has, and asking for a page changes no more of it than asked."""
    trace, output = tmp_path / "trace.jsonl", tmp_path / "page.html"
    arguments = ("--trace", trace, "--trace-top", 2)
    assert command(*short(*arguments, "--report", output)).status == 0
    assert output.read_text("utf-8") == run_page(trace)
    with_page = read_trace(trace)
    assert command(*short(*arguments)).status == 0
    assert with_page[:-1] == read_trace(trace)[:-1]
    assert all(len(token["top"]) == 2 for token in with_page[1:-1])
    assert "layers" not in with_page[1]


def test_a_page_that_cannot_be_written_is_refused_at_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", None)  # is not called
    trace = tmp_path / "trace.jsonl"
    result = command(*short("--report", trace, "--trace", trace))
    one_error(result, "would take the place of its own source")
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_fails_has_a_page(command: Command, tmp_path: Path) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "page.html"
    assert command(*short("--trace", trace)).status == 0
    token = read_trace(trace)[-2]["token_id"]
    broken = str(write_model(tmp_path / "broken", poisoned(token)))
    result = command(*short("--report", output, tokens=40), model=broken)
    assert result.status == 2
    (row,) = facts_of(output)["rows"]
    assert row["ended"] == "error"
    assert row["error"] in result.err


def test_an_interrupted_run_has_a_page(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in the middle of the run: what was written until then is shown."""
    write = TraceWriter.write
    written = []

    def press(self: TraceWriter, record: dict[str, Any]) -> None:
        written.append(record)
        if len(written) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, record)

    monkeypatch.setattr(TraceWriter, "write", press)
    output = tmp_path / "page.html"
    assert command(*short("--report", output, tokens=100)).status == 130
    facts = facts_of(output)
    assert facts["complete"] is True
    (row,) = facts["rows"]
    assert row["ended"] == "interrupt"
    assert row["tokens"] == sum(record["type"] == "token" for record in written) < 100
