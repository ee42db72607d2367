"""The standing regime of trust: tries, counts, and tells what failed.

    python scripts/verify.py PART [OPTIONS]        one part; PART --help lists its options
    python scripts/verify.py all                   every part with its defaults, then the table
    python scripts/verify.py table                 the table of what has been found so far

Each part keeps what it has done in a folder (--output, .verify by default), goes on from there when
it is started again, and begins anew with --fresh. The status is 1 where something failed.
"""

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from verification.findings import Line, read_findings, write_findings

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "fuzzing": "damaged files of every kind that is read, 10,000 of each",
    "properties": "property-based tests, with many more examples than in the suite",
    "repeats": "the same rows again: in other batches, other processes, after an interrupt",
    "faults": "kills at random moments of every command that writes",
    "memory": "the memory that a batch says it will take, against what it takes",
    "parity": "configurations compared with transformers",
    "coverage": "lines and branches of the package that the tests run",
    "mutants": "faults planted into sampler, metrics and cache, of which the tests find most",
}


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / ".verify", metavar="DIR")
    parser.add_argument("--fresh", action="store_true", help="forget what the part has done")
    commands = parser.add_subparsers(dest="part", required=True, metavar="PART")
    modules = {name: importlib.import_module(f"verification.{name}") for name in PARTS}
    for name, purpose in PARTS.items():
        modules[name].add_arguments(commands.add_parser(name, help=purpose, description=purpose))
    commands.add_parser("all", help="every part with its defaults, then the table")
    commands.add_parser("table", help="the table of what has been found so far")
    args = parser.parse_args()

    chosen = {"all": list(PARTS), "table": []}.get(args.part, [args.part])
    for name in chosen:
        folder = args.output / name
        if args.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        own = argparse.ArgumentParser()
        modules[name].add_arguments(own)
        options = args if args.part == name else own.parse_args([])
        print(f"{name}: {PARTS[name]}", file=sys.stderr)
        started = time.perf_counter()
        lines = modules[name].run(options, folder)
        write_findings(args.output, name, lines, time.perf_counter() - started)
    shown = PARTS if args.part in ("all", "table") else chosen
    lines = [line for name in shown for line in read_findings(args.output, name)]
    Console().print(table_of(lines))
    for line in lines:
        for detail in line.details[:5]:
            print(f"{line.what}: {detail}", file=sys.stderr)
    return 1 if any(line.failures for line in lines) else 0


def table_of(lines: list[Line]) -> Table:
    """The findings as a table."""
    table = Table("what", "tried", "failures", "wanted", "note", box=None, pad_edge=False)
    for line in lines:
        tried = f"{line.tried:,} {line.unit}"
        table.add_row(line.what, tried, f"{line.failures:,}", line.wanted, line.note)
    return table


if __name__ == "__main__":
    sys.exit(main())
