"""The rows of a study: every setting on every item with every seed, in one batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, SupportsFloat

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import Record, content_hash
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import CalibratedSampler, calibrate_sampler, encode_prompt
from entropix_jax.engine.results import Request, Row
from entropix_jax.errors import UserError
from entropix_jax.lab.measures import measure_row
from entropix_jax.lab.sweep import Setting
from entropix_jax.lab.tasks.task import Item, Split, Task
from entropix_jax.lab.tasks.writing import read_prompts
from entropix_jax.lab.votes import record_lows
from entropix_jax.model.loading import LanguageModel

TUNING = "tuning"  # the name of the phase that tunes samplers
_TAKEN = ("score", "tokens", "forwards", "seconds")  # columns of every result
_CAPACITY_STEP = 64  # tokens; cache capacities are multiples of it


@dataclass(frozen=True)
class Question:
    """An item of a task, tokenized for a model."""

    task: Task
    item: Item
    prompt: tuple[int, ...]
    ends: tuple[int, ...]  # the tokens that end an answer
    max_new_tokens: int

    @cached_property
    def digest(self) -> bytes:
        """A hash of everything that determines the answer and its score, except code."""
        item = self.item
        asked = (self.prompt, self.ends, self.task.stop, self.max_new_tokens)
        parts = (*asked, item.answer, *item.accepted)
        return hashlib.blake2b(repr(parts).encode()).digest()


@dataclass(frozen=True)
class Trial:
    """One row: a setting on a question with a seed; `number` is its index in the phase."""

    number: int
    phase: str
    question: Question
    setting: Setting
    seed: int

    @property
    def id(self) -> str:
        """The row's name, unique in the study."""
        question = self.question
        setting = self.setting.name
        return f"{self.phase}/{question.task.name}/{question.item.id}/{setting}/{self.seed}"

    @property
    def record(self) -> Record:
        """The key of the row's result in a store."""
        name = self.id.encode("utf-8", "surrogatepass")
        return Record(self.number + 1, self.id, content_hash(name + self.question.digest))


class Prompts(Task):
    """Prompts of a file, without answers. Each call of `items` reads the file again."""

    name = "prompts"
    scored = False

    def __init__(self, address: str) -> None:
        self._address = address

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        """The prompts, the same for both splits."""
        return read_prompts(self._address)

    def extract(self, item: Item, text: str) -> str | None:
        """None: there is no answer to find."""
        return None

    def score(self, item: Item, answer: str | None) -> float:
        """NaN: there is nothing to compare with."""
        return math.nan


def read_questions(
    model: LanguageModel,
    task: Task,
    split: Split,
    items: int,
    max_new_tokens: int | None = None,
    skip: int = 0,
) -> Iterator[Question]:
    """Tokenizes `items` items of a split after the first `skip`, or all if that is 0.

    Raises:
        UserError: no items, an invalid item, two items of one id, or an error in the task's code.
    """
    if not isinstance(task.stop, tuple | list) or not all(isinstance(s, str) for s in task.stop):
        raise UserError(f"task '{task.name}': stop = {task.stop!r}: must be a tuple of texts")
    budget = max_new_tokens or task.max_new_tokens
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise UserError(f"task '{task.name}': max_new_tokens = {budget!r}: must be an integer > 0")
    chat = model.is_chat_model if task.chat is None else task.chat
    ends = model.end_ids(chat=chat)
    ids: set[str] = set()
    last = skip + items if items else 0
    for item in islice(_items_of(task, split, last, chat=chat), skip, None):
        where = _where(task, item)
        if not isinstance(item.id, str) or item.id in ids:
            raise UserError(f"{where}: an item's id must be text and unique")
        ids.add(item.id)
        if not isinstance(item.prompt, str | tuple | list):
            raise UserError(f"{where}: the prompt must be text or messages, not {item.prompt!r}")
        if not isinstance(item.answer, str):
            raise UserError(f"{where}: the answer must be text, not {item.answer!r}")
        as_chat = chat or not isinstance(item.prompt, str)
        try:
            prompt = tuple(encode_prompt(model, item.prompt, chat=as_chat))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        yield Question(task, item, prompt, ends, budget)
    if not ids:
        after = f" after the first {skip}" if skip else ""
        raise UserError(f"task '{task.name}': no items in its split '{split}'{after}")


def _items_of(task: Task, split: Split, items: int, *, chat: bool) -> Iterator[Item]:
    with _user_code(f"task '{task.name}': items"):
        iterator = iter(task.items(split, chat=chat))
    for number in range(1, items + 1) if items else count(1):
        with _user_code(f"task '{task.name}': item {number} of '{split}': items"):
            try:
                item = next(iterator)
            except StopIteration:
                return
        if not isinstance(item, Item):
            raise UserError(f"task '{task.name}': items returned {item!r}, not an Item")
        yield item


def _where(task: Task, item: Item) -> str:
    return f"task '{task.name}': item {item.id!r}"


@contextmanager
def _user_code(where: str) -> Iterator[None]:
    """Turns any exception of a task's code into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())
        raise UserError(f"{where} failed: {type(error).__name__}: {message}") from error


def list_trials(
    phase: str,
    questions: Iterable[Question],
    settings: Sequence[Setting],
    seeds_of: Callable[[str], Sequence[int]],
) -> Iterator[Trial]:
    """Lists the rows by question, setting and seed, so that each prompt is prefilled once.
    `seeds_of` returns the seeds of a task."""
    number = 0
    for question in questions:
        for setting in settings:
            for seed in seeds_of(question.task.name):
                yield Trial(number, phase, question, setting, seed)
                number += 1


def choose_capacity(model: LanguageModel, questions: Iterable[Question]) -> int:
    """Cache capacity, in tokens, for the longest question and its answer."""
    longest = max(len(question.prompt) + question.max_new_tokens for question in questions)
    return min(-(-longest // _CAPACITY_STEP) * _CAPACITY_STEP, model.config.max_positions)


class TrialRun:
    """Runs trials of any settings in one batch, and stores their results."""

    def __init__(
        self, model: LanguageModel, settings: Sequence[Setting], slots: int, capacity: int
    ):
        """Calibrates the samplers.

        Raises:
            UserError: a sampler does not fit the model.
        """
        self._model = model
        self.samplers = {setting.name: self._calibrated(setting) for setting in settings}
        notes = (note for sampler in self.samplers.values() for note in sampler.notes)
        self.notes = tuple(dict.fromkeys(notes))
        self.tokens = 0
        self.engine = Engine(model, slots=slots, capacity=capacity)

    def run(
        self, trials: Iterable[Trial], store: Store, on_event: Callable[[], None] = lambda: None
    ) -> None:
        """Runs the trials without a result in the store. Calls `on_event` after each token."""
        for event in self.engine.run(self._requests(trials, store)):
            self.tokens += event.token is not None and not event.retracted
            row = event.row
            if row.finish_reason is not None:
                assert row.started is not None
                seconds = time.perf_counter() - row.started
                trial: Trial = row.request.tag
                store.write(trial.record, make_result(trial, row, seconds))
            on_event()

    def stop(self) -> None:
        """Asks the run to end after the current event. A signal handler may call it."""
        self.engine.stop()

    def _calibrated(self, setting: Setting) -> CalibratedSampler:
        try:
            return calibrate_sampler(setting.sampler, self._model)
        except UserError as error:
            raise UserError(f"setting '{setting.name}': {error}") from None

    def _requests(self, trials: Iterable[Trial], store: Store) -> Iterator[Request]:
        for trial in trials:
            if store.is_done(trial.record):
                continue
            request = self._request(trial)
            try:
                self.engine.check(request)
            except UserError as error:  # the prompt is too long
                failed = Row(request, finish_reason="error", error=str(error))
                store.write(trial.record, make_result(trial, failed, 0.0))
                continue
            yield request

    def _request(self, trial: Trial) -> Request:
        question = trial.question
        # The row id has no setting, so an item has the same random numbers in all settings.
        name = f"{question.task.name}/{question.item.id}".encode("utf-8", "backslashreplace")
        return Request(
            question.prompt,
            self.samplers[trial.setting.name],
            max_new_tokens=question.max_new_tokens,
            row_id=name.decode(),
            seed=trial.seed,
            eos_ids=question.ends,
            stop=question.task.stop,
            tag=trial,
        )


def make_result(trial: Trial, row: Row, seconds: float) -> dict[str, Any]:
    """Scores a finished row; returns the result to store.

    Raises:
        UserError: the task's code fails, or returns an invalid answer, score or measure.
    """
    task, item = trial.question.task, trial.question.item
    where = _where(task, item)
    with _user_code(f"{where}: extract"):
        answer = task.extract(item, row.text) if row.error is None else None
    if not isinstance(answer, str | None):
        raise UserError(f"{where}: extract returned {answer!r}, not text or None")
    with _user_code(f"{where}: score"):
        value = task.score(item, answer)
        score = float(value) if isinstance(value, SupportsFloat) else math.inf
    if math.isinf(score):
        raise UserError(f"{where}: score returned {value!r}, not a finite number or NaN")
    if math.isnan(score) and trial.phase == TUNING:
        raise UserError(f"{where}: score returned {value!r}: samplers cannot be tuned by it")
    measures = _measures(trial.question, row.text)
    fields = row.to_json()
    regimes, actions = fields.pop("regimes"), fields.pop("actions")
    return {
        "phase": trial.phase,
        "task": task.name,
        "item": item.id,
        "setting": trial.setting.name,
        "sampler": trial.setting.sampler.name,
        "varied": dict(trial.setting.varied),
        "seed": trial.seed,
        "score": None if math.isnan(score) else score,
        "answer": answer,
        "expected": item.answer or " | ".join(item.accepted),
        "measures": measures,
        **fields,
        "regimes": regimes,
        "actions": actions,
        **measure_row(row),
        "confidence_lows": record_lows(row),
        "timings": {"seconds": round(seconds, 4)},
    }


def _measures(question: Question, text: str) -> dict[str, list[float]]:
    """A text's further measures by name, each a part and the whole; UserError if one is none."""
    task, item = question.task, question.item
    where = f"{_where(task, item)}: measures"
    with _user_code(where):
        given = dict(task.measures(item, text))
        measures = {name: [float(part), float(whole)] for name, (part, whole) in given.items()}
    for name, pair in measures.items():
        if not isinstance(name, str) or not all(map(math.isfinite, pair)):
            raise UserError(f"{where} returned {name!r}: {given[name]!r}, not two finite numbers")
        if name in _TAKEN:
            raise UserError(f"{where}: '{name}' is a measure of every text: choose another name")
    return measures
