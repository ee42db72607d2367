"""`entropix-jax ablate`: compares settings of a sampler, in one compiled program."""

from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from entropix_jax.cli.options import OptionalCount, own_mechanisms
from entropix_jax.errors import check_range
from entropix_jax.lab.command import StudyOptions, run_study


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyOptions):
    """Runs the settings of a sweep file on its tasks, and writes tables, plots and a summary.

    Example:
        presets --output build/study
    """

    sweep: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")]
    """A sweep file, or the name of one in configs/ablations/."""
    items: OptionalCount = None
    """Maximum number of items per task, to run part of a study. Its rows equal those of the whole
    study (default: as in the sweep file)."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    from entropix_jax.lab.sweep import Calibrate, Sweep, find_sweep, read_sweep

    check_range("--items", arguments.items, 1)
    path, own = find_sweep(arguments.sweep), own_mechanisms(arguments.plugin)

    def plan(calibrate: Calibrate) -> Sweep:
        sweep = read_sweep(path, calibrate, own, arguments.data)
        most = arguments.items
        return sweep if most is None else replace(sweep, items=sweep.items.at_most(most))

    return run_study(plan, arguments)
