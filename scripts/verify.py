"""The standing regime of trust: tries, counts, and tells what failed.

    python scripts/verify.py PART [OPTIONS]        one part; PART --help lists its options
    python scripts/verify.py all                   every part with its defaults, then the table
    python scripts/verify.py table [--markdown]    the table of what has been found so far

Findings are kept in a folder (--output, .verify by default). Fuzzing, kills, memory and mutants go
on where they were stopped, as long as the code is the same; --fresh begins anew. The status is 1
where something failed. Some parts need the extra `verification`, or `parity`.
"""

import argparse
import importlib
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from verification.findings import Findings, Line, code_digest, read_findings, write_findings

from entropix_jax.version import checked_out_commit

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "fuzzing": "damaged files of every kind that is read, 10,000 of each",
    "properties": "property-based tests, with many more examples than in the suite",
    "repeats": "the same rows again: in other batches, streamed, in other processes",
    "faults": "kills at random moments of every command that writes",
    "memory": "the memory that a batch says it will take, against what it takes",
    "parity": "configurations compared with transformers",
    "coverage": "lines and branches of the package that the tests run",
    "mutants": "faults planted into sampler, metrics and cache, of which the tests find most",
}
# What these have kept says nothing of other code; the others look for themselves.
OF_ONE_CODE = ("faults", "memory")
_COLUMNS = ("what", "tried", "failures", "wanted", "note", "commit")


def main() -> int:
    """Runs what the command line names."""
    name = next((word for word in sys.argv[1:] if word in (*PARTS, "all", "table")), "")
    args = _parser(name).parse_args()
    args.output = args.output.resolve()
    chosen = {"all": list(PARTS), "table": []}.get(name, [name])
    for part in chosen:
        options = args if name == part else _parser(part).parse_args([part])
        started, commit = time.perf_counter(), checked_out_commit()
        try:
            lines = _found(part, options, args.output / part, fresh=args.fresh)
        except Exception as error:  # the other parts go on
            traceback.print_exc()
            lines = [Line(part, 0, "things", 1, note=f"{type(error).__name__}: {error}")]
        seconds = round(time.perf_counter() - started, 1)
        write_findings(args.output, part, Findings(lines, commit, seconds))
    shown = PARTS if name in ("all", "table") else chosen
    found = [findings for part in shown if (findings := read_findings(args.output, part))]
    lines = [line for findings in found for line in findings.lines]
    if not lines:
        print(f"no findings in {args.output}: run a part first", file=sys.stderr)
        return 1
    if name == "table" and args.markdown:
        print("\n".join(markdown_of(found)))
    else:
        Console().print(table_of(found))
    for line in lines:
        for detail in line.details[:5]:
            print(f"{line.what}: {detail}", file=sys.stderr)
    return 1 if any(line.failures or not line.tried for line in lines) else 0


def _parser(name: str) -> argparse.ArgumentParser:
    """For a command line that names `name`: what the other parts need is not imported."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--output", type=Path, default=ROOT / ".verify", metavar="DIR")
    common.add_argument("--fresh", action="store_true", help="forget what the part has done")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="PART")
    for part, purpose in PARTS.items():
        own = commands.add_parser(part, help=purpose, description=purpose, parents=[common])
        if part == name:
            _module(part).add_arguments(own)
    commands.add_parser("all", help="every part, then the table", parents=[common])
    table = commands.add_parser("table", help="what has been found so far", parents=[common])
    table.add_argument("--markdown", action="store_true", help="for a README")
    return parser


def _module(part: str) -> Any:
    try:
        return importlib.import_module(f"verification.{part}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"error: {part} needs {error.name}: pip install -e '.[verification,parity]'"
        ) from None


def _found(part: str, options: argparse.Namespace, folder: Path, *, fresh: bool) -> list[Line]:
    """What a part finds; it keeps what it has done in `folder`."""
    mark = folder / "code"
    other = mark.exists() and mark.read_text(encoding="utf-8") != code_digest()
    if fresh or (other and part in OF_ONE_CODE):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(code_digest(), encoding="utf-8")
    print(f"{part}: {PARTS[part]}", file=sys.stderr)
    lines: list[Line] = _module(part).run(options, folder)
    return lines


def table_of(found: Sequence[Findings]) -> Table:
    """The findings as a table."""
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for cells in _rows(found):
        table.add_row(*cells)
    return table


def markdown_of(found: Sequence[Findings]) -> list[str]:
    """The same in Markdown, line by line."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *_rows(found)]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _rows(found: Sequence[Findings]) -> list[tuple[str, ...]]:
    return [
        (
            line.what,
            f"{line.tried:,} {line.unit}",
            f"{line.failures:,}",
            line.wanted,
            line.note,
            findings.commit or "",
        )
        for findings in found
        for line in findings.lines
    ]


if __name__ == "__main__":
    sys.exit(main())
