"""A small run of the script that loads a server with clients that vanish or read slowly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

SCRIPT = Path(__file__).parents[1] / "scripts" / "server_load.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_server_recovers_from_faulty_clients() -> None:
    command = [sys.executable, str(SCRIPT), *"faults --clients 20 --readers 4".split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["faults"] == []
    assert report["texts_compared"] == 10 + 3 + 2 + 2
    assert (report["killed"], report["exit_status"]) == (-9, 0)
