"""The rows of a run on the host: rows in slots, waiting rows, and moves by the caller.

A move changes a row's `Row` and creates a new `RunningRow`, which is inserted before the next
chunk. The old one ignores the results of chunks in flight.
"""

from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from entropix_jax.engine.results import MAX_SAMPLES, Event, Request, Row
from entropix_jax.engine.running import (
    NOTHING,
    Answer,
    RunningRow,
    check_place,
    check_request,
    find_no_token,
)
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.integers import check_integer
from entropix_jax.model.loading import LanguageModel


class Roster:
    """`slots` has the current or last row of each slot, `waiting` the next rows, forks first, and
    `held` the rows before them whose programs are not compiled yet."""

    def __init__(self, model: LanguageModel, slots: int, capacity: int) -> None:
        """`capacity` is the cache positions of a row."""
        self.slots: list[RunningRow | None] = [None] * slots
        self.waiting: deque[RunningRow] = deque()
        self.held: list[RunningRow] = []
        self._model = model
        self._capacity = capacity
        self._source: Iterator[Request | Row | None] = iter(())
        self._known: WeakValueDictionary[int, Row] = WeakValueDictionary()  # by `id`
        self._number = 0  # of the next row

    @property
    def running(self) -> dict[int, RunningRow]:
        """The running rows, by slot."""
        return {slot: row for slot, row in enumerate(self.slots) if row is not None and row.running}

    def begin(self, requests: Iterable[Request | Row | None]) -> None:
        """Begins a run without rows."""
        self.slots = [None] * len(self.slots)
        self.waiting.clear()
        self.held.clear()
        self._source, self._number = iter(requests), 0

    def take_over(self, slots: Sequence[RunningRow | None]) -> None:
        """Puts the ended rows of the run before into the slots."""
        self.slots = [*slots]
        for row in self.slots:
            if row is not None:
                row.left = True

    def end(self) -> None:
        """Ends the run. Its rows can no longer be moved."""
        self._known.clear()

    def fetch(self) -> RunningRow | None:
        """Returns the next row, or None if there is none yet. Fetches a request if no row waits."""
        if not self.waiting and (request := next(self._source, None)) is not None:
            row = request if isinstance(request, Row) else Row(request, number=self._number)
            action = row.request.sampler.parts.action(row.ahead_action) if row.ahead else 0
            self.waiting.append(self._run(row, Answer([*row.ahead], action), moved=False))
        return self.waiting[0] if self.waiting else None

    def cancel(self, row: Row) -> list[Event]:
        """Ends a row as "cancelled"; see `Engine.end`."""
        self._check(row)
        for running in (*self.slots, *self.held, *self.waiting):
            if running is not None and running.row is row and running.running:
                for rows in (self.held, self.waiting):
                    if running in rows:
                        rows.remove(running)
                return [*running.interrupt("cancelled")]
        return []

    def fork(
        self, row: Row, number: int, position: int | None, budget: int | None = None
    ) -> list[Row]:
        """Forks a row; see `Engine.fork`."""
        number = check_integer("number", number, 1, MAX_SAMPLES)
        whole = row.request if budget is None else replace(row.request, max_new_tokens=budget)
        kept = self._kept(row, position, whole)
        forks = []
        for _ in range(number):
            row.forks += 1
            request = replace(whole, row_id=f"{row.request.row_id}.{row.forks}")
            tokens = [replace(token, row=self._number) for token in row.tokens[:kept]]
            source = row.number, len(row.log)
            forks.append(Row(request, tokens, number=self._number, source=source))
            self._move(forks[-1])
        return forks

    def rewind(self, row: Row, position: int) -> None:
        """Rewinds a row; see `Engine.rewind`."""
        kept = self._kept(row, position, row.request)
        gone = row.tokens[kept:]
        retracted = {*map(id, gone)}
        row.log = [(token, was or id(token) in retracted) for token, was in row.log]
        row.retracted_tokens += gone
        del row.tokens[kept:]
        row.rewinds += 1
        row.finish_reason = None
        self._move(row)

    def force(self, row: Row, tokens: Sequence[int], action: str) -> None:
        """Forces tokens on a row; see `Engine.force`."""
        self._check(row)
        name = f"row '{row.request.row_id}'"
        actions = [mechanism.name for mechanism in row.request.sampler.mechanisms]
        if row.finish_reason is not None:
            raise UserError(f"{name} has ended: rewind it before tokens are forced")
        left = self._budget(row.request) - len(row.tokens)
        if len(tokens) > left:
            raise UserError(f"{name}: a budget of {left} is left for {len(tokens)} forced tokens")
        if (strange := find_no_token(self._model, tokens)) is not None:
            raise UserError(
                f"the tokens forced on {name} hold {strange!r}, which is not a token id"
            )
        if action not in actions:
            raise UserError(f"no mechanism is named '{action}'{nearest(action, actions)}")
        self._move(row, Answer([*tokens], actions.index(action)))

    def _check(self, row: Row) -> None:
        if self._known.get(id(row)) is not row:
            raise UserError(f"row '{row.request.row_id}' is not one of a run in progress")

    def _budget(self, request: Request) -> int:
        return check_request(self._model, request, self._capacity)

    def _kept(self, row: Row, position: int | None, request: Request) -> int:
        self._check(row)
        return check_place(row, self._budget(request), position)

    def _run(self, row: Row, forced: Answer, *, moved: bool) -> RunningRow:
        running = RunningRow(row, self._model, self._capacity, forced, moved=moved)
        self._known[id(row)] = row
        self._number = max(self._number, row.number + 1)
        return running

    def _move(self, row: Row, forced: Answer = NOTHING) -> None:
        """Runs the changed row in its slot or its place in the queue. Without one it waits behind
        other moved rows and before any request."""
        new = self._run(row, forced, moved=True)
        places: tuple[MutableSequence[Any], ...] = (self.slots, self.held, self.waiting)
        for rows in places:
            for i, old in enumerate(rows):
                if old is not None and old.row is row:
                    old.left = True
                    rows[i] = new
                    return
        self.waiting.insert(sum(other.moved for other in self.waiting), new)
