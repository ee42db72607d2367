"""The HTTP server, which leaves signals to the command."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

_KEEP_ALIVE = 15  # seconds that a connection may idle
_GRACE = 5.0  # seconds for a client to read the rest, once all is done
_LOOK = 0.05  # seconds between two looks at that


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set; what it answers then is answered whole, but
    to clients that do not read it once nothing else is to be done."""

    def __init__(self, app: ASGIApp, idle: Callable[[], bool], grace: float = _GRACE) -> None:
        """`idle` tells whether nothing is to be done."""
        config = uvicorn.Config(
            app,
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what it has begun, and ends."""
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
