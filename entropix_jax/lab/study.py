"""A study: tunes samplers on one split, runs all settings on the other, and writes the results.

A study is stored in one folder and resumes from it: `tuning.jsonl` and `test.jsonl` grow row by
row. Tables, plots and summary are made from them at the end.
"""

from __future__ import annotations

import inspect
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import Record, content_hash
from entropix_jax.batch.spread import SpreadRun
from entropix_jax.cli.status import ProgressView, show_status
from entropix_jax.errors import UserError
from entropix_jax.host.cluster import Cluster
from entropix_jax.lab.outputs import describe, find_best, find_tasks, write_json, write_output
from entropix_jax.lab.results import Row, read_results, write_rows
from entropix_jax.lab.spread import identify
from entropix_jax.lab.sweep import NONE, Setting, Sweep, name_tuned
from entropix_jax.lab.tasks.task import Task
from entropix_jax.lab.trials import TUNING, Phase, TrialRun, choose_settings, read_phase
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import code_identity
from entropix_jax.version import __version__

# The name of a phase, its settings, and an actor's slots and capacity, to its cluster.
Spread = Callable[[str, tuple[tuple[str, str], ...], int, int], Cluster]

_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "safetensors", "tokenizers")
_CAPACITY_STEP = 64  # tokens; cache capacities are multiples of it


class Study:
    """One study on one model. A stopped study continues when the command is run again."""

    def __init__(
        self,
        model: LanguageModel,
        sweep: Sweep,
        folder: Path,
        *,
        name: str,
        slots: int,
        spread: Spread | None = None,
    ) -> None:
        """Checks the sweep and creates the folder, before anything is computed.

        Args:
            name: the model's name in the results.
            spread: makes the cluster for a phase, its settings as `choose_settings` takes them, and
                the slots and capacity of an actor. None: the rows run here.

        Raises:
            UserError: an unknown task, two tasks with one name, or a folder that cannot be created.
        """
        self._model = model
        self._name = name
        self._sweep = sweep
        self._folder = folder
        self._slots = slots
        self._spread = spread
        self._cluster: Cluster | None = None
        self._capacity = 0
        self._run: TrialRun | None = None
        self._stopping = False
        self.rows: list[Row] = []  # of the finished study
        self._tasks = find_tasks(sweep)
        for setting in sweep.settings:
            where, method = f"setting '{setting.name}'", setting.method
            if setting.forks > slots:
                raise UserError(f"{where}: {setting.forks} forks do not fit into {slots} slots")
            free = [task.name for task in self._tasks if not task.votes]
            if free and setting.forks > 1 and method.votes:
                answers = f"the answers of task '{free[0]}' are free text"
                raise UserError(f"{where}: method '{method.name}' votes: {answers}")
        # Hashed now, as it was just imported: the file may change while the study runs.
        # The version of this package identifies the code of its own tasks.
        self._codes = {
            task.name: _hash_code(task)
            for task in self._tasks
            if type(task).__module__.partition(".")[0] != "entropix_jax"
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: the folder cannot be created: {error.strerror}") from None

    def stop(self) -> None:
        """Requests the end of the run after the current event. Safe in a signal handler."""
        self._stopping = True
        if self._run is not None:
            self._run.engine.stop()
        if self._cluster is not None:
            self._cluster.stop()

    def run(self) -> bool:
        """Runs the rows that have no result yet, and writes tables, plots and the summary. Shows
        the progress on standard error.

        Returns:
            Whether the study finished; False if it was stopped.

        Raises:
            UserError: the folder has another study's results, or cannot be written.
        """
        sweep, tuning = self._sweep, self._sweep.tuning
        test = read_phase(self._model, sweep, self._tasks, "test")
        named, tuning_rows = [(one.name, one.name) for one in sweep.settings], list[Row]()
        if tuning is None:
            self._shape((test, sweep.settings))
        else:
            # Tune: run all candidates on the tuning split, and add the best of each sampler.
            phase = read_phase(self._model, sweep, self._tasks, TUNING)
            candidates = list(chain.from_iterable(tuning.candidates.values()))
            one_each = (group[0] for group in tuning.candidates.values())
            self._shape((phase, candidates), (test, [*sweep.settings, *one_each]))
            about = {"split": "tuning", "items": tuning.items.to_json()}
            found = self._run_phase(phase, about, [(one.name, one.name) for one in candidates])
            if found is None:
                return False
            tuning_rows = found
            best = {*find_best(found, tuning)["best"]}
            named += [
                (name_tuned(name, group), one.name)
                for name, group in tuning.candidates.items()
                for one in group
                if one.name in best
            ]

        # Test: run all settings on the test split.
        about = {"split": sweep.split, "items": sweep.items.to_json()}
        optional = {"skip": sweep.skip, "most_seeds": sweep.most_seeds}
        about |= {key: value.to_json() for key, value in optional.items() if value != NONE}
        rows = self._run_phase(test, about, named)
        if rows is None:
            return False
        self._write(choose_settings(sweep, named), tuning_rows, rows)
        self.rows = rows
        return True

    def _shape(self, *phases: tuple[Phase, Iterable[Setting]]) -> None:
        """Sets the rows in parallel and their cache capacity, the same for all phases, so that they
        share compiled programs. Each phase comes with its settings."""
        rows = (phase.rows * sum(one.forks for one in settings) for phase, settings in phases)
        self._slots = min(self._slots, max(rows))
        longest = max(phase.longest for phase, _ in phases)
        capacity = -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP
        self._capacity = min(capacity, self._model.config.max_positions)

    def _run_phase(
        self, phase: Phase, about: Mapping[str, Any], named: Sequence[tuple[str, str]]
    ) -> list[Row] | None:
        """Runs the rows of a phase without a result; None if the run was stopped."""
        settings = choose_settings(self._sweep, named)
        number = phase.rows * len(settings)
        lookup = self._sweep.lookup
        self._run = run = TrialRun(self._model, settings, self._slots, self._capacity, lookup)
        path = self._folder / f"{phase.name}.jsonl"
        with Store(str(path), self._identity(phase, about, settings, run)) as store:
            # Check every trial, as a stored result may belong to a question that has changed.
            done = [store.is_done(trial.record) for trial in phase.trials(settings)]
            if not all(done) and not self._stopping:
                before = f", {store.done} already done" if store.done else ""
                print(f"{phase.name}: {number} rows{before}", file=sys.stderr)
                if self._spread is None:
                    with ProgressView(store, run, number).follow():
                        run.run(phase.trials(settings), store)
                else:
                    records = (trial.record for trial in phase.trials(settings))
                    cluster = self._spread(phase.name, tuple(named), self._slots, self._capacity)
                    self._run_there(cluster, records, store, number)
        if self._stopping:
            return None
        return read_results(path, (trial.id for trial in phase.trials(settings)))

    def _run_there(
        self, cluster: Cluster, records: Iterator[Record], store: Store, number: int
    ) -> None:
        """Runs the rows of a phase on a cluster. UserError if its model differs from that here."""

        def write(record: Any, result: Mapping[str, Any]) -> None:
            if "score" not in result:
                raise UserError(f"{record.id}: {result['error']}")
            store.write(record, result)

        self._cluster, run = cluster, SpreadRun(cluster)
        run.left = number - store.done
        with cluster:
            with show_status("starting actors") as status:
                there, own = cluster.describe(status.show), identify(self._model)
            if there not in (None, own):
                problem = f"its nodes use another model or precision: {there}, here {own}"
                raise UserError(f"--ray: {problem}: give --dtype and --precision")
            with ProgressView(store, run, number).follow():
                run.run(records, write, store.is_done)

    def _identity(
        self,
        phase: Phase,
        about: Mapping[str, Any],
        settings: Sequence[Setting],
        run: TrialRun,
    ) -> dict[str, Any]:
        model, samplers = self._model, run.samplers
        tasks = {question.task.name: question.task for question in phase.questions}
        return {
            "model_fingerprint": model.fingerprint,
            "precision": model.precision.to_json(),
            "phase": phase.name,
            "tasks": [*tasks],  # without paths
            **about,
            "seeds": list(phase.seeds),
            "max_new_tokens": self._sweep.max_new_tokens.to_json(),
            "settings": {s.name: {**samplers[s.name].values, **_search(s)} for s in settings},
            **({} if run.lookup is None else {"lookup": run.lookup.identity}),
            "version": __version__,
            "judges": {name: dict(task.identity()) for name, task in tasks.items()},
            **({"task_code": self._codes} if self._codes else {}),
            **code_identity(settings[0].sampler.mechanisms if settings else ()),
        }

    def _write(
        self, settings: Sequence[Setting], tuning: Sequence[Row], test: Sequence[Row]
    ) -> None:
        """Writes the study's description, its rows, and its output."""
        assert self._run is not None
        samplers, about = self._run.samplers, self._about(len(settings), len(test))
        parameters = {
            setting.name: {
                "sampler": setting.sampler.name,
                "varied": dict(setting.varied),
                **_search(setting),
                "parameters": dict(sorted(samplers[setting.name].values.items())),
            }
            for setting in settings
        }
        write_json(self._folder / "study.json", about | {"settings": parameters})
        write_rows([*tuning, *test], self._folder / "rows.jsonl.xz")
        names = [setting.name for setting in settings]
        write_output(self._sweep, self._tasks, names, tuning, test, about, self._folder)

    def _about(self, settings: int, rows: int) -> dict[str, Any]:
        """Describes what was run, and with what."""
        model = self._model
        return {
            "description": self._sweep.description,
            "model": f"{self._name} ({model.fingerprint})",
            "precision": model.precision.to_json(),
            **describe(self._sweep, self._tasks, settings, rows),
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


def _search(setting: Setting) -> dict[str, Any]:
    """A setting's method and its most continuations, if it searches."""
    return {} if setting.forks == 1 else {"method": setting.method.name, "forks": setting.forks}


def _hash_code(task: Task) -> str | None:
    """A hash of the source file of a task's class; None without one."""
    try:
        file = inspect.getsourcefile(type(task))
        return None if file is None else content_hash(Path(file).read_bytes())
    except (OSError, TypeError):
        return None


def checked_out_commit() -> str | None:
    """Returns the commit of the repository that the package runs from, with `-dirty` if tracked
    files have changed. None for an installed package, or without Git."""
    root = Path(__file__).parent.parent.parent
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    command = [git, "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(
            [*command, "--abbrev=12"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
