"""Generation as a user calls it: prompts in, a stream of tokens and at the end the results out.

The host only hands out work and reads what came back. While it reads one chunk of steps, the device
already runs the next.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.decode import answer, decode, prefill
from entropix_jax.decode_state import (
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    FINISHED_STOP,
    RUNNING,
    WAITS_FOR_CHOICE,
    WAITS_FOR_TEXT,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    init_state,
)
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import (
    MIN_WINDOW,
    bucket,
    check_recording,
    chunk_size,
    for_rows,
    sampler_params,
)
from entropix_jax.records import branch_records, differ, futures_of, token_record, two_best
from entropix_jax.results import Event, Piece, Request, Row
from entropix_jax.sampler.arms import BRANCH, INJECT
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Sampler
from entropix_jax.stopping import StopFilter
from entropix_jax.trace import TokenRecord

MAX_STEPS = 32  # most steps between two looks of the host
_LOOK_SECONDS = 0.1  # how often the host would like to look, for a stream that flows
_MAX_EOS = 8
_MIN_CAPACITY = 256
_MIN_PREFILL, _MAX_PREFILL = 16, 512

# A row's text so far to the text to inject.
Retrieve = Callable[[str], str]
# A row and the texts of its two best branches to the index of the one to take, or None.
Ask = Callable[[int, Sequence[str]], int | None]

_FINISH = {FINISHED_EOS: "eos", FINISHED_LENGTH: "length", FINISHED_ERROR: "error"}


class Generation:
    """A run over some rows. Iterate to make it go; `rows` then holds the results.

    Leaving the iteration early, or `stop`, leaves the rows as far as they came; `interrupt` then
    ends them.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        sampler: Sampler | str = "entropix",
        *,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        turn_end: bool = False,
        recording: Recording | None = None,
        retrieve: Retrieve | None = None,
        ask: Ask | None = None,
    ) -> None:
        """Checks everything that can be checked before anything is computed.

        Args:
            stop: a text that ends a row, or several.
            ignore_eos: no token ends a row.
            turn_end: the end of a chat's turn ends a row too, whether or not the model's folder
                says so.
            recording: what each token's record holds besides the usual.
            retrieve: is given a row's text whenever a thought is due, and returns the text to
                inject in its place. Where that is empty or does not fit the budget, the sampler's
                own thought is injected, and where that does not fit either the row just draws.
            ask: is given a row and the texts of the two best branches, the better one first, where
                their scores are too close to call, and returns which it shall be, or None for the
                better one.

        Raises:
            UserError: no request, an empty prompt, one that leaves no room for a token or holds
                what is no token, or a sampler or recording that does not fit the model.
        """
        if not requests:
            raise UserError("there is nothing to generate: no request")
        if isinstance(sampler, str):
            sampler = load_sampler(sampler)
        self.model = model
        self.sampler = sampler.calibrated(model.folder)
        self.seed = seed
        self.rows = [Row(request) for request in requests]
        self.timings: dict[str, float] = {}
        self._recording = recording or Recording()
        check_recording(model, self._recording)
        stops = [stop] if isinstance(stop, str) else stop
        self._budgets = [_budget(model, request) for request in requests]
        self._stops = [StopFilter[TokenRecord](stops) for _ in requests]
        self._streams = [model.tokenizer.stream(after=request.prompt) for request in requests]
        params = sampler_params(model, self.sampler)
        self._params = for_rows(params, len(requests))
        self._thoughts = [
            ids[:length].tolist()
            for ids, length in zip(params.inject.thoughts, params.inject.lengths, strict=True)
            if length
        ]
        self._retrieve = retrieve
        self._ask = ask
        self._held: list[TokenRecord | None] = [None] * len(requests)
        self._answers: dict[int, tuple[list[int], int]] = {}
        self._chosen: dict[int, list[dict[str, Any]]] = {}
        self._asked = [0] * len(requests)
        self._waited = 0.0
        ends = model.turn_end_ids if turn_end else model.generation.eos_ids
        self._eos_ids = _padded_ids(() if ignore_eos else ends)
        self._steps = 1
        self._asked_to_stop = False
        self._start = time.perf_counter()
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[Event]:
        """The events, token by token: all rows of one step, then the next step. A second iteration
        goes on where the first was left."""
        return self._iterator

    def _iterate(self) -> Iterator[Event]:
        self._start = time.perf_counter()
        for chunk in self._chunks():
            asked = time.perf_counter()
            records, log = chunk[0], chunk[1] if int(chunk[1].count) else None
            records, log = jax.device_get((records, log))
            self._pace(time.perf_counter() - asked)
            for event in self._events(records, log):
                if event.token is not None:
                    self.timings.setdefault("first_token", self._seconds())
                yield event
                # What took a token's place comes next, and belongs to it.
                if self._asked_to_stop and not event.retracted:
                    return
        self.timings["total"] = self._seconds()

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._asked_to_stop = True

    def interrupt(self) -> list[Event]:
        """Ends the rows that had not ended, and gives the text that was still held back of them."""
        self.timings.setdefault("total", self._seconds())
        events: list[Event] = []
        for index, row in enumerate(self.rows):
            events += self._release(index)
            if row.finish_reason is None:
                events.append(self._end(index, "interrupt"))
        return events

    def _seconds(self) -> float:
        """Since the start, without the time in which a person was asked."""
        return time.perf_counter() - self._start - self._waited

    def run(self) -> list[Row]:
        """Runs to the end and gives the rows."""
        for _ in self:
            pass
        return self.rows

    def _chunks(self) -> Iterator[tuple[StepRecord, BranchLog]]:
        """What chunks of steps did. While the host reads one, the device runs the next."""
        state = self._prefilled()
        in_flight: deque[tuple[int, StepRecord, BranchLog]] = deque()
        while True:
            while len(in_flight) < 2 and self._wants_more(sum(steps for steps, *_ in in_flight)):
                steps = self._steps
                state, records, log = decode(
                    self.model.params,
                    self._params,
                    self._eos_ids,
                    self._with_answers(state),
                    jnp.int32(steps),
                    config=self.model.config,
                    window=self._window(state.cache.capacity),
                    max_steps=MAX_STEPS,
                    recording=self._recording,
                    arms=tuple(self.sampler.arms.values()),
                )
                in_flight.append((steps, records, log))
            if not in_flight:
                return
            yield in_flight.popleft()[1:]

    def _wants_more(self, steps: int) -> bool:
        """Whether a row will still run after the `steps` that are on their way, as far as is
        known."""
        if self._asked_to_stop:
            return False
        running = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        return any(steps == 0 or self._budgets[i] - self._number(i) > steps for i in running)

    def _window(self, capacity: int) -> int:
        """Slots enough for the longest row as far as it is known, and no more: a row that is longer
        already ends the chunk before its first step. So how many slots a step reads, and with them
        the last digits of what it computes, never depends on when the host looked."""
        lengths = [len(row.request.prompt) + self._number(i) for i, row in enumerate(self.rows)]
        return min(bucket(max(lengths), MIN_WINDOW), capacity)

    def _number(self, index: int) -> int:
        """The tokens of a row that are known."""
        return len(self.rows[index].tokens) + (self._held[index] is not None)

    def _prefilled(self) -> DecodeState:
        """All prompts cached but for their last tokens; one that all rows share is run once."""
        requests = [row.request for row in self.rows]
        keys = np.stack([row_key(self.seed, request.row_id) for request in requests])
        shared = all(list(r.prompt) == list(requests[0].prompt) for r in requests)
        prompts = [request.prompt for request in requests[: 1 if shared else None]]
        longest = max(
            len(r.prompt) + budget for r, budget in zip(requests, self._budgets, strict=True)
        )
        state = init_state(
            self.model.config,
            prompts,
            self._budgets[: len(prompts)],
            keys[: len(prompts)],
            capacity=bucket(longest, _MIN_CAPACITY),
            dtype=self.model.precision.activations,
            asks_for_text=self._retrieve is not None,
            asks_for_choice=self._ask is not None,
        )
        counts = np.array([len(prompt) - 1 for prompt in prompts])
        done = 0
        while done < counts.max() and not self._asked_to_stop:
            left = int(counts.max()) - done
            size = min(bucket(left, _MIN_PREFILL), self._prefill_size(done + left, len(prompts)))
            tokens = np.zeros((len(prompts), size), np.int32)
            count = np.clip(counts - done, 0, size)
            for row, prompt in enumerate(prompts):
                tokens[row, : count[row]] = prompt[done : done + count[row]]
            state = prefill(
                self.model.params,
                state,
                jnp.asarray(tokens),
                jnp.asarray(count, jnp.int32),
                config=self.model.config,
                window=min(bucket(done + size, MIN_WINDOW), state.cache.capacity),
            )
            done += size
            # Part by part: handed out all at once, they could not be stopped.
            jax.block_until_ready(state.cache.length)
        if shared and len(requests) > 1:
            state = jax.tree.map(lambda x: jnp.repeat(x, len(requests), axis=0), state)
            budgets = jnp.asarray(self._budgets, jnp.int32)
            state = replace(state, keys=jnp.asarray(keys), budget=budgets)
        return state

    def _events(self, records: StepRecord, log: BranchLog | None) -> Iterator[Event]:
        for step in range(records.live.shape[0]):
            for index in np.flatnonzero(records.live[step]):
                if self.rows[index].finish_reason is None:
                    record = jax.tree.map(lambda x: x[step, index], records)  # noqa: B023
                    entry = None
                    if log is not None and record.branch >= 0:
                        entry = jax.tree.map(
                            lambda x: x[record.branch],  # noqa: B023
                            replace(log, count=log.committed),
                        )
                    yield from self._take(int(index), record, entry)

    def _take(self, index: int, record: StepRecord, entry: BranchLog | None) -> Iterator[Event]:
        """What a step did to a row: tokens, one of them perhaps in the place of the last, an end,
        or a question."""
        if record.finish == FINISHED_ERROR:
            yield from self._release(index)
            row = self.rows[index]
            if row.finish_reason is None:  # no stop string
                row.error = f"row {index}: NaN or infinite logits at position {record.position}"
                yield self._end(index, "error")
            return
        decode_text = self.model.tokenizer.decode
        futures = [] if entry is None else futures_of(entry.branches, decode_text)
        if record.finish in (WAITS_FOR_TEXT, WAITS_FOR_CHOICE):
            # Who is asked has seen the whole text: nothing takes its last token back any more.
            yield from self._release(index)
            if self.rows[index].finish_reason is not None or self._asked_to_stop:
                return  # nobody is asked any more
            if record.finish == WAITS_FOR_TEXT:
                return self._answer_with_text(index)
            return self._answer_with_branch(index, futures)
        token = token_record(index, record, self._recording, decode_text)
        held = self._held[index]
        if token.action == "backspace" and held is not None:
            # Drawn from the same distribution, not from the one that was just read.
            token = replace(token, top=held.top, layers=held.layers)
            yield self._retract(index, held)
        else:
            yield from self._release(index)
        if entry is not None:
            *earlier, token = branch_records(token, futures, entry, self._recording, decode_text)
            for one in earlier:
                self._held[index] = one
                yield from self._release(index)
        elif token.action == "branch" and index in self._chosen:
            futures = self._chosen.pop(index)
            token = replace(token, branches=futures, ambiguous=differ(futures))
        if self.rows[index].finish_reason is not None:
            return  # a stop string
        self._held[index] = token
        if not record.may_return:
            reason = _FINISH.get(int(record.finish))
            if (
                reason == "length"
                and self._budgets[index] < self.rows[index].request.max_new_tokens
            ):
                reason = "context"
            yield from self._release(index, reason)

    def _release(self, index: int, reason: str | None = None) -> Iterator[Event]:
        """Adds the token that was held back to its row, for good, and ends the row where it ends:
        for `reason`, or by a stop string."""
        token, row, stop = self._held[index], self.rows[index], self._stops[index]
        if token is None or row.finish_reason is not None:
            return
        self._held[index] = None
        text = self._streams[index].push(token.token_id)
        if reason is not None:
            text += self._streams[index].flush()
        token = replace(token, text=text)
        row.tokens.append(token)
        pieces = tuple(Piece(text, source) for text, source in stop.push(token.text, token))
        row.text += "".join(piece.text for piece in pieces)
        if stop.stopped or reason is not None:
            pieces += self._end(index, "stop" if stop.stopped else str(reason)).pieces
        yield Event(index, token, pieces)

    def _retract(self, index: int, token: TokenRecord) -> Event:
        """Drops the token that was held back: another one takes its place."""
        self._held[index] = None
        self.rows[index].retracted += 1
        text = self._streams[index].peek(token.token_id)
        return Event(index, replace(token, text=text), (), retracted=True)

    def _end(self, index: int, reason: str) -> Event:
        """Ends a row, and gives the text that had been held back."""
        row = self.rows[index]
        row.finish_reason = reason
        pieces = tuple(Piece(text, source) for text, source in self._stops[index].flush())
        row.text += "".join(piece.text for piece in pieces)
        return Event(index, None, pieces)

    def _answer_with_text(self, index: int) -> None:
        """Asks the hook for a thought. Where it has none, or one that does not fit, the sampler's
        own takes its place, and where that does not fit either the row just draws."""
        assert self._retrieve is not None
        row, tokenizer = self.rows[index], self.model.tokenizer
        text = self._retrieve(
            tokenizer.decode([*row.request.prompt, *(token.token_id for token in row.tokens)])
        )
        # What a text calls a control token is not one: it must not end a row or open a turn.
        special = tokenizer.special_ids
        retrieved = [i for i in tokenizer.encode(text, add_bos=False) if i not in special]
        turn = self._asked[index] % max(len(self._thoughts), 1)
        self._asked[index] += 1
        room = self._budgets[index] - len(row.tokens)
        candidates = (retrieved, *self._thoughts[turn : turn + 1])
        fitting = (tokens for tokens in candidates if 0 < len(tokens) <= room)
        self._answers[index] = (next(fitting, []), INJECT)

    def _answer_with_branch(self, index: int, futures: list[dict[str, Any]]) -> None:
        """Asks which of the two best branches it shall be, where their texts differ."""
        assert self._ask is not None
        chosen = next(i for i, future in enumerate(futures) if future["chosen"])
        if differ(futures):
            two = two_best(futures)
            started = time.perf_counter()
            answer = self._ask(index, [future["text"] for future in two])
            self._waited += time.perf_counter() - started
            if answer is not None:
                chosen = next(i for i, future in enumerate(futures) if future is two[answer])
        whole = self.sampler.values["branch.commit_all"]
        tokens = futures[chosen]["tokens"][: None if whole else 1]
        room = self._budgets[index] - self._number(index)
        self._chosen[index] = [{**f, "chosen": i == chosen} for i, f in enumerate(futures)]
        self._answers[index] = (tokens[:room], BRANCH)

    def _prefill_size(self, length: int, batch: int) -> int:
        return chunk_size(self.model.config, length, batch, _MAX_PREFILL)

    def _with_answers(self, state: DecodeState) -> DecodeState:
        """Tells the device what the host knows: rows that a stop string has ended, and answers."""
        for index, (tokens, action) in self._answers.items():
            padded = np.zeros(state.history.shape[1], np.int32)
            padded[: len(tokens)] = tokens
            state = answer(
                state,
                jnp.int32(index),
                jnp.asarray(padded),
                jnp.int32(len(tokens)),
                jnp.int32(action),
                jnp.int32(max(self.sampler.values["inject.cooldown"], 1)),
            )
        self._answers.clear()
        stopped = np.array([row.finish_reason == "stop" for row in self.rows])
        if not stopped.any():
            return state
        # One that had gone on to wait gets no answer any more.
        goes_on = (state.finish == RUNNING) | (state.finish >= WAITS_FOR_TEXT)
        return replace(state, finish=jnp.where(stopped & goes_on, FINISHED_STOP, state.finish))

    def _pace(self, waited: float) -> None:
        """More steps a chunk while chunks come fast: a first token at once, then a steady flow."""
        if waited < _LOOK_SECONDS / 2:
            self._steps = min(2 * self._steps, MAX_STEPS)
        elif waited > _LOOK_SECONDS:
            self._steps = max(self._steps // 2, 1)


def _budget(model: LanguageModel, request: Request) -> int:
    """The tokens that a row may generate: as many as asked for, within the model's positions."""
    prompt, positions = len(request.prompt), model.config.max_positions
    if prompt == 0:
        raise UserError("the prompt is empty")
    if strange := [i for i in request.prompt if not 0 <= i < model.config.vocab_size]:
        raise UserError(f"the prompt holds {strange[0]}, which is no token")
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if prompt >= positions:
        raise UserError(
            f"the prompt has {prompt} tokens, the model {positions} positions: "
            f"at most {positions - 1} leave room for an answer"
        )
    return min(request.max_new_tokens, positions - prompt)


def _padded_ids(ids: Sequence[int]) -> jax.Array:
    """End tokens as int32 [_MAX_EOS], so that their number compiles nothing; -1 matches none."""
    if len(ids) > _MAX_EOS:
        raise UserError(f"the model names {len(ids)} end tokens, at most {_MAX_EOS} are possible")
    return jax.device_put(np.array([*ids, *[-1] * (_MAX_EOS - len(ids))], np.int32))
