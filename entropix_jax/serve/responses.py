"""`/v1/responses`: converts requests to chats, and answers to that API's responses and events."""

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field

from entropix_jax.serve.schema import (
    Body,
    Chat,
    Messages,
    OutputBudget,
    Seed,
    parse_values,
    unsupported,
)

# Parameters that a response repeats.
_REPEATED: dict[str, Any] = {
    "error": None,
    "metadata": {},
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "none",
    "tools": [],
    "truncation": "disabled",
}
_ECHOED = ("instructions", "max_output_tokens", "model", "temperature", "top_p")  # of the request
_SAME = {"model", "stream", "temperature", "top_p", "seed"}  # keys of a chat
_REFUSED = ("previous_response_id", "conversation", "prompt", "background")
_HINTS = {"include", "reasoning", "truncation", "max_tool_calls"}


def _as_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of an input: a text, or a list of items of the type `message`."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a text or a list of messages")
    for place, item in enumerate(value):
        if item.get("type", "message") != "message":
            kind = f"item {place} of type {item['type']!r}"
            raise ValueError(f"{kind} is not supported, only 'message'")
    return [{"role": item.get("role"), "content": item.get("content")} for item in value]


class _Format(BaseModel):
    """The form of an answer. Other keys are ignored."""

    type: str = "text"


class _Text(BaseModel):
    format: _Format = _Format()


class Responses(Body):
    """The body of a request. Nothing is stored, so it cannot name an earlier response."""

    harmless: ClassVar[frozenset[str]] = Body.harmless | _HINTS

    input: Annotated[Messages, BeforeValidator(_as_messages)]
    instructions: str | None = None
    max_output_tokens: OutputBudget = None
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Seed = None
    text: _Text = _Text()

    def to_chat(self) -> Chat:
        """Returns the request as a chat.

        Raises:
            ApiError: the request uses an unsupported feature.
        """
        extra = self.model_extra or {}
        for key in _REFUSED:
            if extra.get(key):
                raise unsupported(key)
        if (kind := self.text.format.type) != "text":
            message = f"text.format: type {kind!r} is not supported by this server, only 'text'"
            raise unsupported("text.format", message)
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        values = self.model_dump(include=_SAME, exclude_unset=True)
        values["messages"] = [*first, *self.input]
        values["max_completion_tokens"] = self.max_output_tokens
        values["stream_options"] = {"include_usage": True}
        return parse_values(Chat, values).model_copy(update={"entropix": self.entropix})


class ResponseForm:
    """Converts the chunks of a chat to the events of a response. The last one has all of it."""

    def __init__(self, body: Responses, number: str) -> None:
        self._body = body
        self._id, self._item = f"resp_{number}", f"msg_{number}"
        self._created = int(time.time())
        self._text = ""
        self._sequence = 0

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of a stream whose last chunk has the usage."""
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        usage, status = None, "completed"
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._frame("in_progress"))
        item = self._message("in_progress") | {"content": []}
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event("content_part.added", **place, part=self._part())
        async for chunk in chunks:
            usage = chunk["usage"]
            for choice in chunk["choices"]:
                if choice["finish_reason"] == "length":
                    status = "incomplete"
                if delta := choice["delta"]["content"]:
                    self._text += delta
                    yield self._event("output_text.delta", **place, delta=delta, logprobs=[])
        yield self._event("output_text.done", **place, text=self._text, logprobs=[])
        yield self._event("content_part.done", **place, part=self._part())
        yield self._event("output_item.done", output_index=0, item=self._message(status))
        yield self._event(status, response=self._frame(status, usage))

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self._sequence - 1, **values}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        message = {"id": self._item, "type": "message", "role": "assistant", "status": status}
        return {**message, "content": [self._part()]}

    def _frame(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response so far. It has `usage` once it has ended."""
        body, incomplete = self._body, {"reason": "max_output_tokens"}
        counts = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            **_REPEATED,
            **{name: getattr(body, name) for name in _ECHOED},
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": incomplete if status == "incomplete" else None,
            "output": [self._message(status)] if usage else [],
            "usage": counts,
            **body.warnings,
        }
