"""Configurations compared with `transformers`: the tests that do so, counted."""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from verification.findings import Line

ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This part has no options."""


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Runs the tests marked `parity` (the extra `parity`); one that is skipped is a failure."""
    report = folder / "parity.xml"
    report.unlink(missing_ok=True)
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "parity", f"--junit-xml={report.resolve()}"],
        cwd=ROOT,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [one.get("name") for one in cases if any(c.tag != "properties" for c in one)]
    return [
        Line(
            "comparisons with transformers",
            len(cases),
            "tests",
            len(failed) or int(suite.returncode != 0),
            details=[{"test": name} for name in failed],
        )
    ]
