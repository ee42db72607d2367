"""One row as the host sees it: what the device did to it becomes tokens, text, and an end."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from entropix_jax.decode_state import (
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
)
from entropix_jax.errors import UserError, check_range
from entropix_jax.health import NOWHERE, describe
from entropix_jax.loading import LanguageModel
from entropix_jax.records import Branching, Fields, Outcome, branch_records, differ, two_best
from entropix_jax.results import Event, Piece, Request, Row
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.stopping import StopFilter
from entropix_jax.trace import TokenRecord

# A row's text so far to the text to inject.
Retrieve = Callable[[str], str]
# A row and the texts of its two best branches to the index of the one to take, or None.
Ask = Callable[[int, Sequence[str]], int | None]

_CHOSEN_BY = ("temperature", "top_k", "top_p", "min_p")
_FINISH = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length", FINISHED_ERROR: "error"}


class RunningRow:
    """A row on its way. A token is held back as long as it can still be taken back."""

    def __init__(
        self,
        number: int,
        row: Row,
        model: LanguageModel,
        sampler: Sampler,
        params: SamplerSettings,
        *,
        budget: int,
        seed: int,
        eos_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        retrieve: Retrieve | None = None,
        ask: Ask | None = None,
    ) -> None:
        """`number` is what its events and records call it; `params` are the sampler's for one row
        of the model; `budget` stands in place of the request's own; `eos_ids` are the tokens that
        end the row; `seed`, `stop`, `retrieve` and `ask` are as `Generation` has them."""
        self.number = number
        self.row = row
        self.sampler = sampler
        self.params = params
        self.budget = budget
        self.seed = seed
        self.eos_ids = eos_ids
        self.started: float | None = None  # when it got its slot, by `time.perf_counter`
        self.waited = 0.0  # seconds in which a person was asked
        self.answer: tuple[list[int], int] | None = None  # tokens and action, on their way
        self.retrieve = retrieve
        self.ask = ask
        self._tokenizer = model.tokenizer
        self._stop = StopFilter[TokenRecord](stop)
        self._stream = model.tokenizer.stream(after=row.request.prompt)
        self._held: Fields | None = None
        self._chosen: list[dict[str, Any]] | None = None
        self._asked: Fields = {}
        self._retrieved = 0

    @property
    def running(self) -> bool:
        """Whether the row has no end yet, as far as is known."""
        return self.row.finish_reason is None

    @property
    def known(self) -> int:
        """The row's tokens that are known, prompt and the one that is held back included."""
        return len(self.row.request.prompt) + self._generated

    @property
    def left(self) -> int:
        """How many tokens the row may still generate, as far as is known."""
        return self.budget - self._generated

    @property
    def _generated(self) -> int:
        return len(self.row.tokens) + (self._held is not None)

    def take(
        self, outcome: Outcome, branching: Branching | None, stopping: Callable[[], bool]
    ) -> Iterator[Event]:
        """What a step did to the row: tokens, one of them perhaps in the place of the last, an end,
        or a question, whose `answer` then waits to be fetched.

        `stopping` tells whether the run is to end: then nobody is asked any more.
        """
        token, finish = outcome.token, outcome.finish
        if finish == FINISHED_ERROR:
            yield from self._release()
            if self.running:  # no stop string
                position, stage = outcome.unsound
                fault = f"NaN or infinite logits at position {token['position']}"
                if position != NOWHERE:
                    fault = describe(position, stage)
                self.row.error = fault
                yield self._end("error")
            return
        if finish in (WAITS_FOR_TEXT, WAITS_FOR_CHOICE):
            # Who is asked has seen the whole text: nothing takes its last token back any more.
            yield from self._release()
            if not self.running or stopping():
                return
            if finish == WAITS_FOR_TEXT:
                return self._answer_with_text()
            assert branching is not None
            # What the candidates were chosen by: the steps that commit one choose nothing.
            self._asked = {name: token[name] for name in _CHOSEN_BY}
            return self._answer_with_branch(branching.futures)
        held = self._held
        if token["action"] == "backspace" and held is not None:
            # Drawn from the same distribution, not from the one that was just read.
            token |= {name: held[name] for name in ("top", "layers") if name in held}
            yield self._retract(held)
        else:
            yield from self._release()
        if branching is not None:
            *earlier, token = branch_records(token, branching)
            for one in earlier:
                self._held = one
                yield from self._release()
        elif token["action"] == "branch":  # of the one that was chosen when asked
            token |= self._asked
            if self._chosen is not None:
                token |= {"branches": self._chosen, "ambiguous": differ(self._chosen)}
                self._chosen = None
        if not self.running:
            return  # a stop string
        self._held = token
        if not outcome.may_return:
            reason = _FINISH.get(finish)
            if reason == "length" and self.budget < self.row.request.max_new_tokens:
                reason = "context"
            yield from self._release(reason)

    def interrupt(self) -> Iterator[Event]:
        """Ends the row where it stands, and gives the text that was still held back of it."""
        yield from self._release()
        if self.running:
            yield self._end("interrupt")

    def _release(self, reason: str | None = None) -> Iterator[Event]:
        """Adds the token that was held back to the row, for good, and ends the row where it ends:
        for `reason`, or by a stop string."""
        held, row = self._held, self.row
        if held is None or not self.running:
            return
        self._held = None
        text = self._stream.push(held["token_id"])
        if reason is not None:
            text += self._stream.flush()
        token = TokenRecord(**held, text=text)
        row.tokens.append(token)
        pieces = tuple(Piece(text, source) for text, source in self._stop.push(token.text, token))
        row.text += "".join(piece.text for piece in pieces)
        if self._stop.stopped or reason is not None:
            pieces += self._end("stop" if self._stop.stopped else str(reason)).pieces
        yield Event(self.number, token, pieces)

    def _retract(self, held: Fields) -> Event:
        """Drops the token that was held back: another one takes its place."""
        self._held = None
        self.row.retracted += 1
        token = TokenRecord(**held, text=self._stream.peek(held["token_id"]))
        self.row.taken_back.append(token)
        return Event(self.number, token, (), retracted=True)

    def _end(self, reason: str) -> Event:
        """Ends the row, and gives the text that had been held back."""
        self.row.finish_reason = reason
        pieces = tuple(Piece(text, source) for text, source in self._stop.flush())
        self.row.text += "".join(piece.text for piece in pieces)
        return Event(self.number, None, pieces)

    def _answer_with_text(self) -> None:
        """Asks the hook for a thought. Where it has none, or one that does not fit, the sampler's
        own takes its place, and where that does not fit either the row just draws."""
        assert self.retrieve is not None
        row, tokenizer, inject = self.row, self._tokenizer, self.params.own["inject"]
        text = self.retrieve(
            tokenizer.decode([*row.request.prompt, *(token.token_id for token in row.tokens)])
        )
        if not isinstance(text, str):
            raise UserError(f"retrieve gave {text!r}: expected a text, an empty one for none")
        # What a text calls a control token is not one: it must not end a row or open a turn.
        special = tokenizer.special_ids
        retrieved = [i for i in tokenizer.encode_within(text) if i not in special]
        thoughts = [ids[ids >= 0].tolist() for ids in inject.thought if ids[0] >= 0]
        turn = self._retrieved % max(len(thoughts), 1)
        self._retrieved += 1
        candidates = (retrieved, *thoughts[turn : turn + 1])
        fitting = (tokens for tokens in candidates if 0 < len(tokens) <= self.left)
        self.answer = (next(fitting, []), self.params.action("inject"))

    def _answer_with_branch(self, futures: list[dict[str, Any]]) -> None:
        """Asks which of the two best branches it shall be, where their texts differ."""
        assert self.ask is not None
        chosen = next(i for i, future in enumerate(futures) if future["chosen"])
        if differ(futures):
            two = two_best(futures)
            started = time.perf_counter()
            answer = self.ask(self.number, [future["text"] for future in two])
            self.waited += time.perf_counter() - started
            if answer not in (None, 0, 1):
                raise UserError(f"ask gave {answer!r}: expected 0, 1, or None for the better one")
            if answer is not None:
                chosen = next(i for i, future in enumerate(futures) if future is two[answer])
        whole = self.sampler.values["branch.commit_all"]
        tokens = futures[chosen]["tokens"][: None if whole else 1]
        self._chosen = [{**f, "chosen": i == chosen} for i, f in enumerate(futures)]
        self.answer = (tokens[: self.left], self.params.action("branch"))


def budget_of(model: LanguageModel, request: Request, capacity: int | None = None) -> int:
    """The tokens that a row may generate: as many as asked for, within the model's positions, and
    within the slots of a cache where `capacity` says how many.

    Raises:
        UserError: an empty prompt, one that holds what is no token or leaves no room for one, or
            no token asked for.
    """
    prompt, positions = len(request.prompt), model.config.max_positions
    if prompt == 0:
        raise UserError("the prompt is empty")
    if strange := [i for i in request.prompt if not 0 <= i < model.config.vocab_size]:
        raise UserError(f"the prompt holds {strange[0]}, which is no token")
    check_range("max_new_tokens", request.max_new_tokens, 1)
    room = positions if capacity is None else min(positions, capacity)
    if prompt >= room:
        limit = f"a row has room for {room}" if room < positions else f"the model {room} positions"
        raise UserError(
            f"the prompt has {prompt} tokens, {limit}: at most {room - 1} leave room for an answer"
        )
    return min(request.max_new_tokens, room - prompt)
