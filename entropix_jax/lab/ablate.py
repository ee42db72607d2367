"""`entropix-jax ablate`: compares settings of a sampler, in one compiled program."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from entropix_jax.cli.options import EXIT_OK, File, OptionalCount, Positional
from entropix_jax.errors import UserError, check_range, require
from entropix_jax.lab.command import StudyOptions, run_study, show_output


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyOptions):
    """Runs the settings of a sweep file on its tasks, and writes tables, plots and a summary.

    Example:
        presets --output build/study
    """

    sweep: Annotated[Positional, "SWEEP"]
    """A sweep file, or the name of one in configs/ablations/."""
    items: OptionalCount = None
    """Maximum number of items per task, to run part of a study. Its rows equal those of the whole
    study (default: as in the sweep file)."""
    rows: File = None
    """File of rows, rows.jsonl.xz or test.jsonl of a study: writes tables, plots and summary from
    them, without running anything."""
    against: File = None
    """File of rows to compare those of this run with. Prints each one that differs; the exit status
    is then 1."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    require("lab", "matplotlib", "pandas", "tabulate")
    from entropix_jax.lab.outputs import recompute
    from entropix_jax.lab.sweep import Calibrate, Sweep, find_sweep, read_sweep
    from entropix_jax.sampler.presets import import_mechanisms

    check_range("--items", arguments.items, 1)
    if None not in (arguments.rows, arguments.against):
        raise UserError("--rows and --against: give one of them")
    path = find_sweep(arguments.sweep)
    data = arguments.data if arguments.rows is None else arguments.data or "."

    def plan(calibrate: Calibrate) -> Sweep:
        own = import_mechanisms(arguments.plugin)
        sweep = read_sweep(path, calibrate, own, data)
        sweep = replace(sweep, lookup=arguments.lookup or sweep.lookup)
        most = arguments.items
        return sweep if most is None else replace(sweep, items=sweep.items.at_most(most))

    if arguments.rows is None:
        return run_study(plan, arguments, against=arguments.against)
    folder = Path(arguments.output)
    recompute(plan(lambda sampler: sampler), arguments.rows, folder)
    show_output(folder)
    return EXIT_OK
