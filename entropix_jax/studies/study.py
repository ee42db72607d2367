"""A whole study: samplers are tuned on one split, all settings are run on the other, and what came
of them is written down.

Everything lies in one folder and is resumed from there: `tuning.jsonl` and `test.jsonl` grow row by
row, the rest is made from them at the end.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from entropix_jax import __version__
from entropix_jax.batches.output import Store
from entropix_jax.batches.records import content_hash
from entropix_jax.errors import UserError
from entropix_jax.files import replacing
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import CalibratedSampler
from entropix_jax.studies.digest import Digest, digest_of
from entropix_jax.studies.summary import Findings, Tuned, findings_of, summary
from entropix_jax.studies.sweep import Setting, Sweep, tuned_name
from entropix_jax.studies.tables import Results, write_tables
from entropix_jax.studies.trials import (
    TUNING,
    Prompts,
    Question,
    Trial,
    TrialRun,
    capacity_of,
    questions_of,
    trials_of,
)
from entropix_jax.studies.truth import hold_against_truth, speaks_of_the_world
from entropix_jax.tasks.registry import find_task
from entropix_jax.tasks.task import Item, Split, Task
from entropix_jax.version import checked_out_commit

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "safetensors", "tokenizers")
_VOTES = (1, 3, 5, 7, 9, 15, 25, 41)  # samples of a vote, odd: two that differ are no majority
_TRUTH_TEXTS = 40


@dataclass(frozen=True)
class _Phase:
    """Which questions are asked, and how often."""

    name: str
    split: Split
    items: int
    seeds: tuple[int, ...]


class Study:
    """One study on one model. `run` may be called again after `stop`: it goes on."""

    def __init__(
        self, model: LanguageModel, sweep: Sweep, folder: Path, *, name: str, slots: int
    ) -> None:
        """Checks what can be checked before anything is computed.

        Args:
            name: what the study calls the model.

        Raises:
            UserError: an unknown task, a sampler that does not fit the model, or a folder that
                cannot be made.
        """
        self._model = model
        self._name = name
        self._sweep = sweep
        self._folder = folder
        self._slots = slots
        self._run: TrialRun | None = None
        self._stopping = False
        if sweep.prompts is None:
            self._tasks: list[Task] = [find_task(name) for name in sweep.tasks]
        else:
            self._tasks = [Prompts(sweep.prompts)]
        names = [task.name for task in self._tasks]
        if len(set(names)) < len(names):
            raise UserError(f"two tasks are called '{max(names, key=names.count)}'")
        # As it is now, when it has just been imported: a study takes a while.
        self._codes = {task.name: _code_of(task) for task in self._tasks if _is_own(task)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made a folder: {error.strerror}") from None

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._stopping = True
        if self._run is not None:
            self._run.stop()

    def run(self, watch: Callable[[str, int, Store, TrialRun], Any]) -> Findings | None:
        """Runs what is not done yet, and writes tables, pictures and the summary.

        Args:
            watch: is given a phase, how many rows it has, its store and its run, and returns a
                context manager whose value is called after each token: a view of the progress.

        Returns:
            The findings; None where the run was stopped before its end.

        Raises:
            UserError: the folder holds another study, or cannot be written.
        """
        sweep, tuning = self._sweep, self._sweep.tuning
        test = _Phase("test", sweep.split, sweep.items, sweep.seeds)
        settings, tuned = list(sweep.settings), []
        if tuning is None:
            slots, capacity = self._shape({test: len(settings)})
        else:
            trying = _Phase(TUNING, "tuning", tuning.items, tuning.seeds)
            candidates = [one for group in tuning.candidates.values() for one in group]
            numbers = {trying: len(candidates), test: len(settings) + len(tuning.candidates)}
            slots, capacity = self._shape(numbers)
            results = self._run_phase(trying, candidates, slots, capacity, watch)
            if results is None:
                return None
            digest = digest_of(results, self._judge(trying), sizes=(1,))
            for name, group in tuning.candidates.items():
                chosen, how = _best(digest, name, group)
                settings.append(chosen)
                tuned.append(how)
        results = self._run_phase(test, settings, slots, capacity, watch)
        if results is None:
            return None
        sizes = [k for k in _VOTES if k <= len(sweep.seeds)]
        digest = digest_of(results, self._judge(test), sizes=sizes)
        return self._write(results, digest, settings, sizes, tuned)

    def _questions(self, phase: _Phase) -> Iterator[Question]:
        most = self._sweep.max_new_tokens
        for task in self._tasks:
            yield from questions_of(self._model, task, phase.split, phase.items, most)

    def _shape(self, settings: Mapping[_Phase, int]) -> tuple[int, int]:
        """Slots and cache slots of each that fit all phases, so that they share their programs.
        `settings` says how many each phase has."""
        numbers = [
            sum(1 for _ in self._questions(phase)) * number * len(phase.seeds)
            for phase, number in settings.items()
        ]
        questions = chain.from_iterable(map(self._questions, settings))
        return min(self._slots, max(numbers)), capacity_of(self._model, questions)

    def _run_phase(
        self,
        phase: _Phase,
        settings: Sequence[Setting],
        slots: int,
        capacity: int,
        watch: Callable[[str, int, Store, TrialRun], Any],
    ) -> Results | None:
        """Runs the rows of a phase that are not done; None where that was stopped."""

        def trials() -> Iterator[Trial]:
            return trials_of(phase.name, self._questions(phase), settings, phase.seeds)

        number = sum(1 for _ in self._questions(phase)) * len(settings) * len(phase.seeds)
        self._run = TrialRun(self._model, settings, slots=slots, capacity=capacity)
        path = self._folder / f"{phase.name}.jsonl"
        with Store(str(path), self._identity(phase, settings, self._run.samplers)) as store:
            # Each is looked at: what is done may have been another question's.
            if not all(store.is_done(trial.record) for trial in trials()) and not self._stopping:
                with watch(phase.name, number, store, self._run) as looked:
                    self._run.run(trials(), store, looked)
        return None if self._stopping else Results(path, number)

    def _judge(self, phase: _Phase) -> dict[str, tuple[Task, dict[str, Item]]]:
        """Each task and its items by id."""
        judge: dict[str, tuple[Task, dict[str, Item]]] = {
            task.name: (task, {}) for task in self._tasks
        }
        for question in self._questions(phase):
            judge[question.task.name][1][question.item.id] = question.item
        return judge

    def _identity(
        self,
        phase: _Phase,
        settings: Sequence[Setting],
        samplers: Mapping[str, CalibratedSampler],
    ) -> dict[str, Any]:
        model = self._model
        return {
            "model_fingerprint": model.fingerprint,
            "precision": model.precision.to_json(),
            "phase": phase.name,
            "tasks": [task.name for task in self._tasks],  # wherever their files lie
            "split": phase.split,
            "items": phase.items,
            "seeds": list(phase.seeds),
            "max_new_tokens": self._sweep.max_new_tokens,
            "settings": {setting.name: dict(samplers[setting.name].values) for setting in settings},
            "version": __version__,
            **({"task_code": self._codes} if self._codes else {}),
        }

    def _write(
        self,
        results: Results,
        digest: Digest,
        settings: Sequence[Setting],
        sizes: Sequence[int],
        tuned: Sequence[Tuned],
    ) -> Findings:
        from entropix_jax.studies.plots import draw_plots

        sweep, folder = self._sweep, self._folder
        assert self._run is not None
        samplers = self._run.samplers
        bases = {s.name: s.base for s in settings if s.base is not None}
        base = next((s for s in settings if s.name in bases.values()), settings[0])
        watched = list(dict.fromkeys((base.name, sweep.baseline)))
        truth = []
        if _about_the_world(self._tasks) and speaks_of_the_world(self._model):
            truth = hold_against_truth(self._model, samplers[base.name], texts=_TRUTH_TEXTS)
        findings = findings_of(digest, sweep.baseline, bases, sizes, watched, truth, tuned)
        varied = sorted({key for setting in settings for key in setting.varied})
        write_tables(results, varied, folder, "results")
        about = self._about(settings, len(results))
        _write_json(folder / "study.json", about | {"settings": _parameters(settings, samplers)})
        lines = {name: _as_text(value) for name, value in about.items()}
        pictures = draw_plots(findings, folder / "plots")
        page = summary(findings, lines) + "".join(
            f"\n![{name}](plots/{name}.png)\n" for name in pictures
        )
        with replacing(folder / "summary.md") as scratch:
            scratch.write_text(page, encoding="utf-8", errors="backslashreplace")
        return findings

    def _about(self, settings: Sequence[Setting], rows: int) -> dict[str, Any]:
        """What was run, and with what."""
        sweep, model = self._sweep, self._model
        return {
            "description": sweep.description,
            "model": f"{self._name} ({model.fingerprint})",
            "precision": model.precision.to_json(),
            "tasks": list(sweep.tasks) or [sweep.prompts],
            "split": sweep.split,
            "items of each task": sweep.items or "all",
            "seeds": list(sweep.seeds),
            "settings": len(settings),
            "rows": rows,
            "versions": {
                "entropix_jax": __version__,
                **{name: version(name) for name in _PACKAGES},
                "python": platform.python_version(),
            },
            "commit": checked_out_commit(),
            "hardware": (
                f"{len(jax.devices())} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores, "
                f"{platform.machine()}"
            ),
        }


def _parameters(
    settings: Sequence[Setting], samplers: Mapping[str, CalibratedSampler]
) -> dict[str, Any]:
    """Each setting's sampler in full."""
    return {
        setting.name: {
            "sampler": setting.sampler.name,
            "varied": dict(setting.varied),
            "parameters": dict(sorted(samplers[setting.name].values.items())),
        }
        for setting in settings
    }


def _best(digest: Digest, name: str, group: Sequence[Setting]) -> tuple[Setting, Tuned]:
    """The candidate with the highest score; of equal ones the cheaper, then the first."""
    strata = np.asarray(digest.strata)

    def score(setting: Setting) -> float:
        scores = digest.settings[setting.name].score()
        tasks = range(len(digest.tasks))
        return float(np.mean([scores[strata == task].mean() for task in tasks]))

    def merit(setting: Setting) -> tuple[float, float]:
        return round(score(setting), 9), -float(digest.settings[setting.name].cost().mean())

    best = max(group, key=merit)
    how = Tuned(name, len(group), score(best), score(group[0]), best.varied)
    return replace(best, name=tuned_name(name, group), varied={}), how


def _is_own(task: Task) -> bool:
    """Whether a task is a user's own: not of this package, whose version says what its code is."""
    return type(task).__module__.partition(".")[0] != "entropix_jax"


def _code_of(task: Task) -> str | None:
    """A hash of the file that a task's class is written in; None where there is none."""
    try:
        file = inspect.getsourcefile(type(task))
        return None if file is None else content_hash(Path(file).read_bytes())
    except (OSError, TypeError):
        return None


def _about_the_world(tasks: Sequence[Task]) -> bool:
    return any(type(task).__module__ == "entropix_jax.tasks.tiny" for task in tasks)


def _as_text(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _write_json(path: Path, content: Any) -> None:
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
