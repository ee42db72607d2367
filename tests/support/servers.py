"""Servers with the engine, over loopback, or with a fake engine, in process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Event, Row
from entropix_jax.engine.state import Recording
from entropix_jax.host.lookup import Lookup
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.serve.app import make_app
from entropix_jax.serve.http import HttpServer
from entropix_jax.serve.model import ServedModel
from entropix_jax.serve.worker import Worker
from tests.support.samplers import LITERAL
from tests.support.waiting import PATIENCE

SLOTS, QUEUE, CONTEXT, TOP = 4, 12, 256, 10


@dataclass
class Running:
    """A server that listens at `url`."""

    url: str
    worker: Worker
    served: ServedModel


def serve(model: LanguageModel, top: int = TOP) -> ServedModel:
    lookup = Lookup("a test", lambda text: "Rita sang.")
    return ServedModel("tiny", model, load_sampler(LITERAL), CONTEXT, top, lookup=lookup)


def make_engine(model: LanguageModel) -> Engine:
    recording = Recording(top=TOP, layers=True, raw_layers=True, state=True)
    return Engine(model, slots=SLOTS, capacity=CONTEXT, recording=recording, look=0.04)


@contextlib.contextmanager
def listening(model: LanguageModel, limit: float = PATIENCE) -> Iterator[Running]:
    served = serve(model)
    worker = Worker(make_engine(model), slots=SLOTS, queue=QUEUE)
    worker.start()
    server = HttpServer(make_app(served, worker, limit=limit), worker.idle)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        wait_until(lambda: server.started)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", worker, served)
        server.should_exit = True
        thread.join()
    worker.close()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


class FakeEngine:
    """A fake engine, in which a row ends once `step` was called for each of its tokens. It has any
    number of slots. A row whose prompt is `[DEFECT]` raises an error."""

    DEFECT = 666
    programs: Any = SimpleNamespace(sets=(), counts=(0, 0))

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._new: dict[int, Row] = {}
        self.chunks = 0
        self.has_slots = True
        self.steps = threading.Semaphore(0)

    def step(self, number: int = 1) -> None:
        self.steps.release(number)

    def new_row(self, request: Request) -> Row:
        row = self._new[id(request)] = Row(request)
        return row

    def end(self, row: Row) -> list[Event]:
        row.finish_reason = "cancelled"
        self.rows = [one for one in self.rows if one is not row]
        return [Event(row, None, ()), Event(row, None, ())]

    def run(self, source: Iterable[Request | None], between: Callable[[], None]) -> Iterator[Event]:
        self.rows, waiting = [], iter(source)
        left: dict[int, int] = {}
        while True:
            between()
            self.chunks += 1
            request = next(waiting, None)
            if request is not None:
                row = self._new.pop(id(request))
                self.rows.append(row)
                row.started = time.perf_counter() if self.has_slots else None
                left[id(row)] = request.max_new_tokens
                if [*request.prompt] == [self.DEFECT]:
                    raise RuntimeError("a defect")
            elif not self.rows:
                return
            if not self.steps.acquire(timeout=0.005):
                continue
            for row in [*self.rows]:
                left[id(row)] -= 1
                if not left[id(row)]:
                    row.finish_reason = "length"
                    self.rows.remove(row)
                yield Event(row, None, ())


@contextlib.contextmanager
def fake_server(
    model: LanguageModel, *, slots: int = 2, queue: int = 2, **options: Any
) -> Iterator[tuple[FakeEngine, Worker, Callable[[], httpx.AsyncClient]]]:
    """Yields a fake engine, its worker, and a function that returns clients in process."""
    engine: Any = FakeEngine()
    worker = Worker(engine, slots=slots, queue=queue)
    worker.start()
    app = make_app(serve(model), worker, **options)

    def client() -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")

    yield engine, worker, client
    engine.step(1000)
    worker.close()
