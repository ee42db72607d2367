"""`entropix-jax report`: makes an HTML page from a trace."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from entropix_jax.cli.options import EXIT_OK, Positional
from entropix_jax.host.files import check_regular


@dataclass(frozen=True)
class Arguments:
    """Makes one self-contained HTML page from a trace.

    Example:
        run.jsonl --output run.html
    """

    trace: Annotated[Positional, "TRACE"]
    """The trace of a run (`generate --trace FILE` or `batch --trace DIR`)."""
    output: Annotated[str, "FILE.html"]
    """The page to write."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    from entropix_jax.report.page import check_report, write_report

    trace, output = Path(arguments.trace), Path(arguments.output)
    check_report(output, trace)
    check_regular(trace, ": give a trace")
    write_report(trace, output)
    print(f"page: {output}", file=sys.stderr)
    return EXIT_OK
