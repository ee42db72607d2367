"""The property tests with many times as many examples, others in each run, area by area."""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from verification.findings import Line

ROOT = Path(__file__).parents[2]

# What is tried in each area, by the names that the tests count it under, and where.
AREAS = {
    "draws": ("draws under any rule, of any logits", "test_properties_draw.py"),
    "distributions": ("entropy, varentropy, noise floor", "test_properties_metrics.py"),
    "attentions": ("metrics of attention", "test_properties_metrics.py"),
    "points": ("regimes, any boxes", "test_properties_regimes.py"),
    "histories": ("loop guard", "test_properties_regimes.py"),
    "schedules": ("schedules replayed", "test_properties_cache.py"),
    "texts": ("texts of those against one pass", "test_properties_cache.py"),
    "samplers": ("samplers to a file and back, or refused", "test_properties_presets.py"),
    "traces": ("traces to a file and back, cut or damaged", "test_properties_trace.py"),
}
FILES = tuple(dict.fromkeys(file for _, file in AREAS.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--areas", nargs="+", choices=FILES, default=FILES, metavar="FILE")
    parser.add_argument("--times", type=int, default=10, help="how many times the suite's examples")
    parser.add_argument("--limit", type=float, default=3 * 3600, help="seconds for an area's tests")


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Runs each area's tests in a process of its own; the lines are those of the areas that ran."""
    lines: list[Line] = []
    for file in args.areas:
        start = time.perf_counter()
        counts, failures = _tested(file, folder, args.times, args.limit)
        seconds = time.perf_counter() - start
        kinds = [kind for kind, (_, where) in AREAS.items() if where == file]
        for kind in kinds:
            # A failure is told once, at the first line of its tests.
            own = failures if kind == kinds[0] else []
            note = f"{seconds:.0f} s" if kind == kinds[0] else ""
            tried = counts.get(kind, 0)
            lines.append(Line(AREAS[kind][0], tried, kind, len(own), note=note, details=own))
        print(f"{file}: {counts}, {len(failures)} failures, {seconds:.0f} s", file=sys.stderr)
    return lines


def _tested(
    file: str, folder: Path, times: int, limit: float
) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How much of each kind the tests of a file tried, and what failed."""
    results, counts, log = (folder / f"{file}{end}" for end in (".xml", ".json", ".log"))
    for old in (results, counts):
        old.unlink(missing_ok=True)
    environment = {**os.environ, "ENTROPIX_THOROUGH": str(times), "ENTROPIX_TRIED": str(counts)}
    command = [sys.executable, "-m", "pytest", "-q", "--hypothesis-show-statistics"]
    command += [f"--junitxml={results}", str(ROOT / "tests" / file)]
    with log.open("w", encoding="utf-8") as output:
        status = _status(command, environment, output.fileno(), limit)
    told = json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {}
    failures = _failures(results) if results.exists() else []
    if status != 0 and not failures:
        end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        failures = [{"test": file, "message": f"exit status {status}", "output": end}]
    return told, failures


def _status(
    command: Sequence[str], environment: dict[str, str], output: int, limit: float
) -> int | str:
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=limit
        ).returncode
    except subprocess.TimeoutExpired:
        return f"none after {limit:.0f} s"


def _failures(results: Path) -> list[dict[str, str]]:
    """What failed, of a file in JUnit's form; the output holds the example, made small."""
    return [
        {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "message": (problem.get("message") or "")[:500],
            "output": (problem.text or "")[-4000:],
        }
        for case in ElementTree.parse(results).iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
