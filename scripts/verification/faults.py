"""Every command that writes, ended by a signal at a random moment and started again: what comes of
it must be what an undisturbed run leaves."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from verification.commands import (
    BUCKET,
    COMMANDS,
    Command,
    batch_arguments,
    files_of_server,
    s3_server,
    write_inputs,
)
from verification.findings import Line
from verification.hosts import HOSTS, lose_hosts
from verification.outputs import Left, left_in, page_is_of_its_trace, trace_tokens

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
NAMES = [*COMMANDS, HOSTS]
AGAIN = 0.75  # how likely a run that was ended is ended once more before it may complete
_PATIENCE = 900.0  # seconds for a run that nothing disturbs
# What no run may say.
_NOT_SAID = ("Traceback", "Exception ignored", "Fatal Python error", "persistent compilation cache")


@dataclass
class Ended:
    """How a run ended."""

    status: int
    out: bytes
    err: str
    seconds: float
    began: bool = True  # the package was in command when the signal came, not Python
    unexpected: bool = False  # the status is none that the signal should lead to


@dataclass
class Outcome:
    """What a command's kill points came to."""

    chains: int = 0  # runs from nothing to their end
    points: int = 0
    early: int = 0  # of them before the package was in command, or after
    compared: int = 0
    lost: int = 0
    duplicated: int = 0
    differing: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--points", type=int, default=20, help="kill points of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--command", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="of these alone"
    )


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Runs the kill points that are not done yet, and gives a line for each command and one for
    the records of all."""
    place = folder / "faults"
    inputs = place / "inputs"
    outcomes: dict[str, Outcome] = {}
    write_inputs(inputs)
    with s3_server() as environment:
        trial = _Trial(place, inputs, environment)
        for name in args.command:
            if name != HOSTS and not (COMMANDS[name].remote and environment is None):
                outcomes[name] = trial.of(name, args.points, args.seed)
        lines = [_line(name, outcome) for name, outcome in outcomes.items()]
        if HOSTS in args.command:
            whole, given = trial.undisturbed("merge"), (args.points, args.seed)
            lines.append(lose_hosts(place, inputs, trial.environment, whole, *given))
    return [*lines, _records(outcomes)] if outcomes else lines


def _line(name: str, outcome: Outcome) -> Line:
    how = "gone on with" if COMMANDS[name].resumes else "run anew"
    outside = f"{outcome.early} of them outside the package" if outcome.early else ""
    return Line(
        what=f"{name}: ended by a signal at a random moment and {how}",
        tried=outcome.points,
        unit="kill points",
        failures=len(outcome.failures),
        note=outside,
        details=outcome.failures,
    )


def _records(outcomes: dict[str, Outcome]) -> Line:
    lost, twice, other = (
        sum(getattr(outcome, name) for outcome in outcomes.values())
        for name in ("lost", "duplicated", "differing")
    )
    return Line(
        what="records after these runs: lost, duplicated or other than undisturbed",
        tried=sum(outcome.compared for outcome in outcomes.values()),
        unit="records",
        failures=lost + twice + other,
        note=f"{lost} lost, {twice} duplicated, {other} differ",
    )


class _Trial:
    """Runs commands in folders of their own, beside each other in one place."""

    def __init__(self, place: Path, inputs: Path, remote: dict[str, str] | None) -> None:
        self._place = place
        self._inputs = inputs
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(place / "cache"),  # of compiled programs, filled by first runs
            **(remote or {}),
        }
        self.environment.pop("JAX_COMPILATION_CACHE_DIR", None)

    def of(self, name: str, points: int, seed: int) -> Outcome:
        """All kill points of one command; those that an earlier call has run count."""
        command = COMMANDS[name]
        state = self._place / f"{name}-{seed}.json"
        outcome = Outcome()
        if state.exists():
            outcome = Outcome(**json.loads(state.read_text(encoding="utf-8")))
        if outcome.points >= points:
            return outcome
        whole, usual, seconds = self._undisturbed(name, command)
        while outcome.points < points:
            rng = random.Random(f"{seed} {name} {outcome.chains}")
            self._chain(name, command, rng, outcome, (whole, usual, seconds))
            outcome.chains += 1
            new = state.with_suffix(".new")
            new.write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
            new.replace(state)
            print(
                f"{name}: {outcome.points} of {points} kill points, "
                f"{len(outcome.failures)} failures",
                file=sys.stderr,
                flush=True,
            )
        return outcome

    def undisturbed(self, name: str) -> Left:
        """What a command leaves that nothing disturbs."""
        return self._undisturbed(name, COMMANDS[name])[0]

    def _undisturbed(self, name: str, command: Command) -> tuple[Left, bytes, float]:
        """What a run leaves and says that nothing disturbs, and how long it takes, the second
        time."""
        _temporary(self._inputs).mkdir(exist_ok=True)
        for part in command.inputs:
            if not (self._inputs / part).exists():
                self._make_inputs(part)
        for _ in range(2):
            work = self._new_folder(name)
            ended = self._run(command, work)
            if ended.status:
                raise UserError(f"{name} fails, undisturbed: {ended.err.strip()}")
        return self._left(command, work), ended.out, ended.seconds

    def _make_inputs(self, part: str) -> None:
        """What the commands read that other commands write."""
        if part == "run.jsonl":
            arguments = ("--prompt", "Once", "--max-new-tokens", "40", "--trace", part)
            self._run(Command("main", arguments), self._inputs)
            return
        for index in range(2):
            place = ("--distributed", "--processes", "2", "--process", str(index))
            self._run(Command("batch", batch_arguments(*place)), self._inputs)

    def _chain(
        self,
        name: str,
        command: Command,
        rng: random.Random,
        outcome: Outcome,
        undisturbed: tuple[Left, bytes, float],
    ) -> None:
        """One run from nothing to its end, ended on the way once or several times."""
        whole, usual, seconds = undisturbed
        work = self._new_folder(name)
        ended = self._run(command, work, rng, seconds)
        while ended.status:
            wrong = self._after_a_kill(command, work, whole, usual, ended)
            outcome.points += 1
            outcome.early += not ended.began
            self._tell(name, outcome, ended, wrong)
            again = rng.random() < AGAIN
            ended = self._run(command, work, *((rng, seconds) if again else ()))
            if not again:
                break
        wrong = [] if ended.status == 0 else [f"status {ended.status}"]
        left = self._left(command, work)
        lost = whole.records.keys() - left.records.keys()
        differing = [
            f"{file} {key}"
            for (file, key), value in left.records.items()
            if whole.records.get((file, key), value) != value
        ]
        extra = [f"{file} {key}" for file, key in left.records.keys() - whole.records.keys()]
        wrong += [f"lost: {file} {key}" for file, key in sorted(lost)]
        wrong += [f"duplicated: {what}" for what in left.duplicated]
        wrong += [f"differs: {what}" for what in differing]
        wrong += [f"should not be there: {what}" for what in extra]
        wrong += [f"torn: {what}" for what in left.torn] + left.broken
        wrong += [f"left behind: {what}" for what in left.scratch]
        if ended.out != usual:
            wrong.append("says something else on standard output")
        page = work / "run.html"
        if page.with_suffix(".jsonl").exists() and page.exists() and not page_is_of_its_trace(page):
            wrong.append("the page is not its trace's")
        outcome.compared += len(whole.records)
        outcome.lost += len(lost)
        outcome.duplicated += len(left.duplicated)
        outcome.differing += len(differing) + len(extra)
        self._tell(name, outcome, ended, wrong)

    def _tell(self, name: str, outcome: Outcome, ended: Ended, wrong: list[str]) -> None:
        wrong += [f"status {ended.status}"] if ended.unexpected else []
        if ended.began:
            wrong += [f"says '{text}'" for text in _NOT_SAID if text in ended.err]
        if not wrong:
            return
        outcome.failures.append(
            {
                "command": name,
                "chain": outcome.chains,
                "point": outcome.points,
                "status": ended.status,
                "seconds": round(ended.seconds, 3),
                "wrong": wrong[:20],
                "stderr": ended.err[-2000:],
            }
        )
        print(f"{name}: {outcome.failures[-1]}", file=sys.stderr, flush=True)

    def _after_a_kill(
        self, command: Command, work: Path, whole: Left, usual: bytes, ended: Ended
    ) -> list[str]:
        """What is wrong with what a run left that was ended."""
        left = self._left(command, work)
        wrong = list(left.broken) + [f"duplicated: {what}" for what in left.duplicated]
        if not usual.startswith(ended.out.rstrip(b"\n")):
            wrong.append("says something else on standard output")
        for name in left.files:
            here, there = left.of(name), whole.of(name)
            if command.module == "main" and name == "run.jsonl":
                wrong += _trace_problems(work / name, there)
                continue
            if command.module == "main":  # the page of a run that Ctrl-C has ended is another
                continue
            wrong += [
                f"differs: {name} {key[1]}"
                for key, value in here.items()
                if there.get(key) != value
            ]
            # Parts hold records on their way, the joined object all of them.
            growing = name in command.grows or (command.remote and name == "out.jsonl")
            if not growing and here.keys() != there.keys():
                wrong.append(f"not whole: {name}")
        wrong += [f"torn: {name}" for name in left.torn if name not in command.grows]
        return wrong

    def _run(
        self,
        command: Command,
        work: Path,
        rng: random.Random | None = None,
        seconds: float = 0.0,
    ) -> Ended:
        """Runs a command to its end, or, with `rng`, sends it a signal before `seconds` are
        over."""
        bucket = f"s3://{BUCKET}/{work.name}"
        given = [text.format(inputs=self._inputs, bucket=bucket) for text in command.arguments]
        out, err = (self._place / f"{work.name}.{name}" for name in ("stdout", "stderr"))
        started = time.monotonic()
        began, number = True, None
        with out.open("wb") as said, err.open("wb") as told:
            process = subprocess.Popen(
                [sys.executable, "-m", f"entropix_jax.{command.module}", *given],
                cwd=work,
                env={**self.environment, "TMPDIR": str(_temporary(work))},
                preexec_fn=_heeds_ctrl_c,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=told,
            )
            try:
                process.wait(_PATIENCE if rng is None else rng.uniform(0.0, seconds))
            except subprocess.TimeoutExpired:
                number = signal.SIGKILL if rng is None else rng.choice(SIGNALS)
                began = _send(process, number)
                process.wait(_PATIENCE)
        ended = Ended(
            process.returncode, out.read_bytes(), err.read_text(), time.monotonic() - started
        )
        if number is None:
            return ended
        wanted = {-number if number == signal.SIGKILL else 128 + number, 0}  # 0: it was through
        if not began:
            wanted |= {-number, 1}  # Python's own ways to end, as it starts and stops
        return replace(ended, began=began, unexpected=ended.status not in wanted)

    def _new_folder(self, name: str) -> Path:
        """An empty folder for a command, with its inputs."""
        command = COMMANDS[name]
        work = self._place / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        shutil.rmtree(_temporary(work), ignore_errors=True)
        _temporary(work).mkdir()
        for part in command.inputs:
            shutil.copyfile(self._inputs / part, work / part)
        if command.remote:
            fs = files_of_server()
            if fs.exists(f"{BUCKET}/{name}"):
                fs.rm(f"{BUCKET}/{name}", recursive=True)
        return work

    def _left(self, command: Command, work: Path) -> Left:
        if command.remote:
            fs = files_of_server()
            shutil.rmtree(work)
            work.mkdir()
            for found in fs.find(f"{BUCKET}/{work.name}"):
                target = work / found.partition(f"{BUCKET}/{work.name}/")[2]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(fs.cat_file(found))
        left = left_in(work, command.inputs)
        left.scratch += [f"{path.name} in TMPDIR" for path in _temporary(work).iterdir()]
        return left


def _heeds_ctrl_c() -> None:
    """In a command's process: a shell has what it starts in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _temporary(work: Path) -> Path:
    """Where a command puts what it would leave in the system's folder for temporary files."""
    return work.with_name(f"{work.name}.tmp")


def _trace_problems(path: Path, there: dict[tuple[str, str], Any]) -> list[str]:
    """What is wrong with a trace that was cut short. What an interrupt brought out last might have
    been taken back."""
    if not path.read_bytes().count(b"\n"):  # cut off within the header
        return []
    try:
        tokens = trace_tokens(path)
    except UserError as error:
        return [str(error)]
    usual = [value for value in there.values() if value["type"] in ("token", "retracted")]
    return [] if tokens[:-1] == usual[: len(tokens[:-1])] else [f"differs: {path.name}"]


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Sends a signal; gives whether the package was in command by then. Before its first line and
    after its last one Python is, which handles SIGTERM never."""
    process.send_signal(signal.SIGSTOP)
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        began = bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    except (OSError, StopIteration):
        began = False
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    return began
