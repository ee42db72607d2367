"""Kept rows: later requests continue them from any of their tokens.

Everything here belongs to the event loop's thread; the engine's adds tokens to the rows that run.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Row
from entropix_jax.engine.row import check_place
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.schema import ApiError

_ID_BYTES = 16  # of a row's id, so that it cannot be guessed
ROW_TOKENS = 16  # memory of a row besides its tokens, its sampler above all, counted in tokens
_TOKEN_CHARACTERS = 16  # more than tokens have on average


@dataclass(eq=False)
class KeptRow:
    """A kept row. `ended` is by `time.perf_counter`, None while the row runs. `counted` is its
    share of the store's size."""

    row: Row
    ended: float | None = None
    counted: int = 0

    @property
    def size(self) -> int:
        """Number of tokens, prompt and retracted ones included, plus `ROW_TOKENS`. Messages count
        where they are much longer than the prompt, which a template may trim."""
        request = self.row.request
        values = (value for message in request.messages or () for value in message.values())
        characters = sum(len(str(value)) for value in values)
        prompt = max(len(request.prompt), characters // _TOKEN_CHARACTERS)
        return prompt + len(self.row.log) + ROW_TOKENS

    def timings(self) -> dict[str, float]:
        """Returns the timings of the row's trace, in seconds. Empty if it never started."""
        times = {"first_token": self.row.first_token, "total": self.ended}
        start = self.row.started
        return {k: t - start for k, t in times.items() if t is not None and start is not None}


class RowStore:
    """The kept rows by id: at most `capacity` tokens in total. Evicts the least recently used row
    first, and does not keep a row that exceeds `capacity` by itself."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows: OrderedDict[str, KeptRow] = OrderedDict()
        self.size = 0  # tokens in total

    def put(self, row: Row) -> str:
        """Keeps a row, which may still run. Returns its id."""
        row_id = secrets.token_urlsafe(_ID_BYTES)
        self._rows[row_id] = KeptRow(row)
        self._count(row_id)
        return row_id

    def end(self, row_id: str) -> None:
        """Notes that a row has ended. No-op if it was evicted."""
        if (kept := self._rows.get(row_id)) is not None:
            kept.ended = time.perf_counter()
            for token, _ in kept.row.log:
                for name in ("layers", "layers_varentropy"):
                    if isinstance(value := getattr(token, name), np.ndarray):  # a view of all rows'
                        setattr(token, name, value.copy())
            self._count(row_id)

    def get(self, row_id: str, *, ended: bool = False) -> KeptRow:
        """Returns a row.

        Raises:
            ApiError: there is no such row (404), or it still runs and must have `ended` (409).
        """
        kept = self._rows.get(row_id)
        if kept is None:
            message = "no such row: it was not kept, or it was evicted"
            raise ApiError(message, status=404, code="row_not_found")
        self._rows.move_to_end(row_id)
        if ended and kept.ended is None:
            raise ApiError("the row has not ended", status=409, code="row_running")
        return kept

    def delete(self, row_id: str) -> None:
        """Removes a row. ApiError if there is none."""
        self.size -= self.get(row_id).counted
        del self._rows[row_id]

    def _count(self, row_id: str) -> None:
        """Counts a row's present size, and evicts rows until all fit."""
        kept = self.get(row_id)
        self.size += kept.size - kept.counted
        kept.counted = kept.size
        if kept.size > self.capacity:
            self.delete(row_id)
        while self.size > self.capacity:
            self.delete(next(iter(self._rows)))


def continue_row(
    model: LanguageModel,
    row: Row,
    request: Request,
    position: int,
    first: Sequence[int] = (),
    *,
    capacity: int | None = None,
) -> Request:
    """Returns the request of a new row that continues after the first `position` tokens of another
    one, with the tokens `first` next.

    Nothing is decided between the tokens of a thought or a branch. There, without `first`, the rest
    of it is repeated before the row continues.

    Args:
        request: the new row's, without a prefix. Its budget counts from the prompt.
        capacity: the cache positions of a row.

    Raises:
        ApiError: the row does not have that position.
        UserError: `check_place` refuses it.
    """
    log = row.log[:]  # a snapshot: the row may still run
    places = [at for at, (_, retracted) in enumerate(log) if not retracted]
    if position > len(places):
        message = f"position: the row has {len(places)} tokens, not {position}"
        raise ApiError(message, param="entropix.from")
    tokens = [log[at][0] for at in places]
    rest = [] if first else _unit_rest(tokens, position)
    budget = check_request(model, request, capacity)
    check_place(replace(row, tokens=tokens), budget, len(request.prompt) + position)
    end = places[position - 1] + 1 if position else 0
    prefix = [(replace(token), retracted) for token, retracted in log[:end]]
    if rest and prefix and rest[0].action == "branch" and rest[-1].state is not None:
        # The forwards of the branches are counted when they end.
        last, counted = prefix[-1][0], rest[-1].state.states["branch"]
        assert last.state is not None
        last.state = replace(last.state, states={**last.state.states, "branch": counted})
    forced = [*first] or [token.token_id for token in rest]
    return replace(
        request,
        number=row.number,
        prefix=prefix,
        forced=forced[: budget - position],
        action=rest[0].action if rest else "inject",
        chosen=bool(first),
    )


def _unit_rest(tokens: Sequence[TokenRecord], position: int) -> Sequence[TokenRecord]:
    """Returns the tokens from a position to the end of the thought or branch around it."""
    end = position
    while 0 < end < len(tokens) and _same_unit(tokens[end - 1], tokens[end]):
        end += 1
    return tokens[position:end]


def _same_unit(before: TokenRecord, token: TokenRecord) -> bool:
    """Whether a token was written with the one before it."""
    if token.action == "branch":
        return token.branches is None and before.action == "branch"
    return before.state is not None and bool(before.state.queued > 0)
