"""Warm-up before the first request: rows that compile the usual programs, or read them from the
compilation cache."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from entropix_jax.engine.prompts import TOGETHER, may_join
from entropix_jax.engine.request import Request
from entropix_jax.engine.shapes import bucket
from entropix_jax.engine.tokens import start_of_text
from entropix_jax.names import SERVED
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.serve.request import GREEDY, PLAIN, ServedModel
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.worker import Ticket, Worker

_TOKENS = 2  # per row: the first compiles prefill, the second decoding
# Tokens of a prompt: one for each size in which prompts to 1000 tokens are read.
_LENGTHS = (2, 30, 60, 120, 250, 500, 1000)
_LOOK = 0.05  # seconds between two checks of the worker
# Steps with both penalties of the API serve rows without them, at less than 2 % of a step's time.
_PENALTIES = {"repetition.frequency": 1e-6, "repetition.presence": 1e-6}
# A fork with at least two candidates, whatever the model's probabilities.
_FORK = {f"arms.{name}": BRANCH.name for name in SERVED} | {
    "branch.max_share": 1e6,
    "branch.per_row": 1,
    "branch.width": 2,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
    "branch.depth": 1,
}


async def warm_up(served: ServedModel, worker: Worker, show: Callable[[str], None]) -> None:
    """Compiles the usual programs by running rows: of the usual prompt lengths by the server's
    sampler with the API's penalties, and one that forks if that sampler can. Calls `show` with the
    program that compiles. The worker's counts omit the rows."""

    async def wait_while(holds: Callable[[], bool]) -> None:
        while holds():
            if (program := worker.engine.compiling) is not None:
                show(program)
            await asyncio.sleep(_LOOK)

    try:
        for requests in _batches(served, min(TOGETHER, worker.most)):
            rows = map(worker.engine.new_row, requests)
            worker.submit([Ticket(row, lambda updates: None) for row in rows])
            await wait_while(lambda: not worker.idle())
    except ApiError:  # the server is shutting down, or clients fill its queue
        return
    await wait_while(lambda: worker.alive and worker.engine.compiling is not None)
    worker.forget()


def _batches(served: ServedModel, most: int) -> Iterator[list[Request]]:
    """Yields requests to run at the same time, at most `most`."""
    start = start_of_text(served.model)[0]
    own = served.choose_sampler(None, _PENALTIES)
    # The same programs serve requests with only the API's sampling options.
    plain = (served.choose_sampler(name) for name in (GREEDY, PLAIN))
    own = replace(own, others=frozenset().union(*(one.parts.used for one in plain)))

    def request(length: int) -> Request:
        return Request([start] * length, own, max_new_tokens=_TOKENS)

    short = request(_LENGTHS[0])
    # The second one's text is copied from the first one's slot.
    yield [short, short][:most]
    if own.lanes:
        yield [replace(short, sampler=served.choose_sampler(None, {**_PENALTIES, **_FORK}))]
    for length in _LENGTHS[1:]:
        if length + _TOKENS <= served.context:
            yield [request(length)]
            # Short prompts that arrive together are read together.
            if may_join(bucket(length, 1), length):
                yield [request(length - number) for number in range(most)]
