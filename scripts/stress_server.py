"""Faults against a server of its own, over loopback, in bounded loops.

    python scripts/stress_server.py                             minutes: the whole of it
    python scripts/stress_server.py --clients 20 --bodies 300   seconds

It starts `serve` on `tiny` and ends it. Clients vanish in the middle of their streams, others read
slowly, bodies are malformed or too large, keys are wrong, and the server is killed and started
again. Prints JSON with what happened and `faults`, what should not have: a traceback in
the server's log, a slot that stays taken, another text for a client that stayed, an answer that is
no answer. The exit status is 1 if there are any. Linux: memory is read from /proc.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from serving import HEADERS, KEY, PATIENCE, Server, free_port

SLOTS, CONTEXT, TOKENS = 8, 256, 24
KEEP = 2048  # tokens of kept rows: soon as many as there may be
PARTS = 5  # of the malformed bodies; the first ones compile what they need
CONNECTIONS, CHUNK = 8, 250  # of malformed bodies
SLOW_SECONDS = 5.0  # of slow readers

COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Guests:",
    "max_tokens": 2,
    "n": 1,
    "seed": 1,
    "temperature": 0.7,
    "top_p": 0.9,
    "stop": ["!"],
    "logprobs": 2,
    "logit_bias": {"5": -100, "6": 2.5},
    "stream": False,
    "entropix": {"tokens": True, "details": True, "keep": True, "sampler": {"thresholds.h1": 0.3}},
}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Guests?"}],
    "max_completion_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/score": {"model": "tiny", "input": "Guests: Nina.", "top": 2},
    "/v1/rows": {"type": "header", "format_version": 1, "prompt_tokens": [1]},
}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 0.5, 1e300, 2**70, "", "x", "\u0000", "\U0001f600" * 40, "tiny"),
    *([], [[]], [1, 2], ["a"], [[1], [2]], [None], {}, {"a": {}}, {"extends": "min-p"}),
    *({"row": "x", "position": 1}, "word " * 400, [[[[[[[[1]]]]]]]], {"role": "user"}),
)


def body_of(seed: int) -> dict[str, Any]:
    """The request of a client."""
    return {"model": "tiny", "prompt": "Guests:", "seed": seed, "max_tokens": TOKENS}


async def stream(client: httpx.AsyncClient, seed: int, vanish: bool) -> str | None:
    """A client's text; None for one that vanishes after its first event."""
    body, text = body_of(seed) | {"stream": True}, ""
    if vanish:
        body["max_tokens"] = CONTEXT
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if vanish:
                    return None
    return text


async def crowd(url: str, clients: int) -> dict[int, str]:
    """The texts of the clients that stay, by their seeds."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=HEADERS, timeout=PATIENCE, limits=limits
    ) as client:
        asked = [stream(client, seed, vanish=seed % 2 == 1) for seed in range(clients)]
        found = await asyncio.gather(*asked)
    return {seed: text for seed, text in enumerate(found) if text is not None}


def alone(url: str, clients: int) -> dict[int, str]:
    """The same texts, one after another."""
    with httpx.Client(base_url=url, headers=HEADERS, timeout=PATIENCE) as client:
        return {
            seed: client.post("/v1/completions", json=body_of(seed)).json()["choices"][0]["text"]
            for seed in range(0, clients, 2)
        }


def raw_request(url: str, path: str, body: bytes) -> bytes:
    """A request as it is sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_slowly(url: str, readers: int) -> list[socket.socket]:
    """Clients that have asked for long streams, through small windows."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    found = []
    for seed in range(readers):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((host, int(port)))
        body = body_of(seed) | {
            "stream": True,
            "max_tokens": CONTEXT,
            "entropix": {"details": True},
        }
        client.sendall(raw_request(url, "/v1/completions", json.dumps(body).encode()))
        found.append(client)
    return found


def mutate(rng: random.Random, value: Any) -> Any:
    """The value with one part changed, or gone, or new."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        changed, key = dict(value), rng.choice([*value])
        match rng.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(("x", "tools", "best_of", "echo", "from"))] = rng.choice(ODD)
            case _:
                changed[key] = mutate(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def malformed(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that was valid before."""
    path = rng.choice([*PATHS])
    body: Any = PATHS[path]
    for _ in range(rng.randrange(1, 4)):
        body = mutate(rng, body)
    raw = json.dumps(body).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(raw))
        raw = rng.choice((raw[:at], raw[:at] + rng.randbytes(3) + raw[at:], raw + raw, b"[" * at))
    return path, raw


async def ask_malformed(url: str, bodies: int, seed: int) -> tuple[Counter[int], list[str]]:
    """The answers' statuses, and those that are none."""
    rng, statuses, faults = random.Random(seed), Counter[int](), list[str]()
    headers = {**HEADERS, "Content-Type": "application/json"}

    async def ask(client: httpx.AsyncClient, path: str, raw: bytes) -> None:
        try:
            answer = await client.post(path, content=raw, headers=headers)
        except httpx.HTTPError as error:
            faults.append(f"{path}: {type(error).__name__}: {raw[:200]!r}")
            return
        statuses[answer.status_code] += 1
        told = answer.status_code == 200 or "error" in answer.json()
        if answer.status_code == 500 or not told:
            faults.append(f"{path}: {answer.status_code}: {raw[:200]!r}")

    for first in range(0, bodies, CHUNK):
        limits = httpx.Limits(max_connections=CONNECTIONS)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
            some = [malformed(rng) for _ in range(min(CHUNK, bodies - first))]
            await asyncio.gather(*(ask(client, path, raw) for path, raw in some))
    return statuses, faults


def ask_too_much(url: str, number: int) -> Counter[int]:
    """The statuses of oversized bodies, whose length is told or not."""
    found, part = Counter[int](), b" " * 2**16
    for i in range(number):
        try:
            content: Any = part * 80 if i % 2 else (part for _ in range(80))
            headers = {**HEADERS, "Content-Type": "application/json"}
            answer = httpx.post(f"{url}/v1/score", content=content, headers=headers, timeout=60)
            found[answer.status_code] += 1
        except httpx.HTTPError:  # cut before all was sent
            found[0] += 1
    return found


def ask_without_a_key(url: str, number: int) -> Counter[int]:
    """The statuses of requests with no key, or a wrong one."""
    given = ["", "Bearer", "Bearer x", "Basic c3RyZXNz", f"Bearer {KEY}x", f"bearer {KEY[:-1]}"]
    with httpx.Client(base_url=url, timeout=60) as client:
        return Counter(
            client.post(
                "/v1/completions", json=COMPLETION, headers={"Authorization": given[i % len(given)]}
            ).status_code
            for i in range(number)
        )


def stress(folder: Path, *, clients: int, bodies: int, readers: int, seed: int) -> dict[str, Any]:
    """What happened, and `faults`."""
    port, faults = free_port(), list[str]()
    options = f"--model tiny --slots {SLOTS} --context {CONTEXT} --keep {KEEP}".split()
    options += ["--queue", str(max(clients, 16))]
    server = Server(folder, port, options)
    report: dict[str, Any] = {"clients": clients, "bodies": bodies, "slow_readers": readers}
    try:
        texts = alone(server.url, clients)
        report["rss_before_mib"] = server.resident()

        began = time.monotonic()
        crowded = asyncio.run(crowd(server.url, clients))
        report["crowd_seconds"] = round(time.monotonic() - began, 1)
        slow = read_slowly(server.url, readers)
        beside = asyncio.run(crowd(server.url, clients // 4))
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            for reader in slow:
                reader.recv(256)
            time.sleep(0.05)
        for reader in slow:
            reader.close()
        report["texts_compared"] = len(crowded) + len(beside)
        for seeds in (crowded, beside):
            faults += [f"another text for seed {i}" for i, x in seeds.items() if x != texts[i]]
        report["rss_after_crowd_mib"] = server.resident()

        began = time.monotonic()
        statuses, resident = Counter[int](), list[float]()
        for part in range(PARTS):
            asked = ask_malformed(server.url, bodies // PARTS, PARTS * seed + part)
            found, more = asyncio.run(asked)
            statuses += found
            faults += more
            resident.append(server.resident())
        report["rss_after_bodies_mib"] = resident
        report["malformed_seconds"] = round(time.monotonic() - began, 1)
        report["malformed"] = dict(sorted(statuses.items()))
        report["oversized"] = dict(ask_too_much(server.url, 8))
        if set(report["oversized"]) - {413, 0}:
            faults.append("an oversized body was taken")
        report["wrong_keys"] = dict(ask_without_a_key(server.url, 60))
        if set(report["wrong_keys"]) != {401}:
            faults.append("a wrong key was taken")

        after = server.settle()
        report["slots_running"] = after["slots_running"]
        report["queue_waiting"] = after["queue_waiting"]
        report["kept_tokens"] = after["kept_tokens"]
        report["engine_failures"] = after["engine_failures_total"]
        report["rss_after_mib"] = server.resident()
        if after["slots_running"] or after["queue_waiting"]:
            faults.append("slots or places in the queue stay taken")
        if alone(server.url, 4) != {i: texts[i] for i in range(0, 4, 2)}:
            faults.append("another text after it all")

        report["killed"] = kill_while_it_streams(server)
        faults += tracebacks(server)
        server = Server(folder, port, options)
        if alone(server.url, 4) != {i: texts[i] for i in range(0, 4, 2)}:
            faults.append("another text after the restart")
        report["exit_status"] = server.end(signal.SIGTERM)
        if report["exit_status"]:
            faults.append("it does not end well")
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
    faults += tracebacks(server)
    return report | {"faults": faults[:20], "faults_in_all": len(faults)}


def kill_while_it_streams(server: Server) -> int:
    """Kills it within a stream, whose client sees the end of it. Returns the exit status."""
    body = body_of(0) | {"stream": True, "max_tokens": CONTEXT}
    url = f"{server.url}/v1/completions"
    try:
        with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            status = server.end(signal.SIGKILL)
            list(lines)
    except httpx.HTTPError:
        pass
    return status


def tracebacks(server: Server) -> list[str]:
    """Lines of the server's log beyond those of its start."""
    usual = ("memory of each device", "listening on", "note:", "compiling the usual programs")
    return [line.rstrip() for line in server.log if not any(text in line for text in usual)]


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200, help="half of them vanish")
    parser.add_argument("--bodies", type=int, default=10_000, help="that are malformed")
    parser.add_argument("--readers", type=int, default=8, help="that are slow")
    parser.add_argument("--seed", type=int, default=0, help="of the malformed bodies")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
        report = stress(Path(folder), **vars(asked))
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
