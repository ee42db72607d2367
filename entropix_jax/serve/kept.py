"""Rows that stay on the server, so that later requests go on from any of their tokens.

Everything here belongs to the event loop's thread; the engine's adds tokens to the rows that run.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import check_place, check_request
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.schema import ApiError

_ID_BYTES = 16  # of a row's id, which nobody guesses
ROW_TOKENS = 16  # what a row takes besides its tokens, its sampler above all, as so many of them
Log = Sequence[tuple[TokenRecord, bool]]  # tokens, and whether each was retracted
_TOKEN_CHARACTERS = 16  # more than tokens have on average
_WRITTEN = ("inject", "think_end", "budget_forcing")  # actions that force a text


@dataclass(eq=False)
class KeptRow:
    """A row that is kept. `given` is the log of tokens whose records the row takes over once it has
    ended: it was forced to repeat those that were not retracted. `ended` is by
    `time.perf_counter`; None while it runs."""

    row: Row
    given: Log = ()
    ended: float | None = None

    @property
    def size(self) -> int:
        """Its tokens in all, prompt and retracted ones included, and what a row takes itself.
        Messages count where they are much longer than the prompt, which a template may trim."""
        messages = self.row.request.messages or ()
        told = sum(len(value) for message in messages for value in message.values())
        prompt = max(len(self.row.request.prompt), told // _TOKEN_CHARACTERS)
        return prompt + len(self.row.log) + ROW_TOKENS

    def settle(self) -> None:
        """The row has ended: nothing else is added."""
        self.ended, row = time.perf_counter(), self.row
        self._take_over()
        for token, _ in row.log:
            if isinstance(token.layers, np.ndarray):  # without those of the rows beside it
                token.layers = token.layers.copy()

    def _take_over(self) -> None:
        """The records of the given tokens; what was spent, and the states, are this row's own."""
        row, count, spent = self.row, 0, 0
        log: list[tuple[TokenRecord, bool]] = []
        for given, gone in self.given:
            if gone:
                log.append((replace(given, forwards=spent), True))
            elif count < len(row.tokens):
                own = row.tokens[count]
                spent = own.forwards
                row.tokens[count] = replace(given, state=own.state, forwards=spent)
                log.append((row.tokens[count], False))
                count += 1
            else:
                break
        row.log[:count] = log  # they were forced: nothing was retracted in between
        row.retracted_tokens[:0] = [token for token, gone in log if gone]
        self.given = ()

    def timings(self) -> dict[str, float]:
        """Of its trace, in seconds."""
        row, start = self.row, self.row.started
        if start is None or self.ended is None:
            return {}
        first = {} if row.first_token is None else {"first_token": row.first_token - start}
        return {**first, "total": self.ended - start}


class Kept:
    """The rows that are kept, by their ids: at most `most` tokens in all, so far as they have
    ended. The one that was not used for longest goes first; one that is too large itself is not
    kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows: OrderedDict[str, KeptRow] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.size = 0  # tokens in all

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
            told = "no such row: it was not kept, or it was evicted"
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
        size = self._rows[number].size
        self.size += size - self._sizes.get(number, 0)
        self._sizes[number] = size
        self._rows.move_to_end(number)
        if size > self.most:
            self._forget(number)
        while self.size > self.most:
            self._forget(next(iter(self._rows)))

    def _forget(self, number: str) -> None:
        del self._rows[number]
        self.size -= self._sizes.pop(number)


@dataclass(frozen=True)
class Begun:
    """A row that goes on: its first `skip` tokens to come are forced ones that `given` has, for
    which see `KeptRow`. `forwards` is what was spent before."""

    row: Row
    given: Log
    forwards: int

    @property
    def skip(self) -> int:
        """How many of its tokens to come are no news."""
        return sum(not gone for _, gone in self.given)


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
    log = _log_before(row, position)
    given: Log = () if known else log
    if known:
        new.tokens = [replace(one) for one in before]
        copies = iter(new.tokens)
        new.log = [(one if gone else next(copies), gone) for one, gone in log]
        new.retracted_tokens = [one for one, gone in log if gone]
        if rest and before and rest[0].action == "branch" and rest[-1].state is not None:
            # What the branches took is counted when they end.
            state, end = new.tokens[-1].state, rest[-1].state
            assert state is not None
            own = {**state.own, "branch": end.own["branch"]}
            new.tokens[-1].state = replace(state, own=own)
    else:
        written = [*(one.token_id for one in before), *written]
        action = "inject"
    place = len(request.prompt) + position
    new.chosen = range(place, place + len(first))
    if position < len(tokens):
        new.finish_reason = None
    budget = check_request(model, request, capacity)
    check_place(new, budget)
    if not known and position >= budget:
        told = f"the context is full at position {len(request.prompt) + position}"
        raise ApiError(told, param="entropix.from")
    new.ahead, new.ahead_action = written[: budget - len(new.tokens)], action
    spent = max((token.forwards for token in new.tokens), default=0)
    return Begun(new, given, spent)


def _log_before(row: Row, position: int) -> Log:
    """The row's log up to the last of its first `position` tokens."""
    log, count = row.log[:], 0
    for end, (_, gone) in enumerate(log):
        if count == position:
            return log[:end]
        count += not gone
    return log


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
