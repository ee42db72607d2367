"""The work of actors of a Ray cluster for studies and the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from entropix_jax.batch.records import Record
from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.errors import UserError
from entropix_jax.lab.outputs import find_tasks
from entropix_jax.lab.sweep import Calibrate, Sweep
from entropix_jax.lab.trials import Trial, TrialRun, choose_settings, read_phase
from entropix_jax.model.loading import LanguageModel

Result = Mapping[str, Any]


class HostedTrials:
    """The trials of one phase, in an actor."""

    def __init__(self, run: TrialRun, trials: Sequence[Trial], slots: int) -> None:
        self.slots = slots
        self._run, self._trials = run, trials

    def run(self, items: Iterator[Any], write: Callable[[Any, Result], None]) -> None:
        """Runs the trials that have these records. UserError if one has another record here."""
        given = dict[int, Record]()

        def trials() -> Iterator[Trial | None]:
            for item in items:
                if item is None:
                    yield None
                    continue
                trial = self._trials[item.line - 1]
                if trial.record != item:
                    raise UserError(f"{item.id}: the task has another item here")
                given[item.line] = item
                yield trial

        def finish(record: Record, result: Result) -> None:
            write(given.pop(record.line), result)

        self._run.run(trials(), SimpleNamespace(write=finish, is_done=lambda record: False))


@dataclass(frozen=True)
class PhaseCopy:
    """Makes a study's phase in an actor, from what the command was given.

    `settings` has the name of each setting, and that of the sweep's own setting that it is.
    """

    plan: Callable[[Calibrate], Sweep]
    load: Callable[[], LanguageModel]
    phase: str
    settings: tuple[tuple[str, str], ...]
    slots: int
    capacity: int

    def __call__(self) -> tuple[HostedTrials, dict[str, Any]]:
        """Loads the model. Returns the trials, and what identifies the model."""
        model = self.load()
        sweep = self.plan(lambda sampler: calibrate_sampler(sampler, model).sampler)
        phase = read_phase(model, sweep, find_tasks(sweep), self.phase)
        settings = choose_settings(sweep, self.settings)
        run = TrialRun(model, settings, self.slots, self.capacity, sweep.lookup)
        # A trial takes as many slots as it has forks, on average.
        slots = max(self.slots * len(settings) // sum(one.forks for one in settings), 1)
        return HostedTrials(run, [*phase.trials(settings)], slots), identify(model)


def identify(model: LanguageModel) -> dict[str, Any]:
    """Returns what must be the same of a study's model in all actors and in the driver."""
    return {"fingerprint": model.fingerprint, "precision": model.precision.to_json()}


@dataclass(frozen=True)
class TextsCopy:
    """Makes an engine for requests of the harness in an actor, from the harness's arguments."""

    model: str | None
    dtype: str | None
    sampler: str
    changes: Mapping[str, Any]
    slots: int
    capacity: int

    def __call__(self) -> tuple[HostedTexts, dict[str, Any]]:
        """Loads the model. Returns the engine, and what identifies the model."""
        from entropix_jax.host.compile_cache import use_compilation_cache
        from entropix_jax.model.loading import load
        from entropix_jax.sampler.presets import load_sampler

        use_compilation_cache()
        model = load(self.model, self.dtype)
        sampler = calibrate_sampler(load_sampler(self.sampler).with_values(self.changes), model)
        engine = Engine(model, slots=self.slots, capacity=self.capacity)
        return HostedTexts(engine, sampler, self.slots), identify(model)


class HostedTexts:
    """Requests of the harness in an actor, which come without their sampler."""

    def __init__(self, engine: Engine, sampler: CalibratedSampler, slots: int) -> None:
        self.slots = slots
        self._engine, self._sampler = engine, sampler

    def run(self, items: Iterator[Any], write: Callable[[Any, Any], None]) -> None:
        """Runs requests. A result is a text, and an error or None."""
        own = (item and replace(item, sampler=self._sampler, tag=item) for item in items)
        for event in self._engine.run(own):
            if event.row.finish_reason is not None:
                write(event.row.request.tag, (event.row.text, event.row.error))
