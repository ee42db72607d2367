"""`python -m entropix_jax.ablate`: compares settings of a sampler, in one compiled program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.cli.options import (
    Activations,
    Count,
    Dtype,
    Folder,
    Model,
    Module,
    own_mechanisms,
    parse,
    run_command,
)
from entropix_jax.errors import check_range


@dataclass(frozen=True)
class Arguments:
    """Runs the settings of a sweep file on its tasks; writes tables, plots and a summary.

    Example:
        presets --output build/study
    """

    sweep: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")]
    """A sweep file, or the name of one in configs/ablations/."""
    output: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Folder of the results. The same command resumes an interrupted study."""
    data: Folder = None
    """Folder of the published files of tasks that are named without a file: gsm8k_test.jsonl,
    svamp.json, nq_open_dev.jsonl, ifeval.jsonl, prompts.csv (default: the environment variable
    ENTROPIX_DATA)."""
    items: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Maximum number of items of each task, for a part of a study. Its rows equal those of the
    whole study (default: as in the sweep file)."""
    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 if its package is installed, else tiny)."""
    slots: Count = 64
    """Rows in parallel."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""
    precision: Activations = None
    """Type of hidden states (default: on a CPU float32, else the weights')."""
    plugin: Module = None
    """Import a Python module whose MECHANISMS the samplers may use. Its code runs."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.ablate") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    from entropix_jax.lab.command import run_study
    from entropix_jax.lab.sweep import Calibrate, Sweep, find_sweep, read_sweep

    check_range("--items", arguments.items, 1)
    path, own = find_sweep(arguments.sweep), own_mechanisms(arguments.plugin)

    def plan(calibrate: Calibrate) -> Sweep:
        sweep = read_sweep(path, calibrate, own, arguments.data)
        most = arguments.items
        return sweep if most is None else replace(sweep, items=sweep.items.at_most(most))

    return run_study(
        plan,
        Path(arguments.output),
        model=arguments.model,
        slots=arguments.slots,
        dtype=arguments.dtype,
        precision=arguments.precision,
    )
