"""`python -m entropix_jax.report`: what came of runs in, a page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.commandline import EXIT_OK, Flag, parse, run_command


@dataclass(frozen=True)
class Arguments:
    """Makes one self-contained HTML page, to open in any browser.

    Of a trace: the run, token by token. Of several traces of one prompt: the runs side by side. Of
    what `batch` writes: its records. Of a folder that `ablate` or `evaluate` wrote: the study.
    """

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT [...]")]
    """A trace or several (`--trace FILE` of `main`, `--trace DIR` of `batch`), the output of a
    batch, or the folder of a study."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")]
    """The page."""
    compare: Flag = False
    """Put the texts of one trace side by side."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.report") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    from entropix_jax.errors import UserError
    from entropix_jax.report.kinds import page_of
    from entropix_jax.report.page import check_report, write_page

    inputs, output = [Path(name) for name in arguments.inputs], Path(arguments.output)
    if not inputs:
        raise UserError("a trace, a batch's output or a study's folder must be given (see --help)")
    check_report(output, *inputs)
    write_page(page_of(inputs, compare=arguments.compare), output)
    return EXIT_OK
