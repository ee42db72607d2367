"""A server of a script's own, over loopback, in a process that it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
KEY = "stress"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 300.0  # seconds for one answer: a busy machine compiles


def free_port() -> int:
    """A port that was free a moment ago, for a server that is to have the same one twice."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


class Server:
    """`serve` with some options, at `url`. Its key, `KEY`, is kept in `folder`."""

    def __init__(self, folder: Path, port: int, options: Sequence[str]) -> None:
        keys = folder / "keys"
        keys.write_text(KEY + "\n")
        command = [sys.executable, "-m", "entropix_jax.serve", "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--api-key-file", str(keys), *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listens.wait(PATIENCE):
            self.process.kill()
            raise SystemExit("the server does not listen:\n" + "".join(self.log))
        listening = [line for line in self.log if "listening on" in line]
        if not listening:
            raise SystemExit("the server ended:\n" + "".join(self.log))
        url = listening[0].split()[-1]
        self.url = url.removesuffix("/v1")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "listening on" in line:
                self._listens.set()
        self._listens.set()

    def resident(self) -> float:
        """MiB of memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return round(int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024, 1)

    def gauges(self) -> dict[str, float]:
        """What /metrics says."""
        text = httpx.get(f"{self.url}/metrics", headers=HEADERS, timeout=PATIENCE).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("entropix_"): float(value) for name, _, value in lines}

    def settle(self) -> dict[str, float]:
        """The same, once nothing runs; or after a while."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            found = self.gauges()
            if not found["slots_running"] and not found["queue_waiting"]:
                break
            time.sleep(0.1)
        return found

    def end(self, number: signal.Signals) -> int:
        """Ends it by a signal. Returns its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(5)
