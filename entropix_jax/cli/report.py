"""`python -m entropix_jax.report`: traces in, an HTML page out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.cli.options import EXIT_OK, Flag, parse, run_command
from entropix_jax.errors import UserError
from entropix_jax.host.files import opening

_PEEK = 2**20  # bytes of a first line: a record's own fields come first


@dataclass(frozen=True)
class Arguments:
    """Makes one self-contained HTML page of a trace, or compares traces of one prompt."""

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE [...]")]
    """Traces (`--trace FILE` of `main`, `--trace DIR` of `batch`). One gives a page of the run,
    token by token; several are compared side by side."""
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
        _check_trace(trace)
    compare = arguments.compare or len(traces) > 1
    write_page(comparison_page(traces) if compare else run_page(traces[0]), output)
    return EXIT_OK


def _check_trace(path: Path) -> None:
    """Raises for inputs that have no page, with what to do instead."""
    if path.is_dir():
        if (path / "study.json").exists():
            raise UserError(
                f"{path}: a study has no page: read its summary.md and plots/, or its results.csv"
            )
        raise UserError(f"{path}: a folder: give a trace")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file: save it in one")
    with opening(path) as file:
        first = file.readline(_PEEK)
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return  # the reader says what is wrong
    if isinstance(record, dict) and {"id", "line", "digest"} <= record.keys():
        raise UserError(
            f"{path}: a batch's output has no page: read it with pandas.read_json({path.name!r},"
            " lines=True), or run batch with --trace DIR and give one of its traces"
        )
