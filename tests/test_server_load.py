"""A small run of the script that loads a server with clients that vanish or read slowly."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

import pytest
import server_load


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_server_recovers_from_faulty_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = server_load.Server.__init__
    few = ["--sampler", "temperature", "--presets", "temperature"]  # that compile fast
    monkeypatch.setattr(
        server_load.Server, "__init__", lambda self, own, port=0: start(self, [*own, *few], port)
    )
    report = server_load.provoke_faults(Namespace(clients=20, readers=4))
    assert report["faults"] == []
    assert report["texts_compared"] == 10 + 3 + 2 + 2
    assert (report["killed"], report["exit_status"]) == (-9, 0)
