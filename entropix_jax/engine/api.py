"""The public functions `generate`, `stream` and `score`, and the run of a list of requests."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.memory import max_slots
from entropix_jax.engine.records import check_recording
from entropix_jax.engine.request import MAX_SAMPLES, Ask, Lookup, Request, check_request
from entropix_jax.engine.results import Event, Rows
from entropix_jax.engine.score import ScoredToken, score_tokens
from entropix_jax.engine.shapes import MIN_CAPACITY, bucket
from entropix_jax.engine.state import Recording
from entropix_jax.engine.tokens import Prompt, encode_prompt, prompt_messages
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.arguments import checked
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

_MAX_SLOTS = 64

AnySampler = CalibratedSampler | Sampler | str | Path


@checked
def generate(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    sampler: AnySampler = "entropix",
    **options: Any,
) -> Rows:
    """Generates texts from one prompt, or from several in one batch, and returns the finished rows
    in the order of the prompts.

    Arguments and errors are those of `stream`. If a row fails, its `error` says why.
    """
    return stream(model, prompt, _calibrated(sampler, model), **options).run()


@checked
def stream(
    model: LanguageModel,
    prompt: Prompt | Sequence[Prompt],
    sampler: AnySampler = "entropix",
    *,
    max_new_tokens: int = 256,
    samples: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    system: str | None = None,
    stop: str | Sequence[str] | None = (),
    ignore_eos: bool = False,
    escape_special: bool = False,
    recording: Recording | None = None,
    lookup: Lookup | None = None,
    ask: Ask | None = None,
) -> "Generation":
    """Returns a run that advances as it is iterated. It yields events, token by token, whose
    `pieces` are newly final text. Its `rows` have the results.

    Args:
        prompt: a text, a conversation (messages with a `role` and a `content`), or a list of
            either. Rows of one prompt do not depend on the others. Equal prompts get different
            random numbers, as do `samples`.
        sampler: a preset's name, a file that ends in .toml, or a sampler.
        max_new_tokens: maximum number of tokens to generate.
        samples: rows per prompt, with different random numbers.
        seed: of all random numbers.
        chat: whether a text is a turn of a chat; None: depends on the model.
        system: a system message, for a chat only.
        stop: one or several texts that end a row and are not part of it.
        ignore_eos: continue past end tokens.
        escape_special: encode control tokens in the prompt as ordinary text.
        recording: optional parts of each token's record.
        lookup, ask: see `Request`.

    UserError if an input is invalid.
    """
    check_range("samples", samples, 1, MAX_SAMPLES)
    stops = [stop] if isinstance(stop, str) else stop or ()
    calibrated = _calibrated(sampler, model)
    seen: Counter[tuple[int, ...]] = Counter()
    requests = []
    several = not isinstance(prompt, str) and prompt and not isinstance(prompt[0], Mapping)
    prompts: Any = prompt if several else [prompt]
    for one in prompts:
        as_chat = model.is_chat_model or not isinstance(one, str) if chat is None else chat
        tokens = encode_prompt(
            model, one, chat=as_chat, system=system, escape_special=escape_special
        )
        messages = prompt_messages(one, chat=as_chat, system=system)
        for _ in range(samples):
            seen[tuple(tokens)] += 1
            request = Request(
                tokens,
                calibrated,
                max_new_tokens=max_new_tokens,
                row_id=str(seen[tuple(tokens)] - 1),
                seed=seed,
                eos_ids=() if ignore_eos else model.end_ids(chat=as_chat),
                stop=stops,
                lookup=lookup,
                ask=ask,
                messages=messages,
            )
            requests.append(request)
    return Generation(model, requests, recording=recording)


@checked
def score(
    model: LanguageModel,
    text: str,
    sampler: AnySampler = "entropix",
    *,
    context: int | None = None,
    recording: Recording | None = None,
) -> Iterator[ScoredToken]:
    """Scores a given text: the model's uncertainty, token by token. Generates nothing.

    The regimes are the sampler's; for `context`, `recording` and errors see `score_tokens`.
    """
    calibrated = _calibrated(sampler, model)
    tokens = model.tokenizer.encode(text, add_bos=True)
    return score_tokens(model, tokens, calibrated, context=context, recording=recording)


def _calibrated(sampler: AnySampler, model: LanguageModel) -> CalibratedSampler:
    """Resolves a sampler for the model and issues its notes as warnings, unless it is already
    resolved."""
    if isinstance(sampler, CalibratedSampler):
        return sampler
    if isinstance(sampler, str | Path):
        sampler = load_sampler(sampler)
    calibrated = calibrate_sampler(sampler, model)
    for note in calibrated.notes:
        warnings.warn(note, stacklevel=4)
    return calibrated


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
            raise UserError("the list of requests is empty")
        recording = check_recording(model, recording)
        longest = max(len(one.prompt) + check_request(model, one) for one in requests)
        capacity = bucket(longest, MIN_CAPACITY)
        self.engine = engine or Engine(
            model,
            slots=_count_slots(model, len(requests), capacity),
            capacity=capacity,
            recording=recording,
        )
        first, engine = requests[0], self.engine
        several = any(request.prompt != first.prompt for request in requests)
        shared_header = header(
            model, first.sampler, first.prompt, seed=first.seed, messages=first.messages
        )
        self.timings: dict[str, float] = {}
        self._requests = [replace(request, number=i) for i, request in enumerate(requests)]
        rows = map(engine.new_row, self._requests)
        self.rows = Rows(rows, None if several else shared_header, self.timings)
        self._start = time.perf_counter()
        self._iterator = self._iterate()

    def __iter__(self) -> Iterator[Event]:
        """Yields the events of all rows, step by step. A second iteration continues the first."""
        return self._iterator

    def _iterate(self) -> Iterator[Event]:
        self._start = time.perf_counter()
        for event in self.engine.run(self._requests):
            if event.token is not None:
                self.timings.setdefault("first_token", self.seconds())
            yield event
        if all(row.finish_reason is not None for row in self.rows):
            self.timings["total"] = self.seconds()

    def stop(self) -> None:
        """Requests the end of the run after the current event. Safe in a signal handler."""
        self.engine.stop()

    def interrupt(self) -> list[Event]:
        """Ends the rows that have not finished; the events have their last text."""
        self.timings.setdefault("total", self.seconds())
        events = list(self.engine.interrupt())
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
    slots = min(rows, _MAX_SLOTS)
    return max(max_slots(model, slots=slots, capacity=capacity), 1)
