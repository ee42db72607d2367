"""What the server costs: its throughput beside `batch`'s own, and the wait for a first token.

    python scripts/server_speed.py                                  some minutes, with smollm2
    python scripts/server_speed.py --model tiny --rounds 1          a minute
    python scripts/server_speed.py --server "--keep 0"              a server that keeps no rows

Starts `serve` in a process of its own, over loopback, and ends it. 50 prompts are answered by
`batch`, in this process, and by the server, whose clients are those of the `openai` package: they
stream side by side, each its next prompt when one has ended. The two take turns at going first,
after a round that warms them up, in which the server tells the tokens, too. Prints JSON: tokens a
second of each, medians of ratios, milliseconds to a first token where nothing else runs, and
`faults`, prompts whose texts or tokens differ. The exit status is 1 if there are any.

Each is as a user gets it. The server records more of each token, and its clients take their time on
the same cores; `batch` allocates its cache in each round. A first token of `batch` is counted from
its slot on, one of the server from the request on, the connection included.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from serving import KEY, Server, free_port

from entropix_jax.batch.records import Record
from entropix_jax.batch.run import BatchRun, Defaults
from entropix_jax.cli.options import EXIT_OK
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.model.loading import load
from entropix_jax.sampler.presets import load_sampler

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
FIRST_TOKENS = 15  # times that each is asked for one
CONTEXT = 512
Answer = tuple[str, list[int]]  # its text and its tokens


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    model: str
    dtype: str | None
    sampler: str
    clients: int
    tokens: int
    rounds: int
    server: str


class Batch:
    """The prompts in this process."""

    def __init__(self, asked: Asked) -> None:
        self._run = BatchRun(
            load(asked.model, asked.dtype),
            Defaults(load_sampler(asked.sampler)),
            slots=asked.clients,
            capacity=CONTEXT,
        )
        self._tokens = asked.tokens

    def records(self, prompts: Sequence[str]) -> Iterator[Record]:
        """A record for each, whose seed is its number."""
        for number, prompt in enumerate(prompts):
            talk = [{"role": "user", "content": prompt}]
            record = Record(number, str(number), "", messages=talk, seed=number)
            yield replace(record, max_new_tokens=self._tokens)

    def answer(self) -> tuple[float, dict[int, Answer]]:
        """Seconds, and the answer to each prompt."""
        found: dict[int, Answer] = {}

        def keep(record: Any, result: Any) -> None:
            found[int(record.id)] = result["text"], result["token_ids"]

        began = time.perf_counter()
        self._run.run(self.records(PROMPTS), keep)
        return time.perf_counter() - began, found

    def first_token(self) -> float:
        """Seconds from a slot to the first token, for a row that has the engine to itself."""
        found: list[float] = []
        self._run.run(
            self.records(PROMPTS[:1]),
            lambda _, result: found.append(result["timings"]["first_token"]),
        )
        return found[0]


class Clients:
    """The same prompts, asked of a server."""

    def __init__(self, asked: Asked, url: str) -> None:
        self._asked = asked
        self._url = f"{url}/v1"

    async def _stream(
        self, client: openai.AsyncOpenAI, number: int, *, tokens: bool = False
    ) -> tuple[float, Answer]:
        """Seconds to the first text, and the answer, with its tokens if they are asked for."""
        began, first, text, ids = time.perf_counter(), 0.0, "", list[int]()
        parts = await client.chat.completions.create(
            model=self._asked.model,
            messages=[{"role": "user", "content": PROMPTS[number]}],
            max_completion_tokens=self._asked.tokens,
            seed=number,
            stream=True,
            extra_body={"entropix": {"tokens": tokens, "id": str(number)}},
        )
        async for part in parts:
            choice: Any = part.choices[0]
            first = first or (time.perf_counter() - began if choice.delta.content else 0.0)
            text += choice.delta.content or ""
            ids += [one["token_id"] for one in getattr(choice, "entropix", {}).get("tokens", ())]
        assert text, f"no text came for prompt {number}"
        return first, (text, ids)

    async def _all(self, *, tokens: bool) -> dict[int, Answer]:
        waiting, found = iter(range(len(PROMPTS))), dict[int, Answer]()
        async with self._client() as client:

            async def ask() -> None:
                for number in waiting:
                    _, found[number] = await self._stream(client, number, tokens=tokens)

            await asyncio.gather(*(ask() for _ in range(self._asked.clients)))
        return found

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self._url, api_key=KEY, max_retries=0)

    def answer(self, *, tokens: bool = False) -> tuple[float, dict[int, Answer]]:
        """See `Batch`."""
        began = time.perf_counter()
        found = asyncio.run(self._all(tokens=tokens))
        return time.perf_counter() - began, found

    def first_token(self) -> float:
        """Seconds to the first token of a stream, its connection included."""

        async def ask() -> float:
            async with self._client() as client:
                seconds, _ = await self._stream(client, 0)
            return seconds

        return asyncio.run(ask())


def compare(asked: Asked, batch: Batch, clients: Clients) -> dict[str, Any]:
    """What was measured, and `faults`."""
    speeds: dict[str, list[float]] = {"batch": [], "server": []}
    firsts: dict[str, list[float]] = {"batch": [], "server": []}
    faults: list[str] = []
    contestants: dict[str, Batch | Clients] = {"batch": batch, "server": clients}
    # To warm up, token by token.
    _, expected = batch.answer()
    _, found = clients.answer(tokens=True)
    faults += [f"prompt {n} has other tokens" for n in expected if found[n] != expected[n]]
    total = sum(len(tokens) for _, tokens in expected.values())
    for turn in range(asked.rounds):
        for name in ("batch", "server") if turn % 2 else ("server", "batch"):
            seconds, found = contestants[name].answer()
            speeds[name].append(round(total / seconds, 1))
            differ = [n for n, (text, _) in expected.items() if found[n][0] != text]
            faults += [f"round {turn}: prompt {n} has another text by {name}" for n in differ]
    for turn in range(1 + FIRST_TOKENS):
        for name, contestant in contestants.items():
            seconds = contestant.first_token()
            firsts[name] += [1e3 * seconds] if turn else []
    ratios = [a / b for a, b in zip(speeds["server"], speeds["batch"], strict=True)]
    waits = [a - b for a, b in zip(firsts["server"], firsts["batch"], strict=True)]
    return {
        **vars(asked),
        "tokens_per_second": speeds,
        "server_of_batch": round(statistics.median(ratios), 3),
        "first_token_ms": {k: round(statistics.median(v), 1) for k, v in firsts.items()},
        "server_later_ms": round(statistics.median(waits), 1),
        "prompts_compared": (1 + asked.rounds) * len(PROMPTS),
        "faults": faults,
    }


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", help="the type of the weights (default: the checkpoint's)")
    parser.add_argument("--sampler", default="entropix")
    parser.add_argument("--clients", type=int, default=16, help="and slots")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=2, help="after the first, which is not timed")
    parser.add_argument("--server", default="", help="more options of serve, in one word")
    asked = Asked(**vars(parser.parse_args()))
    use_compilation_cache()
    options = ["--model", asked.model, "--slots", str(asked.clients), "--context", str(CONTEXT)]
    options += ["--sampler", asked.sampler, *asked.server.split()]
    options += [] if asked.dtype is None else ["--dtype", asked.dtype]
    with TemporaryDirectory(prefix="entropix-jax-") as folder:
        server = Server(Path(folder), free_port(), options)
        try:
            found = compare(asked, Batch(asked), Clients(asked, server.url))
        finally:
            server.end(signal.SIGTERM)
    print(json.dumps(found, indent=2))
    return 1 if found["faults"] else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
