"""A study as a command runs it: progress, Ctrl-C, and what was found on the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown

from entropix_jax.batches.progress import ProgressView, Standing
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.commandline import EXIT_OK, model_name
from entropix_jax.errors import check_range, require
from entropix_jax.interrupts import deferred_interrupts, exit_status
from entropix_jax.loading import LanguageModel, check_backend, load, resolve_model
from entropix_jax.programs import use_compilation_cache
from entropix_jax.studies.study import Study
from entropix_jax.studies.sweep import Calibrate, Sweep

if TYPE_CHECKING:
    from entropix_jax.batches.store import Store
    from entropix_jax.studies.trials import TrialRun


def run_study(
    plan: Callable[[Calibrate], Sweep],
    folder: Path,
    *,
    model: str | None,
    slots: int,
    dtype: str | None,
) -> int:
    """Runs a study, tells what it found, and returns the exit status.

    Args:
        plan: gives the study, from what gives a sampler the model's thresholds. The model is not
            loaded before it is asked for: a mistake in the study should not wait for that.

    Raises:
        UserError: whatever a user can mend.
    """
    require("lab", "matplotlib", "pyarrow")  # not after hours of work
    check_range("--slots", slots, 1)
    model = model_name(model)
    place = resolve_model(model)

    @cache
    def loaded() -> LanguageModel:
        check_backend()
        use_compilation_cache()
        return load(str(place), dtype)

    sweep = plan(lambda sampler: calibrate_sampler(sampler, loaded()))
    # The cache of the hub names a snapshot's folder by its commit.
    name = place.resolve().name if Path(model).exists() else model
    study = Study(loaded(), sweep, folder, name=name, slots=slots)

    told: set[str] = set()

    @contextmanager
    def watch(phase: str, number: int, store: Store, run: TrialRun) -> Iterator[Callable[[], None]]:
        done = f", {store.done} of them are done already" if store.done else ""
        for note in run.notes:
            if note not in told:
                print(f"note: {note}", file=sys.stderr)
                told.add(note)
        print(f"{phase}: {number} rows{done}", file=sys.stderr)

        def standing() -> Standing:
            engine = run.engine
            return Standing(store.done, run.tokens, engine.steps, engine.used)

        with ProgressView(standing, number) as view:
            yield view.looked

    with deferred_interrupts(study.stop, (signal.SIGINT, signal.SIGTERM)) as pressed:
        findings = study.run(watch)
    if findings is None:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return exit_status(pressed[0])
    page = (folder / "summary.md").read_text(encoding="utf-8")
    text = page.partition("\n![")[0]
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)
    print(f"written: {folder}/ (summary.md, results.csv, results.parquet, plots/)", file=sys.stderr)
    return EXIT_OK
