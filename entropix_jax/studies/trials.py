"""The rows of a study: each setting on each item with each seed, side by side in one batch."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, SupportsFloat

from entropix_jax.batches.index import hash_of
from entropix_jax.batches.source import BadRecord, Record, read_records
from entropix_jax.batches.store import Store
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import encode_prompt, sampler_params
from entropix_jax.results import Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.studies.measures import measures_of
from entropix_jax.studies.sweep import Setting
from entropix_jax.tasks.task import Item, Split, Task

TUNING = "tuning"  # the phase of the rows that samplers are tuned by
_SLOT_STEP = 64  # a row's cache slots are a multiple of it


@dataclass(frozen=True)
class Question:
    """An item of a task, as a model is given it."""

    task: Task
    item: Item
    prompt: tuple[int, ...]
    ends: tuple[int, ...]  # the tokens that end an answer
    max_new_tokens: int

    @cached_property
    def digest(self) -> bytes:
        """A hash of all that makes the answer and its score what they are, but for code."""
        asked = (self.prompt, self.ends, self.task.stop, self.max_new_tokens, self.item.answer)
        return hashlib.blake2b(repr(asked).encode()).digest()


@dataclass(frozen=True)
class Trial:
    """One row: a setting on a question with a seed. `number` counts them from 0."""

    number: int
    phase: str
    question: Question
    setting: Setting
    seed: int

    @property
    def id(self) -> str:
        """A name that no other row of the study has."""
        question = self.question
        setting = self.setting.name
        return f"{self.phase}/{question.task.name}/{question.item.id}/{setting}/{self.seed}"

    @property
    def record(self) -> Record:
        """What a store knows the row by."""
        name = self.id.encode("utf-8", "surrogatepass")
        return Record(self.number + 1, self.id, hash_of(name + self.question.digest))


class Prompts(Task):
    """A file of prompts: questions without answers. It is read again for each look at it."""

    name = "prompts"

    def __init__(self, address: str) -> None:
        self._address = address

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        """The prompts, whatever the split."""
        for record in read_records(self._address):
            if isinstance(record, BadRecord):
                raise UserError(f"{self._address}: line {record.line}: {record.error}")
            yield Item(record.id, record.prompt or record.messages or (), "")

    def extract(self, item: Item, text: str) -> str | None:
        """Nothing: nobody asked."""
        return None

    def score(self, item: Item, answer: str | None) -> float:
        """Neither right nor wrong."""
        return math.nan


def questions_of(
    model: LanguageModel, task: Task, split: Split, items: int, max_new_tokens: int | None = None
) -> Iterator[Question]:
    """The first `items` items of a split, all of them where that is 0, as token ids.

    Raises:
        UserError: there is none, one cannot be put as the task wants it, two have one id, or the
            task's own code fails or gives what is none.
    """
    if not isinstance(task.stop, tuple | list) or not all(isinstance(s, str) for s in task.stop):
        raise UserError(f"task '{task.name}': stop = {task.stop!r}: must be a tuple of texts")
    most = max_new_tokens or task.max_new_tokens
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UserError(f"task '{task.name}': max_new_tokens = {most!r}: must be an integer > 0")
    chat = model.is_chat_model if task.chat is None else task.chat
    ends = tuple(model.turn_end_ids if chat else model.generation.eos_ids)
    found: set[str] = set()
    for item in _items_of(task, split, items, chat=chat):
        where = _where(task, item)
        if not isinstance(item.id, str) or item.id in found:
            raise UserError(f"{where}: an item's id must be text, and no other item's")
        found.add(item.id)
        if not isinstance(item.prompt, str | tuple | list):
            raise UserError(f"{where}: the prompt must be text or messages, not {item.prompt!r}")
        if not isinstance(item.answer, str):
            raise UserError(f"{where}: the answer must be text, not {item.answer!r}")
        as_chat = chat or not isinstance(item.prompt, str)
        try:
            prompt = tuple(encode_prompt(model, item.prompt, chat=as_chat))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        yield Question(task, item, prompt, ends, most)
    if not found:
        raise UserError(f"task '{task.name}': no items in its split '{split}'")


def _items_of(task: Task, split: Split, items: int, *, chat: bool) -> Iterator[Item]:
    with _own_code(f"task '{task.name}': items"):
        found = iter(task.items(split, chat=chat))
    for number in range(1, items + 1) if items else count(1):
        with _own_code(f"task '{task.name}': item {number} of '{split}': items"):
            try:
                item = next(found)
            except StopIteration:
                return
        if not isinstance(item, Item):
            raise UserError(f"task '{task.name}': items gave {item!r}, not an Item")
        yield item


def _where(task: Task, item: Item) -> str:
    return f"task '{task.name}': item {item.id!r}"


@contextmanager
def _own_code(where: str) -> Iterator[None]:
    """Whatever a task's own code may raise becomes one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{where} failed: {type(error).__name__}: {said}") from error


def trials_of(
    phase: str, questions: Iterable[Question], settings: Sequence[Setting], seeds: Sequence[int]
) -> Iterator[Trial]:
    """The rows in order: question by question, setting by setting, seed by seed. So those of one
    prompt come together, and it is read once."""
    number = 0
    for question in questions:
        for setting in settings:
            for seed in seeds:
                yield Trial(number, phase, question, setting, seed)
                number += 1


def capacity_of(model: LanguageModel, questions: Iterable[Question]) -> int:
    """Cache slots enough for the longest question and its answer, within the model's positions."""
    longest = max(len(question.prompt) + question.max_new_tokens for question in questions)
    return min(-(-longest // _SLOT_STEP) * _SLOT_STEP, model.config.max_positions)


class TrialRun:
    """Runs trials through one batch, whatever their settings, and stores what came of each."""

    def __init__(
        self, model: LanguageModel, settings: Sequence[Setting], slots: int, capacity: int
    ):
        """Checks the samplers.

        Raises:
            UserError: a sampler that does not fit the model.
        """
        self._model = model
        self._capacity = capacity
        self._samplers = {setting.name: self._prepared(setting) for setting in settings}
        notes = (note for sampler, _ in self._samplers.values() for note in sampler.notes)
        self.notes = tuple(dict.fromkeys(notes))  # what a user should know of the samplers
        _, params = next(iter(self._samplers.values()))
        self.tokens = 0
        self.engine = Engine(model, params, slots=slots, capacity=capacity, recording=Recording())

    def run(
        self, trials: Iterable[Trial], store: Store, looked: Callable[[], None] = lambda: None
    ) -> None:
        """Runs the trials that the store has no result of. `looked` is called after each token."""
        running: dict[int, tuple[Trial, RunningRow]] = {}

        def rows() -> Iterator[RunningRow]:
            for trial in trials:
                if store.is_done(trial.record):
                    continue
                try:
                    row = self._row(trial)
                except UserError as error:  # a prompt that is too long
                    nothing = Row(Request(trial.question.prompt, "", 1), finish_reason="error")
                    nothing.error = str(error)
                    store.write(trial.record, result_of(trial, nothing, 0.0))
                    continue
                running[trial.number] = trial, row
                yield row

        for event in self.engine.run(rows()):
            self.tokens += event.token is not None and not event.retracted
            trial, row = running[event.row]
            if not row.running:
                assert row.started is not None
                seconds = time.perf_counter() - row.started
                store.write(trial.record, result_of(trial, row.row, seconds))
                del running[event.row]
            looked()

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self.engine.stop()

    def _prepared(self, setting: Setting) -> tuple[Sampler, SamplerSettings]:
        try:
            calibrated = calibrate_sampler(setting.sampler, self._model)
            return calibrated, sampler_params(self._model, calibrated)
        except UserError as error:
            raise UserError(f"setting '{setting.name}': {error}") from None

    def _row(self, trial: Trial) -> RunningRow:
        question = trial.question
        # The random numbers of an item are the same in all settings: what differs is the sampler.
        name = f"{question.task.name}/{question.item.id}".encode("utf-8", "backslashreplace")
        request = Request(question.prompt, name.decode(), question.max_new_tokens)
        sampler, params = self._samplers[trial.setting.name]
        return RunningRow(
            trial.number,
            Row(request),
            self._model,
            sampler,
            params,
            budget=budget_of(self._model, request, self._capacity),
            seed=trial.seed,
            eos_ids=question.ends,
            stop=question.task.stop,
        )


def result_of(trial: Trial, row: Row, seconds: float) -> dict[str, Any]:
    """A row of the study's table.

    Raises:
        UserError: the task's own code fails, or gives no answer or score that can be one.
    """
    task, item = trial.question.task, trial.question.item
    where = _where(task, item)
    with _own_code(f"{where}: extract"):
        answer = task.extract(item, row.text) if row.error is None else None
    if not isinstance(answer, str | None):
        raise UserError(f"{where}: extract gave {answer!r}, not text or None")
    with _own_code(f"{where}: score"):
        given = task.score(item, answer)
        score = float(given) if isinstance(given, SupportsFloat) else math.inf
    if math.isinf(score):
        raise UserError(f"{where}: score gave {given!r}, not a finite number or NaN")
    if math.isnan(score) and trial.phase == TUNING:
        raise UserError(f"{where}: score gave {given!r}: samplers cannot be tuned by it")
    told = row.to_json()
    regimes, actions = told.pop("regimes"), told.pop("actions")
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
        "expected": item.answer,
        **told,
        "regimes": regimes,
        "actions": actions,
        **measures_of(row),
        "timings": {"seconds": round(seconds, 4)},
    }
