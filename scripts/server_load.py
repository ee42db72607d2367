"""Loads a server of its own, over loopback: its speed next to `batch`, or clients that misbehave.

    python scripts/server_load.py speed                             some minutes, with smollm2
    python scripts/server_load.py speed --model tiny --repeats 1    a minute
    python scripts/server_load.py faults                            minutes, with tiny
    python scripts/server_load.py faults --clients 20               seconds

`speed` answers 50 prompts by `batch`, in this process, and by the server, whose clients stream side
by side. The two take turns. Figures are medians, also of the wait for a first token where nothing
else runs. `batch` counts it from the row's slot on, the server's clients from the request on.

`faults` has clients vanish in the middle of their streams and others read slowly, and kills and
restarts the server. Linux: memory is read from /proc.

Both print JSON with a list `faults`: texts that differ from `batch` or from the same client alone,
tracebacks in the server's log, leaked slots, missing answers. The exit status is 1 if the list is
not empty.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
from timing import Figures

from entropix_jax.batch.records import Record
from entropix_jax.batch.run import BatchRun, Defaults
from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.model.loading import load
from entropix_jax.sampler.presets import load_sampler

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300.0  # seconds for one answer: a busy machine compiles
CONTEXT = 512
TOPICS = (
    *("a lighthouse", "the rain", "an old clock", "two brothers", "a long walk", "a broken bridge"),
    *("a bakery at night", "the first snow", "a lost letter", "a small garden"),
)
ASKS = (
    *("Write a short story about {}.", "Write four lines of a poem about {}."),
    *("List three facts about {}.", "Explain to a child what is special about {}."),
    "What would you ask someone who knows all about {}?",
)
PROMPTS = [ask.format(topic) for topic in TOPICS for ask in ASKS]
# Of the mode `faults`:
TOKENS = 24  # of an answer
LONG = 400  # tokens of a stream that is not read to its end
SLOW_SECONDS = 5.0
# Lines of a log in which nothing went wrong.
USUAL = ("memory of each device", "listening on", "note:", "compiling programs")


class Server:
    """`serve` in a process of its own, at `url`."""

    def __init__(self, options: Iterable[object], port: int = 0) -> None:
        command = [sys.executable, "-m", "entropix_jax", "serve", "--port", port, *options]
        self.process = subprocess.Popen(
            [*map(str, command)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listens.wait(PATIENCE)
        listening = [line for line in self.log if "listening on" in line]
        if not listening:
            self.end(signal.SIGKILL)
            raise UserError("the server does not listen:\n" + "".join(self.log))
        self.url = listening[0].split()[-1].removesuffix("/v1")
        self.port = int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "listening on" in line:
                self._listens.set()
        self._listens.set()

    def resident(self) -> float:
        """Returns MiB of memory."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return round(int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024, 1)

    def running(self) -> float:
        """Returns the rows that run or wait, after up to 30 seconds in which they may end."""
        found, end = 1.0, time.monotonic() + 30
        while found and time.monotonic() < end:
            time.sleep(0.1)
            lines = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text.splitlines()
            names = ("entropix_slots_running ", "entropix_queue_waiting ")
            found = sum(float(line.split()[1]) for line in lines if line.startswith(names))
        return found

    def end(self, number: signal.Signals) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(5)

    def unusual(self) -> list[str]:
        """Returns the lines of the log that a server without faults does not write."""
        return [line.rstrip() for line in self.log if not any(text in line for text in USUAL)]


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], most: int | None = None
) -> tuple[str, float]:
    """Returns a stream's text and the seconds to its first part. The client vanishes after `most`
    parts."""
    began, first, parts = time.perf_counter(), 0.0, list[str]()
    async with client.stream("POST", path, json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                first = first or (time.perf_counter() - began if parts[-1] else 0.0)
            if len(parts) == most:
                break
    return "".join(parts), first


def connect(url: str) -> httpx.AsyncClient:
    """Returns a client with as many connections as it has requests."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits)


# Speed.


def measure_speed(args: argparse.Namespace) -> dict[str, Any]:
    """Answers the prompts by `batch` and by the server, in turns."""
    use_compilation_cache()
    options = ["--model", args.model, "--slots", args.clients, "--context", CONTEXT]
    options += ["--sampler", args.sampler, *args.server.split()]
    options += [] if args.dtype is None else ["--dtype", args.dtype]
    defaults = Defaults(load_sampler(args.sampler))
    model = load(args.model, args.dtype)
    run = BatchRun(model, defaults, slots=args.clients, capacity=CONTEXT)
    answers: dict[str, dict[int, str]] = {"batch": {}, "server": {}}
    counts: dict[int, int] = {}
    waits: dict[str, list[float]] = {"batch": [], "server": []}
    faults: list[str] = []

    def by_batch(numbers: Sequence[int]) -> float:
        def keep(record: Any, result: Any) -> None:
            answers["batch"][int(record.id)] = result["text"]
            counts[int(record.id)] = len(result["token_ids"])
            waits["batch"].append(result["timings"]["first_token"])

        records = [
            Record(
                number,
                str(number),
                "",
                messages=[{"role": "user", "content": PROMPTS[number]}],
                seed=number,
                max_new_tokens=args.tokens,
            )
            for number in numbers
        ]
        began = time.perf_counter()
        run.run(iter(records), keep)
        return time.perf_counter() - began

    def by_server(numbers: Sequence[int]) -> float:
        waiting = iter(numbers)

        async def ask(client: httpx.AsyncClient) -> None:
            for number in waiting:
                body = {
                    "model": args.model,
                    "messages": [{"role": "user", "content": PROMPTS[number]}],
                    "max_completion_tokens": args.tokens,
                    "seed": number,
                    "entropix": {"id": str(number)},
                }
                answers["server"][number], first = await stream(
                    client, "/v1/chat/completions", body
                )
                waits["server"].append(first)

        async def ask_all() -> None:
            async with connect(server.url) as client:
                await asyncio.gather(*(ask(client) for _ in range(args.clients)))

        began = time.perf_counter()
        asyncio.run(ask_all())
        seconds = time.perf_counter() - began
        differ = [n for n, text in answers["server"].items() if text != answers["batch"][n]]
        faults.extend(f"prompt {number} has another text" for number in differ)
        return seconds

    server = Server(options)
    figures = Figures(args.repeats)
    numbers = range(len(PROMPTS))
    try:
        by_batch(numbers)
        contestants = {"batch": lambda: by_batch(numbers), "server": lambda: by_server(numbers)}
        figures.measure(contestants, kind="50 prompts", tokens=sum(counts.values()))
        for found in waits.values():
            found.clear()
        for _ in range(15):
            by_batch([0])
            by_server([0])
        figures.add(waits, kind="first token")
    finally:
        server.end(signal.SIGTERM)
    figures.print_table()
    return {"figures": figures.rows, "faults": faults + server.unusual()}


# Faults.


def body_of(seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Returns the request of a client."""
    return {"model": "tiny", "prompt": "Guests:", "seed": seed, "max_tokens": tokens}


def ask_alone(url: str, seeds: Iterable[int]) -> dict[int, str]:
    """Returns the texts of clients one after another."""
    with httpx.Client(base_url=url, timeout=PATIENCE) as client:
        return {
            seed: client.post("/v1/completions", json=body_of(seed)).json()["choices"][0]["text"]
            for seed in seeds
        }


def ask_together(url: str, clients: int) -> dict[int, str]:
    """Returns the texts of clients side by side, whose odd ones vanish after a first part."""

    async def ask_all() -> dict[int, str]:
        async with connect(url) as client:
            asked = (
                stream(client, "/v1/completions", body_of(seed, LONG), most=1)
                if seed % 2
                else stream(client, "/v1/completions", body_of(seed))
                for seed in range(clients)
            )
            found = await asyncio.gather(*asked)
        return {seed: found[seed][0] for seed in range(0, clients, 2)}

    return asyncio.run(ask_all())


def read_slowly(server: Server, readers: int) -> list[socket.socket]:
    """Returns connections that have asked for long streams, with small windows."""
    found = []
    for seed in range(readers):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps(body_of(seed, LONG) | {"stream": True, "entropix": {"details": True}})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
        client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        found.append(client)
    return found


def kill_while_it_streams(server: Server) -> int:
    """Kills the server within a stream and returns its exit status."""
    body, url = body_of(0, LONG) | {"stream": True}, f"{server.url}/v1/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            status = server.end(signal.SIGKILL)
            list(lines)
    except httpx.HTTPError:  # the client sees the end of it
        pass
    return status


def provoke_faults(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what happened, and `faults`."""
    options = ["--model", "tiny", "--slots", 8, "--context", CONTEXT]
    options += ["--queue", max(args.clients, 16)]
    faults = list[str]()
    server = Server(options)
    report: dict[str, Any] = {}
    try:
        texts = ask_alone(server.url, range(0, args.clients, 2))
        report["memory_mib"] = [server.resident()]
        compared = [ask_together(server.url, args.clients)]
        slow = read_slowly(server, args.readers)
        compared.append(ask_together(server.url, args.clients // 4))
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            for reader in slow:
                reader.recv(256)
            time.sleep(0.05)
        for reader in slow:
            reader.close()
        report["memory_mib"].append(server.resident())
        if server.running():
            faults.append("slots or places in the queue stay taken")
        compared.append(ask_alone(server.url, range(0, min(4, args.clients), 2)))
        report["killed"] = kill_while_it_streams(server)
        faults += server.unusual()
        server = Server(options, server.port)
        compared.append(ask_alone(server.url, range(0, min(4, args.clients), 2)))
        report["exit_status"] = server.end(signal.SIGTERM)
        if report["exit_status"]:
            faults.append("it does not end well")
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
    report["texts_compared"] = sum(map(len, compared))
    for found_texts in compared:
        differ = [seed for seed, text in found_texts.items() if text != texts[seed]]
        faults += [f"another text for seed {seed}" for seed in differ]
    return report | {"faults": faults + server.unusual()}


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, metavar="COMMAND")
    speed, faults = kinds.add_parser("speed"), kinds.add_parser("faults")
    speed.set_defaults(run=measure_speed)
    speed.add_argument("--model", default="smollm2")
    speed.add_argument("--dtype", help="the type of the weights (default: the checkpoint's)")
    speed.add_argument("--sampler", default="entropix")
    speed.add_argument("--clients", type=int, default=16, help="and slots")
    speed.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    speed.add_argument("--repeats", type=int, default=2, help="after the first, which is not timed")
    speed.add_argument("--server", default="", help="more options of serve, in one word")
    faults.set_defaults(run=provoke_faults)
    faults.add_argument("--clients", type=int, default=200, help="half of them vanish")
    faults.add_argument("--readers", type=int, default=8, help="that are slow")
    args = parser.parse_args()
    report = args.run(args)
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
