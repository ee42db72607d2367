"""Connections of the HTTP server, which answers and shuts down with any clients."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from entropix_jax.serve.http import HttpServer, _log_error
from tests.support.servers import wait_until


async def hello(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"hello {len(body)}")


@contextmanager
def serving(
    answer: Any = hello, **options: Any
) -> Iterator[tuple[HttpServer, tuple[str, int], list[bool]]]:
    """Yields a server with one route, its address, and its idle flag."""
    idle = [True]
    app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
    server = HttpServer(app, lambda: idle[0], grace=0.2, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield server, place, idle
        finally:
            idle[0] = server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_shutdown_does_not_wait_for_clients_that_do_not_read(
    busy: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The server shuts down shortly after its last work, and not earlier."""
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            yield bytes(2**20)
            sent += 1

    async def endless(request: Request) -> Response:
        return StreamingResponse(parts())

    with serving(endless) as (server, place, idle), socket.create_connection(place) as client:
        idle[0] = False
        client.sendall(HEAD + b"\r\n")
        wait_until(lambda: sent > 0)
        time.sleep(0.2)
        assert sent < 100  # the sockets are full
        began = time.monotonic()
        server.should_exit = True
        time.sleep(busy)
        idle[0] = True
        wait_until(lambda: not server.server_state.connections)
        assert busy + 0.2 <= time.monotonic() - began < 20
    assert caplog.text == ""


HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def ask(place: tuple[str, int]) -> bytes:
    with socket.create_connection(place, timeout=10) as client:
        client.sendall(HEAD + b"Connection: close\r\n\r\n")
        return b"".join(iter(lambda: client.recv(4096), b""))


def read_until(client: socket.socket, text: bytes) -> None:
    found = b""
    while text not in found:
        more = client.recv(4096)
        assert more, found
        found += more


def is_closed(client: socket.socket) -> bool:
    client.settimeout(10)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_incomplete_head_times_out() -> None:
    with serving(head=0.5) as (_, place, _), ExitStack() as stack:

        def connect(*parts: bytes) -> socket.socket:
            client = stack.enter_context(socket.create_connection(place, timeout=10))
            for part in parts:
                client.sendall(part)
            return client

        silent, part = connect(), connect(HEAD + b"X-")
        again = connect(HEAD + b"\r\n")
        read_until(again, b"hello 0")
        again.sendall(HEAD)  # the head of a second request
        began = time.monotonic()
        # The body has a separate time limit.
        slow = connect(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        assert all(map(is_closed, (silent, part, again)))
        assert time.monotonic() - began < 5
        time.sleep(0.6)
        slow.sendall(b"b")
        read_until(slow, b"hello 2")


def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Above the bound, connections without a request are closed, oldest first, with one warning."""
    with serving(max_open=8) as (server, place, _), ExitStack() as stack:
        clients = []
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(place, timeout=10))
            client.sendall(HEAD + b"X-")
            clients.append(client)
            assert len(clients) % 10 or b"hello" in ask(place)
        wait_until(lambda: len(server.server_state.connections) <= 8)
        assert all(map(is_closed, clients[:32]))
    assert len(caplog.records) == 1
    assert "8 connections: closing idle ones" in caplog.text


def test_idle_connections_do_not_block_others() -> None:
    """Connections with unfinished bodies do not block others either."""
    with serving(max_open=3) as (_, place, _), ExitStack() as stack:
        for _ in range(3):
            idle = stack.enter_context(socket.create_connection(place, timeout=10))
            idle.sendall(HEAD + b"\r\n")
            read_until(idle, b"hello")
            assert b"hello" in ask(place)
            body = stack.enter_context(socket.create_connection(place, timeout=10))
            body.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
            assert b"hello" in ask(place)


def test_protocol_errors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (_, place, _):
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        for _ in range(5):
            with socket.create_connection(place, timeout=10) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert b"400" in client.recv(4096)
            with socket.create_connection(place, timeout=10) as client:
                client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n")
                assert b"400" in client.recv(4096)
        upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        with socket.create_connection(place, timeout=10) as client:
            client.sendall(HEAD + upgrade)
            read_until(client, b"hello")
        context = {"message": "socket.accept() out of system resource", "exception": OSError(24)}
        loop: Any = None
        for _ in range(1000):
            _log_error(loop, context)
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert lines == ["Invalid HTTP request received.", f"{context['message']}: OSError(24)"]


def test_new_connections_are_answered_until_shutdown() -> None:
    with serving() as (server, place, idle):
        idle[0] = False
        server.should_exit = True
        time.sleep(0.3)
        assert b"hello" in ask(place)
        idle[0] = True
        wait_until(lambda: not server.server_state.connections)

        def refused() -> bool:
            try:
                return not ask(place)
            except OSError:
                return True

        wait_until(refused)


def test_the_bound_is_below_the_descriptor_limit() -> None:
    """Runs in another process, since limits apply to a process."""
    code = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "from entropix_jax.serve.http import free_connections as free;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512)); a = free();"
        "b = resource.getrlimit(resource.RLIMIT_NOFILE)[0]; print(a, b)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most, soft = map(int, told.stdout.split())
    assert soft == 512
    assert 256 < most <= 512 - 96
