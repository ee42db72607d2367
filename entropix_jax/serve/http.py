"""The HTTP server, which leaves signals to the command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_KEEP_ALIVE = 15  # seconds that a connection may idle
_GRACE = 5.0  # seconds for a client to read the rest, once all is done
_LOOK = 0.05  # seconds between two looks at that
_HEAD = 20.0  # seconds for the head of a request to arrive
BACKLOG = 2048  # connections that wait to be accepted
_AT_ONCE = 16  # connections that are accepted at once
_DESCRIPTORS = 65536  # open files of the process, at most
_RESERVE = 64  # of those for anything but connections
_MINUTE = 60.0
_LOG = logging.getLogger(__name__)


def _is_told_elsewhere(record: logging.LogRecord) -> bool:
    """A filter for what `_Connection` logs in its own words."""
    return record.msg != "Invalid HTTP request received."


def log_programs() -> None:
    """Logs from here on which programs compile while the server runs."""
    log = logging.getLogger("entropix_jax.engine.programs")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def free_connections() -> int:
    """Returns how many connections the process may hold: its descriptors, up to the hard limit,
    without those that are open, those that one look at the listener may add, and a reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft < most:
        with contextlib.suppress(ValueError, OSError):  # a kernel may have a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    taken = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _RESERVE
    # Those that the bound closes are gone one look later.
    return max(soft - taken - 2 * _AT_ONCE - _RESERVE, 1)


class Log:
    """Lines of the server's log: equal ones at most once a minute."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def warn(self, kind: str, detail: str = "") -> None:
        """Logs a line of a kind, with a detail of this case."""
        now = time.monotonic()
        if now - self._last.get(kind, -_MINUTE) >= _MINUTE:
            self._last[kind] = now
            _LOG.warning("%s%s", kind, detail)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The exception handler of an event loop."""
        error = context.get("exception")
        if isinstance(error, OSError):  # nothing to mend here
            self.warn(context["message"], f": {error!r}")
        else:
            loop.default_exception_handler(context)


class _Connection(H11Protocol):
    """A connection whose requests must have their head within a time. Beyond `most` connections the
    one that has waited longest for its client is closed."""

    def __init__(
        self, *, most: int, head: float, log: Log, waiting: _Waiting, **options: Any
    ) -> None:
        super().__init__(**options)
        self._most, self._head, self._log, self._waiting = most, head, log, waiting
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._most and self._waiting:
            told = f"{self._most} connections: closing idle ones"
            self._log.warn(told, ", oldest first")
            next(iter(self._waiting))._close()
        super().connection_made(transport)
        self._waiting[self] = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._expect_head()
        super().data_received(data)
        if self.cycle is not before:
            self._has_head()
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._waiting.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._waiting[self] = None
        else:  # a pipelined request
            self._has_head()

    def send_400_response(self, msg: str) -> None:
        client = "" if self.client is None else f" from {self.client[0]}"
        self._log.warn("a malformed HTTP request", client)
        if self.cycle is not None:  # its body is malformed: the application has lost its client
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as if it had not asked for an upgrade."""

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self._head, self._close)

    def _has_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._has_head()
        self._waiting.pop(self, None)
        self.transport.abort()


_Waiting = dict[_Connection, None]  # that wait for the rest of a request, or for one, in order


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set; what it answers then is answered whole, but
    to clients that do not read it once nothing else is to be done."""

    def __init__(
        self,
        app: ASGIApp,
        idle: Callable[[], bool],
        grace: float = _GRACE,
        *,
        head: float = _HEAD,
        most: int | None = None,
    ) -> None:
        """`idle` tells whether nothing is to be done. A request's head must be there within `head`
        seconds; there are at most `most` connections, by default as many as descriptors allow."""
        self._log = Log()
        logging.getLogger("uvicorn.error").addFilter(_is_told_elsewhere)
        most = free_connections() if most is None else most
        connection: Any = partial(_Connection, most=most, head=head, log=self._log, waiting={})
        config = uvicorn.Config(
            app,
            http=connection,
            backlog=_AT_ONCE,  # connections that one look at the listener accepts
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
        )
        super().__init__(config)
        self._idle = idle
        self._grace = grace

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections; as many as before may wait to be accepted."""
        asyncio.get_running_loop().set_exception_handler(self._log.handle)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what it has begun, and ends. Until that is done new requests are answered, too:
        the application refuses them."""
        while not self._idle():
            await asyncio.sleep(_LOOK)
        leaving = asyncio.ensure_future(self._leave())
        try:
            await super().shutdown(sockets)
        finally:
            leaving.cancel()

    async def _leave(self) -> None:
        """Cuts the connections that are left when nothing was to be done for a while."""
        since = time.monotonic()
        while time.monotonic() - since < self._grace:
            if not self._idle():
                since = time.monotonic()
            await asyncio.sleep(_LOOK)
        for connection in [*self.server_state.connections]:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
