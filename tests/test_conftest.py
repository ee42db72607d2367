"""Status of skipped tests with and without ENTROPIX_REQUIRE_ALL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = """
import pytest

def test_passes(): pass
def test_skips(): pytest.skip("because")
def test_asks_for_data(shared_data): pass
@pytest.mark.xfail(strict=True)
def test_known_to_fail(): raise AssertionError
"""


@pytest.mark.parametrize(
    ("require_all", "summary"),
    [("", "1 passed, 2 skipped, 1 xfailed"), ("1", "1 failed, 1 passed, 1 deselected, 1 xfailed")],
)
def test_status_of_skipped_tests(tmp_path: Path, require_all: str, summary: str) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    parity\n    shared_data\n")
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    environment = os.environ | {"ENTROPIX_REQUIRE_ALL": require_all, "ENTROPIX_SHARED_DATA": ""}
    command = [sys.executable, "-m", "pytest", str(tmp_path)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == bool(require_all), run.stdout
    assert summary in run.stdout.splitlines()[-1]
