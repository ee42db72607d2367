"""The thread of the server's engine, with a fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from entropix_jax.engine.programs import Programs, Steps
from entropix_jax.engine.state import Recording
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.serve.model import ServedModel
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.worker import Ticket, Update, Worker
from tests.support.runs import unrun
from tests.support.samplers import LITERAL, NAMES
from tests.support.servers import FakeEngine, fake_server, serve, wait_until

pytestmark = pytest.mark.anyio
Client = Callable[[], httpx.AsyncClient]
Standing = tuple[FakeEngine, Worker, Client]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Guests:", "max_tokens": 2}
SEARCH = {"method": "self-consistency", "forks": 2, "vote": True}
limited = pytest.mark.parametrize("standing", [{"limit": 0.1}], indirect=True)
searched = pytest.mark.parametrize("own", [{}, SEARCH])
streamed = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def standing(tiny: LanguageModel, request: pytest.FixtureRequest) -> Iterator[Standing]:
    """A fake engine, its worker, and clients. The parameter has options of the application."""
    with fake_server(tiny, **getattr(request, "param", {})) as found:
        yield found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # nothing is compiled here
        while not holds():
            await asyncio.sleep(0.002)


def submit(worker: Worker, *budgets: int) -> tuple[list[Ticket], list[list[Update]]]:
    """Submits a row of each budget. Returns their tickets, and their updates as they come."""
    soon: Any = asyncio.get_running_loop().call_soon_threadsafe
    updates = [list[Update]() for _ in budgets]
    rows = [worker.engine.new_row(unrun([1], "0", budget)) for budget in budgets]
    tickets = [*map(Ticket, rows, (partial(soon, own.extend) for own in updates))]
    worker.submit(tickets)
    return tickets, updates


async def test_rows_that_are_cancelled(standing: Standing) -> None:
    """Cancels rows that run, wait, or have already ended."""
    engine, worker, _ = standing
    (ticket,), (updates,) = submit(worker, 9)
    await until(lambda: worker.stats() == (1, 0))
    worker.cancel(ticket)
    await until(lambda: len(updates) == 2)
    # Only the last update has the reason.
    assert [one.finish_reason for one in updates] == [None, "cancelled"]
    worker.cancel(ticket)
    (first, _), (cancelled, finished) = submit(worker, 1, 1)
    worker.cancel(first)
    await until(lambda: bool(cancelled) and worker.stats() == (1, 0))
    engine.step()
    await until(lambda: bool(finished))
    assert (cancelled[-1].finish_reason, finished[-1].finish_reason) == ("cancelled", "length")
    assert worker.finished == {"cancelled": 2, "length": 1}


@pytest.mark.parametrize("standing", [{"queue": 1}], indirect=True)
async def test_a_search_counts_as_its_rows(standing: Standing) -> None:
    """The queue and the metrics count the rows of a search. They end with the client."""
    engine, worker, client = standing
    gone, body = asyncio.Event(), {**BODY, "entropix": SEARCH}
    leaving = asyncio.create_task(post_silently(client, body, gone))
    await until(lambda: worker.stats() == (2, 0))
    async with client() as ask:
        full = await ask.post("/v1/completions", json=body)
        assert full.json()["error"]["code"] == "queue_full"
        first = asyncio.create_task(ask.post("/v1/completions", json=BODY))
        await until(lambda: worker.stats() == (3, 0))
        gone.set()
        await leaving
        await until(lambda: worker.stats() == (1, 0))
        assert worker.finished == {"cancelled": 2}
        second = asyncio.create_task(ask.post("/v1/completions", json=body | {"max_tokens": 1}))
        await until(lambda: worker.stats() == (3, 0))
        engine.step(2)
        (choice,) = (await second).json()["choices"]
        ends = [one["finish_reason"] for one in choice["entropix"]["continuations"]]
        assert ends == ["length", "length"]
        assert (await first).status_code == 200
    assert worker.finished == {"cancelled": 2, "length": 3}


async def test_calls_run_next_to_chunks(standing: Standing) -> None:
    """Calls run one at a time, from a separate queue."""
    engine, worker, _ = standing
    _, updates = submit(worker, 9, 9, 9, 9)  # the queue of rows is full
    await until(lambda: worker.stats() == (4, 0))
    gate = threading.Event()
    held = worker.call(gate.wait)
    await until(lambda: held.running() and worker.stats() == (4, 0))
    waiting = [worker.call(lambda: None) for _ in range(3)]
    with pytest.raises(ApiError, match="too many requests wait"):
        worker.call(lambda: None)
    # A long call does not block rows.
    chunks = engine.chunks
    await until(lambda: engine.chunks > chunks)
    waiting[1].cancel()  # there is room again
    waiting.append(worker.call(lambda: None))
    gate.set()
    for call in (held, waiting[0], waiting[3]):
        await asyncio.wrap_future(call)
    engine.step(9)
    await until(lambda: all(own and own[-1].finish_reason for own in updates))
    assert worker.idle()
    assert await asyncio.wrap_future(worker.call(lambda: 7)) == 7  # while no row runs


async def test_requests_whose_programs_are_missing(standing: Standing, tiny: LanguageModel) -> None:
    """A request is answered if its programs are compiled, later if they are listed, else never."""
    engine, _, client = standing
    served = ServedModel("tiny", tiny, load_sampler(LITERAL), 64, 0, ["mirostat"])
    listed = served.list_programs()
    first, second = listed.sets
    engine.programs = programs = Programs(tiny, Recording(), listed.sets)
    programs.largest = {one: Steps(one, 64) for one in listed.sets}
    programs._compiled[Steps(first, 64)] = print
    engine.step(9)
    async with client() as ask:

        async def post(sampler: Any, **fields: Any) -> httpx.Response:
            own = {"entropix": {"sampler": sampler}}
            return await ask.post("/v1/completions", json={**BODY, **fields, **own})

        options = {"temperature": 0.5, "repetition_penalty": 1.2, "logit_bias": {"9": 1}}
        assert (await post(None, **options)).status_code == 200
        later = await post("mirostat")
        assert (later.status_code, later.headers["retry-after"]) == (503, "30")
        assert later.json()["error"]["code"] == "compiling"
        assert "of sampler 'mirostat' are still compiling (0 in the queue)" in later.text
        programs._failed[Steps(second, 64)] = RuntimeError("no such luck\nmore")
        answer = await post("mirostat")
        broken = answer.json()["error"]
        assert (answer.status_code, broken["code"]) == (500, "compile_failed")
        assert broken["message"].endswith("failed: no such luck")
        programs._failed.clear()
        programs._compiled[Steps(second, 64)] = print
        assert (await post("mirostat")).status_code == 200
        never = await post("xtc")
        assert (never.status_code, never.json()["error"]["param"]) == (400, "entropix.sampler")
        assert "mechanism 'xtc' is not compiled here: start the server with a" in never.text
        lines = (await ask.get("/metrics")).text.splitlines()
        assert {"entropix_programs_compiled 2", "entropix_programs_waiting 0"} <= {*lines}


def test_all_settings_have_programs_by_default(tiny: LanguageModel) -> None:
    """The first set does not grow. `surrogate`, a control for studies, must be in the sampler."""
    settings: dict[str, Any] = {"phrases.banned": ["x"], "no_repeat_ngram.size": 2}
    settings |= {"think_end.patience": 1, "budget_forcing.min_tokens": 1, "confidence.threshold": 1}
    served, names = serve(tiny), {key.partition(".")[0] for key in settings}
    first, second = served.list_programs().sets
    assert names <= served.choose_sampler(settings).parts.used <= second
    assert not names & first
    assert {*NAMES} - second == {"surrogate"}


async def test_errors_of_too_many_requests(standing: Standing) -> None:
    engine, worker, client = standing
    async with client() as ask:
        first = asyncio.create_task(ask.post("/v1/completions", json={**BODY, "n": 4}))
        await until(lambda: worker.stats() == (4, 0))
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


@searched
@streamed
async def test_a_failed_engine_is_restarted(
    standing: Standing, stream: bool, own: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Running rows end with an error, and the next ones run."""
    engine, worker, client = standing
    async with client() as ask:
        body = {**BODY, "prompt": [FakeEngine.DEFECT], "stream": stream, "entropix": own}
        answer = await ask.post("/v1/completions", json=body)
        assert answer.status_code == (200 if stream else 500)
        error = json.loads(answer.text.strip().removeprefix("data: "))["error"]
        message = "the engine failed, and started anew"
        assert (error["type"], error["message"]) == ("server_error", message)
        with pytest.raises(ZeroDivisionError):  # a call's error is the caller's
            await asyncio.wrap_future(worker.call(lambda: 1 // 0))
        engine.step(2)
        assert (await ask.post("/v1/completions", json=BODY)).status_code == 200
    assert worker.failures == 1
    assert worker.finished == {"error": own.get("forks", 1), "length": 1}
    assert "RuntimeError: a defect" in caplog.text


async def post_silently(client: Client, body: dict[str, Any], gone: asyncio.Event) -> None:
    """Requests a completion, reads nothing, and disconnects when `gone` is set."""
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
    headers = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
    scope: Any = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    scope |= {"method": "POST", "path": "/v1/completions", "scheme": "http", "query_string": b""}
    scope["headers"] = headers
    await application.app(scope, receive, send)


@pytest.mark.parametrize("echo", [False, True])
async def test_rows_end_with_a_client_that_reads_nothing(standing: Standing, echo: bool) -> None:
    _, worker, client = standing
    gone = asyncio.Event()
    body = {**BODY, "n": 2, "stream": True, "echo": echo}
    answering = asyncio.create_task(post_silently(client, body, gone))
    await until(lambda: worker.stats() == (2, 0))
    gone.set()
    await answering
    await until(lambda: worker.stats() == (0, 0))


async def test_a_client_that_leaves_before_its_echo(standing: Standing) -> None:
    """No row runs for it."""
    _, worker, client = standing
    hold, gone = threading.Event(), asyncio.Event()
    held = worker.call(hold.wait)
    body = {**BODY, "echo": True, "logprobs": 1, "stream": True}
    answering = asyncio.create_task(post_silently(client, body, gone))
    await until(lambda: worker.stats() == (0, 1))
    gone.set()
    await answering  # at once, while the score waits
    hold.set()
    await asyncio.wrap_future(held)
    wait_until(worker.idle)
    assert not worker.finished


@limited
@streamed
async def test_the_time_limit_of_a_waiting_request(standing: Standing, stream: bool) -> None:
    engine, worker, client = standing
    engine.has_slots = False
    async with client() as ask:
        answer = await ask.post("/v1/completions", json={**BODY, "stream": stream})
        error = json.loads(answer.text.strip().removeprefix("data: "))["error"]
        assert error["code"] == "timeout"
        assert stream or (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        hold = threading.Event()
        held = worker.call(hold.wait)
        scores = await ask.post("/v1/score", json={"model": "tiny", "input": "Guests: Nina"})
        assert (scores.status_code, scores.headers["retry-after"]) == (503, "10")
        hold.set()
        await asyncio.wrap_future(held)
    wait_until(worker.idle)


@limited
@searched
async def test_the_time_limit_of_a_request(standing: Standing, own: dict[str, Any]) -> None:
    _, worker, client = standing
    async with client() as ask:
        answer = await ask.post("/v1/completions", json={**BODY, "entropix": own})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["entropix"]["finish_reason"] == "cancelled"
    wait_until(lambda: worker.stats() == (0, 0))
