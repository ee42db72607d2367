"""A study: tunes samplers on one split, runs all settings on the other, and writes the results.

A study lives in one folder and resumes from it: `tuning.jsonl` and `test.jsonl` grow row by row;
the tables, plots and summary are made from them at the end.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import content_hash
from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.errors import UserError
from entropix_jax.host.files import replacing
from entropix_jax.lab.by_task import NONE, ByTask
from entropix_jax.lab.digest import Digest, collect_digest
from entropix_jax.lab.findings import Findings, Tuned, analyse_digest
from entropix_jax.lab.record import record_findings
from entropix_jax.lab.summary import format_summary
from entropix_jax.lab.sweep import Setting, Sweep, name_tuned
from entropix_jax.lab.tables import Results, write_scores, write_tables
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.tasks.task import Split, Task
from entropix_jax.lab.trials import (
    TUNING,
    Prompts,
    Question,
    Trial,
    TrialRun,
    choose_capacity,
    list_trials,
    read_questions,
)
from entropix_jax.lab.truth import compare_with_truth, has_world_vocabulary
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import code_identity
from entropix_jax.version import __version__

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "safetensors", "tokenizers")
_SIZES = (1, 3, 5, 7, 9, 15, 25, 41)  # samples for one answer; odd, as two that differ tie
_TRUTH_TEXTS = 40


@dataclass(frozen=True)
class _Phase:
    """The items and seeds of the tuning or the test run."""

    name: str
    split: Split
    items: ByTask
    seeds: tuple[int, ...]
    skip: ByTask = NONE
    most_seeds: ByTask = NONE

    def seeds_of(self, task: str) -> tuple[int, ...]:
        """The seeds of a task."""
        return self.seeds[: self.most_seeds.of(task) or None]


class Study:
    """One study on one model. A stopped study continues when the command is run again."""

    def __init__(
        self, model: LanguageModel, sweep: Sweep, folder: Path, *, name: str, slots: int
    ) -> None:
        """Checks the sweep and creates the folder, before anything is computed.

        Args:
            name: the model's name in the results.

        Raises:
            UserError: an unknown task, two tasks of one name, or a folder that cannot be created.
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
        sweep.items.check_tasks("items", names)
        sweep.skip.check_tasks("skip", names)
        sweep.most_seeds.check_tasks("most_seeds", names)
        sweep.max_new_tokens.check_tasks("max_new_tokens", names)
        if sweep.tuning is not None:
            sweep.tuning.items.check_tasks("tuning.items", names)
        if sweep.tuning and not any(task.scored for task in self._tasks):
            raise UserError(f"tuning: no score to tune by: {', '.join(names)} has none")
        # Hashed now, as it was just imported: the file may change while the study runs.
        self._codes = {task.name: _hash_code(task) for task in self._tasks if _is_user_task(task)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: the folder cannot be created: {error.strerror}") from None

    def stop(self) -> None:
        """Asks the run to end after the current event. A signal handler may call it."""
        self._stopping = True
        if self._run is not None:
            self._run.stop()

    def run(self, watch: Callable[[str, int, Store, TrialRun], Any]) -> Findings | None:
        """Runs the rows that have no result yet, and writes tables, plots and the summary.

        Args:
            watch: shows the progress. Called with a phase's name, its number of rows, its store and
                its run; returns a context manager, whose value is called after each token.

        Returns:
            The findings; None if the run was stopped.

        Raises:
            UserError: the folder has another study's results, or cannot be written.
        """
        sweep, tuning = self._sweep, self._sweep.tuning
        test = _Phase("test", sweep.split, sweep.items, sweep.seeds, sweep.skip, sweep.most_seeds)
        settings, tuned = list(sweep.settings), []
        if tuning is None:
            slots, capacity = self._shape({test: len(settings)})
        else:
            # Tune: run all candidates on the tuning split, and add the best of each sampler.
            tuning_phase = _Phase(TUNING, "tuning", tuning.items, tuning.seeds)
            candidates = list(chain.from_iterable(tuning.candidates.values()))
            numbers = {tuning_phase: len(candidates), test: len(settings) + len(tuning.candidates)}
            slots, capacity = self._shape(numbers)
            results = self._run_phase(tuning_phase, candidates, slots, capacity, watch)
            if results is None:
                return None
            digest = collect_digest(results, self._votes, sizes=(1,))
            for name, group in tuning.candidates.items():
                best, result = _choose_best(digest, name, group)
                settings.append(best)
                tuned.append(result)

        # Test: run all settings on the test split.
        results = self._run_phase(test, settings, slots, capacity, watch)
        if results is None:
            return None
        fewest = min(len(test.seeds_of(task.name)) for task in self._tasks)
        sizes = [k for k in _SIZES if k <= fewest]
        digest = collect_digest(results, self._votes, sizes=sizes)
        return self._write(results, digest, settings, sizes, tuned)

    def _tasks_of(self, phase: _Phase) -> list[Task]:
        """The tasks of a phase: samplers are tuned by those that have a score."""
        return [task for task in self._tasks if task.scored or phase.name != TUNING]

    def _questions(self, phase: _Phase) -> Iterator[Question]:
        for task in self._tasks_of(phase):
            items, skip = phase.items.of(task.name) or 0, phase.skip.of(task.name) or 0
            most = self._sweep.max_new_tokens.of(task.name)
            yield from read_questions(self._model, task, phase.split, items, most, skip)

    def _count(self, phase: _Phase) -> int:
        """The number of a phase's rows for one setting."""
        return sum(len(phase.seeds_of(one.task.name)) for one in self._questions(phase))

    def _shape(self, settings: Mapping[_Phase, int]) -> tuple[int, int]:
        """The number of rows in parallel and their cache capacity, common to all phases, so that
        they share compiled programs. `settings` gives each phase's number of settings."""
        numbers = [self._count(phase) * number for phase, number in settings.items()]
        questions = chain.from_iterable(map(self._questions, settings))
        return min(self._slots, max(numbers)), choose_capacity(self._model, questions)

    def _run_phase(
        self,
        phase: _Phase,
        settings: Sequence[Setting],
        slots: int,
        capacity: int,
        watch: Callable[[str, int, Store, TrialRun], Any],
    ) -> Results | None:
        """Runs the rows of a phase that have no result; None if that was stopped."""

        def trials() -> Iterator[Trial]:
            return list_trials(phase.name, self._questions(phase), settings, phase.seeds_of)

        number = self._count(phase) * len(settings)
        self._run = TrialRun(self._model, settings, slots=slots, capacity=capacity)
        path = self._folder / f"{phase.name}.jsonl"
        with Store(str(path), self._identity(phase, settings, self._run.samplers)) as store:
            # Check every trial, as a stored result may belong to a question that has changed.
            if not all(store.is_done(trial.record) for trial in trials()) and not self._stopping:
                with watch(phase.name, number, store, self._run) as on_event:
                    self._run.run(trials(), store, on_event)
        return None if self._stopping else Results(path, number)

    @property
    def _votes(self) -> dict[str, bool]:
        return {task.name: task.votes for task in self._tasks}

    def _identity(
        self, phase: _Phase, settings: Sequence[Setting], samplers: Mapping[str, CalibratedSampler]
    ) -> dict[str, Any]:
        model = self._model
        return {
            "model_fingerprint": model.fingerprint,
            "precision": model.precision.to_json(),
            "phase": phase.name,
            "tasks": [task.name for task in self._tasks_of(phase)],  # without paths
            "split": phase.split,
            "items": phase.items.to_json(),
            **({"skip": phase.skip.to_json()} if phase.skip != NONE else {}),
            "seeds": list(phase.seeds),
            **({"most_seeds": phase.most_seeds.to_json()} if phase.most_seeds != NONE else {}),
            "max_new_tokens": self._sweep.max_new_tokens.to_json(),
            "settings": {setting.name: dict(samplers[setting.name].values) for setting in settings},
            "version": __version__,
            "judges": {task.name: dict(task.identity()) for task in self._tasks_of(phase)},
            **({"task_code": self._codes} if self._codes else {}),
            **code_identity(settings[0].sampler.mechanisms if settings else ()),
        }

    def _write(
        self,
        results: Results,
        digest: Digest,
        settings: Sequence[Setting],
        sizes: Sequence[int],
        tuned: Sequence[Tuned],
    ) -> Findings:
        """Computes the findings, and writes tables, plots and the summary."""
        from entropix_jax.lab.plots import draw_plots

        sweep, folder = self._sweep, self._folder
        assert self._run is not None
        samplers = self._run.samplers
        bases = {s.name: s.base for s in settings if s.base is not None}
        base = next((s for s in settings if s.name in bases.values()), settings[0])
        watched = list(dict.fromkeys((base.name, sweep.baseline)))

        # Findings, with the model's true entropy where the generator of the text knows it.
        truth = []
        if _has_world_task(self._tasks) and has_world_vocabulary(self._model):
            truth = compare_with_truth(self._model, samplers[base.name], texts=_TRUTH_TEXTS)
        baselines = (sweep.baseline, *sweep.baselines)
        findings = analyse_digest(digest, baselines, bases, sizes, watched, truth, tuned)

        # The files.
        varied = sorted({key for setting in settings for key in setting.varied})
        measures = list(dict.fromkeys(chain.from_iterable(digest.own.values())))
        write_tables(results, varied, measures, folder, "results")
        write_scores(results, folder / "scores.csv")
        about = self._about(settings, len(results))
        _write_json(folder / "study.json", about | {"settings": _parameters(settings, samplers)})
        _write_json(folder / "findings.json", record_findings(findings))
        plots = draw_plots(findings, folder / "plots")
        page = format_summary(findings, about)
        page += "".join(f"\n![{name}](plots/{name}.png)\n" for name in plots)
        with replacing(folder / "summary.md") as scratch:
            scratch.write_text(page, encoding="utf-8", errors="backslashreplace")
        return findings

    def _about(self, settings: Sequence[Setting], rows: int) -> dict[str, Any]:
        """Describes what was run, and with what."""
        sweep, model = self._sweep, self._model
        return {
            "description": sweep.description,
            "model": f"{self._name} ({model.fingerprint})",
            "precision": model.precision.to_json(),
            "tasks": [task.name for task in self._tasks],  # without paths
            "split": sweep.split,
            "items of each task": sweep.items.to_json() or "all",
            **({"items skipped": sweep.skip.to_json()} if sweep.skip != NONE else {}),
            "seeds": list(sweep.seeds),
            **({"seeds of a task": sweep.most_seeds.to_json()} if sweep.most_seeds != NONE else {}),
            "settings": len(settings),
            "rows": rows,
            "versions": {
                "entropix_jax": __version__,
                **{name: version(name) for name in _PACKAGES},
                "python": platform.python_version(),
            },
            "judges": {task.name: dict(task.identity()) for task in self._tasks},
            "commit": checked_out_commit(),
            "hardware": (
                f"{len(jax.devices())} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores, "
                f"{platform.machine()}"
            ),
        }


def _parameters(
    settings: Sequence[Setting], samplers: Mapping[str, CalibratedSampler]
) -> dict[str, Any]:
    """All values of each setting's sampler."""
    return {
        setting.name: {
            "sampler": setting.sampler.name,
            "varied": dict(setting.varied),
            "parameters": dict(sorted(samplers[setting.name].values.items())),
        }
        for setting in settings
    }


def _choose_best(digest: Digest, name: str, group: Sequence[Setting]) -> tuple[Setting, Tuned]:
    """The candidate with the highest score; on a tie the cheaper, then the first."""
    strata = np.asarray(digest.strata)

    def score(setting: Setting) -> float:
        scores = digest.settings[setting.name].score()
        tasks = range(len(digest.tasks))
        return float(np.mean([scores[strata == task].mean() for task in tasks]))

    def merit(setting: Setting) -> tuple[float, float]:
        return round(score(setting), 9), -float(digest.settings[setting.name].cost().mean())

    best = max(group, key=merit)
    tuned = Tuned(name, len(group), score(best), score(group[0]), best.varied)
    return replace(best, name=name_tuned(name, group), varied={}), tuned


def _is_user_task(task: Task) -> bool:
    """Whether a task is not part of this package, whose version identifies its code."""
    return type(task).__module__.partition(".")[0] != "entropix_jax"


def _hash_code(task: Task) -> str | None:
    """A hash of the source file of a task's class; None without one."""
    try:
        file = inspect.getsourcefile(type(task))
        return None if file is None else content_hash(Path(file).read_bytes())
    except (OSError, TypeError):
        return None


def _has_world_task(tasks: Sequence[Task]) -> bool:
    return any(type(task).__module__ == "entropix_jax.lab.tasks.tiny" for task in tasks)


def _write_json(path: Path, content: Any) -> None:
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def checked_out_commit() -> str | None:
    """The commit of the repository that the package is run from, `-dirty` where files that Git
    knows have been changed since. None elsewhere, or without Git."""
    root = Path(__file__).parent.parent.parent
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    about = ["describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(
            [git, "--no-optional-locks", "-C", str(root), *about],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # no reason to lose what it is told of
        return None
    return found.stdout.strip() or None
