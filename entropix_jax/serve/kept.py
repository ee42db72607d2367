"""Rows that stay on the server, so that later requests go on from any of their tokens.

Everything here belongs to the event loop's thread; the engine's adds tokens to the rows that run.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import check_place, check_request
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.schema import ApiError

_ID_BYTES = 16  # of a row's id, which nobody guesses
_WRITTEN = ("inject", "think_end", "budget_forcing")  # actions that force a text


@dataclass(eq=False)
class KeptRow:
    """A row that is kept. `given` are tokens whose record the row takes over once it has ended: it
    was forced to repeat them. `ended` is by `time.perf_counter`; None while it runs."""

    row: Row
    given: Sequence[TokenRecord] = ()
    ended: float | None = None

    @property
    def size(self) -> int:
        """Its tokens in all, prompt and retracted ones included."""
        return len(self.row.request.prompt) + len(self.row.log)

    def settle(self) -> None:
        """The row has ended: nothing else is added."""
        self.ended, row = time.perf_counter(), self.row
        for i, given in enumerate(self.given[: len(row.tokens)]):  # forced, so none was retracted
            row.tokens[i] = replace(given, state=row.tokens[i].state)
            row.log[i] = row.tokens[i], False
        self.given = ()
        for token, _ in row.log:
            if isinstance(token.layers, np.ndarray):  # without those of the rows beside it
                token.layers = token.layers.copy()

    def timings(self) -> dict[str, float]:
        """Of its trace, in seconds."""
        row, start = self.row, self.row.started
        if start is None or self.ended is None:
            return {}
        first = {} if row.first_token is None else {"first_token": row.first_token - start}
        return {**first, "total": self.ended - start}


class Kept:
    """The rows that are kept, by their ids: at most `most` tokens in all, so far as they have
    ended. The one that was not used for longest goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows: OrderedDict[str, KeptRow] = OrderedDict()
        self._sizes: dict[str, int] = {}

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(self._sizes.values())

    def put(self, kept: KeptRow) -> str:
        """Keeps a row, which may still run. Returns its id."""
        number = secrets.token_urlsafe(_ID_BYTES)
        self._rows[number] = kept
        self._weigh(number)
        return number

    def settle(self, number: str) -> None:
        """The row has ended. It may be gone."""
        if (kept := self._rows.get(number)) is not None:
            kept.settle()
            self._weigh(number)

    def get(self, number: str, *, ended: bool = False) -> KeptRow:
        """A row. ApiError if there is none, or if it is to have `ended` and has not."""
        kept = self._rows.get(number)
        if kept is None:
            told = "no such row: it was not kept, or others took its place"
            raise ApiError(told, status=404, code="row_not_found")
        self._rows.move_to_end(number)
        if ended and kept.ended is None:
            raise ApiError("the row has not ended", status=409, code="row_running")
        return kept

    def drop(self, number: str) -> None:
        """Forgets a row. ApiError if there is none."""
        self.get(number)
        self._forget(number)

    def _weigh(self, number: str) -> None:
        self._sizes[number] = self._rows[number].size
        self._rows.move_to_end(number)
        while self.size > self.most:
            self._forget(next(iter(self._rows)))

    def _forget(self, number: str) -> None:
        del self._rows[number], self._sizes[number]


@dataclass(frozen=True)
class Begun:
    """A row that goes on: its first `skip` tokens to come are forced ones that `given` has."""

    row: Row
    given: Sequence[TokenRecord] = field(default=())

    @property
    def skip(self) -> int:
        """How many of its tokens to come are no news."""
        return len(self.given)

    @property
    def forwards(self) -> int:
        """What was spent before."""
        return max((token.forwards for token in self.row.tokens), default=0)


def go_on(
    model: LanguageModel,
    row: Row,
    request: Request,
    position: int,
    first: Sequence[int] = (),
    *,
    capacity: int | None = None,
) -> Begun:
    """A row that goes on after the first `position` tokens of another one, with `first` next.

    Between the tokens of a thought or a branch nothing is decided: without `first` the rest of it
    comes as it was, and then the row goes on. Where the tokens have no states they are forced one
    by one.

    Args:
        request: what it goes on by; its budget counts from the prompt.
        capacity: the cache positions of a row.

    Raises:
        ApiError: a position that the row does not have.
        UserError: `check_place` refuses it.
    """
    tokens = row.tokens[:]  # it may run meanwhile
    if not 0 <= position <= len(tokens):
        told = f"position: the row has {len(tokens)} tokens, not {position}"
        raise ApiError(told, param="entropix.from")
    before, rest = tokens[:position], [] if first else _rest(tokens, position)
    written = [*first] or [one.token_id for one in rest]
    action = rest[0].action if rest else "inject"
    new = Row(request, number=row.number, finish_reason=row.finish_reason)
    known = not before or before[-1].state is not None
    given: list[TokenRecord] = [] if known else before
    if known:
        new.tokens = [replace(one) for one in before]
        if rest and before and rest[0].action == "branch" and rest[-1].state is not None:
            # What the branches took is counted when they end.
            state, end = new.tokens[-1].state, rest[-1].state
            assert state is not None
            own = {**state.own, "branch": end.own["branch"]}
            new.tokens[-1].state = replace(state, own=own)
    else:
        written = [*(one.token_id for one in before), *written]
        action = "inject"
    if position < len(tokens):
        new.finish_reason = None
    budget = check_request(model, request, capacity)
    check_place(new, budget)
    if len(given) >= budget:
        told = f"no room is left at position {len(request.prompt) + position}"
        raise ApiError(told, param="entropix.from")
    new.ahead, new.ahead_action = written[: budget - len(new.tokens)], action
    return Begun(new, given)


def _rest(tokens: Sequence[TokenRecord], position: int) -> list[TokenRecord]:
    """The tokens from a position on, up to the end of the thought or branch that it is in."""
    end = position
    while 0 < end < len(tokens) and _goes_on(tokens[end - 1], tokens[end]):
        end += 1
    return [*tokens[position:end]]


def _goes_on(before: TokenRecord, token: TokenRecord) -> bool:
    """Whether a token was written with the one before it."""
    if token.action == "branch":
        return token.branches is None and before.action == "branch"
    if before.state is not None:
        return bool(before.state.queued > 0)
    return token.action in _WRITTEN and token.action == before.action
