"""The script that puts a server under stress, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "stress_server.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_faults_leave_no_trace() -> None:
    options = "--clients 20 --bodies 300 --readers 4".split()
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["texts_compared"] == 13
    assert sum(report["malformed"].values()) == 300
    assert report["malformed"]["400"] > 100
    assert report["wrong_keys"] == {"401": 60}
    assert (report["killed"], report["exit_status"]) == (-9, 0)
