"""Which lines and branches of the package the tests run, measured over the whole suite."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from verification.findings import Line

ROOT = Path(__file__).resolve().parents[2]
WANTED = 95.0  # per cent
# Commands that tests start are measured, too.
CONFIGURATION = """
[run]
branch = true
source = entropix_jax
parallel = true
patch = subprocess
data_file = {folder}/data
sigterm = true

[report]
exclude_also =
    if TYPE_CHECKING:
    if __name__ == .__main__.:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--workers", type=int, default=2, help="test processes side by side")
    parser.add_argument("--tests", nargs="+", default=[], help="these alone (default: the suite)")


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Runs the suite under coverage.py (the extra `verification`)."""
    for old in [*folder.glob("data*"), *folder.glob("coverage.json")]:
        old.unlink()
    settings = folder / "coveragerc"
    settings.write_text(CONFIGURATION.format(folder=folder.resolve()), encoding="utf-8")
    python = [sys.executable, "-m"]
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings.resolve())}
    suite = subprocess.run(
        [
            *(*python, "coverage", "run", f"--rcfile={settings.resolve()}", "-m", "pytest", "-q"),
            *("--numprocesses", str(args.workers), "--dist", "loadfile", *args.tests),
        ],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    report = folder / "coverage.json"
    for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report.resolve())]):
        subprocess.run(
            [*python, "coverage", command[0], f"--rcfile={settings.resolve()}", *command[1:]],
            cwd=ROOT,
            check=True,
        )
    found = json.loads(report.read_text(encoding="utf-8"))
    total = found["totals"]
    lines = 100 * total["covered_lines"] / total["num_statements"]
    branches = 100 * total["covered_branches"] / total["num_branches"]
    files = [
        {"file": name, "covered": round(one["summary"]["percent_covered"], 1)}
        for name, one in found["files"].items()
        if one["summary"]["percent_covered"] < WANTED
    ]
    return [
        Line("the suite's tests", 1, "run", suite.returncode != 0),
        Line(
            "lines of the package that tests run",
            total["num_statements"],
            "lines",
            int(lines < WANTED),
            f"at least {WANTED:g} %",
            f"{lines:.1f} %",
            sorted(files, key=lambda one: one["covered"]),
        ),
        Line(
            "branches of the package that tests take",
            total["num_branches"],
            "branches",
            int(branches < WANTED),
            f"at least {WANTED:g} %",
            f"{branches:.1f} %",
        ),
    ]
