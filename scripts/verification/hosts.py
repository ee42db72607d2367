"""One of two processes of a batch is killed: the other must not care."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verification.commands import batch_arguments
from verification.findings import Line
from verification.outputs import Left, left_in

HOSTS = "hosts"
_MET = b"memory of each device"  # what a process says once it has met the other
_PATIENCE = 600.0  # seconds until a process has met the other, on a busy machine
_LONGEST = 60.0  # seconds that the other may go on beyond what a whole run takes


def lose_hosts(
    place: Path,
    inputs: Path,
    environment: Mapping[str, str],
    whole: Left,
    points: int,
    seed: int,
) -> Line:
    """Runs a batch on two processes that meet on this machine, one of which is killed at a random
    moment after that; the other one must come to its own end. The one that was killed is started
    again by itself, and the parts are joined: that must be `whole`."""
    state = place / f"{HOSTS}-{seed}.json"
    failures: list[dict[str, Any]] = []
    done, usual = 0, 0.0
    if state.exists():
        done, usual, failures = json.loads(state.read_text(encoding="utf-8"))
    while done < points:
        pair = _Pair(place / HOSTS, inputs, environment)
        if not usual:
            usual = pair.undisturbed()
        rng = random.Random(f"{seed} {HOSTS} {done}")
        wrong = pair.lose_one(rng, usual, whole)
        done += 1
        if wrong:
            failures.append({"point": done, "wrong": wrong})
        state.write_text(json.dumps([done, usual, failures]), encoding="utf-8")
        print(f"{HOSTS}: {done} of {points} kill points {wrong}", file=sys.stderr, flush=True)
    return Line(
        what="one of two processes of a batch is killed: the other ends, and the rest is made up",
        tried=done,
        unit="kill points",
        failures=len(failures),
        details=failures,
    )


class _Pair:
    """Two processes that share a batch, in an empty folder."""

    def __init__(self, work: Path, inputs: Path, environment: Mapping[str, str]) -> None:
        self._work = work
        self._inputs = inputs
        self._environment = dict(environment)

    def undisturbed(self) -> float:
        """How long both take from their meeting to their end, in seconds."""
        self._meet()
        started = time.monotonic()
        for process in self._processes:
            process.wait(_PATIENCE)
        return time.monotonic() - started

    def lose_one(self, rng: random.Random, usual: float, whole: Left) -> list[str]:
        """What is wrong after one was lost."""
        wrong: list[str] = []
        self._meet()
        lost = rng.randrange(2)
        moment = rng.uniform(0.0, usual)
        time.sleep(moment)
        self._processes[lost].send_signal(rng.choice((signal.SIGTERM, signal.SIGKILL)))
        self._processes[lost].wait(_PATIENCE)
        try:
            status = self._processes[1 - lost].wait(usual + _LONGEST)
        except subprocess.TimeoutExpired:
            self._processes[1 - lost].kill()
            status = self._processes[1 - lost].wait()
            wrong.append(f"the other has not ended after {usual + _LONGEST:.0f} s")
        if status:
            wrong.append(f"the other ends with status {status}")
        for number, more in ((lost, ("--process", str(lost))), (2, ())):
            place = ("--distributed", "--processes", "2", *more) if more else ("--merge", "2")
            again = self._start(number, *place)
            if again.wait(_PATIENCE):
                wrong.append(f"status {again.returncode}: {self._said(number)!r}")
        for number in range(3):
            if b"Traceback" in self._said(number):
                wrong.append(f"process {number} says {self._said(number)!r}")
        left = left_in(self._work, tuple(f"{number}.err" for number in range(3)))
        wrong += left.duplicated + left.broken + left.torn + left.scratch
        if left.of("out.jsonl") != whole.of("out.jsonl"):
            wrong.append("the joined parts are not what one process makes")
        return wrong

    def _meet(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        place = ("--distributed", "--coordinator", address, "--processes", "2")
        self._processes = [self._start(i, *place, "--process", str(i)) for i in range(2)]
        end = time.monotonic() + _PATIENCE
        while not all(_MET in self._said(number) for number in range(2)):
            if time.monotonic() > end or any(p.poll() is not None for p in self._processes):
                raise RuntimeError(f"they do not meet: {self._said(0)!r} {self._said(1)!r}")
            time.sleep(0.01)

    def _start(self, number: int, *place: str) -> subprocess.Popen[bytes]:
        given = [text.format(inputs=self._inputs) for text in batch_arguments(*place)]
        with self._told(number).open("ab") as told:
            return subprocess.Popen(
                [sys.executable, "-m", "entropix_jax.batch", *given],
                cwd=self._work,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
            )

    def _said(self, number: int) -> bytes:
        told = self._told(number)
        return told.read_bytes() if told.exists() else b""

    def _told(self, number: int) -> Path:
        return self._work / f"{number}.err"
