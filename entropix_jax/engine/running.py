"""One running row on the host: converts step outcomes to tokens, text, and a finish reason."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from entropix_jax.engine.preparation import CalibratedSampler, describe_token
from entropix_jax.engine.records import StepOutcome
from entropix_jax.engine.results import Event, Move, Piece, Request, Row
from entropix_jax.engine.slots import Arrival, fresh_tally, padded_ids
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    ENDED_BY,
    EOS,
    ERROR,
    LENGTH,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
    Joined,
)
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.integers import as_integer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.text.stop import StopFilter
from entropix_jax.text.turns import stop_ids

_PROPOSAL = ("temperature", "top_k", "top_p", "min_p")  # of a `TokenRecord`
_REASONS = {EOS: "eos", LENGTH: "length", ERROR: "error"}


class Answer(NamedTuple):
    """The host's answer to a row that waits for it."""

    tokens: list[int]  # the row's next ones; none: it samples
    action: int  # index into the sampler's mechanisms, which the tokens carry


NOTHING = Answer([], 0)


class RunningRow:
    """A running row. A token is pending until no later step can retract it.

    A row with tokens continues after them. A row that the caller moves gets a new instance.
    """

    def __init__(
        self,
        row: Row,
        model: LanguageModel,
        capacity: int,
        forced: Answer = NOTHING,
        *,
        moved: bool = False,
    ) -> None:
        """`capacity` is the cache positions of the row; the `forced` tokens come next.
        UserError: see `check_request` and `check_place`."""
        self.row = row
        self.request = row.request
        self.budget = check_request(model, row.request, capacity)
        check_place(row, self.budget)
        self.forced = forced
        self.moved = moved  # by the host, and not inserted since
        self.left = False  # another one runs the row
        self.cached = 0  # tokens of its text that the slot has cached for good
        self.answer: Answer | None = None  # on its way to the device
        self._prompt = [*row.request.prompt]
        # A stop string that is a control token ends the row by its id: it has no text.
        self._end_ids = all_end_ids(model, row.request)
        self._tokenizer = model.tokenizer
        self._stop = StopFilter[TokenRecord](row.request.stop)
        self._stream = model.tokenizer.stream(after=row.request.prompt)
        # Tokens that a later step may retract, in between those that one did, in the order of their
        # events.
        self._pending: list[tuple[TokenRecord, bool]] = []
        self._paths: list[list[TokenRecord]] = []  # of each branch, while the row is forked
        self._forked: TokenRecord | None = None  # of the last fork whose tokens are forced
        self._state = row.tokens[-1].state if row.tokens else None
        self._retrieved = 0 if self._state is None else int(self._state.states["inject"].begun)
        row.text, row.finish_reason, row.error = "", None, None
        row.tokens = [*row.tokens]  # the caller may have given those of another row
        row.log = row.log or [(token, False) for token in row.tokens]
        if row.log or forced.tokens or row.source is not None:
            action = row.request.sampler.mechanisms[forced.action].name
            counts = len(row.log), len(row.tokens), row.rewinds
            row.moves.append(Move(*counts, [*map(int, forced.tokens)], action))
            if row.log and not row.budget and row.source is None:
                row.source = (-1, 0)  # its tokens are from another run
        row.budget = self.budget
        for token in row.tokens:
            self._show(token)

    @property
    def running(self) -> bool:
        """Whether the row has not finished yet, as far as the host knows."""
        return self.row.finish_reason is None and not self.left

    @property
    def ids(self) -> list[int]:
        """The prompt and the committed tokens."""
        return [*self._prompt, *(token.token_id for token in self.row.tokens)]

    @property
    def prefix(self) -> list[int]:
        """All tokens except the last one. A slot caches them before the row's next step."""
        return self.ids[:-1]

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
            budget=np.int32(self.budget),
            # Each rewind gives other random numbers.
            keys=row_key(request.seed, request.row_id + rewinds),
            asks_for_text=np.bool_(request.retrieve is not None),
            asks_for_choice=np.bool_(request.ask is not None),
            settings=request.sampler.settings,
            eos_ids=padded_ids(self._end_ids),
            tally=replace(
                tally,
                queued=np.int32(len(self.forced.tokens)),  # type: ignore[arg-type]
                queue_action=np.int32(self.forced.action),  # type: ignore[arg-type]
            ),
            forwards=np.int32(max(forwards, default=0)),
        )

    def has_cached(self, other: "RunningRow") -> bool:
        """Whether the slot of this row has cached another row's tokens except the last one. New
        rows share only whole prompts, so that they do not depend on the progress of other rows."""
        prefix = other.prefix
        if self.cached < len(prefix):
            return False
        if not other.row.tokens:
            return self._prompt == other._prompt
        return self.ids[: len(prefix)] == prefix

    def shared(self, other: "RunningRow") -> int:
        """Number of another row's tokens, without the last one, that are cached in this slot."""
        if self.row.finish_reason == "error":  # its cache may hold NaN
            return 0
        both = zip(self.ids[: self.cached], other.prefix, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))

    @property
    def length(self) -> int:
        """The row's tokens that the host knows, including the prompt, pending ones, and the longest
        branch."""
        branch = max(map(len, self._paths), default=0)
        return len(self.request.prompt) + self._generated + branch

    @property
    def remaining(self) -> int:
        """How many tokens the row may still generate."""
        return self.budget - self._generated

    @property
    def _generated(self) -> int:
        return len(self.row.tokens) + len(self._live)

    @property
    def _live(self) -> list[TokenRecord]:
        return [token for token, retracted in self._pending if not retracted]

    def apply(self, outcome: StepOutcome, stopping: Callable[[], bool]) -> Iterator[Event]:
        """Applies a step's outcome to the row or a branch: commits tokens, retracts pending ones,
        ends the row, or calls a hook and sets `answer`.

        `stopping` returns whether the run is stopping: then no hook is called.
        """
        yield from self._apply(outcome, stopping)
        self.cached = len(self._prompt) + len(self.row.tokens) - 1

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
        # A row that failed, that waits for a text, or that is forked: what it has stands.
        if outcome.status == ERROR:
            yield from self._commit()
            if self.running:  # no stop string
                self.row.error = f"NaN or infinite logits at position {token.position}"
                yield self._end("error")
        elif outcome.status == WAITS_FOR_TEXT:
            yield from self._commit()
            if self.running and not stopping():
                self.answer = self._retrieve_thought()
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
        if reason == "length" and self.budget < self.request.max_new_tokens:
            reason = "context"
        yield from self._commit(reason=reason)

    def _join(
        self, joined: Joined, outcome: StepOutcome, stopping: Callable[[], bool]
    ) -> Iterator[Event]:
        """Ends the fork: commits the best branch, or lets the host choose."""
        paths, self._paths = self._paths, []
        ids = [[token.token_id for token in path] for path in paths]
        scores = [score if isfinite(score) else None for score in joined.scores]
        branches = [
            BranchRecord(tokens, self._tokenizer.decode_within(tokens), score, i == joined.best)
            for i, (tokens, score) in enumerate(zip(ids, scores, strict=False))
        ]
        two = _two_best(branches)
        ambiguous = bool(joined.ambiguous) and len({branch.text for branch in two}) == 2
        first, *rest = paths[joined.best]
        if joined.committed:
            # All of them were proposed by the fork's step, and paid for by its end.
            drawn_by = {name: getattr(first, name) for name in _PROPOSAL}
            forwards = outcome.token.forwards
            first = replace(first, branches=branches, ambiguous=ambiguous, forwards=forwards)
            tokens = [first, *(replace(token, **drawn_by, forwards=forwards) for token in rest)]
            tokens[-1].state = outcome.token.state
            yield from self._add(tokens, outcome)
            return
        self._forked = replace(first, branches=branches, ambiguous=ambiguous)
        if outcome.status == WAITS_FOR_CHOICE and not stopping():
            self.answer = self._choose_branch(branches)

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
            if token.position in row.chosen and token.action == "inject":
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
        live = self._live
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

    def _retrieve_thought(self) -> Answer:
        """Calls `Request.retrieve`. Returns its text, else the sampler's own thought: the first of
        the two that fits into the budget and holds no token that is never drawn."""
        assert self.request.retrieve is not None
        tokenizer, settings = self._tokenizer, self.request.sampler.settings
        text = self.request.retrieve(tokenizer.decode(self.ids))
        if not isinstance(text, str):
            raise UserError(f"retrieve gave {text!r}: expected a text, an empty one for none")
        # The name of a control token in a text is not that token: it must not end a row or a turn.
        special = tokenizer.special_ids
        retrieved = [i for i in tokenizer.encode_within(text) if i not in special]
        thought = settings.own["inject"].thought
        thoughts = [ids[ids >= 0].tolist() for ids in thought if ids[0] >= 0]
        turn = self._retrieved % max(len(thoughts), 1)
        self._retrieved += 1
        candidates = (retrieved, *thoughts[turn : turn + 1])
        fitting = (tokens for tokens in candidates if 0 < len(tokens) <= self.remaining)
        never = {*settings.unwritable.tolist()}
        allowed = (tokens for tokens in fitting if never.isdisjoint(tokens))
        return Answer(next(allowed, []), self.request.sampler.parts.action("inject"))

    def _choose_branch(self, branches: list[BranchRecord]) -> Answer:
        """Returns the tokens of the best branch. If the fork is ambiguous, `Request.ask` chooses
        between the two best branches."""
        assert self.request.ask is not None
        assert self._forked is not None
        chosen = next(i for i, branch in enumerate(branches) if branch.chosen)
        if self._forked.ambiguous:
            two = _two_best(branches)
            started = time.perf_counter()
            answer = self.request.ask(self.row.number, [branch.text for branch in two])
            self.row.waited += time.perf_counter() - started
            if answer not in (None, 0, 1):
                raise UserError(f"ask gave {answer!r}: expected 0, 1, or None for the better one")
            if answer is not None:
                chosen = next(i for i, branch in enumerate(branches) if branch is two[answer])
        whole = self.request.sampler.values["branch.commit_all"]
        tokens = branches[chosen].tokens[: None if whole else 1]
        branches = [replace(b, chosen=i == chosen) for i, b in enumerate(branches)]
        self._forked = replace(self._forked, branches=branches)
        return Answer(tokens[: self.remaining], self.request.sampler.parts.action("branch"))

    def _as_chosen(self, token: TokenRecord) -> TokenRecord:
        """A token; if it is a branch's that is committed by force, as the fork's step proposed it.
        The first one has all branches."""
        forked = self._forked
        if token.action != "branch" or forked is None:
            return token
        told = {name: getattr(forked, name) for name in (*_PROPOSAL, "branches", "ambiguous")}
        self._forked = replace(forked, branches=None, ambiguous=None)
        return replace(token, **told)


def _two_best(branches: Sequence[BranchRecord]) -> list[BranchRecord]:
    """Returns the two branches with the highest scores, the better one first."""
    scored = [(branch.score, branch) for branch in branches if branch.score is not None]
    return [branch for _, branch in sorted(scored, key=lambda pair: -pair[0])[:2]]


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


def find_no_token(model: LanguageModel, tokens: Sequence[Any]) -> Any:
    """Returns the first invalid token id; None if all are valid."""
    ids = range(model.config.vocab_size)
    return next((i for i in tokens if isinstance(i, float) or as_integer(i) not in ids), None)


def all_end_ids(model: LanguageModel, request: Request) -> tuple[int, ...]:
    """Returns the request's end tokens and its stop strings that are control tokens."""
    stops = stop_ids(model.tokenizer, request.stop)
    return tuple(dict.fromkeys((*request.eos_ids, *stops)))


def check_request(model: LanguageModel, request: Request, capacity: int | None = None) -> int:
    """Checks a request and returns the number of tokens that it may generate: `max_new_tokens`,
    limited by the model's positions and by `capacity`, the cache positions of a row, if given.
    UserError for a prompt that is empty, too long or has an invalid token id, a sampler that is not
    calibrated, a budget below one, or too many end tokens."""
    prompt, positions = len(request.prompt), model.config.max_positions
    if prompt == 0:
        raise UserError("the prompt is empty")
    if (strange := find_no_token(model, request.prompt)) is not None:
        raise UserError(f"the prompt holds {describe_token(model, strange)}")
    if not isinstance(request.sampler, CalibratedSampler):
        raise UserError("the sampler is not calibrated: see entropix_jax.calibrate_sampler")
    check_range("max_new_tokens", request.max_new_tokens, 1)
    if not all(isinstance(stop, str) and stop for stop in request.stop):
        raise UserError("stop strings must not be empty")
    padded_ids(all_end_ids(model, request))
    room = positions if capacity is None else min(positions, capacity)
    if prompt >= room:
        limit = f"a row has room for {room}" if room < positions else f"the model {room} positions"
        raise UserError(
            f"the prompt has {prompt} tokens, {limit}: shorten it to at most {room - 1}"
        )
    return min(request.max_new_tokens, room - prompt)
