"""Runs what the README says, block by block and in order, as a reader would.

    python scripts/run_readme.py [--list] [--quick] [--from N] [--to N] [--limit SECONDS]

Indented blocks are commands, run in the repository's folder; fenced Python is run by
`.venv/bin/python`, fenced TOML is given to `--sampler` or `ablate`, whichever it is for, both in a
folder that is removed at the end. Fenced blocks without a language need a network, a cloud or an
accelerator, and are left out, by name. --quick leaves out what takes minutes, too. The status is 1
where a block failed.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# How a command begins; formulas are indented, too.
COMMAND = re.compile(r"(scripts/|\.ci/|\.venv/bin/|printf |for )")
# Commands that take minutes, or a lot of memory.
LONG = re.compile(
    r"scripts/(test|benchmark|parity|precision|verify|demo)|\.ci/run"
    r"|entropix_jax\.(ablate|evaluate)|--self-tokens 32000|calibrate --model smollm2"
)


@dataclass(frozen=True)
class Block:
    """A block of the README."""

    line: int
    kind: str  # "shell", "python", "toml" or "" for what is not run
    text: str

    @property
    def title(self) -> str:
        """Its first line."""
        return f"README.md:{self.line}: {self.text.splitlines()[0].strip()}"

    @property
    def is_long(self) -> bool:
        """Whether --quick leaves it out."""
        return self.is_sweep or (self.kind == "shell" and LONG.search(self.text) is not None)

    @property
    def is_sweep(self) -> bool:
        """Whether it is a file for `ablate`."""
        return self.kind == "toml" and re.search("^tasks =", self.text, re.M) is not None


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a Markdown text, in order."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start = number
        if fence := re.fullmatch(r"```(\w*)", lines[number]):
            number += 1
            while lines[number] != "```":
                number += 1
            yield Block(start + 2, fence[1], "\n".join(lines[start + 1 : number]))
        elif lines[number].startswith("    ") and not lines[number - 1].strip():
            while number < len(lines) and (lines[number][:4] == "    " or not lines[number]):
                number += 1
            block = "\n".join(line[4:] for line in lines[start:number]).strip()
            yield Block(start + 1, "shell" if COMMAND.match(block) else "", block)
            continue
        number += 1


def run(block: Block, scratch: Path, limit: float | None) -> subprocess.CompletedProcess[str]:
    """Runs a block: commands in the repository's folder, all else in `scratch`, which stands in for
    /tmp, too: what an earlier run left there would be gone on with. What takes longer than `limit`
    seconds is ended, with what it started, and status 124."""
    python = ROOT / ".venv" / "bin" / "python"
    place = ROOT if block.kind == "shell" else scratch
    if block.kind == "python":
        file = scratch / "block.py"
        file.write_text(block.text, encoding="utf-8")
        command = [str(python), str(file)]
    elif block.kind == "toml":
        file = scratch / "block.toml"
        file.write_text(block.text, encoding="utf-8")
        command = [str(python), "-m", f"entropix_jax.{'ablate' if block.is_sweep else 'main'}"]
        if block.is_sweep:
            command += [str(file), "--output", str(scratch / "sweep")]
        else:
            command += ["--prompt", "Guests:", "--sampler", str(file)]
    else:
        text = block.text.replace("/tmp/", f"{shlex.quote(str(scratch))}/")
        command = ["bash", "-euo", "pipefail", "-c", text]
    process = subprocess.Popen(
        command,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, *_ended(process))
    except BaseException:  # Ctrl-C reaches this process alone
        _ended(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, *told)


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a process and its children, which have a moment to tidy up; what they had said."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=5)
    return "", "(something that it started is still there)"


def main() -> int:
    """Runs the blocks, and tells of each how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the blocks, run nothing")
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="LINE")
    parser.add_argument("--to", dest="last", type=int, default=10**9, metavar="LINE")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a block after so many")
    args = parser.parse_args()
    found = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for block in found:
            if not args.first <= block.line <= args.last:
                continue
            left_out = "not run here" if not block.kind else ""
            if args.quick and block.is_long:
                left_out = "takes minutes"
            if args.list or left_out:
                print(f"{block.title} ({left_out or block.kind})", flush=True)
                continue
            started = time.perf_counter()
            ran = run(block, Path(scratch), args.limit)
            seconds = time.perf_counter() - started
            print(f"{block.title} (status {ran.returncode}, {seconds:.1f} s)", flush=True)
            if ran.returncode:
                failed += 1
                print(ran.stdout[-1000:] + ran.stderr[-2000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("run_readme: ended by Ctrl-C")
