"""The command `serve`: it listens, drains at a signal, and reports errors in one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from entropix_jax.engine.loop import shared_lanes
from entropix_jax.engine.memory import plan_memory
from entropix_jax.model.loading import LanguageModel
from tests.support.commands import one_error, refusal, run_command
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def test_serve_drains_at_a_signal(tiny: LanguageModel) -> None:
    """The server finishes running requests and rejects new ones."""
    command = "-m entropix_jax serve --model tiny --port 0 --slots 2 --context 512".split()
    command += ["--sampler", "temperature", "--presets", "temperature"]
    options: Any = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stderr": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, *command], text=True, **options)
    with started as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)  # even if an assertion below fails
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[0].startswith("memory of each device: at least")
        slots = 2 + shared_lanes(2)
        plan = plan_memory(tiny.config, tiny.precision, slots=slots, capacity=512, mesh=None)
        assert str(plan) in lines[0]
        assert lines[1] == "compiling programs, which later starts reuse ...\n"
        assert lines[2].startswith("tiny: page at http://127.0.0.1:")
        url = lines[2].split()[-1]
        assert lines[2] == f"tiny: page at {url[:-2]}, API listening on {url}\n"
        body: dict[str, Any] = {"model": "tiny", "prompt": "Guests:", "max_tokens": 200}
        body |= {"stream": True, "seed": 1}
        body["entropix"] = {"sampler": {"extends": "temperature", "base.temperature": 20.0}}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=PATIENCE) as answer:
            received = answer.iter_lines()
            assert next(received).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in received if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2] or '"finish_reason":"stop"' in rest[-2]
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/models")


def test_errors_of_serve(tmp_path: Path) -> None:
    def refused(*arguments: object, message: str) -> None:
        one_error(run_command("serve", "--model", "tiny", *arguments), message)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused("--port", port, message=f"--port {port}: Address already in use")
    refused("--port", 70000, message="--port must be at most 65535")
    refused("--host", "no.such.host.invalid", message="--host no.such.host.invalid")
    refused("--slots", 0, message="--slots must be at least 1")
    refused("--context", 511, message="--context must be at least 512")
    refused("--presets", "entropic", message="--presets: no preset 'entropic', did you mean")
    refused("--time-limit", 0, message="--time-limit must be above 0")
    refused("--top-logprobs", 21, message="--top-logprobs must be at most 20")
    refused("--api-key-file", tmp_path / "none", message="none")
    refused("--allow-origin", "friend.org", message="expected SCHEME://HOST")
    refused("--sampler", "entropic", message="did you mean 'entropix'?")
    refused("--port", 0, "--context", 9999, message="the model has 4096 positions")
    one_error(run_command("serve", "--port", 0, "--model", "./none"), "none")


@pytest.mark.parametrize("cold", ["", "--cold"])
def test_a_program_that_cannot_be_compiled(cold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends with the reason, also if it accepts connections already."""
    broken = Mock(**{"lower.side_effect": RuntimeError("no such luck\nmore")})
    monkeypatch.setattr("entropix_jax.engine.programs.decode_for_backend", lambda: broken)
    server = Mock(should_exit=False)  # a real one's logging would close pytest's captured stream

    async def listen(_: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while not server.should_exit:
                await asyncio.sleep(0.01)

    server.serve = listen
    monkeypatch.setattr("entropix_jax.serve.http.HttpServer", lambda *_: server)
    start = "--model tiny --port 0 --slots 1 --context 512 --sampler greedy --presets greedy"
    line = refusal(run_command("serve", *f"{start} {cold}".split()))
    assert line.startswith("error: compiling steps of 512 positions, ")
    assert line.endswith("failed: no such luck")


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one_error(run_command("serve", "--model", "tiny"), 'pip install "entropix-jax[serve]"')
