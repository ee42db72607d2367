"""The resident engine: one thread owns the device, and requests come and go.

The worker calls the event loop once per row and chunk of steps, not once per token.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Event, Piece, Row
from entropix_jax.engine.search import Outcome, Search
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.serve.schema import try_again
from entropix_jax.text.numbers import last_answer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """A snapshot of an `Event`, whose row changes meanwhile. `finish_reason` is set in the row's
    last update, and `outcome` if the row is the chosen one of a search. `choice` has the id and the
    texts of two branches between which the client chooses."""

    token: TokenRecord | None = None
    pieces: tuple[Piece, ...] = ()
    retracted: bool = False
    finish_reason: str | None = None
    error: str | None = None
    outcome: Outcome | None = None
    choice: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Ticket:
    """A submitted row or search. `send` receives the updates of the row. The worker's thread calls
    it, or the thread that cancels a waiting job, so it must not block and must not call the worker.
    For a search, the updates of the chosen row come once the search has ended."""

    job: Row | Search
    send: Callable[[list[Update]], Any]

    @property
    def size(self) -> int:
        """Maximum number of rows that run at the same time."""
        return self.job.forks if isinstance(self.job, Search) else 1

    @property
    def rows(self) -> Sequence[Row]:
        """The rows so far."""
        return self.job.rows if isinstance(self.job, Search) else [self.job]

    @property
    def running(self) -> list[Row]:
        """The rows that have not ended."""
        return [row for row in self.rows if row.finish_reason is None]


class Worker:
    """Runs submitted rows and searches in parallel. All methods may be called from any thread.

    `tokens` counts the committed tokens by regime, `retracted` the retracted ones, `finished` the
    rows by finish reason, `failures` the restarts of the engine. Other threads may use
    `new_row` and `programs` of the `engine`, nothing else.
    """

    def __init__(self, engine: Engine, *, slots: int, queue: int) -> None:
        """`slots` is the engine's number of slots, `queue` the maximum number of waiting rows."""
        self.tokens: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.retracted = self.failures = 0
        self.engine = engine
        self.slots = slots
        self.max_rows = slots + queue  # of a request
        self._max_waiting = queue
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._calls = ThreadPoolExecutor(1, "calls")
        self._jobs: list[Future[Any]] = []
        self._running: dict[int, Ticket] = {}  # by the id of the job
        self._begun: deque[Row] = deque()  # of the newest search, not fetched by the engine yet
        self._cancelled: list[Ticket] = []
        self._closing = False
        self._updates: dict[Ticket, list[Update]] = {}  # of this chunk
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self._thread.is_alive() and not self._closing

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Submits jobs whose requests were checked, all or none. ApiError if the queue is full
        (429) or the worker is closing (503)."""
        with self._changed:
            free = max(self.slots - _size(self._running.values()), 0)
            self._check_room(_size(self._queue) + _size(tickets) - free)
            self._queue.extend(tickets)
            self._changed.notify()

    def call(self, call: Callable[[], Any]) -> "Future[Any]":
        """Runs a call that needs the device next to the rows, one at a time, in a separate thread,
        because it may compile. As many calls may wait as rows. ApiError as `submit`."""
        with self._changed:
            self._jobs = [one for one in self._jobs if not one.done()]
            self._check_room(sum(not one.running() for one in self._jobs))
            self._jobs.append(future := self._calls.submit(call))
        return future

    def _check_room(self, waiting: int) -> None:
        if self._closing:
            raise try_again("the server is shutting down", 10)
        if waiting > self._max_waiting:
            raise try_again("too many requests wait", 1, status=429, code="queue_full")

    def cancel(self, ticket: Ticket) -> None:
        """Ends a job, if it runs or waits. Its last update follows."""
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self.finished["cancelled"] += 1
                ticket.send([Update(finish_reason="cancelled")])
            elif id(ticket.job) in self._running:
                self._cancelled.append(ticket)

    def stats(self) -> tuple[int, int]:
        """Returns the number of running rows, and of waiting rows and calls."""
        with self._changed:
            waiting = sum(not (job.done() or job.running()) for job in self._jobs)
            # No row of a search runs while it decides how to continue.
            running = sum(max(len(ticket.running), 1) for ticket in self._running.values())
            return running, _size(self._queue) + waiting

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.stats() == (0, 0) and all(job.done() for job in self._jobs)

    def refuse(self) -> None:
        """Rejects new requests; running ones finish. A signal handler may call it."""
        self._closing = True

    def close(self) -> None:
        """Finishes all submitted rows, then ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._calls.shutdown(cancel_futures=True)

    # In the thread

    def offer(self, ticket: Ticket, choice: Mapping[str, Any]) -> None:
        """Adds a choice to the updates of a row. Hooks of its request call it."""
        self._updates.setdefault(ticket, []).append(Update(choice=choice))

    def _serve(self) -> None:
        while True:
            try:
                for event in self.engine.run(self._source(), self._between):
                    self._note(event, event.row.finish_reason)
                self._send()
                return
            except BaseException:  # a library's panic is not an Exception
                _LOG.exception("the engine failed and starts anew")
                self._fail()

    def _fail(self) -> None:
        """Ends the running rows with an error. The engine is as before its run."""
        end = Update(finish_reason="error", error="the engine failed, and started anew")
        with self._changed:
            self.failures += 1
            self.finished["error"] += sum(len(one.running) for one in self._running.values())
            for ticket in self._running.values():
                self._updates.setdefault(ticket, []).append(end)
            self._running.clear()
            self._begun.clear()
            self._cancelled.clear()
        self._send()

    def _source(self) -> Iterator[Request | None]:
        """Yields the requests, None if none waits but others run. Blocks while nothing runs."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._running or self._closing)
                if self._queue and not self._begun:
                    ticket = self._queue.popleft()
                    job = ticket.job
                    self._running[id(job)] = ticket
                    if isinstance(job, Search):
                        job.begin(self.engine)
                    self._begun.extend(ticket.rows)
                elif not self._running:
                    return
            yield self._begun.popleft().request if self._begun else None

    def _between(self) -> None:
        """Ends the cancelled rows and sends the updates of the chunk."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        for ticket in cancelled:
            if id(ticket.job) not in self._running:
                continue
            if isinstance(ticket.job, Search):  # its outcome is that of its tokens so far
                for row in ticket.running:
                    if row in self._begun:
                        self._begun.remove(row)
                        row.finish_reason = "cancelled"
                        continue
                    for event in self.engine.end(row):
                        self._count(event)
                self._end_search(ticket.job, "cancelled")
                continue
            *events, last = self.engine.end(ticket.job)
            for event in events:
                self._note(event, None)
            self._note(last, last.row.finish_reason)
        self._send()

    def _note(self, event: Event, reason: str | None) -> None:
        self._count(event)
        row, search = event.row, event.row.request.tag
        if isinstance(search, Search):
            if reason is not None:
                self.finished[reason] += 1
            if search.advance(self.engine):
                self._end_search(search)
            return
        update = Update(event.token, event.pieces, event.retracted, reason, row.error)
        self._updates.setdefault(self._running[id(row)], []).append(update)
        if reason is not None:
            with self._changed:
                self.finished[reason] += 1
                del self._running[id(row)]

    def _count(self, event: Event) -> None:
        if event.token is not None and event.retracted:
            self.retracted += 1
        elif event.token is not None:
            self.tokens[event.token.regime] += 1

    def _end_search(self, search: Search, reason: str | None = None) -> None:
        """Adds the updates of the chosen row, by default with its own finish reason."""
        outcome = search.outcome(last_answer)
        with self._changed:
            # The engine ended these rows without an event.
            self.finished["cancelled"] += [r.finish_reason for r in search.rows].count("cancelled")
            ticket = self._running.pop(id(search))
        for row in search.rows:  # a kept row does not retain the others, nor do its continuations
            row.request = replace(row.request, tag=search.request.tag)
        row, text = outcome.row, outcome.row.text  # without the stop string that ended it
        updates = [] if row.log else [Update()]
        for token, retracted in row.log:
            new = "" if retracted else text[: len(token.text)]
            text = text[len(new) :]
            updates.append(Update(token, (Piece(new, token),), retracted))
        reason = reason or row.finish_reason
        updates[-1] = replace(updates[-1], finish_reason=reason, error=row.error, outcome=outcome)
        self._updates[ticket] = updates

    def _send(self) -> None:
        pending, self._updates = self._updates, {}
        for ticket, updates in pending.items():
            try:
                ticket.send(updates)
            except RuntimeError:  # its event loop is closed
                _LOG.debug("an event loop ended before its requests")


def _size(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.size for ticket in tickets)
