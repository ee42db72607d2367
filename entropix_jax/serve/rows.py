"""The routes of kept rows: as a trace, as a page, from a file, and away."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from entropix_jax.engine.results import Rows
from entropix_jax.engine.trace import header
from entropix_jax.report.page import regime_rule, run_page
from entropix_jax.serve.kept import Kept, KeptRow
from entropix_jax.serve.reopened import reopen
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.wanted import Served
from entropix_jax.serve.wire import json_answer, read_bytes

Result = TypeVar("Result")
MOST_BYTES = 32 * 2**20  # of a file that is opened
_FILES = 4  # that arrive side by side
_THREADS = 2
# What a row says is never run as this server's own page.
_FILE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "sandbox",
    "X-Content-Type-Options": "nosniff",
}


class KeptRows:
    """The handlers."""

    def __init__(self, served: Served, kept: Kept) -> None:
        self._served = served
        self._kept = kept
        self._arriving = asyncio.Semaphore(_FILES)  # they take memory
        self._opening = asyncio.Lock()  # what is made of one takes more
        # Of its own: no text that is to be read waits for files.
        self._threads = ThreadPoolExecutor(_THREADS, "files")

    async def _apart(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """A call's result, from a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def about(self, request: Request) -> Response:
        """`GET /v1/rows/ID`: its prompt, seed, sampler and regime rule, and the quantile tables."""
        number = request.path_params["id"]
        row = self._kept.get(number).row
        sampler = row.request.sampler
        values = dict(sorted(sampler.values.items()))
        decode = self._served.model.tokenizer.decode
        return json_answer(
            {
                "row": number,
                "prompt": await asyncio.to_thread(decode, row.request.prompt, skip_special=False),
                "seed": row.request.seed,
                "sampler": values,
                "percentiles": dict(sorted(sampler.sampler.percentiles.items())),
                "calibration": sampler.calibration.to_json(),
                **regime_rule(values, "the row"),
            }
        )

    async def trace(self, request: Request) -> Response:
        """`GET /v1/rows/ID/trace`: what `--trace` writes."""
        return await self._file(request, Path.read_bytes, "row.jsonl", "application/x-ndjson")

    async def report(self, request: Request) -> Response:
        """`GET /v1/rows/ID/report`: what `--report` writes."""

        def page(trace: Path) -> bytes:
            return run_page(trace).encode("utf-8", "replace")

        return await self._file(request, page, "row.html", "text/html")

    async def _file(
        self, request: Request, make: Callable[[Path], bytes], name: str, kind: str
    ) -> Response:
        """A file made of a row's trace."""
        kept = self._kept.get(request.path_params["id"], ended=True)

        def write() -> bytes:
            with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
                trace = Path(folder) / "row.jsonl"
                self._write(kept, trace)
                return make(trace)

        content = await self._apart(write)
        headers = _FILE | {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(content, 200, headers, kind)

    def _write(self, kept: KeptRow, path: Path) -> None:
        one, served = kept.row.request, self._served
        first = header(
            served.model,
            one.sampler,
            one.prompt,
            seed=one.seed,
            name=served.name,
            messages=one.messages,
        )
        Rows([kept.row], first, kept.timings()).save_trace(path)

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/rows/ID`."""
        self._kept.drop(request.path_params["id"])
        return Response(status_code=204)

    async def open(self, request: Request) -> Response:
        """`POST /v1/rows`: keeps the rows of a trace, or of a page."""
        async with self._arriving:
            body = await read_bytes(request, MOST_BYTES)
            async with self._opening:
                found = await self._apart(reopen, self._served, body)
                if (tokens := sum(one.size for one in found)) > self._kept.most:
                    most = f"this server keeps at most {self._kept.most} (--keep)"
                    told = f"the file has {tokens} tokens, {most}"
                    raise ApiError(told, status=413)
                ids = [self._kept.put(one) for one in found]
                return await self._apart(self._opened, ids, found)

    def _opened(self, ids: Sequence[str], found: Sequence[KeptRow]) -> Response:
        rows = [{"row": i, **self._told(one)} for i, one in zip(ids, found, strict=True)]
        return json_answer({"rows": rows})

    def _told(self, kept: KeptRow) -> dict[str, Any]:
        row = kept.row
        decode = self._served.model.tokenizer.decode
        return {
            "prompt": decode(row.request.prompt, skip_special=False),
            "prompt_tokens": [*row.request.prompt],
            **({} if row.request.messages is None else {"messages": row.request.messages}),
            "tokens": [token.to_json(retracted=gone) for token, gone in row.log],
            "text": row.text,
            "finish_reason": row.finish_reason,
            "sampler": dict(sorted(row.request.sampler.values.items())),
        }
