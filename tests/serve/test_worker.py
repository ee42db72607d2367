"""The resident engine's thread, with a stand-in for the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.worker import Closing, QueueFull, Ticket, Update, Worker
from tests.support.runs import unrun
from tests.support.servers import StandIn, standing_in, wait_until

_PATIENCE = 60.0  # seconds: nothing is compiled here
Client = Callable[[], httpx.AsyncClient]


class Asked:
    """Tickets of one event loop, and what they were told, call by call."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.loop = asyncio.get_running_loop()
        self.told: list[tuple[int, list[Update]]] = []
        self.tickets: list[Ticket] = []

    def submit(self, *budgets: int, prompt: int = 1) -> None:
        first = len(self.tickets)
        new = [
            Ticket(Row(unrun([prompt], "0", budget)), self.loop, self._note(first + number))
            for number, budget in enumerate(budgets)
        ]
        self.worker.submit(new)
        self.tickets += new

    def _note(self, number: int) -> Callable[[list[Update]], None]:
        return lambda updates: self.told.append((number, updates))

    def ends(self) -> dict[int, str]:
        updates = [(number, updates[-1].finish_reason) for number, updates in self.told]
        return {number: reason for number, reason in updates if reason is not None}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENCE):
            while not holds():
                await asyncio.sleep(0.002)


def run(model: LanguageModel, check: Callable[..., Awaitable[None]], **options: Any) -> None:
    with standing_in(model, **options) as (engine, worker, client):
        asyncio.run(check(engine, worker, client))  # type: ignore[arg-type]


def test_rows_are_told_until_their_ends(tiny: LanguageModel) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        asked.submit(2, 3)
        await asked.until(lambda: worker.stats() == (2, 0))
        engine.step(2)
        await asked.until(lambda: 0 in asked.ends())
        assert asked.ends() == {0: "length"}
        assert [len(updates) for number, updates in asked.told if number == 1] in ([2], [1, 1])
        asked.submit(1)
        await asked.until(lambda: worker.stats() == (2, 0))
        engine.step()
        await asked.until(lambda: len(asked.ends()) == 3)
        assert worker.stats() == (0, 0)
        assert worker.finished == {"length": 3}

    run(tiny, check)


def test_no_more_wait_than_there_is_room_for(tiny: LanguageModel) -> None:
    """All rows of a request are taken, or none."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        assert worker.most == 5
        with pytest.raises(QueueFull):
            asked.submit(1, 1, 1, 1, 1, 1)
        assert worker.stats() == (0, 0)
        asked.submit(9)
        await asked.until(lambda: worker.stats() == (1, 0))
        with pytest.raises(QueueFull):
            asked.submit(1, 1, 1, 1, 1)
        asked.submit(1, 1, 1, 1)
        worker.refuse()
        with pytest.raises(Closing):
            asked.submit(1)
        assert not worker.alive
        await asked.until(lambda: worker.stats() == (5, 0))
        engine.step(9)
        await asked.until(lambda: len(asked.ends()) == 5)

    run(tiny, check, queue=3)


def test_rows_that_are_cancelled(tiny: LanguageModel) -> None:
    """Running, waiting, or at their end already."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        asked.submit(9)
        await asked.until(lambda: worker.stats() == (1, 0))
        worker.cancel(asked.tickets[0])
        await asked.until(lambda: len(asked.ends()) == 1)
        # The reason comes with the last update alone.
        (told,) = (updates for _, updates in asked.told)
        assert [one.finish_reason for one in told] == [None, "cancelled"]
        worker.cancel(asked.tickets[0])
        # A call keeps the thread, so that the next ones wait.
        gate = asyncio.Event()
        held = asyncio.wrap_future(
            worker.call(lambda: asyncio.run_coroutine_threadsafe(gate.wait(), asked.loop).result())
        )
        asked.submit(1, 1)
        worker.cancel(asked.tickets[1])
        await asked.until(lambda: len(asked.ends()) == 2)
        gate.set()
        assert await held
        await asked.until(lambda: worker.stats() == (1, 0))
        engine.step()
        await asked.until(lambda: len(asked.ends()) == 3)
        assert asked.ends() == {0: "cancelled", 1: "cancelled", 2: "length"}
        assert worker.finished == {"cancelled": 2, "length": 1}

    run(tiny, check)


def test_an_engine_that_fails(tiny: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    """The rows that ran end with an error, and the next ones run."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        asked.submit(9)
        await asked.until(lambda: worker.stats() == (1, 0))
        asked.submit(1, prompt=StandIn.DEFECT)
        await asked.until(lambda: len(asked.ends()) == 2)
        assert asked.ends() == {0: "error", 1: "error"}
        assert asked.told[0][1][-1].error == "the engine failed, and started anew"
        with pytest.raises(ZeroDivisionError):  # a call's error is the caller's
            await asyncio.wrap_future(worker.call(lambda: 1 // 0))
        asked.submit(1)
        await asked.until(lambda: worker.stats() == (1, 0))
        engine.step()
        await asked.until(lambda: len(asked.ends()) == 3)
        assert (asked.ends()[2], worker.failures) == ("length", 1)

    run(tiny, check)
    assert "RuntimeError: a defect" in caplog.text


def test_it_closes_when_all_have_ended(tiny: LanguageModel) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        asked.submit(3, 3)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asked.until(lambda: not worker.alive and worker.stats() == (2, 0))
        engine.step(3)
        await closing
        await asked.until(lambda: len(asked.ends()) == 2)
        assert asked.ends() == {0: "length", 1: "length"}

    run(tiny, check)


# The same, as clients see it.

BODY = {"model": "tiny", "prompt": "Guests:", "max_tokens": 2}


def test_answers_to_too_many(tiny: LanguageModel) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        async with client() as ask:
            body = {**BODY, "n": 4}
            first = asyncio.create_task(ask.post("/v1/completions", json=body))
            while worker.stats() != (4, 0):
                await asyncio.sleep(0.002)
            full = await ask.post("/v1/completions", json={**BODY, "n": 3})
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert full.json()["error"]["code"] == "queue_full"
            never = await ask.post("/v1/completions", json={**BODY, "n": 5})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
            worker.refuse()
            late = await ask.post("/v1/completions", json=BODY)
            assert (late.status_code, late.headers["retry-after"]) == (503, "10")
            assert (await ask.get("/health")).status_code == 503
            engine.step(2)
            answer = await first
            assert (answer.status_code, len(answer.json()["choices"])) == (200, 4)

    run(tiny, check)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_an_engine_that_fails(tiny: LanguageModel, stream: bool) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        async with client() as ask:
            body = {**BODY, "prompt": [StandIn.DEFECT], "stream": stream}
            answer = await ask.post("/v1/completions", json=body)
            if stream:
                assert answer.status_code == 200
                (event,) = answer.text.strip().split("\n\n")
                error = json.loads(event.removeprefix("data: "))["error"]
            else:
                assert answer.status_code == 500
                error = answer.json()["error"]
            assert (error["type"], error["message"]) == (
                "server_error",
                "the engine failed, and started anew",
            )

    run(tiny, check)


async def _ask_alone(client: Client, body: dict[str, Any], gone: asyncio.Event) -> None:
    """A client of a completion who reads nothing, and leaves once it is `gone`."""
    asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await gone.wait()  # the socket is full

    async with client() as ask:
        application: Any = ask._transport
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/completions",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"host", b"localhost:8000"), (b"content-type", b"application/json")],
    }
    await application.app(scope, receive, send)


@pytest.mark.parametrize("body", [BODY, {**BODY, "echo": True}])
def test_a_stream_that_nobody_reads(tiny: LanguageModel, body: dict[str, Any]) -> None:
    """Its rows end with its client, who leaves before a byte of it was sent."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        gone = asyncio.Event()
        asked = {**body, "n": 2, "stream": True}
        answering = asyncio.create_task(_ask_alone(client, asked, gone))
        async with asyncio.timeout(_PATIENCE):
            while worker.stats() != (2, 0):
                await asyncio.sleep(0.002)
            gone.set()
            await answering
            while worker.stats() != (0, 0):
                await asyncio.sleep(0.002)

    run(tiny, check)


def test_calls_run_next_to_chunks(tiny: LanguageModel) -> None:
    """One at a time, out of a queue of their own."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        asked = Asked(worker)
        asked.submit(9, 9, 9, 9)  # the queue of rows is full
        await asked.until(lambda: worker.stats() == (4, 0))
        gate = asyncio.Event()
        held = worker.call(
            lambda: asyncio.run_coroutine_threadsafe(gate.wait(), asked.loop).result()
        )
        await asked.until(lambda: worker.stats() == (4, 0))
        waiting = [worker.call(lambda: None) for _ in range(3)]
        with pytest.raises(QueueFull):
            worker.call(lambda: None)
        # A call that takes long holds no row up.
        chunks = engine.chunks
        await asked.until(lambda: engine.chunks > chunks)
        waiting[1].cancel()  # nobody waits for it: there is room again
        waiting.append(worker.call(lambda: None))
        gate.set()
        for call in (held, waiting[0], waiting[3]):
            await asyncio.wrap_future(call)
        engine.step(9)
        await asked.until(lambda: len(asked.ends()) == 4)
        assert worker.idle()
        assert await asyncio.wrap_future(worker.call(lambda: 7)) == 7  # where nothing runs

    run(tiny, check)


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_of_a_request_that_waits(tiny: LanguageModel, stream: bool) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        engine.has_slots = False
        async with client() as ask:
            answer = await ask.post("/v1/completions", json={**BODY, "stream": stream})
            if stream:
                error = json.loads(answer.text.strip().removeprefix("data: "))["error"]
            else:
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
                error = answer.json()["error"]
            assert error["code"] == "timeout"
            hold = threading.Event()
            held = worker.call(hold.wait)
            scores = await ask.post("/v1/score", json={"model": "tiny", "input": "Guests: Nina"})
            assert (scores.status_code, scores.headers["retry-after"]) == (503, "10")
            hold.set()
            await asyncio.wrap_future(held)
        wait_until(worker.idle)

    run(tiny, check, limit=0.1)


def test_a_stream_that_is_gone_before_its_echo(tiny: LanguageModel) -> None:
    """Nothing runs for it."""

    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        hold, gone = threading.Event(), asyncio.Event()
        held = worker.call(hold.wait)
        body = {**BODY, "echo": True, "logprobs": 1, "stream": True}
        answering = asyncio.create_task(_ask_alone(client, body, gone))
        async with asyncio.timeout(_PATIENCE):
            while worker.stats() != (0, 1):
                await asyncio.sleep(0.002)
            gone.set()
            await answering  # at once, while the score waits
        hold.set()
        await asyncio.wrap_future(held)
        wait_until(worker.idle)
        assert not worker.finished

    run(tiny, check)


def test_the_time_of_a_request(tiny: LanguageModel) -> None:
    async def check(engine: StandIn, worker: Worker, client: Client) -> None:
        async with client() as ask:
            (choice,) = (await ask.post("/v1/completions", json=BODY)).json()["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["entropix"]["finish_reason"] == "cancelled"
        wait_until(lambda: worker.stats() == (0, 0))

    run(tiny, check, limit=0.05)
