"""Fuzzing: damaged and hostile inputs, some thousands of each kind that is read from outside.

Each input must give a right result or a `UserError` of one line. A failure is any other exception,
a crash of the process, an input that takes more than some seconds, and memory beyond a bound. The
readers run in a process of their own, which is watched, and started again after its end with the
next input. Input and outcome follow from surface, seed and number: `--surface NAME --seed S
--number N` tries a single one, and keeps it as a file.
"""

import argparse
import gc
import importlib
import json
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verification.findings import Line, code_digest

MODULE = "verification.surfaces"
SECONDS = 5.0  # of processor time, that an input may take
PATIENCE = 60.0  # seconds without a sign of life, whatever the load on the machine
GROWTH = 512 * 2**20  # bytes, of the process's largest size over that at its start
_ADDRESSES = 3 * 2**30  # bytes of address space over that at the start: keeps the machine usable
_START = 300.0  # seconds, for imports and valid inputs
_DETAILS = 12  # failures that are told of, of each surface
_TAIL = 1500  # characters of a traceback
_ROOT = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    from verification.surfaces import SURFACES

    parser.add_argument(
        "--inputs", type=int, default=10_000, help="inputs of each surface (default: %(default)s)"
    )
    parser.add_argument(
        "--surface", nargs="+", choices=[*SURFACES], default=[*SURFACES], metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--number", type=int, help="try this one input alone, and keep it in the folder"
    )


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Fuzzes the surfaces that were asked for; goes on where an earlier run was ended."""
    from verification.surfaces import SURFACES

    lines = []
    for name in args.surface:
        if args.number is not None:
            outcome = fuzz(name, args.seed, range(args.number, args.number + 1), keep=folder)
        else:
            outcome = _resumed(name, args.seed, args.inputs, folder)
        line = outcome.line(SURFACES[name].what, args.seed)
        print(f"{name}: {line.tried} inputs, {line.failures} failures ({line.note})", flush=True)
        lines.append(line)
    return lines


@dataclass
class Outcome:
    """What came of a surface's inputs; `failures` hold a number, a kind and what happened."""

    surface: str
    next: int = 0
    tried: int = 0
    refused: int = 0  # with a line for the user; the others gave a result
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def line(self, what: str, seed: int) -> Line:
        """A line of the table: of failures with the same end, the first."""
        first: dict[str, dict[str, Any]] = {}
        for failure in self.failures:
            told = first.setdefault(failure["signature"], {**failure, "times": 0, "seed": seed})
            told["times"] += 1
        rate = self.tried / self.seconds if self.seconds else 0.0
        note = f"{self.refused} refused, {rate:.0f} a second"
        details = list(first.values())[:_DETAILS]
        return Line(what, self.tried, "inputs", len(self.failures), note=note, details=details)


def _resumed(name: str, seed: int, inputs: int, folder: Path) -> Outcome:
    """All inputs of a surface, those that an earlier run of the same code tried not again."""
    folder.mkdir(parents=True, exist_ok=True)
    path, code = folder / f"{name}.json", f"{code_digest()} {seed}"
    outcome = Outcome(name)
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept.pop("code") == code and kept["next"] <= inputs:
            outcome = Outcome(**kept)

    def save(found: Outcome) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"code": code, **vars(found)}, indent=1), encoding="utf-8")
        os.replace(new, path)

    return fuzz(name, seed, range(outcome.next, inputs), outcome=outcome, save=save)


# The watch.


def fuzz(
    name: str,
    seed: int,
    numbers: range,
    *,
    module: str = MODULE,
    seconds: float = SECONDS,
    patience: float = PATIENCE,
    growth: int = GROWTH,
    outcome: Outcome | None = None,
    save: Any = None,
    keep: Path | None = None,
) -> Outcome:
    """Tries a surface's inputs of these numbers.

    Args:
        name: of one of `module.SURFACES`.
        seconds: of processor time, for one input.
        patience: seconds for one input, before the process counts as hung.
        growth: bytes by which the process may grow.
        outcome: what came of those before, which is added to.
        save: called with the outcome now and then.
        keep: a folder for the inputs.
    """
    outcome = outcome or Outcome(name, next=numbers.start)
    outcome.next = numbers.start
    begun, before = time.monotonic(), outcome.seconds
    saved = begun
    with tempfile.TemporaryDirectory(prefix="entropix-jax-fuzzing-") as scratch:
        while outcome.next < numbers.stop:
            options = {
                "module": module,
                "surface": name,
                "seed": seed,
                "first": outcome.next,
                "last": numbers.stop,
                "folder": scratch,
                "seconds": seconds,
                "growth": growth,
                "keep": None if keep is None else str(keep),
            }
            for told in _worker(options, patience):
                outcome.next = told["number"] + 1
                outcome.tried += 1
                if "kind" in told:
                    outcome.failures.append(told)
                else:
                    outcome.refused += told["refused"]
                outcome.seconds = before + time.monotonic() - begun
                if save is not None and time.monotonic() > saved + 5:
                    save(outcome)
                    saved = time.monotonic()
    outcome.seconds = before + time.monotonic() - begun
    if save is not None:
        save(outcome)
    return outcome


def _worker(options: dict[str, Any], patience: float) -> Iterator[dict[str, Any]]:
    """What a process tells of its inputs, up to its end; how it ended, where that is a failure."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "verification.fuzzing", json.dumps(options)],
            env={
                "JAX_PLATFORMS": "cpu",
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)]),
            },
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        number = options["first"]
        ended = ""
        try:
            deadline = time.monotonic() + _START
            buffer = b""
            while not ended:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    ended = f"hang: nothing for {patience:g} s"
                    break
                chunk = os.read(process.stdout.fileno(), 2**16)
                if not chunk:
                    ended = "crash"
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                deadline = time.monotonic() + patience
                for line in lines:
                    told = json.loads(line)
                    if "end" in told:
                        return
                    number = told["number"]
                    if "begun" not in told:
                        yield told
        finally:
            process.kill()
            process.stdout.close()
            status = process.wait()
        errors.seek(max(0, errors.seek(0, 2) - _TAIL))
        tail = errors.read().decode("utf-8", "replace")
        if ended == "crash":
            ended = f"crash: the process ended with status {status}"
        if status == 1 and "Traceback" in tail:  # not the reader's, whose exceptions are told
            raise RuntimeError(f"{options['surface']}, input {number}: {tail}")
        yield {"number": number, "kind": ended, "signature": ended, "what": tail}


# The process that is watched.


def work(options: dict[str, Any]) -> None:
    """Tries inputs, and tells of each before and after."""
    # What the libraries print is not what is told.
    told = os.dup(1)
    os.dup2(2, 1)

    def tell(**content: Any) -> None:
        os.write(told, json.dumps(content).encode() + b"\n")

    module = importlib.import_module(options["module"])
    surface = module.SURFACES[options["surface"]]
    from verification.surfaces import inputs_of
    from verification.surfaces import scratch as emptied

    seeds, read = surface.prepare(emptied(Path(options["folder"]), "valid"))
    for valid in seeds:
        read(valid)  # also imports what is imported late
    gc.collect()
    start = _largest()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _ADDRESSES, hard))
    for number in range(options["first"], options["last"]):
        data = inputs_of(surface, seeds, options["seed"], number)
        if options["keep"] is not None:
            folder = Path(options["keep"])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{surface.name}-{options['seed']}-{number}").write_bytes(data)
        tell(number=number, begun=True)
        begun = time.process_time()
        failure, refused = _tried(read, data)
        taken = time.process_time() - begun
        if failure is None and taken > options["seconds"]:
            failure = _failure("slow", f"{taken:.1f} s of processor time")
        large = _largest() - start > options["growth"]
        if failure is None and large:
            failure = _failure("memory", f"{(_largest() - start) >> 20} MiB more than at the start")
        if failure is None:
            tell(number=number, refused=refused)
        else:
            tell(number=number, **failure)
        if large:  # the next process starts small again
            break
    tell(end=True)


def _tried(read: Any, data: bytes) -> tuple[dict[str, Any] | None, bool]:
    """What went wrong with an input, None if nothing did; whether it was refused, as it may be."""
    from entropix_jax.errors import UserError
    from verification.surfaces import check_line

    try:
        try:
            read(data)
        except UserError as error:
            check_line(error)
            return None, True
    except BaseException as error:  # a panic of Rust's is no Exception
        what = traceback.format_exc(limit=-6)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "entropix_jax" in f.filename or "verification" in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        signature = f"{type(error).__name__} at {place}: {re.sub('[0-9]+', 'N', str(error)[:60])}"
        return _failure("exception", what[-_TAIL:], signature), False
    return None, False


def _failure(kind: str, what: str, signature: str | None = None) -> dict[str, Any]:
    return {"kind": kind, "signature": signature or kind, "what": what}


def _largest() -> int:
    """Bytes that this process has had in memory at most."""
    return _status("VmHWM")


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    raise RuntimeError(f"no {name} in /proc/self/status")


def main(argv: Sequence[str]) -> None:
    """The process that is watched."""
    work(json.loads(argv[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
