"""The command `verify`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.__main__ import main
from tests.support.traces import read_trace

Json = dict[str, Any]
Lines = list[Json]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    options = "--model tiny --sampler temperature --max-new-tokens 12 --ignore-eos".split()
    assert main(["generate", "--prompt", "The sky", *options, "--trace", str(path)]) == 0
    return path


def verify(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(["verify", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_a_run_and_an_altered_one(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "every one of 12 tokens follows from the settings\n"
    assert verify(trace, capsys=capsys) == (0, told, "")
    assert verify(trace, "--model", "tiny", capsys=capsys) == (0, told, "")
    lines = read_trace(trace)
    lines[5]["entropy"] += 0.5
    path = tmp_path / "altered.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, out, err = verify(path, capsys=capsys)
    assert (status, err) == (1, "")
    assert out.startswith(f"{path}: line 6, position {lines[5]['position']}, metrics: entropy is ")
    lines = read_trace(trace)
    for missing in ([*lines[:5], *lines[6:]], [*lines[:5], lines[4], *lines[5:]]):
        path.write_text("".join(f"{json.dumps(line)}\n" for line in missing))
        assert verify(path, capsys=capsys)[0] == 1


def header(**changes: Any) -> Callable[[Lines], Any]:
    return lambda lines: lines[0].update(changes)


def value(key: str, value: Any) -> Callable[[Lines], Any]:
    return lambda lines: lines[0]["sampler_parameters"].update({key: value})


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda lines: lines.pop(0), "line 1: not a trace: the first line must be a header"),
        (lambda lines: lines.pop(), "cut off after line 13"),
        (lambda lines: lines.__delitem__(slice(1, 13)), "bad.jsonl: has no tokens: it cannot be"),
        (lambda lines: lines[0].pop("precision"), "line 1: 'precision' is missing"),
        (lambda lines: lines[-1]["rows"][0].pop("request"), "line 14: row 0: its request is"),
        (lambda lines: lines[-1]["rows"][0]["request"].update(seed="0"), "or malformed"),
        (lambda lines: lines[-1]["rows"][0]["request"].update(source=[3, 1]), "continues a row"),
        (header(seed="0"), "line 1: 'seed' is missing or malformed"),
        (header(model_config={}), "line 1: another model: dtype None in the trace"),
        (header(precision={"weights": "x", "activations": "float32"}), "weights cannot be"),
        (header(model="none/such/place"), "no such model"),
        (value("own.setting", 1), "line 1: the setting own.setting belongs to a mechanism"),
        (value("base.temperature", "hot"), "line 1: base.temperature = 'hot': must be a number"),
        (value("surrogate.varentropy", "median"), "surrogate.varentropy needs tables"),
        (value("regimes.lelv", ["entropy < 40%"]), "regimes.lelv is a percentile"),
        (lambda lines: lines[0]["sampler_parameters"].pop("base.top_p"), "'base.top_p' is missing"),
    ],
)
def test_bad_input(
    alter: Callable[[Lines], Any],
    message: str,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that names the file and the line."""
    lines = read_trace(trace)
    alter(lines)
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, out, err = verify(path, capsys=capsys)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_files_that_are_no_traces(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torn").write_bytes(trace.read_bytes()[:-20])
    (tmp_path / "text").write_text("Once upon a time\n")
    (tmp_path / "batch").write_text('{"id": "a", "line": 1, "digest": "0", "text": "x"}\n')
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("torn", "cut off after line 13"),
        ("text", "line 1: not JSON: not a trace"),
        ("batch", "run batch with --trace DIR"),
        ("pipe", "not a regular file"),
        ("none", "no such file"),
        (".", "not a regular file"),
    ):
        status, out, err = verify(tmp_path / name, capsys=capsys)
        assert (status, out) == (2, "")
        assert message in err
