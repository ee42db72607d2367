"""The routes of the server."""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Receive, Scope, Send

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.methods import METHODS
from entropix_jax.engine.results import Row, Rows
from entropix_jax.engine.score import ScoredToken, score_tokens
from entropix_jax.engine.search import Search
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError
from entropix_jax.names import REGIMES
from entropix_jax.report.page import regime_rule
from entropix_jax.sampler.files import preset_names
from entropix_jax.serve.answers import Answer, Updates
from entropix_jax.serve.choices import OpenChoices
from entropix_jax.serve.guard import Guard
from entropix_jax.serve.kept import RowStore
from entropix_jax.serve.model import ServedModel
from entropix_jax.serve.page import PageFiles
from entropix_jax.serve.request import (
    GenerationRequest,
    chat_request,
    choose_method,
    completion_request,
    continuation_request,
)
from entropix_jax.serve.responses import ResponseForm, Responses
from entropix_jax.serve.schema import (
    MAX_TOP,
    ApiError,
    Chat,
    ChosenBranch,
    Completion,
    Generating,
    Score,
    parse,
    try_again,
)
from entropix_jax.serve.wire import events, json_answer, read_body, refuse, unless_gone
from entropix_jax.serve.worker import Ticket, Update, Worker

KEEP = 32768  # tokens of kept rows
# Writer, name and content type of each kind of file.
_FILES = {
    "trace": (Rows.save_trace, "row.jsonl", "application/x-ndjson"),
    "report": (Rows.save_report, "row.html", "text/html"),
}
# Browsers never run a row's text as this server's own page.
_FILE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "sandbox",
    "X-Content-Type-Options": "nosniff",
}
_STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Run:
    """The submitted rows, or the search, of an answer."""

    def __init__(
        self,
        worker: Worker,
        store: RowStore,
        choices: OpenChoices,
        answer: Answer,
        limit: float,
    ) -> None:
        """Submits the rows, and ends them after `limit` seconds."""
        self._loop, search = asyncio.get_running_loop(), answer.request.search
        requests = answer.request.requests
        if answer.request.body.entropix.ask:
            asks = [partial(self._ask, index) for index in range(len(requests))]
            requests = [replace(one, ask=ask) for one, ask in zip(requests, asks, strict=True)]
        rows = [] if search is not None else [*map(worker.engine.new_row, requests)]
        jobs: Sequence[Row | Search] = rows if search is None else [search]
        self._worker, self._store, self._answer = worker, store, answer
        self._choices, self._offered = choices, list[str]()
        self._updates: asyncio.Queue[tuple[int, list[Update]]] = asyncio.Queue()
        soon: Any = self._loop.call_soon_threadsafe
        self._tickets = [Ticket(job, partial(soon, self._note, i)) for i, job in enumerate(jobs)]
        worker.submit(self._tickets)
        self._keeps = answer.request.body.entropix.keep
        if self._keeps and search is None:
            for choice, row in zip(answer.choices, rows, strict=False):
                choice.row_id = store.put(row)
                choice.row_ids = [choice.row_id]
        self._timer = self._loop.call_later(limit, self.end)

    async def updates(self) -> Updates:
        """Yields the updates of the rows until all have ended. Raises ApiError if the time limit
        passed before any row had a slot."""
        running = len(self._tickets)
        while running:
            index, updates = await self._updates.get()
            rows = (row for ticket in self._tickets for row in ticket.rows)
            late = self._loop.time() >= self._timer.when()
            if late and all(row.started is None for row in rows):
                raise try_again("the request timed out", 10, code="timeout")
            running -= updates[-1].finish_reason is not None
            yield index, updates

    def end(self) -> None:
        """Ends the rows that have not ended."""
        self._timer.cancel()
        for choice_id in self._offered:
            self._choices.close(choice_id)
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    def _ask(self, index: int, row: int, texts: Sequence[str]) -> "Future[int | None]":
        """Offers the client of a row a choice between two branches, in the engine's thread."""
        choice_id, future = self._choices.open(self._loop)
        self._offered.append(choice_id)
        self._worker.offer(self._tickets[index], {"id": choice_id, "texts": [*texts]})
        return future

    def _note(self, index: int, updates: list[Update]) -> None:
        choice, last = self._answer.choices[index], updates[-1]
        if self._keeps and last.outcome is not None:
            choice.row_ids = [self._store.put(row) for row in last.outcome.rows]
            choice.row_id = choice.row_ids[last.outcome.chosen]
        if last.finish_reason is not None:
            for row_id in choice.row_ids:
                self._store.end(row_id)
        self._updates.put_nowait((index, updates))


class Stream(StreamingResponse):
    """The events of a run, which ends with the response, even if its client disconnects before the
    first event."""

    def __init__(self, run: Run, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, 200, _STREAM, "text/event-stream")
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.end()


class Api:
    """The handlers. `limit` is the time limit of a request, in seconds."""

    def __init__(self, served: ServedModel, worker: Worker, store: RowStore, limit: float) -> None:
        self._served = served
        self._worker = worker
        self._store = store
        self._limit = limit
        self._created = int(time.time())
        self._choices = OpenChoices()

    # Generation

    async def generate(self, kind: type[Generating | Responses], request: Request) -> Response:
        """`POST /v1/completions`, `/v1/chat/completions` and `/v1/responses`."""
        body = parse(kind, await read_body(request))
        common = body.to_chat() if isinstance(body, Responses) else body
        self._served.check_name(common.model)
        if common.rows > self._worker.max_rows:
            limit = f"at most {self._worker.max_rows} are possible"
            raise ApiError(f"{common.rows} rows are requested, {limit}", param="n")
        keeps = self._store.capacity > 0
        if common.entropix.keep and not keeps:
            raise ApiError("entropix.keep: this server keeps no rows (--keep)", param="entropix")
        if common.entropix.ask and (isinstance(body, Responses) or not common.stream):
            message = "entropix.ask requires a streamed completion or chat"
            raise ApiError(message, param="entropix")
        method = choose_method(self._served, common, slots=self._worker.slots, keeps=keeps)
        checked = await self._check(common)
        if checked.requests:
            self._check_programs(checked.sampler)
        if method is not None:
            checked = replace(checked, search=method[0].search(checked.requests[0], method[1]))
        answer = Answer(self._served, checked, body.warnings)
        form = ResponseForm(body, answer.id) if isinstance(body, Responses) else None
        return await unless_gone(request, self._respond(answer, form))

    async def _check(self, body: Generating) -> GenerationRequest:
        """Returns the rows of a request, in a thread because a long text takes time."""
        if isinstance(body, Chat):
            return await asyncio.to_thread(chat_request, self._served, body)
        assert isinstance(body, Completion)
        if (place := body.entropix.begin) is None:
            return await asyncio.to_thread(completion_request, self._served, body)
        row = self._store.get(place.row).row
        return await asyncio.to_thread(continuation_request, self._served, body, row)

    def _check_programs(self, sampler: CalibratedSampler) -> None:
        """Raises ApiError if a sampler's programs are not in the server's list (400), failed to
        compile (500), or are not yet compiled (503)."""
        programs, used = self._worker.engine.programs, sampler.parts.used
        if not programs.sets:
            return
        if (found := programs.set_of(used)) is None:
            name = min(used - programs.sets[-1])
            hint = "start the server with a preset or --set that uses it"
            message = f"entropix.sampler: mechanism '{name}' is not compiled here: {hint}"
            raise ApiError(message, param="entropix.sampler")
        try:
            compiled = programs.has(found)
        except UserError as error:
            raise ApiError(str(error), status=500, code="compile_failed") from None
        if not compiled:
            count = f"{programs.counts[1]} in the queue"
            reason = f"the programs of sampler '{sampler.name}' are still compiling ({count})"
            raise try_again(reason, 30, code="compiling")

    async def _respond(self, answer: Answer, form: ResponseForm | None) -> Response:
        """Runs the rows of an answer. `form` converts it to the Responses API."""
        if answer.request.echo:
            await self._add_echoes(answer)
        run = Run(self._worker, self._store, self._choices, answer, self._limit)
        updates = run.updates()
        chunks = form.events(answer.chunks(updates)) if form else answer.chunks(updates)
        if answer.request.body.stream:
            return Stream(run, events(chunks))
        try:
            if form is None:
                return json_answer(await answer.whole(updates))
            return json_answer([event async for event in chunks][-1]["response"])
        finally:
            run.end()

    async def _add_echoes(self, answer: Answer) -> None:
        request = answer.request
        for index, prompt in enumerate(request.prompts):
            scored: list[ScoredToken] = []
            if request.top is not None and len(prompt.tokens) > 1:
                scored = await self._score(prompt.tokens, request.sampler)
            for choice in answer.choices[index * request.body.n : (index + 1) * request.body.n]:
                choice.set_echo(scored)

    async def choose(self, request: Request) -> Response:
        """`POST /v1/entropix/choice`: chooses a branch for a row that waits."""
        body = parse(ChosenBranch, await read_body(request))
        self._choices.choose(body.id, body.index)
        return Response(status_code=204)

    # Scores

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`: the metrics of a given text."""
        served = self._served
        body = parse(Score, await read_body(request))
        served.check_name(body.model)
        sampler = served.choose_sampler(body.entropix.sampler)
        encode = partial(served.model.tokenizer.encode, body.input, add_bos=True)
        ids = await asyncio.to_thread(encode)
        if len(ids) > served.context:
            message = f"the text has {len(ids)} tokens, at most {served.context} are possible"
            raise ApiError(message, param="input", code="context_length_exceeded")

        async def answer() -> Response:
            tokens = [token.to_json() for token in await self._score(ids, sampler)]
            for token in tokens:
                token["top"] = token["top"][: body.top]
            usage = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
            found = {"object": "score", "model": served.name, "tokens": tokens, "usage": usage}
            return json_answer(found | body.warnings)

        return await unless_gone(request, answer())

    async def _score(self, ids: Sequence[int], sampler: CalibratedSampler) -> list[ScoredToken]:
        """Returns the scores of a text, computed between two chunks of steps. ApiError if that
        takes too long."""
        model = self._served.model
        config, recording = model.config, Recording(top=min(MAX_TOP, model.config.vocab_size))
        cancelled = threading.Event()

        def read() -> list[ScoredToken]:
            scored = score_tokens(
                model, ids, sampler, context=config.max_positions, recording=recording
            )
            return [*takewhile(lambda _: not cancelled.is_set(), scored)]

        try:
            async with asyncio.timeout(self._limit):
                return await asyncio.wrap_future(self._worker.call(read))
        except TimeoutError:
            raise try_again("the request timed out", 10, code="timeout") from None
        finally:
            cancelled.set()

    # Kept rows

    async def row(self, request: Request) -> Response:
        """`GET /v1/rows/ID`: its prompt, seed, sampler and regime rule, and the quantile tables."""
        kept = self._store.get(row_id := request.path_params["id"])
        first = await asyncio.to_thread(self._header, kept.row)
        values = first["sampler_parameters"]
        facts = {name: first[name] for name in ("prompt", "seed", "percentiles", "calibration")}
        rule = regime_rule(values, "the row")
        return json_answer({"row": row_id, "sampler": values, **facts, **rule})

    async def file(self, kind: str, request: Request) -> Response:
        """`GET /v1/rows/ID/trace` or `.../report`: the file that `--trace` or `--report` writes."""
        kept = self._store.get(request.path_params["id"], ended=True)
        save, name, content_type = _FILES[kind]

        def write() -> bytes:
            rows = Rows([kept.row], self._header(kept.row), kept.timings())
            with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
                save(rows, path := Path(folder) / name)
                return path.read_bytes()

        content = await asyncio.to_thread(write)
        attachment = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(content, 200, _FILE_HEADERS | attachment, content_type)

    def _header(self, row: Row) -> dict[str, Any]:
        """Returns the header of a row's trace. Decodes the prompt, so call it in a thread."""
        asked, served = row.request, self._served
        facts: Any = {"seed": asked.seed, "name": served.name, "messages": asked.messages}
        return header(served.model, asked.sampler, asked.prompt, **facts)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/rows/ID`."""
        self._store.delete(request.path_params["id"])
        return Response(status_code=204)

    # The server

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_answer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._served.check_name(request.path_params["name"])
        return json_answer(self._model())

    def _model(self) -> dict[str, Any]:
        served = self._served
        own = {
            "context": served.context,
            "sampler": served.sampler.name,
            "samplers": preset_names() if served.presets is None else [*served.presets],
            "methods": {name: method.choice for name, method in METHODS.items()},
            "top": served.top,
            "keep": self._store.capacity,
            "chat": served.model.is_chat_model,
        }
        common = {"id": served.name, "object": "model", "created": self._created}
        return {**common, "owned_by": "entropix_jax", "entropix": own}

    async def health(self, request: Request) -> Response:
        """`GET /health`."""
        alive = self._worker.alive
        return json_answer({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, in Prometheus' text form."""
        worker = self._worker
        running, waiting = worker.stats()
        compiled, queued = worker.engine.programs.counts
        ahead = max(running - worker.slots, 0)  # rows that the engine has fetched ahead
        values = {
            "slots": worker.slots,
            "slots_running": running - ahead,
            "queue_waiting": waiting + ahead,
            "kept_tokens": self._store.size,
            "programs_compiled": compiled,
            "programs_waiting": queued,
            "retracted_total": worker.retracted,
            "engine_failures_total": worker.failures,
            **{f'tokens_total{{regime="{name}"}}': worker.tokens[name] for name in REGIMES},
            **{f'rows_finished_total{{reason="{k}"}}': n for k, n in worker.finished.items()},
        }
        lines = (f"entropix_{name} {value}\n" for name, value in values.items())
        return PlainTextResponse("".join(lines))


def make_app(
    served: ServedModel,
    worker: Worker,
    *,
    limit: float = 600.0,
    keep: int = KEEP,
    host: str = "127.0.0.1",
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> Starlette:
    """Returns the server as an ASGI application, on a worker that was started. For `limit` see
    `Api`, for `keep` `RowStore`, for the others `Guard`."""
    api, files = Api(served, worker, RowStore(keep), limit), PageFiles()
    routes: list[BaseRoute] = [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", partial(api.generate, Completion), methods=["POST"]),
        Route("/v1/chat/completions", partial(api.generate, Chat), methods=["POST"]),
        Route("/v1/responses", partial(api.generate, Responses), methods=["POST"]),
        Route("/v1/score", api.score, methods=["POST"]),
        Route("/v1/entropix/choice", api.choose, methods=["POST"]),
        Route("/v1/rows/{id}", api.row),
        Route("/v1/rows/{id}", api.delete, methods=["DELETE"]),
        *(Route(f"/v1/rows/{{id}}/{kind}", partial(api.file, kind)) for kind in _FILES),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/", files.document),
        Mount("/static", files),
    ]
    middleware = [Middleware(Guard, host=host, keys=keys, origins=origins)]
    if origins:
        allowed: Any = {"allow_origins": origins, "allow_headers": ["*"]}
        allowed["allow_methods"] = ["GET", "POST", "DELETE"]
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))
    kinds = (UserError, HTTPException, ClientDisconnect, Exception)
    handlers: dict[Any, Any] = dict.fromkeys(kinds, refuse)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
