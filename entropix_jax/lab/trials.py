"""The rows of a study: every setting on every item with every seed, in one batch."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, Protocol, SupportsFloat

from entropix_jax.batch.records import Record, content_hash
from entropix_jax.batch.run import EngineRun
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.search import Search, recording_for
from entropix_jax.engine.state import Recording
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.errors import Note, UserError
from entropix_jax.host.lookup import open_lookup
from entropix_jax.lab.measures import measure_row
from entropix_jax.lab.sweep import NONE, ByTask, Setting, Sweep, within
from entropix_jax.lab.tasks.task import Item, Split, Task
from entropix_jax.model.loading import LanguageModel

TUNING = "tuning"  # the name of the phase that tunes samplers
_TAKEN = ("score", "tokens", "forwards", "seconds")  # columns of every result


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
        UserError: no items, an invalid item, two items with one id, or an error in the task's code.
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
        with within(where):
            prompt = tuple(encode_prompt(model, item.prompt, chat=as_chat))
        yield Question(task, item, prompt, ends, budget)
    if not ids:
        after = f" after the first {skip}" if skip else ""
        raise UserError(f"task '{task.name}': no items in its split '{split}'{after}")


def _items_of(task: Task, split: Split, items: int, *, chat: bool) -> Iterator[Item]:
    with user_code(f"task '{task.name}': items"):
        iterator = iter(task.items(split, chat=chat))
    for number in range(1, items + 1) if items else count(1):
        with user_code(f"task '{task.name}': item {number} of '{split}': items"):
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
def user_code(where: str) -> Iterator[None]:
    """Turns any exception of a task's code into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())
        raise UserError(f"{where} failed: {type(error).__name__}: {message}") from error


@dataclass(frozen=True)
class Phase:
    """The questions and seeds of the tuning or the test run.

    `most_seeds` is the number of seeds of a task, from the first on; 0: all.
    """

    name: str
    questions: tuple[Question, ...]
    seeds: tuple[int, ...]
    most_seeds: ByTask = NONE

    def seeds_of(self, task: Task) -> tuple[int, ...]:
        """The seeds of a task."""
        return self.seeds[: self.most_seeds.of(task.name) or None]

    @property
    def rows(self) -> int:
        """The number of rows for one setting."""
        return sum(len(self.seeds_of(question.task)) for question in self.questions)

    @property
    def longest(self) -> int:
        """The tokens of the longest question and its answer."""
        return max(len(each.prompt) + each.max_new_tokens for each in self.questions)

    def trials(self, settings: Sequence[Setting]) -> Iterator[Trial]:
        """The rows by question, setting and seed, so that each prompt is prefilled once."""
        rows = (
            (question, setting, seed)
            for question in self.questions
            for setting in settings
            for seed in self.seeds_of(question.task)
        )
        return (Trial(number, self.name, *row) for number, row in enumerate(rows))


def read_phase(model: LanguageModel, sweep: Sweep, tasks: Sequence[Task], name: str) -> Phase:
    """Tokenizes the questions of the phase of this name."""

    def questions(split: Split, items: ByTask, skip: ByTask, of: Sequence[Task]) -> Any:
        for task in of:
            numbers = items.of(task.name) or 0, sweep.max_new_tokens.of(task.name)
            yield from read_questions(model, task, split, *numbers, skip.of(task.name) or 0)

    if name == TUNING:
        assert sweep.tuning is not None
        scored = [task for task in tasks if task.scored]
        asked = questions("tuning", sweep.tuning.items, NONE, scored)
        return Phase(name, tuple(asked), sweep.tuning.seeds)
    asked = questions(sweep.split, sweep.items, sweep.skip, tasks)
    return Phase(name, tuple(asked), sweep.seeds, sweep.most_seeds)


def choose_settings(sweep: Sweep, named: Sequence[tuple[str, str]]) -> list[Setting]:
    """Returns settings, each of a name and of the name of the sweep's own that it is."""
    tuned = () if sweep.tuning is None else chain.from_iterable(sweep.tuning.candidates.values())
    own = {setting.name: setting for setting in (*sweep.settings, *tuned)}
    return [
        own[source] if source == name else replace(own[source], name=name, varied={})
        for name, source in named
    ]


class Results(Protocol):
    """What takes results; see `Store`."""

    def is_done(self, record: Record) -> bool:
        """Whether a record has its result."""

    def write(self, record: Record, result: Mapping[str, Any]) -> None:
        """Takes the result of a record."""


class TrialRun(EngineRun):
    """Runs trials of any settings in one batch, and stores their results."""

    def __init__(
        self,
        model: LanguageModel,
        settings: Sequence[Setting],
        slots: int,
        capacity: int,
        lookup: str | None = None,
    ):
        """Calibrates the samplers, and opens the source of lookups.

        Raises:
            UserError: a sampler does not fit the model, or the source is invalid.
        """
        self.lookup = None if lookup is None else open_lookup(lookup)
        own = {}
        for setting in settings:
            with within(f"setting '{setting.name}'"):
                own[setting.name] = calibrate_sampler(setting.sampler, model)
        used = frozenset().union(*(sampler.parts.used for sampler in own.values()))
        self.samplers = {name: replace(sampler, others=used) for name, sampler in own.items()}
        for note in (note for sampler in self.samplers.values() for note in sampler.notes):
            warnings.warn(note, Note, stacklevel=2)
        self.tokens = 0
        needs = [recording_for(setting.method, setting.forks) for setting in settings]
        needed = Recording(max(need.top for need in needs), state=any(need.state for need in needs))
        self.engine = Engine(model, slots=slots, capacity=capacity, recording=needed)

    def run(self, trials: Iterable[Trial | None], store: Results) -> None:
        """Runs the trials without a result in the store. None stands for no trial yet, and ends the
        run if no row runs."""
        for event in self.engine.run(self._requests(trials, store)):
            self.tokens += event.token is not None and not event.retracted
            search: Search = event.row.request.tag
            if search.advance(self.engine):
                seconds = time.perf_counter() - (search.rows[0].started or 0.0)
                trial: Trial = search.request.tag
                store.write(trial.record, make_result(trial, search, seconds))

    def _requests(self, trials: Iterable[Trial | None], store: Results) -> Iterator[Request | None]:
        for trial in trials:
            if trial is None:
                yield None
                continue
            if store.is_done(trial.record):
                continue
            request = self._request(trial)
            search = trial.setting.method.search(request, trial.setting.forks)
            requests = search.begin(self.engine)
            try:
                self.engine.check(request)
            except UserError as error:  # the prompt is too long
                for row in search.rows:
                    row.finish_reason, row.error = "error", str(error)
                store.write(trial.record, make_result(trial, search, 0.0))
                continue
            yield from requests

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
            lookup=self.lookup,
            tag=trial,
        )


def make_result(trial: Trial, search: Search, seconds: float) -> dict[str, Any]:
    """Scores the answer of a finished search, and returns the result to store.

    Raises:
        UserError: the task's code fails, or returns an invalid answer, score or measure.
    """
    task, item = trial.question.task, trial.question.item
    where = _where(task, item)

    def extract(text: str) -> str | None:
        with user_code(f"{where}: extract"):
            answer = task.extract(item, text)
        if not isinstance(answer, str | None):
            raise UserError(f"{where}: extract returned {answer!r}, not text or None")
        return answer

    outcome = search.outcome(extract)
    row, answer = outcome.row, outcome.answer
    with user_code(f"{where}: score"):
        value = task.score(item, answer)
        score = float(value) if isinstance(value, SupportsFloat) else math.inf
    if math.isinf(score):
        raise UserError(f"{where}: score returned {value!r}, not a finite number or NaN")
    if math.isnan(score) and trial.phase == TUNING:
        raise UserError(f"{where}: score returned {value!r}: samplers cannot be tuned by it")
    measures = _measures(trial.question, row.text)
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
        **row.to_json(),
        "forwards": outcome.forwards,
        **measure_row(row),
        **({"votes": outcome.votes, "forks": len(outcome.forks)} if search.forks > 1 else {}),
        "timings": {"seconds": round(seconds, 4)},
    }


def _measures(question: Question, text: str) -> dict[str, list[float]]:
    """A text's further measures by name, each a part and the whole; UserError if one is invalid."""
    task, item = question.task, question.item
    where = f"{_where(task, item)}: measures"
    with user_code(where):
        given = dict(task.measures(item, text))
        measures = {name: [float(part), float(whole)] for name, (part, whole) in given.items()}
    for name, pair in measures.items():
        if not isinstance(name, str) or not all(map(math.isfinite, pair)):
            raise UserError(f"{where} returned {name!r}: {given[name]!r}, not two finite numbers")
        if name in _TAKEN:
            raise UserError(f"{where}: '{name}' is a measure of every text: choose another name")
    return measures
