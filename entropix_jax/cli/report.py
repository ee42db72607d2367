"""`python -m entropix_jax.report`: traces in, an HTML page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.cli.options import EXIT_OK, Flag, parse, run_command
from entropix_jax.errors import UserError

_traces = tyro.conf.arg(metavar="TRACE [...]", help_behavior_hint="")


@dataclass(frozen=True)
class Arguments:
    """Makes one self-contained HTML page of a trace, or compares traces of one prompt.

    Example:
        run.jsonl --output run.html
    """

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, _traces]
    """Traces (`--trace FILE` of `generate`, `--trace DIR` of `batch`). One trace gives a page of
    the run, token by token. Several traces are compared side by side."""
    output: Annotated[str, tyro.conf.arg(metavar="FILE.html")]
    """The page."""
    compare: Flag = False
    """Compare the texts of one trace side by side."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.report") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    from entropix_jax.report.page import check_report, comparison_page, run_page, write_page

    traces, output = [Path(name) for name in arguments.traces], Path(arguments.output)
    if not traces:
        raise UserError("no trace is given (see --help)")
    check_report(output, *traces)
    for trace in traces:
        if (trace / "study.json").exists():
            told = "read its summary.md and plots/, or its results.csv"
            raise UserError(f"{trace}: a study has no page: {told}")
        if trace.exists() and not trace.is_file():
            raise UserError(f"{trace}: not a regular file: give a trace")
    compare = arguments.compare or len(traces) > 1
    write_page(comparison_page(traces) if compare else run_page(traces[0]), output)
    return EXIT_OK
