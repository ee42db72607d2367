"""`python -m entropix_jax.report`: a trace in, a page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.commandline import EXIT_OK, parse, run_command


@dataclass(frozen=True)
class Arguments:
    """Makes one self-contained HTML page of a run's trace, to open in any browser."""

    trace: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TRACE")]
    """A trace, as `--trace FILE` of `main` or `--trace DIR` of `batch` writes it."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")]
    """The page."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.report") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    from entropix_jax.report.page import check_report, write_report

    trace, output = Path(arguments.trace), Path(arguments.output)
    check_report(output, trace)
    write_report(trace, output)
    return EXIT_OK
