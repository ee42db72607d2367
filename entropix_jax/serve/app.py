"""The routes of the server."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from entropix_jax.engine.preparation import CalibratedSampler, describe_token
from entropix_jax.engine.running import find_no_token
from entropix_jax.engine.score import ScoredToken, score_tokens
from entropix_jax.engine.state import Recording
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import preset_names
from entropix_jax.serve.answers import Answer, Choice
from entropix_jax.serve.guard import Guard
from entropix_jax.serve.kept import Kept, KeptRow
from entropix_jax.serve.page import document, icon, static
from entropix_jax.serve.responses import Response as ResponseOf
from entropix_jax.serve.responses import Responses
from entropix_jax.serve.rows import KeptRows
from entropix_jax.serve.schema import (
    MOST_TOP,
    ApiError,
    Body,
    Chat,
    Completion,
    Detokenize,
    Generating,
    Score,
    Tokenize,
    parse,
)
from entropix_jax.serve.wanted import (
    Served,
    Wanted,
    check_model,
    want_chat,
    want_completion,
    want_more,
)
from entropix_jax.serve.wire import (
    EXPECTED,
    error_answer,
    events,
    json_answer,
    read_body,
    too_late,
    unless_gone,
)
from entropix_jax.serve.worker import Ticket, Update, Worker

AnyGenerating = TypeVar("AnyGenerating", bound=Generating)
KEEP = 32768  # tokens of rows that are kept
_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Run:
    """Rows that were handed in, and what happens to them."""

    def __init__(self, worker: Worker, kept: Kept, wanted: Wanted, limit: float) -> None:
        """Ends the rows after `limit` seconds. QueueFull or Closing if they are not taken."""
        rows, begun = wanted.new_rows(), wanted.begun
        loop = asyncio.get_running_loop()
        self._worker = worker
        self._told: asyncio.Queue[tuple[int, list[Update]]] = asyncio.Queue()
        self._tickets = [
            Ticket(row, loop, partial(self._note, number)) for number, row in enumerate(rows)
        ]
        worker.submit(self._tickets)
        self._kept, self.ids = kept, list[str]()
        self._skip = 0 if begun is None else begun.skip
        if wanted.own.keep:
            given = () if begun is None else begun.given
            self.ids = [kept.put(KeptRow(row, given)) for row in rows]
        self._late = False
        self._timer = loop.call_later(limit, self._stop)

    async def updates(self) -> AsyncGenerator[tuple[int, list[Update]], None]:
        """The number of a row and what happened to it, until all have ended. The rows end with the
        iteration. ApiError if the time was over before one of them had a slot."""
        left = len(self._tickets)
        try:
            while left:
                number, updates = await self._told.get()
                if self._late and all(ticket.row.started is None for ticket in self._tickets):
                    raise too_late()
                left -= updates[-1].finish_reason is not None
                yield number, updates
        finally:
            self.end()

    def end(self) -> None:
        """Ends the rows that have not ended."""
        self._timer.cancel()
        self._cancel()

    def _note(self, number: int, updates: list[Update]) -> None:
        if self.ids and updates[-1].finish_reason is not None:
            self._kept.settle(self.ids[number])
        if self._skip:  # what is forced once more is no news
            skipped = updates[: self._skip]
            self._skip -= sum(update.token is not None for update in skipped)
            ends = [replace(u, token=None, pieces=()) for u in skipped if u.finish_reason]
            updates = ends + updates[len(skipped) :]
        if updates:
            self._told.put_nowait((number, updates))

    def _stop(self) -> None:
        self._late = True
        self._cancel()

    def _cancel(self) -> None:
        for ticket in self._tickets:
            self._worker.cancel(ticket)


class Stream(StreamingResponse):
    """The events of a run, which ends with the answer: also where its client leaves before the run
    is iterated."""

    def __init__(
        self, run: Run, values: AsyncGenerator[dict[str, Any], None], state: Callable[[], str]
    ) -> None:
        super().__init__(events(values, state), 200, _STREAM, "text/event-stream")
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.end()


class Api:
    """The handlers. `limit` is the most seconds that a request's rows may take; if `strict`,
    unknown keys are errors."""

    def __init__(
        self, served: Served, worker: Worker, kept: Kept, limit: float, *, strict: bool = False
    ) -> None:
        self._served = served
        self._strict = strict
        self._kept = kept
        self._worker = worker
        self._limit = limit
        self._created = int(time.time())

    # Generation

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, Completion, self._want, chat=False)

    def _want(self, served: Served, body: Completion) -> Callable[[], Wanted]:
        place = body.entropix.begin
        if place is None:
            return partial(want_completion, served, body)
        return partial(want_more, served, body, self._kept.get(place.row))

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""

        def want(served: Served, body: Chat) -> Callable[[], Wanted]:
            return partial(want_chat, served, body)

        return await self._generate(request, Chat, want, chat=True)

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        body = parse(Responses, await read_body(request), strict=self._strict)
        chat = body.to_chat()
        wanted, answer = await self._prepare(
            chat, partial(want_chat, self._served, chat), chat=True
        )
        answer = replace(answer, warnings=_warnings(body))
        made = ResponseOf(body, answer.number)

        async def stream() -> Response:
            run = self._run(wanted, answer)
            chunks = _chunks(answer, [], run, usage=True)
            return Stream(run, made.events(chunks), self._state)

        async def whole() -> Response:
            return json_answer(made.whole(await self._gather(wanted, answer)))

        return await unless_gone(request, stream() if body.stream else whole())

    async def _generate(
        self,
        request: Request,
        kind: type[AnyGenerating],
        want: Callable[[Served, AnyGenerating], Callable[[], Wanted]],
        *,
        chat: bool,
    ) -> Response:
        body = parse(kind, await read_body(request), strict=self._strict)
        wanted, answer = await self._prepare(body, want(self._served, body), chat=chat)
        if not body.stream:

            async def whole() -> Response:
                return json_answer(await self._gather(wanted, answer))

            return await unless_gone(request, whole())
        usage = body.stream_options.include_usage
        return await unless_gone(request, self._stream(wanted, answer, usage=usage))

    async def _prepare(
        self, body: Generating, want: Callable[[], Wanted], *, chat: bool
    ) -> tuple[Wanted, Answer]:
        """Returns the checked rows that a request asks for, and the answer to fill."""
        served = self._served
        check_model(served, body)
        if body.rows > self._worker.most:
            told = f"{body.rows} rows are requested, at most {self._worker.most} are possible"
            raise ApiError(told, param="n")
        # A long text takes the tokenizer a while.
        wanted = await asyncio.to_thread(want)
        if body.entropix.keep and not self._kept.most:
            raise ApiError("entropix.keep: this server keeps no rows (--keep)", param="entropix")
        for one in wanted.new_rows()[:: wanted.choices]:
            self._worker.check(one.request)
        choices = [
            Choice(served.model, wanted, index, wanted.prompts[index // wanted.choices], chat=chat)
            for index in range(len(wanted.prompts) * wanted.choices)
        ]
        read = sum(len(prompt.tokens) for prompt in wanted.prompts)
        return wanted, Answer(served.name, chat, choices, read, warnings=_warnings(body))

    async def _stream(self, wanted: Wanted, answer: Answer, *, usage: bool) -> Response:
        echoes = await self._echoes(wanted, answer)
        run = self._run(wanted, answer)
        return Stream(run, _chunks(answer, echoes, run, usage=usage), self._state)

    def _state(self) -> str:
        """Returns why a stream has no news."""
        program = self._worker.compiling
        return "waiting" if program is None else f"compiling {program}"

    def _run(self, wanted: Wanted, answer: Answer) -> Run:
        run = Run(self._worker, self._kept, wanted, self._limit)
        for choice, number in zip(answer.choices, run.ids, strict=False):
            choice.kept = number
        return run

    async def _gather(self, wanted: Wanted, answer: Answer) -> dict[str, Any]:
        echoes = await self._echoes(wanted, answer)
        updates: dict[int, list[Update]] = {}
        async for number, more in self._run(wanted, answer).updates():
            updates.setdefault(number, []).extend(more)
        parts = {choice.index: [*echoes[choice.index]] for choice in answer.choices}
        for number, own in updates.items():
            parts[number].append(answer.choices[number].part(own))
        return answer.whole(parts)

    async def _echoes(self, wanted: Wanted, answer: Answer) -> list[list[dict[str, Any]]]:
        """For each choice the part that repeats its prompt, if one does."""
        if not wanted.echo:
            return [[] for _ in answer.choices]
        scored: list[list[ScoredToken]] = []
        for prompt in wanted.prompts:
            asked = wanted.top is not None and len(prompt.tokens) > 1
            sampler = wanted.request.sampler
            scored.append(await self._score(prompt.tokens, sampler) if asked else [])
        return [[c.echo(scored[c.index // wanted.choices])] for c in answer.choices]

    # Scores

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`: the metrics of a given text."""
        served = self._served
        body = parse(Score, await read_body(request), strict=self._strict)
        check_model(served, body)
        sampler = served.choose_sampler(body.entropix, {})
        encode = partial(served.model.tokenizer.encode, body.input, add_bos=True)
        ids = await asyncio.to_thread(encode)
        if len(ids) > served.context:
            told = f"the text has {len(ids)} tokens, at most {served.context} are possible"
            raise ApiError(told, param="input", code="context_length_exceeded")

        async def answer() -> Response:
            tokens = [token.to_json() for token in await self._score(ids, sampler)]
            for token in tokens:
                token["top"] = token["top"][: body.top]
            usage = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
            found = {"object": "score", "model": served.name, "tokens": tokens, "usage": usage}
            told = _warnings(body)
            return json_answer(found | ({"warnings": told} if told else {}))

        return await unless_gone(request, answer())

    async def _score(self, ids: Sequence[int], sampler: CalibratedSampler) -> list[ScoredToken]:
        """The scores of a text, read whole, between two chunks of steps. ApiError if that does not
        end in time."""
        model = self._served.model
        config, recording = model.config, Recording(top=min(MOST_TOP, model.config.vocab_size))

        gone = threading.Event()  # nobody waits

        def read() -> list[ScoredToken]:
            scored = score_tokens(
                model, ids, sampler, context=config.max_positions, recording=recording
            )
            return [*takewhile(lambda _: not gone.is_set(), scored)]

        try:
            async with asyncio.timeout(self._limit):
                return await asyncio.wrap_future(self._worker.call(read))
        except TimeoutError:
            raise too_late() from None
        finally:
            gone.set()

    # Tokens

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: the token ids of a text or of a chat."""
        body, tokenizer = parse(Tokenize, await read_body(request)), self._served.model.tokenizer
        text = body.prompt if body.content is None else body.content
        if (text is None) == (body.messages is None):
            raise ApiError("give one of 'prompt' and 'messages'", param="prompt")

        def encode() -> list[int]:
            if body.messages is None:
                return tokenizer.encode(str(text), add_bos=body.add_special_tokens)
            rendered = tokenizer.render_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
            return tokenizer.encode(rendered, add_bos=True)

        tokens = await asyncio.to_thread(encode)
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": self._served.context}
        return json_answer(found)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids, special tokens included."""
        body, model = parse(Detokenize, await read_body(request)), self._served.model
        if (strange := find_no_token(model, body.tokens)) is not None:
            raise ApiError(f"tokens holds {describe_token(model, strange)}", param="tokens")
        text = model.tokenizer.decode(body.tokens, skip_special=False)
        return json_answer({"prompt": text, "content": text})

    # What the server is, and how it is

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_answer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        if request.path_params["name"] != self._served.name:
            raise ApiError("no such model", status=404, code="model_not_found")
        return json_answer(self._model())

    def _model(self) -> dict[str, Any]:
        own: dict[str, Any] = {"context": self._served.context, "samplers": preset_names()}
        own |= {"top": self._served.top, "keep": self._kept.most}
        own |= {"chat": self._served.model.is_chat_model}
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "entropix_jax",
            "entropix": own,
        }

    async def health(self, request: Request) -> Response:
        """`GET /health`."""
        alive = self._worker.alive
        return json_answer({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' text form."""
        worker = self._worker
        running, waiting = worker.stats()
        # A row that the engine has fetched ahead waits, too.
        ahead = max(running - worker.slots, 0)
        gauges = {"slots": worker.slots, "slots_running": running - ahead}
        gauges |= {"queue_waiting": waiting + ahead, "kept_tokens": self._kept.size}
        lines = [f"# TYPE entropix_{n} gauge\nentropix_{n} {value}" for n, value in gauges.items()]
        tokens = {f'{{regime="{regime}"}}': worker.tokens[regime] for regime in REGIMES}
        ends = {f'{{reason="{reason}"}}': n for reason, n in sorted(worker.finished.items())}
        single = {"retracted": worker.retracted, "engine_failures": worker.failures}
        counters = {"tokens": tokens, "rows_finished": ends}
        counters |= {name: {"": value} for name, value in single.items()}
        for name, values in counters.items():
            lines.append(f"# TYPE entropix_{name}_total counter")
            lines += [f"entropix_{name}_total{label} {value}" for label, value in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")


def _warnings(body: Body) -> list[str]:
    return [f"'{key}' is unknown and was ignored" for key in body.unknown]


async def _chunks(
    answer: Answer, echoes: Sequence[Sequence[dict[str, Any]]], run: Run, *, usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream; one is all that happened to a row in a chunk of steps. Where
    log-probabilities are asked for it has at most one token: clients that show them take a chunk
    for a token."""

    def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
        return answer.frame([*choices], chunk=True) | ({"usage": None} if usage else {})

    for choice in answer.choices if answer.chat else ():
        delta = {"role": "assistant", "content": ""}
        none = {"logprobs": None, "finish_reason": None}
        own = {} if choice.kept is None else {"entropix": {"row": choice.kept}}
        yield chunk({"index": choice.index, "delta": delta, **none, **own})
    for part in (part for parts in echoes for part in parts):
        yield chunk(part)
    async with aclosing(run.updates()) as told:
        async for number, updates in told:
            choice = answer.choices[number]
            for some in ([one] for one in updates) if choice.has_logprobs else (updates,):
                yield chunk(choice.part(some))
    if usage:
        yield answer.frame([], chunk=True) | {"usage": answer.usage()}


def make_app(
    served: Served,
    worker: Worker,
    *,
    limit: float = 600.0,
    keep: int = KEEP,
    host: str = "127.0.0.1",
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    strict: bool = False,
) -> Starlette:
    """The server as an ASGI application, on a worker that was started. For `limit` and `strict`
    see `Api`, for `keep` `Kept`, for the others `Guard`."""
    kept = Kept(keep)
    api = Api(served, worker, kept, limit, strict=strict)
    rows = KeptRows(served, kept)
    routes = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/score", api.score, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/rows", rows.open, methods=["POST"]),
        Route("/v1/rows/{id}", rows.about),
        Route("/v1/rows/{id}", rows.delete, methods=["DELETE"]),
        Route("/v1/rows/{id}/trace", rows.trace),
        Route("/v1/rows/{id}/report", rows.report),
        Route("/health", api.health),
        Route("/", document),
        Route("/static/{name}", static),
        Route("/favicon.ico", icon),
        Route("/metrics", api.metrics),
    ]
    middleware = [Middleware(Guard, host=host, keys=keys, origins=origins)]
    if origins:
        allowed: dict[str, Any] = {
            "allow_headers": ["*"],
            "allow_methods": ["GET", "POST", "DELETE"],
        }
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=origins, **allowed))
    handlers: dict[Any, Any] = dict.fromkeys(EXPECTED, _refuse)
    handlers |= {HTTPException: _misdirected, ClientDisconnect: _gone, Exception: _refuse}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _refuse(request: Request, error: Exception) -> Response:
    return error_answer(error)


async def _misdirected(request: Request, error: HTTPException) -> Response:
    """A path or a method that is not there."""
    told = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers or {})
    return error_answer(ApiError(told, status=error.status_code, headers=headers))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
