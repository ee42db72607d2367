"""One running row on the host: converts step outcomes to tokens, text, and a finish reason."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby, takewhile
from math import isfinite
from typing import Any

import numpy as np

from entropix_jax.engine.hooks import (
    LOOKUP_SECONDS,
    NOTHING,
    Insertion,
    Pending,
    ask_choice,
    ask_question,
    call,
    choose_branch,
    found_text,
    insert_result,
    two_best,
)
from entropix_jax.engine.records import StepOutcome
from entropix_jax.engine.request import all_end_ids, check_request, padded_ids
from entropix_jax.engine.results import Event, Move, Piece, Row
from entropix_jax.engine.slots import Arrival, fresh_tally
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    ENDED_BY,
    EOS,
    ERROR,
    LENGTH,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
    ForkEnd,
)
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.text.stop import StopFilter

_PROPOSAL = ("temperature", "top_k", "top_p", "min_p")  # of a `TokenRecord`
_REASONS = {EOS: "eos", LENGTH: "length"}


class RunningRow:
    """A running row. A token is pending until no later step can retract it.

    A row with tokens continues after them. A row that the caller moves gets a new instance.

    `cached` counts the tokens that the slot has cached for good, `length` all tokens that the host
    has, prompt and pending ones included, and `limit` is the maximum of `length`.
    """

    def __init__(
        self,
        row: Row,
        model: LanguageModel,
        capacity: int,
        forced: Insertion = NOTHING,
        *,
        moved: bool = False,
    ) -> None:
        """`capacity` is the cache positions of the row; the `forced` tokens come next.
        UserError: see `check_request` and `check_place`."""
        request = row.request
        budget = check_request(model, request, capacity)
        check_place(row, budget)
        self.row = row
        self.request = request
        self.forced = forced
        self.moved = moved  # by the host, and not inserted since
        self.replaced = False  # by another instance for the same row
        self.answer: Insertion | None = None  # to be sent to the device
        self.pending: Pending | None = None  # the row waits for it, without an answer yet
        self.cached = 0
        self.limit = len(request.prompt) + budget
        # A stop string that is a control token ends the row by its id: it has no text.
        self._end_ids = all_end_ids(model, request)
        self._tokenizer = model.tokenizer
        self._stop = StopFilter[TokenRecord](request.stop)
        self._stream = model.tokenizer.stream(after=request.prompt)
        # Tokens that are not committed yet, in the order of their events. The flag marks retracted
        # ones.
        self._pending: list[tuple[TokenRecord, bool]] = []
        self._paths: list[list[TokenRecord]] = []  # of each branch, while the row is forked
        self._forked: TokenRecord | None = None  # of the last fork whose tokens are forced
        self._state = row.tokens[-1].state if row.tokens else None
        kept = [token.token_id for token, retracted in request.prefix if not retracted]
        self.begin = *request.prompt, *kept  # the text that it began with
        chosen = len(request.forced) if request.chosen and not moved else 0
        self._chosen = range(len(self.begin), len(self.begin) + chosen)
        if row.log or forced.tokens or row.source is not None:
            action = request.sampler.mechanisms[forced.action].name
            counts = len(row.log), len(row.tokens), row.rewinds
            row.moves.append(Move(*counts, [*map(int, forced.tokens)], action))
            if row.log and not row.budget and row.source is None:
                row.source = (-1, 0)  # its tokens are from another run
        row.text, row.finish_reason, row.error, row.budget = "", None, None, budget
        for token in row.tokens:
            self._show(token)
        self._count()

    @property
    def running(self) -> bool:
        """Whether the row has not finished yet, as far as the host knows."""
        return self.row.finish_reason is None and not self.replaced

    @property
    def ids(self) -> list[int]:
        """The prompt and the committed tokens."""
        return [*self.request.prompt, *(token.token_id for token in self.row.tokens)]

    @property
    def to_cache(self) -> int:
        """Number of tokens, prompt included, before the last committed one. The slot caches them
        before the row's next step."""
        return len(self.request.prompt) + len(self.row.tokens) - 1

    @property
    def remaining(self) -> int:
        """Number of tokens that the row may still generate."""
        return self.limit - self.length

    @property
    def reach(self) -> int:
        """The row's length with its longest branch."""
        return self.length + max(map(len, self._paths), default=0)

    def arrival(self, mechanisms: tuple[Mechanism, ...], capacity: int) -> Arrival:
        """Returns the row as an `Arrival` for its slot, where its first `cached` tokens are cached.
        UserError if its sampler has other mechanisms."""
        row, request, ids = self.row, self.request, [*self.ids, *self.forced.tokens]
        history = np.zeros(capacity, np.int32)
        history[: len(ids)] = ids
        confidences = np.zeros(capacity, np.float32)
        for token in row.tokens:
            confidences[token.position] = token.token_confidence
        fresh = fresh_tally(mechanisms)
        tally = self._state or fresh
        if request.sampler.mechanisms != mechanisms or tally.states.keys() != fresh.states.keys():
            raise UserError("the samplers of one run must have the same mechanisms")
        rewinds = f"~{row.rewinds}" if row.rewinds else ""
        forwards = (token.forwards for token in (*row.tokens, *row.retracted_tokens))
        return Arrival(
            history=history,
            confidences=confidences,
            prompt_length=np.int32(len(request.prompt)),
            cached=np.int32(self.cached),
            budget=np.int32(row.budget),
            # Each rewind gives other random numbers.
            keys=row_key(request.seed, request.row_id + rewinds),
            looks_up=np.bool_(request.lookup is not None),
            asks_for_choice=np.bool_(request.ask is not None),
            clarifies=np.bool_(request.clarify),
            settings=request.sampler.packed,
            eos_ids=padded_ids(self._end_ids),
            tally=replace(
                tally,
                queued=np.int32(len(self.forced.tokens)),  # type: ignore[arg-type]
                queue_action=np.int32(self.forced.action),  # type: ignore[arg-type]
            ),
            forwards=np.int32(max(forwards, default=0)),
        )

    def has_cached(self, other: "RunningRow", *, generated: bool = False) -> bool:
        """Whether the slot of this row has cached another row's tokens except the last one. New
        rows share only the text that they begin with, so that they do not depend on the progress of
        other rows, unless `generated` tokens are accepted."""
        if self.cached < other.to_cache or self.ids[: other.to_cache] != other.ids[:-1]:
            return False
        return generated or len(other.ids) != len(other.begin) or self.begin == other.begin

    @property
    def inherited(self) -> list[Any] | None:
        """The kept cache of the row that this one was forked from. None if it does not have all
        tokens except the last."""
        parent = self.row.parent
        if parent is None or [*parent.ids[: self.to_cache]] != self.ids[:-1]:
            return None
        return parent.layers

    def shared(self, other: "RunningRow") -> int:
        """Number of another row's tokens, without the last one, that are cached in this slot."""
        if self.row.finish_reason == "error":  # its cache may hold NaN
            return 0
        both = zip(self.ids[: self.cached], other.ids[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))

    def apply(self, outcome: StepOutcome, stopping: Callable[[], bool]) -> Iterator[Event]:
        """Applies a step's outcome to the row or a branch: commits tokens, retracts pending ones,
        ends the row, or calls a hook and sets `answer` or `pending`.

        `stopping` returns whether the run is stopping: then no hook is called.
        """
        yield from self._apply(outcome, stopping)
        self.cached = self.to_cache
        self._count()

    def _count(self) -> None:
        """Counts the row's tokens."""
        live = sum(not retracted for _, retracted in self._pending)
        self.length = len(self.request.prompt) + len(self.row.tokens) + live
        assert 0 <= self.cached < self.length <= self.limit

    def _apply(self, outcome: StepOutcome, stopping: Callable[[], bool]) -> Iterator[Event]:
        token, joined = outcome.token, outcome.joined
        # All branches have ended.
        if joined is not None:
            yield from self._join(joined, outcome, stopping)
            return
        # A branch grows. The row's text changes once all branches have ended.
        if outcome.branch >= 0:
            if outcome.live and outcome.status != BRANCH_ENDED:
                self._paths[outcome.branch].append(token)
            return
        # A row that goes back.
        if outcome.rewinds:
            self._retract(token.position)
            yield from self._commit(outcome.settled)
            return
        # A row that failed, that looks something up, or that is forked: its tokens are final.
        if outcome.status == ERROR:
            yield from self._commit()
            if self.running:  # no stop string
                self.row.error = f"NaN or infinite logits at position {token.position}"
                yield self._end("error")
        elif outcome.status == WAITS_FOR_TEXT:
            yield from self._commit()
            if self.running and not stopping():
                assert self.request.lookup is not None
                self.row.lookups += 1
                found = call(self.request.lookup, self._plain_text())
                deadline = time.monotonic() + LOOKUP_SECONDS
                self.wait(Pending(found, self._take_result, deadline))
        elif outcome.candidates:
            yield from self._commit()
            self._paths = [
                [replace(token, token_id=token_id, logprob=logprob)]
                for token_id, logprob in outcome.candidates
            ]
        # One more token.
        else:
            yield from self._add([self._as_chosen(token)], outcome)

    def _add(self, tokens: list[TokenRecord], outcome: StepOutcome) -> Iterator[Event]:
        """Adds a step's tokens, and commits those that later steps cannot retract."""
        self._pending += [(token, False) for token in tokens]
        reason = _REASONS.get(outcome.status)
        if outcome.status >= ENDED_BY:
            reason = self.request.sampler.mechanisms[outcome.status - ENDED_BY].name
        if reason is None:
            yield from self._commit(outcome.settled)
            return
        if reason == "eos" and tokens[-1].token_id not in self.request.eos_ids:
            reason = "stop"
        if reason == "length" and self.row.budget < self.request.max_new_tokens:
            reason = "context"
        yield from self._commit(reason=reason)

    def _join(
        self, joined: ForkEnd, outcome: StepOutcome, stopping: Callable[[], bool]
    ) -> Iterator[Event]:
        """Ends the fork: commits the best branch, or lets the host choose."""
        paths, self._paths = self._paths, []
        ids = [[token.token_id for token in path] for path in paths]
        scores = [score if isfinite(score) else None for score in joined.scores]
        branches = [
            BranchRecord(tokens, self._tokenizer.decode_within(tokens), score, i == joined.best)
            for i, (tokens, score) in enumerate(zip(ids, scores, strict=False))
        ]
        if paths[0][0].action == "clarify":
            branches = [replace(branch, chosen=False) for branch in branches]
            texts = [branch.text for branch in branches if branch.score is not None]
            intents, answer = ask_question(self.request, texts)
            self.answer = None if stopping() else answer
            self._forked = replace(paths[0][0], branches=branches, intents=intents)
            return
        two = two_best(branches)
        ambiguous = bool(joined.ambiguous) and len({branch.text for branch in two}) == 2
        first, *rest = paths[joined.best]
        if joined.committed:
            # All of them were proposed by the fork's step, and paid for by its end.
            assert joined.committed == len(paths[joined.best])
            drawn_by = {name: getattr(first, name) for name in _PROPOSAL}
            forwards = outcome.token.forwards
            first = replace(first, branches=branches, ambiguous=ambiguous, forwards=forwards)
            tokens = [first, *(replace(token, **drawn_by, forwards=forwards) for token in rest)]
            tokens[-1].state = outcome.token.state
            yield from self._add(tokens, outcome)
            return
        self._forked = replace(first, branches=branches, ambiguous=ambiguous)
        if outcome.status == WAITS_FOR_CHOICE and not stopping():
            self.wait(Pending(ask_choice(self.row, branches, ambiguous), self._take_choice))

    def wait(self, pending: Pending) -> None:
        """Makes the row wait for an answer of the host, or takes it at once."""
        self.pending = pending
        self.poll()

    def poll(self) -> None:
        """Takes the answer that the row waits for, once it has arrived or is late."""
        if self.pending is not None and self.pending.is_over:
            pending, self.pending = self.pending, None
            pending.take(pending.future)

    def _plain_text(self) -> str:
        """Returns the prompt and the committed tokens as text, with line breaks for runs of control
        tokens: without them the words of two turns would be one."""
        parts = groupby(self.ids, self._tokenizer.special_ids.__contains__)
        return "\n".join(self._tokenizer.decode(ids) for special, ids in parts if not special)

    def _take_result(self, future: Future[str | None]) -> None:
        """Takes the result of a lookup."""
        where = self._tokenizer, self.ids, self.remaining
        self.answer = insert_result(self.request, *where, found_text(future))

    def _take_choice(self, future: Future[int | None]) -> None:
        """Takes a choice between the branches of the last fork."""
        forked = self._forked
        assert forked is not None
        assert forked.branches is not None
        branches, answer = forked.branches, future.result()
        branches, self.answer = choose_branch(self.request, branches, answer, self.remaining)
        self._forked = replace(forked, branches=branches)

    def interrupt(self, reason: str = "interrupt") -> Iterator[Event]:
        """Ends the row. Its pending tokens and held text become final."""
        yield from self._commit()
        if self.running:
            yield self._end(reason)

    def _commit(self, end: int | None = None, reason: str | None = None) -> Iterator[Event]:
        """Commits the pending tokens before position `end`, by default all. The row ends with the
        last for `reason`, or with a stop string. Retracted ones have their events in between."""
        row = self.row
        while self._pending and self.running:
            token, retracted = self._pending[0]
            if not retracted and end is not None and token.position >= end:
                return
            del self._pending[0]
            row.log.append((token, retracted))
            if retracted:
                row.retracted_tokens.append(token)
                yield self._token_event(token, (), retracted=True)
                continue
            last = reason if not self._pending else None
            if token.position in self._chosen and token.action == self.request.action:
                token.chosen = True
            row.tokens.append(token)
            pieces = self._show(token, ends=last is not None)
            if self._stop.stopped or last is not None:
                pieces += self._end("stop" if self._stop.stopped else str(last)).pieces
            yield self._token_event(token, pieces)
        self._pending.clear()

    def _show(self, token: TokenRecord, *, ends: bool = False) -> tuple[Piece, ...]:
        """Adds a committed token's text. Returns what became final."""
        token.text = self._stream.push(token.token_id) + (self._stream.flush() if ends else "")
        pieces = tuple(Piece(*shown) for shown in self._stop.push(token.text, token))
        self.row.text += "".join(piece.text for piece in pieces)
        return pieces

    def _retract(self, position: int) -> None:
        """Retracts the pending tokens from a position on. Their events follow those of the
        tokens before them, as in a trace."""
        live = [token for token, retracted in self._pending if not retracted]
        for token, text in zip(
            live, self._stream.peek([token.token_id for token in live]), strict=True
        ):
            if token.position >= position:
                token.text = text
        self._pending = [
            (token, retracted or token.position >= position) for token, retracted in self._pending
        ]

    def _token_event(
        self, token: TokenRecord, pieces: tuple[Piece, ...], *, retracted: bool = False
    ) -> Event:
        if self.row.first_token is None:
            self.row.first_token = time.perf_counter()
        return Event(self.row, token, pieces, retracted)

    def _end(self, reason: str) -> Event:
        """Ends the row; the text that could have become a stop string is final."""
        self.row.finish_reason = reason
        pieces = tuple(Piece(text, source) for text, source in self._stop.flush())
        self.row.text += "".join(piece.text for piece in pieces)
        return Event(self.row, None, pieces)

    def _as_chosen(self, token: TokenRecord) -> TokenRecord:
        """Restores the fork's proposal on a branch token that was committed by force. The first
        token has all branches, also those of `clarify`, which commits none."""
        forked = self._forked
        if forked is not None and forked.intents is not None:
            self._forked = None
            return replace(token, branches=forked.branches, intents=forked.intents)
        if token.action != "branch" or forked is None:
            return token
        proposed = {name: getattr(forked, name) for name in (*_PROPOSAL, "branches", "ambiguous")}
        self._forked = replace(forked, branches=None, ambiguous=None)
        return replace(token, **proposed)


def check_place(row: Row, budget: int, position: int | None = None) -> int:
    """Returns the number of a row's tokens before the position where it continues, by default all.
    UserError for a position outside of the generated tokens or without budget, a text that a stop
    string ended, or tokens whose state was not recorded."""
    name, first = f"row '{row.request.row_id}'", len(row.request.prompt)
    end = first + len(row.tokens)
    kept = len(row.tokens) if position is None else position - first
    if not 0 <= kept <= len(row.tokens):
        raise UserError(f"{name} can continue from a position of {first} to {end}, not {position}")
    if kept >= budget:
        raise UserError(f"{name} has no budget left at position {first + kept}")
    if kept == len(row.tokens) and row.finish_reason == "stop":
        raise UserError(
            f"{name} ends with a stop string: it can only continue from before position {end}"
        )
    if kept and row.tokens[kept - 1].state is None:
        raise UserError(f"{name} has no recorded states: use Recording(state=True) to continue it")
    return kept
