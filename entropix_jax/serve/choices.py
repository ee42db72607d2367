"""Choices between two branches that clients make while their rows wait."""

import asyncio
import secrets
from concurrent.futures import Future

from entropix_jax.serve.schema import ApiError

SECONDS = 60.0  # until the row continues with the better branch


class OpenChoices:
    """The choices that wait for an answer, by id. Only `open` may be called from any thread."""

    def __init__(self) -> None:
        self._open: dict[str, Future[int | None]] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> tuple[str, "Future[int | None]"]:
        """Returns the id of a new choice and its future index. The index is None after `SECONDS`,
        by a timer of the event loop."""
        choice_id, future = secrets.token_urlsafe(16), Future[int | None]()
        self._open[choice_id] = future
        loop.call_soon_threadsafe(lambda: loop.call_later(SECONDS, self.close, choice_id))
        return choice_id, future

    def close(self, choice_id: str, index: int | None = None) -> bool:
        """Sets the index of a choice. Returns whether the choice was open."""
        future = self._open.pop(choice_id, None)
        if future is not None:
            future.set_result(index)
        return future is not None

    def choose(self, choice_id: str, index: int) -> None:
        """Sets the index of a choice. ApiError (404) if it is not open."""
        if not self.close(choice_id, index):
            message = "no such choice: it was made, or its time is over"
            raise ApiError(message, status=404, param="id", code="choice_not_found")
