"""Compiles the engine's programs for devices that are not there, and reads what came of them.

    python scripts/devices.py                              the default sampler, all devices
    python scripts/devices.py --devices v5e --mesh model=8
    python scripts/devices.py --programs decode forked --json figures.json

Llama-3.2-1B's shape in bfloat16, as `Engine` runs it: `decode` (steps while no row is forked),
`forked` (steps with the lanes of forks) and `prefill` (a part of a prompt). Nothing runs: every
figure is read off the compiled program. `scripts/test --devices` makes the environments that this
needs; those that lie elsewhere are named by ENTROPIX_DEVICES_CUDA and ENTROPIX_DEVICES_TPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from device_program import COMPILER, DECODE, FORKED, H100, PLATFORM, PREFILL, V5E, Wanted
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Where JAX for a platform comes from, as an extra of this package.
EXTRAS = {"cuda": "devices-cuda", "tpu": "devices-tpu"}
MESHES = ("model=8", "data=8")
EXIT_MISSING = 2


class CompileError(Exception):
    """A program that did not compile."""


def python_for(device: str) -> str | None:
    """The interpreter with the compiler for a device; None: there is none."""
    platform = PLATFORM[device]
    module = COMPILER[platform]
    looks = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"
    named = os.environ.get(f"ENTROPIX_DEVICES_{platform.upper()}")
    beside = str(ROOT / f".venv-devices-{platform}" / "bin" / "python")
    for python in [named] if named else [beside, sys.executable]:
        try:
            if subprocess.run([python, "-c", looks], capture_output=True).returncode == 0:
                return python
        except OSError:
            continue
    return None


def missing(device: str) -> str:
    """What a user does where the compiler for a device is not there."""
    platform = PLATFORM[device]
    extra = EXTRAS[platform]
    return (
        f"{device}: its compiler ({COMPILER[platform]}) is not installed: scripts/test --devices "
        f"makes .venv-devices-{platform} with it, or, in an environment of your own: "
        f"pip install -e '.[{extra}]'"
    )


def measured(
    wanted: Wanted, *, folder: Path | None = None, timeout: float = 3600
) -> dict[str, Any]:
    """The figures of a program, which a process of its own compiles. What XLA dumps stays in the
    folder, if there is one."""
    python = python_for(wanted.device)
    if python is None:
        raise CompileError(missing(wanted.device))
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "figures.json"
        command = [python, str(ROOT / "scripts" / "device_program.py"), json.dumps(asdict(wanted))]
        command += [str(output), str(folder or Path(scratch) / "dump")]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
        if ran.returncode != 0:
            raise CompileError(f"{wanted.device}, {wanted.program}: {ran.stderr[-4000:]}")
        figures: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return figures


def programs(args: argparse.Namespace) -> Iterator[Wanted]:
    """What is to be compiled."""
    for device in args.devices:
        for program in args.programs:
            shapes = [(batch, None) for batch in args.batch]
            if device == V5E and program != PREFILL:
                shapes += [(max(args.batch), mesh) for mesh in args.mesh]
            for batch, mesh in shapes:
                yield Wanted(device, program, batch, mesh, args.sampler, args.context, args.prompt)


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """All figures."""
    heads = (
        "device", "program", "shape", "compile", "arguments", "temporary", "moved", "kernels",
        "waits", "copies", "sorts", "exchanges", "M cycles",
    )  # fmt: skip
    title = "GB; of decode: in a step, + in a call, without branches and inner loops"
    table = Table(*heads, title=title)
    for row in rows:
        on_gpu = PLATFORM[row["device"]] == "cuda"
        copies, in_call = (sum(row[name].values()) for name in ("copies", "call_copies"))
        table.add_row(
            row["device"],
            row["program"],
            shape_of(row),
            f"{sum(row['seconds']):.0f} s",
            *(f"{row[name] / 1e9:.2f}" for name in ("argument_bytes", "temporary_bytes")),
            f"{row['bytes_moved'] / 1e9:.2f}",
            str(row["kernels"]),
            str(row["syncs"]) if on_gpu else "",
            f"{copies} + {in_call}" if in_call else str(copies),
            str(row["sorts"]),
            ", ".join(f"{number} {kind}" for kind, number in row["collectives"].items()),
            "" if on_gpu else f"{row['cycles'] / 1e6:.1f}",
        )
    return table


def shape_of(row: dict[str, Any]) -> str:
    """Rows and positions, in words."""
    names = (field.name for field in fields(Wanted))
    return Wanted(**{name: row[name] for name in names}).shape


def places_of(rows: Sequence[dict[str, Any]], number: int) -> Table:
    """What moves most in each program, by file and function."""
    table = Table("device", "program", "shape", "file, function", "MB", "kernels", "M cycles")
    for row in rows:
        for place, (moved, kernels, cycles) in [*row["by_place"].items()][:number]:
            costs = f"{moved / 1e6:.0f}", str(kernels), f"{cycles / 1e6:.2f}"
            table.add_row(row["device"], row["program"], shape_of(row), place, *costs)
        table.add_section()
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="+", choices=(H100, V5E), default=[H100, V5E])
    parser.add_argument(
        "--programs", nargs="+", choices=(DECODE, FORKED, PREFILL), default=[DECODE, PREFILL]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="rows")
    parser.add_argument(
        "--mesh", nargs="*", default=MESHES, help="of eight TPUs, for the most rows"
    )
    parser.add_argument("--sampler", default="entropix", help="a preset, or a sampler file")
    parser.add_argument("--context", type=int, default=2048, help="cache positions of a row")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt read at once")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="a folder for what XLA dumps of each program")
    parser.add_argument("--places", type=int, default=0, help="so many of the costliest functions")
    args = parser.parse_args(argv)
    console = Console(width=140)
    absent = [missing(device) for device in args.devices if python_for(device) is None]
    if absent:
        for line in absent:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_MISSING
    rows: list[dict[str, Any]] = []
    for wanted in programs(args):
        folder = None
        if args.keep is not None:
            mesh = "" if wanted.mesh is None else f"-{wanted.mesh}"
            folder = args.keep / f"{wanted.device}-{wanted.program}-{wanted.batch}{mesh}"
        try:
            rows.append(measured(wanted, folder=folder))
        except CompileError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        seconds = sum(rows[-1]["seconds"])
        console.print(f"{wanted.device} {wanted.program} {wanted.shape}: {seconds:.0f} s")
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    console.print(table_of(rows))
    if args.places:
        console.print(places_of(rows, args.places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
