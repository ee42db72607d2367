"""Runs the code blocks of README.md and docs/, in order, as a reader would.

    python scripts/run_docs.py [--list] [--quick] [--limit SECONDS] [FILE ...]

Indented blocks are commands, run in the repository's folder. Fenced `python` is run by
`.venv/bin/python`, fenced `toml` is passed to `--sampler` or `ablate`, whichever it is for: both in
a scratch folder, one per file, which also stands in for /tmp. Fenced blocks without a language need
a network, a cloud or an accelerator, and are only listed. --quick also leaves out what takes
minutes. The exit status is 1 if a block failed.
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
COMMAND = re.compile(r"(scripts/|\.ci/|\.venv[a-z-]*/bin/|printf |for )")
# Commands that take minutes, or a lot of memory.
LONG = re.compile(
    r"scripts/(test|bench|devices|parity|train_tiny|demo|server_load)|\.ci/run"
    r"|entropix[_-]jax (ablate|evaluate)|calibrate --model smollm2"
)


@dataclass(frozen=True)
class Block:
    """A code block of a Markdown file."""

    line: int
    kind: str  # "shell", "python", "toml" or "" for what is not run
    text: str

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
    """Runs a block. One that takes longer than `limit` seconds is ended, with what it started, and
    has status 124."""
    python = ROOT / ".venv" / "bin" / "python"
    place = ROOT if block.kind == "shell" else scratch
    if block.kind == "shell":
        text = block.text.replace("/tmp/", f"{shlex.quote(str(scratch))}/")
        command = ["bash", "-euo", "pipefail", "-c", text]
    else:
        file = scratch / f"block.{block.kind}"
        file.write_text(block.text, encoding="utf-8")
        if block.kind == "python":
            command = [str(python), str(file)]
        elif block.is_sweep:
            command = [str(python), "-m", "entropix_jax", "ablate", str(file)]
            command += ["--output", str(scratch / "sweep")]
        else:
            command = [str(python), "-m", "entropix_jax.main", "--prompt", "Guests:"]
            command += ["--sampler", str(file)]
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
        output = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, *_end(process))
    except BaseException:  # Ctrl-C reaches this process alone
        _end(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, *output)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a process group, gently at first, and returns its output so far."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=5)
    return "", "(a process that it started is still running)"


def main() -> int:
    """Runs the blocks and prints how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the blocks, run nothing")
    parser.add_argument("--quick", action="store_true", help="leave out what takes minutes")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="time limit of a block")
    args = parser.parse_args()
    failed = 0
    for file in args.files or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
        with tempfile.TemporaryDirectory() as scratch:
            for block in blocks(file.read_text(encoding="utf-8")):
                title = f"{name}:{block.line}: {block.text.splitlines()[0].strip()}"
                left_out = "" if block.kind in ("shell", "python", "toml") else "not run here"
                if args.quick and block.is_long:
                    left_out = "takes minutes"
                if args.list or left_out:
                    print(f"{title} ({left_out or block.kind})", flush=True)
                    continue
                started = time.perf_counter()
                ran = run(block, Path(scratch), args.limit)
                seconds = time.perf_counter() - started
                print(f"{title} (status {ran.returncode}, {seconds:.1f} s)", flush=True)
                if ran.returncode:
                    failed += 1
                    print(ran.stdout[-1000:] + ran.stderr[-2000:], flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("run_docs: ended by Ctrl-C")
