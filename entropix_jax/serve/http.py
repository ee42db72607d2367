"""The HTTP server, which leaves signals to the command."""

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

_KEEP_ALIVE = 15  # seconds that a connection may idle


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set; what it answers then is answered whole."""

    def __init__(self, app: ASGIApp) -> None:
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
