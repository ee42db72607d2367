"""Bytes in and out: bodies, JSON, server-sent events, errors in the API's form."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from entropix_jax.errors import UserError
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.worker import Closing, QueueFull

MOST_BYTES = 4 * 2**20  # of a body
_SECONDS = 30.0  # for a body to arrive
WAIT = 3.0  # seconds of a stream without news, until a comment says why
_GONE = 499  # nobody reads this answer

Result = TypeVar("Result")
# Caused by a request, or by what others do: no defect.
EXPECTED = (ApiError, UserError, QueueFull, Closing)


async def read_body(request: Request) -> bytes:
    """A JSON body. ApiError if it is too large, too slow, or said to be something else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the content type must be application/json", status=415)
    return await read_bytes(request)


async def read_bytes(request: Request, most: int = MOST_BYTES) -> bytes:
    """Any body. ApiError if it is too large, or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise ApiError(f"the body has more than {most} bytes", status=413)
    except TimeoutError:
        raise ApiError("the body did not arrive", status=408) from None
    return bytes(body)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON. What is infinite or no number is null."""
    return Response(_json(value), status, headers, "application/json")


def error_answer(error: Exception) -> Response:
    """The answer to a request that fails, see EXPECTED; any other error is a defect."""
    told = as_api_error(error)
    return json_answer(told.to_json(), told.status, told.headers)


def as_api_error(error: Exception) -> ApiError:
    """An error in the API's form."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(str(error))
    if isinstance(error, QueueFull):
        told = "too many requests wait: try again later"
        return ApiError(told, status=429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, Closing):
        return ApiError("the server is shutting down", status=503, headers={"Retry-After": "10"})
    return ApiError("the server failed", status=500)


def too_late() -> ApiError:
    """Returns the 503 for requests that timed out."""
    told = "the request timed out: try again later"
    return ApiError(told, status=503, code="timeout", headers={"Retry-After": "10"})


def event(value: Any) -> bytes:
    """A server-sent event of JSON, named by its `type` where that is one of the Responses API."""
    kind = value.get("type")
    name = b"" if kind is None else f"event: {kind}\n".encode()
    return name + b"data: " + _json(value) + b"\n\n"


async def events(
    values: AsyncGenerator[Any, None], state: Callable[[], str], wait: float = WAIT
) -> AsyncIterator[bytes]:
    """A stream of the API: an event for each value, and for an error; or [DONE] at the end. After
    each `wait` seconds without a value there is a comment, the `state`."""
    try:
        async with aclosing(values):
            while True:
                coming = asyncio.ensure_future(anext(values))
                try:
                    while not (await asyncio.wait((coming,), timeout=wait))[0]:
                        yield f": {state()}\n\n".encode()
                    value = coming.result()
                except StopAsyncIteration:
                    break
                finally:
                    if not coming.done():  # the client has left
                        coming.cancel()
                        await asyncio.wait((coming,))
                yield event(value)
    except EXPECTED as error:
        yield event(as_api_error(error).to_json())
        return
    yield b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's result; the work is cancelled once the client goes away."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leave())
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else Response(status_code=_GONE)
    finally:
        doing.cancel()
        leaving.cancel()


def _json(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="null")
