"""Runs a study for `ablate` and `evaluate`: progress, interrupts, and the summary as output."""

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

from entropix_jax.batch.progress import ProgressView, Standing
from entropix_jax.cli.options import EXIT_OK, model_name
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.errors import check_range, require
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.host.interrupts import deferred_interrupts
from entropix_jax.lab.study import Study
from entropix_jax.lab.sweep import Calibrate, Sweep
from entropix_jax.model.loading import LanguageModel, check_backend, load, resolve_model

if TYPE_CHECKING:
    from entropix_jax.batch.output import Store
    from entropix_jax.lab.trials import TrialRun


def run_study(
    plan: Callable[[Calibrate], Sweep],
    folder: Path,
    *,
    model: str | None,
    slots: int,
    dtype: str | None,
    precision: str | None,
) -> int:
    """Runs a study, prints its summary, and returns the exit status.

    Args:
        plan: returns the sweep, given a function that calibrates a sampler for the model. The model
            is loaded on the first call of that function, so most mistakes in a sweep are reported
            before.

    Raises:
        UserError: any error that a user can fix.
    """
    # Check what can be checked before the model is loaded.
    require("lab", "matplotlib", "pyarrow")
    check_range("--slots", slots, 1)
    model = model_name(model)
    path = resolve_model(model)

    @cache
    def load_once() -> LanguageModel:
        check_backend()
        use_compilation_cache()
        return load(str(path), dtype, precision=precision)

    sweep = plan(lambda sampler: calibrate_sampler(sampler, load_once()).sampler)
    # A hub snapshot's folder is named by its commit, so the hub id is kept as the name.
    name = path.resolve().name if Path(model).exists() else model
    study = Study(load_once(), sweep, folder, name=name, slots=slots)

    # Run it, with a progress bar for each phase.
    printed: set[str] = set()

    @contextmanager
    def watch(phase: str, number: int, store: Store, run: TrialRun) -> Iterator[Callable[[], None]]:
        done = f", {store.done} already done" if store.done else ""
        for note in run.notes:
            if note not in printed:
                print(f"note: {note}", file=sys.stderr)
                printed.add(note)
        print(f"{phase}: {number} rows{done}", file=sys.stderr)

        def standing() -> Standing:
            engine = run.engine
            return Standing(store.done, run.tokens, engine.steps, engine.used)

        with ProgressView(standing, number) as view:
            yield view.looked

    with deferred_interrupts(study.stop, (signal.SIGINT, signal.SIGTERM)) as pressed:
        findings = study.run(watch)
    if findings is None:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        return 128 + pressed[0]

    # Print the summary, without its pictures.
    page = (folder / "summary.md").read_text(encoding="utf-8")
    text = page.partition("\n![")[0]
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)
    print(f"written: {folder}/ (summary.md, findings.json, results.csv, plots/)", file=sys.stderr)
    return EXIT_OK
