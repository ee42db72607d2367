"""Before the first request: rows that have the usual programs compiled, or read from the cache."""

import asyncio
from collections.abc import Iterator

from entropix_jax.engine.calibrated import start_of_text
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.slots import lanes_for
from entropix_jax.names import SERVED
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.serve.schema import Own
from entropix_jax.serve.wanted import Served
from entropix_jax.serve.worker import Closing, Ticket, Update, Worker

_TOKENS = 2  # of a row: what its prompt is read by, and what it is decoded by


async def warm_up(served: Served, worker: Worker) -> None:
    """Runs rows by the server's sampler, by the API's plain one, and by one that forks where the
    server's may. They leave no trace in the worker's counts."""
    loop, ended = asyncio.get_running_loop(), asyncio.Queue[None]()

    def note(updates: list[Update]) -> None:
        if updates[-1].finish_reason is not None:
            ended.put_nowait(None)

    for request in _requests(served):
        # The second one's text is copied from where the first one's is cached.
        tickets = [Ticket(Row(request), loop, note) for _ in range(min(2, worker.most))]
        try:
            worker.submit(tickets)
        except Closing:
            return
        for _ in tickets:
            await ended.get()
    worker.forget()


def _requests(served: Served) -> Iterator[Request]:
    prompt = start_of_text(served.model) * _TOKENS
    own = served.choose_sampler(Own(), {})
    samplers = [own, served.choose_sampler(Own(sampler="temperature"), {})]
    if lanes_for(own):
        arms = {f"arms.{name}": BRANCH.name for name in SERVED}
        free = {"branch.max_share": 1e6, "branch.per_row": 1}
        samplers.append(served.choose_sampler(Own(), {**arms, **free}))
    for sampler in samplers:
        yield Request(prompt, sampler, max_new_tokens=_TOKENS)
