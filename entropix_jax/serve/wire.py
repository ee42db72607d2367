"""Bytes in and out: bodies, JSON, server-sent events, errors in the API's form."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from entropix_jax.errors import UserError
from entropix_jax.serve.schema import ApiError

MAX_BYTES = 4 * 2**20  # of a body
_SECONDS = 30.0  # for a body to arrive
_QUIET = 3.0  # seconds without an event before a stream's comment
_CLIENT_GONE = 499  # the status of an answer without a reader


async def read_body(request: Request) -> bytes:
    """Returns a JSON body. ApiError if it is too large, too slow, or of another content type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the content type must be application/json", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise ApiError(f"the body has more than {MAX_BYTES} bytes", status=413)
    except TimeoutError:
        raise ApiError("the body did not arrive", status=408) from None
    return bytes(body)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an answer of JSON. NaN and infinite numbers become null."""
    return Response(_json(value), status, headers, "application/json")


def error_answer(error: Exception) -> Response:
    """Returns the answer to a request that fails."""
    known = as_api_error(error)
    return json_answer(known.to_json(), known.status, known.headers)


async def refuse(request: Request, error: Exception) -> Response:
    """Answers a request that fails."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, HTTPException):  # the path or the method does not exist
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(message, status=error.status_code, headers=dict(error.headers or {}))
    return error_answer(error)


def as_api_error(error: Exception) -> ApiError:
    """Returns an error in the API's form. All errors but a `UserError` are defects (500)."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(str(error))
    return ApiError("the server failed", status=500)


async def events(values: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Yields server-sent events: one for each value, then [DONE], or an error. After each `_QUIET`
    seconds without a value it yields a comment."""
    try:
        while True:
            coming = asyncio.ensure_future(anext(values))
            try:
                while not (await asyncio.wait((coming,), timeout=_QUIET))[0]:
                    yield b": waiting\n\n"
                value = coming.result()
            except StopAsyncIteration:
                break
            finally:
                coming.cancel()  # no-op unless the client has disconnected
            yield _event(value)
    except UserError as error:
        yield _event(as_api_error(error).to_json())
        return
    yield b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the result of the work, which is cancelled if the client disconnects."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_CLIENT_GONE)
    finally:
        working.cancel()
        leaving.cancel()


def _event(value: dict[str, Any]) -> bytes:
    """Returns a server-sent event. Those of the Responses API are named by their `type`."""
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")
