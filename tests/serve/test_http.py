"""The HTTP server ends, whatever its clients do."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from entropix_jax.serve.http import HttpServer
from tests.support.servers import wait_until


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_it_ends_though_a_client_does_not_read(
    busy: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A while after the last work is done, and not before."""
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            yield bytes(2**20)
            sent += 1

    async def endless(request: Request) -> Response:
        return StreamingResponse(parts())

    until = [float("inf")]
    app = Starlette(routes=[Route("/", endless)])
    server = HttpServer(app, lambda: time.monotonic() > until[0], grace=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: sent > 0)
            time.sleep(0.2)
            assert sent < 100  # the sockets are full
            began = time.monotonic()
            until[0] = began + busy
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
            assert busy + 0.2 <= time.monotonic() - began < 20
    assert caplog.text == ""
