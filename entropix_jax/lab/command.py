"""Runs a study for `ablate` and `evaluate`: common options, interrupts, and the printed summary."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli.options import (
    EXIT_OK,
    Activations,
    Count,
    Dtype,
    Folder,
    Model,
    Module,
    OptionalCount,
    RayAddress,
    Source,
    Texts,
    check_cluster,
    model_name,
)
from entropix_jax.cli.status import show_status
from entropix_jax.errors import check_range, require

if TYPE_CHECKING:
    from entropix_jax.lab.sweep import Calibrate, Sweep
    from entropix_jax.model.loading import LanguageModel

Names = Annotated[Texts, "NAME"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `ablate`, `evaluate` and `pivots`."""

    output: Annotated[str, "DIR"]
    """Folder of the results. The same command resumes an interrupted run."""
    data: Folder = None
    """Folder of published files, for tasks named without a file: gsm8k_test.jsonl, svamp.json,
    nq_open_dev.jsonl, ifeval.jsonl, prompts.csv (default: the environment variable
    ENTROPIX_DATA)."""
    model: Model = None
    """smollm2, tiny, asking, a folder in the Hugging Face layout, a GGUF file, or a hub id
    owner/name (default: smollm2 if its package is installed, else tiny)."""
    slots: Count = 64
    """Number of rows that run in parallel."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""
    precision: Activations = "auto"
    """Hidden-state dtype, as in generate. Pass it explicitly to compare results across machines."""

    def load(self, name: str) -> LanguageModel:
        """Loads the model of a name, and turns the compilation cache on."""
        from entropix_jax.host.compile_cache import use_compilation_cache
        from entropix_jax.model.loading import check_backend, load, resolve_model

        check_backend()
        use_compilation_cache()
        with show_status("loading the model"):
            return load(str(resolve_model(name)), self.dtype, precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class StudyOptions(RunOptions):
    """`RunOptions`, the plugin and the cluster of `ablate` and `evaluate`."""

    plugin: Module = None
    """Python module whose MECHANISMS the samplers may use. It is imported, so its code runs."""
    lookup: Source = None
    """Source of the arm lookup: FILE.csv, FILE.jsonl, a URL or exec:PATH; see generate."""
    ray: RayAddress = None
    """Run on all nodes of the Ray cluster with this head; see batch."""
    cpus_per_actor: OptionalCount = None
    """With --ray: cores of a process on a node without accelerators (default: all of the node)."""


def run_study(
    plan: Callable[[Calibrate], Sweep], options: StudyOptions, *, against: str | None = None
) -> int:
    """Runs a study, prints its summary, and returns the exit status.

    Args:
        plan: returns the sweep, given a function that calibrates a sampler for the model. The model
            is loaded on the first call of that function, so most errors in a sweep are reported
            before that.
        against: a file of rows to compare those of the study with, instead of a summary.

    Raises:
        UserError: any error that a user can fix.
    """
    # Check what can be checked before the model is loaded.
    require("lab", "matplotlib", "pandas", "sacrebleu", "tabulate")
    check_range("--slots", options.slots, 1)
    check_cluster(options.ray, options.cpus_per_actor)
    with show_status("loading JAX"):
        from entropix_jax.engine.calibrated import calibrate_sampler
        from entropix_jax.host.cluster import Cluster
        from entropix_jax.host.interrupts import deferred_interrupts
        from entropix_jax.lab.results import find_differences, name_trial, read_rows
        from entropix_jax.lab.spread import PhaseCopy
        from entropix_jax.lab.study import Study
        from entropix_jax.model.loading import resolve_model

    others = None if against is None else read_rows(against)
    model, folder = model_name(options.model), Path(options.output)
    load_once = cache(lambda: options.load(model))
    sweep = plan(lambda sampler: calibrate_sampler(sampler, load_once()).sampler)
    path = resolve_model(model)
    # A hub snapshot's folder is named by its commit, so the hub id is kept as the name.
    name = path.resolve().name if Path(model).exists() else model

    def spread(*phase: Any) -> Cluster:
        copy = PhaseCopy(plan, partial(options.load, model), *phase)
        return Cluster(copy, address=str(options.ray), cpus=options.cpus_per_actor)

    study = Study(
        load_once(),
        sweep,
        folder,
        name=name,
        slots=options.slots,
        spread=None if options.ray is None else spread,
    )

    with deferred_interrupts(study.stop, (signal.SIGINT, signal.SIGTERM)) as pressed:
        is_finished = study.run()
    if not is_finished:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        return 128 + pressed[0]

    if others is None:
        show_output(folder)
        return EXIT_OK
    found = [*find_differences({name_trial(row): row for row in study.rows}, others)]
    print("\n".join([*found, f"{len(study.rows)} rows compared, {len(found)} differ"]))
    return 1 if found else EXIT_OK


def show_output(folder: Path) -> None:
    """Prints a study's summary, without its pictures, and where its files are."""
    page = (folder / "summary.md").read_text(encoding="utf-8")
    print(page.partition("\n![")[0])
    names = "summary.md, findings.json, results.csv, plots/"
    print(f"written: {folder}/ ({names})", file=sys.stderr)
