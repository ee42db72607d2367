"""A run over requests: yields events while it is iterated, and has the rows at the end."""

import time
from collections.abc import Iterator, Sequence

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.memory import most_slots
from entropix_jax.engine.preparation import MIN_CAPACITY, bucket, check_recording
from entropix_jax.engine.results import Event, Request, Row, Rows
from entropix_jax.engine.running import check_request
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel

_MOST_SLOTS = 64


class Generation:
    """Runs requests in parallel while it is iterated. `rows` then has the results.

    If the iteration is left early or ended by `stop`, `rows` has the partial results; `interrupt`
    ends the rows.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        *,
        recording: Recording | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Checks the requests before anything is computed. `recording` has the optional parts of
        each token's record. `engine` is the engine to run on, with its own recording; None: a new
        one. UserError if there is no request, `check_request` rejects one, the recording does not
        fit the model, or one row does not fit into memory."""
        if not requests:
            raise UserError("there is nothing to generate: no request")
        recording = recording or Recording()
        check_recording(model, recording)
        longest = max(len(one.prompt) + check_request(model, one) for one in requests)
        capacity = bucket(longest, MIN_CAPACITY)
        self._engine = engine or Engine(
            model,
            slots=_count_slots(model, len(requests), capacity),
            capacity=capacity,
            recording=recording,
        )
        first = requests[0]
        several = any(request.prompt != first.prompt for request in requests)
        shared_header = header(
            model, first.sampler, first.prompt, seed=first.seed, messages=first.messages
        )
        self.timings: dict[str, float] = {}
        self.rows = Rows(
            (Row(request, number=number) for number, request in enumerate(requests)),
            None if several else shared_header,
            self.timings,
        )
        self._start = time.perf_counter()
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[Event]:
        """Yields the events of all rows, step by step. A second iteration continues the first."""
        return self._iterator

    def _iterate(self) -> Iterator[Event]:
        self._start = time.perf_counter()
        for event in self._engine.run(self.rows):
            if event.token is not None:
                self.timings.setdefault("first_token", self.seconds())
            yield event
        if all(row.finish_reason is not None for row in self.rows):
            self.timings["total"] = self.seconds()

    def stop(self) -> None:
        """Requests the end of the run after the current event. Safe in a signal handler."""
        self._engine.stop()

    def interrupt(self) -> list[Event]:
        """Ends the rows that have not finished; the events have their last text."""
        self.timings.setdefault("total", self.seconds())
        events = list(self._engine.interrupt())
        for row in self.rows:
            if row.finish_reason is None:  # it never had a slot
                row.finish_reason = "interrupt"
                events.append(Event(row, None, ()))
        return events

    def run(self) -> Rows:
        """Runs to the end and returns the rows."""
        for _ in self:
            pass
        return self.rows

    def _repr_html_(self) -> str:
        return self.rows._repr_html_()

    def seconds(self) -> float:
        """Seconds since the start, excluding time in which a person was asked."""
        return time.perf_counter() - self._start - sum(row.waited for row in self.rows)


def _count_slots(model: LanguageModel, rows: int, capacity: int) -> int:
    """Returns the number of rows in parallel: all, up to 64, as far as memory allows."""
    if model.mesh is not None:
        return rows
    slots = min(rows, _MOST_SLOTS)
    fitting = most_slots(model.config, model.precision, slots=slots, capacity=capacity, mesh=None)
    return max(fitting, 1)
