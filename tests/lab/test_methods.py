"""Search methods as settings of a study: the sweep file, and the recorded rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import refusal, run_command

SWEEP = """tasks = ["word-problems"]
items = 3
max_new_tokens = 16
baseline = "one"
[settings.one]
sampler = "min-p"
[settings.several]
sampler = "min-p"
method = "self-consistency"
forks = 3
[settings.forks]
sampler = "min-p"
method = "dts"
forks = 3
[[compare]]
by = "forwards"
curve = ["one", "several"]
"""
MORE = "[settings.more]\nsampler = 'greedy'\n"


def test_methods_are_settings(tmp_path: Path) -> None:
    sweep, output = tmp_path / "sweep.toml", tmp_path / "out"
    sweep.write_text(SWEEP)
    arguments = ["ablate", sweep, "--model", "tiny", "--output", output, "--slots", 4]
    assert run_command(*arguments).status == 0
    rows = [json.loads(line) for line in (output / "test.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    by = {(row["setting"], row["item"]): row for row in rows}
    for (setting, item), row in by.items():
        one = by["one", item]
        if setting == "one":
            assert "votes" not in row
            continue
        # The first continuation of a search equals the single sample.
        assert sum(row["votes"].values()) <= 3
        assert one["forwards"] <= row["forwards"] <= 3 * 15
        assert row["forks"] == 0 or setting == "forks"
        assert one["answer"] in row["votes"] or one["answer"] is None
    assert any(row["forks"] for row in rows if row["setting"] == "forks")
    page = (output / "summary.md").read_text()
    section = page[page.index("## Comparison 1: at equal forwards") :]
    mean = sum(row["forwards"] for row in rows if row["setting"] == "forks") / 3
    assert re.search(rf"\| forks +\| +\| {mean:.3f} \[", section)
    study = json.loads((output / "study.json").read_text())
    assert study["settings"]["forks"]["method"] == "dts"
    assert "method" not in study["settings"]["one"]
    # A study continues only with the same methods and settings. Comparisons may change.
    for old, new, difference in (
        ('"dts"', '"eager"', 'settings.forks.method was "dts" and is now "eager"'),
        ("[[compare]]", f"{MORE}[[compare]]", "settings.more was absent and is now {"),
        ("[settings.several]", "[settings.some]", "settings.some was absent and is now {"),
        ("items = 3", "items = 2", "items was 3 and is now 2"),
    ):
        sweep.write_text(SWEEP.replace(old, new).replace('"one", "several"', '"one", "forks"'))
        assert f"holds another run's results: {difference}" in refusal(run_command(*arguments))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"dts"', '"dst"', "settings.forks: no method 'dst', did you mean 'dts'"),
        ("forks = 3", "forks = 0", "settings.several.forks = 0: must be an integer from 1 to 32"),
        ("forks = 3", "forks = 9", "setting 'several': 9 forks do not fit into 4 slots"),
        ('"word-problems"', '"documents"', "votes: the answers of task 'documents' are free text"),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, message: str) -> None:
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(SWEEP.replace(old, new))
    output = tmp_path / "out"
    found = refusal(
        run_command("ablate", sweep, "--model", "tiny", "--output", output, "--slots", 4)
    )
    assert message in found
    assert not (output / "test.jsonl").exists()
