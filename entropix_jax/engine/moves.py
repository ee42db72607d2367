"""The rows of a run on the host, and the caller's moves: fork, rewind, force, end.

A move changes a row's `Row` and creates a new `RunningRow`, which is inserted before the next
chunk once it has a slot. The old one ignores the results of chunks in flight.
"""

from collections import deque
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from entropix_jax.engine.hooks import NOTHING, Insertion
from entropix_jax.engine.request import MAX_SAMPLES, Request, check_request
from entropix_jax.engine.results import Event, KeptCache, Row
from entropix_jax.engine.row import RunningRow, check_place
from entropix_jax.engine.tokens import find_no_token
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.arguments import check_integer
from entropix_jax.model.loading import LanguageModel


class Roster:
    """The rows of a run, and the caller's moves of them. Base of `Engine`."""

    def __init__(self, model: LanguageModel, slots: int, capacity: int) -> None:
        """`capacity` is the cache positions of a row."""
        self._slots: list[RunningRow | None] = [None] * slots  # current or last row of each slot
        self._waiting: deque[RunningRow] = deque()  # the next rows, forks first
        self._model = model
        self._capacity = capacity
        self._source: Iterator[Request | None] = iter(())
        self._new: WeakValueDictionary[int, Row] = WeakValueDictionary()  # by `id` of the request
        self._known: WeakValueDictionary[int, Row] = WeakValueDictionary()  # by `id`
        self._next_number = 0  # of the next row

    @property
    def _running(self) -> dict[int, RunningRow]:
        """The running rows, by slot."""
        rows = enumerate(self._slots)
        return {slot: row for slot, row in rows if row is not None and row.running}

    def new_row(self, request: Request) -> Row:
        """Returns the row that `run` will use once it fetches the request. Without this call the
        caller gets the row with its first event."""
        row = self._new[id(request)] = Row(request, number=request.number or 0)
        if request.number is not None:  # no fork takes it
            self._next_number = max(self._next_number, request.number + 1)
        return row

    def interrupt(self) -> Iterator[Event]:
        """Ends the unfinished rows of a stopped run. The events have their last text."""
        for row in (*self._slots, *self._waiting):
            if row is not None:
                yield from row.interrupt()

    def end(self, row: Row) -> list[Event]:
        """Ends a row of the run in progress as "cancelled" and frees its slot or its place in the
        queue. Returns its last events, which the run does not yield; none if it has ended.
        UserError if the row is not part of a run in progress."""
        self._check(row)
        for running in (*self._slots, *self._waiting):
            if running is not None and running.row is row and running.running:
                if running in self._waiting:
                    self._waiting.remove(running)
                return [*running.interrupt("cancelled")]
        return []

    def fork(
        self,
        row: Row,
        count: int,
        *,
        position: int | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Row]:
        """Forks a row of the run in progress into `count` new rows. The row continues.

        They take free slots before waiting requests. Their ids are the row's id with ".1", ".2",
        and so on, so each has its own random numbers.

        Args:
            position: where they diverge from the row, by default after its last token.
            max_new_tokens: their budget, by default the row's.

        UserError: see `check_place`; or the row is not part of a run in progress."""
        count = check_integer("count", count, 1, MAX_SAMPLES)
        template = replace(row.request, number=None, prefix=(), forced=(), chosen=False)
        if max_new_tokens is not None:
            template = replace(template, max_new_tokens=max_new_tokens)
        kept = self._count_kept(row, position, template)
        forks = []
        for _ in range(count):
            row.forks += 1
            request = replace(template, row_id=f"{row.request.row_id}.{row.forks}")
            tokens = [replace(token, row=self._next_number) for token in row.tokens[:kept]]
            log = [(token, False) for token in tokens]
            source = row.number, len(row.log)
            fork = Row(request, tokens, log=log, number=self._next_number, source=source)
            if row.kept is not None:
                fork.kept, fork.parent = KeptCache(), row.kept
            forks.append(fork)
            self._move(fork)
        return forks

    def rewind(self, row: Row, position: int) -> None:
        """Retracts the tokens of a row from a position on. It continues from there with other
        random numbers and the sampler's counts of that place, even if it has ended. No event
        reports this. UserError as `fork`."""
        kept = self._count_kept(row, position, row.request)
        gone = row.tokens[kept:]
        retracted = {*map(id, gone)}
        row.log = [(token, was or id(token) in retracted) for token, was in row.log]
        row.retracted_tokens += gone
        del row.tokens[kept:]
        row.rewinds += 1
        row.finish_reason = None
        self._move(row)

    def force(self, row: Row, tokens: Sequence[int], *, action: str = "inject") -> None:
        """Forces tokens on a running row, after its last token. They replace forced tokens that are
        still queued. Their `action` is the name of a mechanism. UserError as `fork`, or for more
        tokens than remain of the budget, an invalid id, an unknown action, or an ended row."""
        self._check(row)
        if row.finish_reason is not None:
            name = row.request.row_id
            raise UserError(f"row '{name}' has ended: rewind it before tokens are forced")
        self._move(row, self._forced(row, tokens, action))

    def _forced(self, row: Row, tokens: Sequence[int], action: str) -> Insertion:
        """Returns tokens to force on a row. UserError if they are not valid."""
        name = f"row '{row.request.row_id}'"
        actions = [mechanism.name for mechanism in row.request.sampler.mechanisms]
        remaining = self._budget(row.request) - len(row.tokens)
        if len(tokens) > remaining:
            raise UserError(f"{name}: {len(tokens)} forced tokens exceed the budget of {remaining}")
        if (strange := find_no_token(self._model, tokens)) is not None:
            raise UserError(f"{name}: forced token {strange!r} is not a token id")
        if action not in actions:
            raise UserError(f"no mechanism is named '{action}'{nearest(action, actions)}")
        return Insertion([*tokens], actions.index(action))

    def _fetch(self) -> RunningRow | None:
        """Returns the next row, or None if there is none yet. Fetches a request if no row waits."""
        if not self._waiting and (request := next(self._source, None)) is not None:
            row = self._new.pop(id(request), None)
            if row is None or row.request is not request:
                row = Row(request)
            row.number = number = self._next_number if request.number is None else request.number
            row.log = [(replace(t, row=number), retracted) for t, retracted in request.prefix]
            row.tokens = [token for token, retracted in row.log if not retracted]
            row.retracted_tokens = [token for token, retracted in row.log if retracted]
            forced = self._forced(row, request.forced, request.action)
            self._waiting.append(self._run_row(row, forced))
        return self._waiting[0] if self._waiting else None

    def _check(self, row: Row) -> None:
        if self._known.get(id(row)) is not row:
            raise UserError(f"row '{row.request.row_id}' is not one of a run in progress")

    def _budget(self, request: Request) -> int:
        return check_request(self._model, request, self._capacity)

    def _count_kept(self, row: Row, position: int | None, request: Request) -> int:
        self._check(row)
        return check_place(row, self._budget(request), position)

    def _run_row(self, row: Row, forced: Insertion, *, moved: bool = False) -> RunningRow:
        running = RunningRow(row, self._model, self._capacity, forced, moved=moved)
        self._known[id(row)] = row
        self._next_number = max(self._next_number, row.number + 1)
        return running

    def _move(self, row: Row, forced: Insertion = NOTHING) -> None:
        """Runs the changed row in its slot or its place in the queue. Without one it waits behind
        other moved rows and before any request. Of tokens that only an end has committed the slot
        may have cached others."""
        new = self._run_row(row, forced, moved=True)
        places: tuple[MutableSequence[Any], ...] = (self._slots, self._waiting)
        for rows in places:
            for i, old in enumerate(rows):
                if old is not None and old.row is row:
                    old.replaced, new.cached = True, min(old.cached, new.to_cache)
                    rows[i] = new
                    return
        self._waiting.insert(sum(other.moved for other in self._waiting), new)
