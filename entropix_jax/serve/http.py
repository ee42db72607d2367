"""The HTTP server, with bounds for slow, idle and vanished clients."""

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
_LOOK = 0.05  # seconds between two checks of whether rows run
BACKLOG = 2048  # connections that wait to be accepted
_AT_ONCE = 16  # connections that are accepted at once
_MAX_FILES = 65536  # open files of the process
_RESERVE = 64  # open files for other things than connections
_MINUTE = 60.0
_LOG = logging.getLogger(__name__)


class _OncePerMinute(logging.Filter):
    """Drops a warning if an equal one was logged in the last minute."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        is_new = now - self._last.get(record.msg, -_MINUTE) >= _MINUTE
        if is_new:
            self._last[record.msg] = now
        return is_new or record.levelno > logging.WARNING


_FILTER = _OncePerMinute()
_LOG.addFilter(_FILTER)


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The exception handler of the event loop. The system's errors, such as too many open files,
    are no defects."""
    error = context.get("exception")
    if isinstance(error, OSError):
        _LOG.warning(f"{context['message']}: %r", error)
    else:
        loop.default_exception_handler(context)


def free_connections() -> int:
    """Returns how many connections the process may hold: its open files, up to the hard limit,
    without those that are open, those that one accept may add, and a reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft < limit:
        with contextlib.suppress(ValueError, OSError):  # a kernel may have a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    taken = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _RESERVE
    # A connection that the bound closes is gone one accept later.
    return max(soft - taken - 2 * _AT_ONCE - _RESERVE, 1)


class _Connection(H11Protocol):
    """A connection whose requests must have their head within `head` seconds. Beyond
    `max_open` connections, the one that has waited longest for its client is closed."""

    def __init__(self, *, max_open: int, head: float, waiting: _Waiting, **options: Any) -> None:
        super().__init__(**options)
        self._max_open, self._head, self._waiting = max_open, head, waiting
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_open and self._waiting:
            _LOG.warning("%d connections: closing idle ones, oldest first", self._max_open)
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
        if self.cycle is not None:  # a malformed body: the application has lost its client
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """No-op: the request is answered without an upgrade."""

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


_Waiting = dict[_Connection, None]  # connections without a whole request, oldest first


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set, then finishes its running requests. It
    leaves signals to the command."""

    def __init__(
        self,
        app: ASGIApp,
        idle: Callable[[], bool],
        *,
        grace: float = 5.0,
        head: float = 20.0,
        max_open: int | None = None,
    ) -> None:
        """Configures the server.

        Args:
            idle: returns whether nothing runs or waits.
            grace: seconds for clients to read the rest once the server is idle.
            head: seconds for the head of a request to arrive.
            max_open: maximum number of connections, by default what the limit of open files allows.
        """
        logging.getLogger("uvicorn.error").addFilter(_FILTER)
        max_open = free_connections() if max_open is None else max_open
        connection: Any = partial(_Connection, max_open=max_open, head=head, waiting={})
        config = uvicorn.Config(
            app,
            http=connection,
            backlog=_AT_ONCE,  # connections that are accepted at once
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
        """Starts to accept connections. `BACKLOG` connections may wait for that."""
        asyncio.get_running_loop().set_exception_handler(_log_error)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits until nothing runs, while the application rejects new requests, then closes the
        connections. Those whose clients do not read are cut after the grace period."""
        while not self._idle():
            await asyncio.sleep(_LOOK)
        cut = asyncio.get_running_loop().call_later(self._grace, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        for connection in [*self.server_state.connections]:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
