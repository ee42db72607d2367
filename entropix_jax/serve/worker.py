"""The resident engine: one thread owns the device, and requests come and go.

What happens to the rows is told to the event loop once for each chunk of steps, not for each token.
"""

import logging
import threading
from asyncio import AbstractEventLoop
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Event, Piece, Request, Row
from entropix_jax.engine.trace import TokenRecord

_LOG = logging.getLogger(__name__)


class QueueFull(Exception):
    """There is no room for a request now."""


class Closing(Exception):
    """The worker takes nothing more."""


@dataclass(frozen=True)
class Update:
    """An `Event` as it was when it happened: its row goes on meanwhile."""

    token: TokenRecord | None
    pieces: tuple[Piece, ...]
    retracted: bool
    finish_reason: str | None  # of the row, after its last event
    error: str | None = None


Tell = Callable[[list[Update]], None]


class Ticket:
    """A row that was handed in. `tell` is called in the event loop `loop`."""

    def __init__(self, row: Row, loop: AbstractEventLoop, tell: Tell) -> None:
        self.row = row
        self.loop = loop
        self.tell = tell


class Worker:
    """Runs what is handed in, side by side. All methods may be called from any thread.

    `tokens` counts the committed tokens by regime, `retracted` those taken back, `finished` the
    rows by the reason of their end, `failures` how often the engine had to start anew.
    """

    def __init__(self, engine: Engine, *, slots: int, queue: int) -> None:
        """`slots` is the engine's number, `queue` how many rows may wait for one of them."""
        self.tokens: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.retracted = self.failures = 0
        self.slots = slots
        self._engine = engine
        self._most = queue
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._calls = ThreadPoolExecutor(1, "calls")
        self._jobs: list[Future[Any]] = []
        self._running: dict[int, Ticket] = {}  # by the id of the row
        self._cancelled: list[Ticket] = []
        self._closing = False
        self._told: dict[Ticket, list[Update]] = {}  # of this chunk, by the worker's thread alone
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def most(self) -> int:
        """Rows that one request may have."""
        return self.slots + self._most

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot run."""
        self._engine.check(request)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hands in rows whose requests were checked, all or none. QueueFull, or Closing."""
        with self._changed:
            free = max(self.slots - len(self._running), 0)
            self._check_room(len(self._queue) + len(tickets) - free)
            self._queue.extend(tickets)
            self._changed.notify()

    def call(self, call: Callable[[], Any]) -> "Future[Any]":
        """Runs a call that needs the device next to the rows, one at a time, in a thread of its
        own: it may compile. As many may wait as rows. QueueFull, or Closing."""
        with self._changed:
            self._jobs = [one for one in self._jobs if not one.done()]
            self._check_room(sum(not one.running() for one in self._jobs))
            self._jobs.append(future := self._calls.submit(call))
        return future

    def _check_room(self, waiting: int) -> None:
        if self._closing:
            raise Closing
        if waiting > self._most:
            raise QueueFull

    def cancel(self, ticket: Ticket) -> None:
        """Ends a row, if it has not ended; its last update follows."""
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                end = Update(None, (), False, "cancelled")
                self.finished["cancelled"] += 1
                ticket.loop.call_soon_threadsafe(ticket.tell, [end])
            elif id(ticket.row) in self._running:
                self._cancelled.append(ticket)

    def stats(self) -> tuple[int, int]:
        """How many rows run, and how many rows and calls wait."""
        with self._changed:
            waiting = sum(not (job.done() or job.running()) for job in self._jobs)
            return len(self._running), len(self._queue) + waiting

    @property
    def compiling(self) -> str | None:
        """The program that compiles, for people; None if none does."""
        return self._engine.compiling

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.stats() == (0, 0) and all(job.done() for job in self._jobs)

    def forget(self) -> None:
        """Counts from here on; nothing runs."""
        self.tokens.clear()
        self.finished.clear()
        self.retracted = 0

    def refuse(self) -> None:
        """Takes nothing more; what was handed in goes on. A signal handler may call it."""
        self._closing = True

    def close(self) -> None:
        """Runs what was handed in to its end, then ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._calls.shutdown(cancel_futures=True)

    # In the thread

    def _serve(self) -> None:
        while True:
            try:
                for event in self._engine.run(self._source(), self._between):
                    self._note(event, event.row.finish_reason)
                self._tell()
                return
            except BaseException:  # a library's panic is no Exception
                _LOG.exception("the engine failed and starts anew")
                self._fail()

    def _fail(self) -> None:
        """Ends what runs with an error. The engine is as before its run."""
        with self._changed:
            self.failures += 1
            for ticket in self._running.values():
                end = Update(None, (), False, "error", "the engine failed, and started anew")
                self._told.setdefault(ticket, []).append(end)
                self.finished["error"] += 1
            self._running.clear()
            self._cancelled.clear()
        self._tell()

    def _source(self) -> Iterator[Row | None]:
        """The rows, None where none waits but others run; it blocks while nothing runs."""
        while True:
            ticket = None
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._running or self._closing)
                if self._queue:
                    ticket = self._queue.popleft()
                    self._running[id(ticket.row)] = ticket
                elif not self._running:
                    return
            yield None if ticket is None else ticket.row

    def _between(self) -> None:
        """Ends the cancelled rows, and tells what happened in the chunk."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        for ticket in cancelled:
            if id(ticket.row) in self._running:
                *events, last = self._engine.end(ticket.row)
                for event in events:
                    self._note(event, None)
                self._note(last, last.row.finish_reason)
        self._tell()

    def _note(self, event: Event, reason: str | None) -> None:
        row, token = event.row, event.token
        if token is not None and event.retracted:
            self.retracted += 1
        elif token is not None:
            self.tokens[token.regime] += 1
        ticket = self._running[id(row)]
        update = Update(token, event.pieces, event.retracted, reason, row.error)
        self._told.setdefault(ticket, []).append(update)
        if reason is not None:
            with self._changed:
                self.finished[reason] += 1
                del self._running[id(row)]

    def _tell(self) -> None:
        """One call for each event loop."""
        told, self._told = self._told, {}
        for loop in {ticket.loop for ticket in told}:
            own = [(ticket, updates) for ticket, updates in told.items() if ticket.loop is loop]
            try:
                loop.call_soon_threadsafe(_hand_out, own)
            except RuntimeError:  # the loop is closed: nobody listens
                _LOG.debug("an event loop ended before its requests")


def _hand_out(told: Sequence[tuple[Ticket, list[Update]]]) -> None:
    for ticket, updates in told:
        ticket.tell(updates)
