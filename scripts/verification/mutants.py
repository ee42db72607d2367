"""Mutation testing: does a test fail where the sampler, the metrics or the cache are wrong?

A seeded sample of mutants, each run against the tests that should notice it, likeliest first. What
is mutated are copies of the tree below the output's folder. The results are kept there one by one,
in a Cosmic Ray session (`cr-report FOLDER/session.sqlite --show-diff`), so a run that was stopped
goes on where it was. A result is kept by what the mutant says: it holds until the mutated line
changes, or, for survivors, until they are tried again.

Judged equivalents stand in `equivalent_mutants.toml`, each with its reason.
"""

import argparse
import difflib
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

from entropix_jax.errors import UserError
from verification.findings import Line
from verification.mutant_sample import Mutant, is_valid, mutants_of, sample

WANTED = 90.0  # per cent
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "entropix_jax"
EQUIVALENTS = Path(__file__).with_name("equivalent_mutants.toml")
WORKER = Path(__file__).with_name("mutant_worker.py")

# What the tests below read.
COPIED = (PACKAGE, "configs", "scripts", "tests", "weights", "pyproject.toml", "README.md")
_LIKELY = 6  # tests that go first because they killed most of a module's mutants
_NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Target:
    """A module, and the test files that should notice what is wrong in it, the quickest and most
    specific first."""

    tests: tuple[str, ...]
    definitions: tuple[str, ...] = ()  # which of its functions and classes; none: all


TARGETS: Mapping[str, Target] = {
    "sampler/arms.py": Target(("arms", "sample")),
    "sampler/branch.py": Target(("rollouts", "branch")),
    "sampler/draw.py": Target(("draw", "truncation")),
    "sampler/keys.py": Target(("keys", "sample")),
    "sampler/params.py": Target(("presets", "regimes", "arms", "sample")),
    "sampler/presets.py": Target(("presets",)),
    "sampler/regimes.py": Target(("regimes", "sample")),
    "sampler/sample.py": Target(("sample", "backspace", "decode_sampling")),
    "sampler/state.py": Target(("sample", "backspace", "decode_sampling")),
    "sampler/settings.py": Target(("presets",)),
    "sampler/truncation.py": Target(("truncation", "baselines")),
    "vocabulary.py": Target(("presets", "report")),
    "metrics.py": Target(("metrics",)),
    "information.py": Target(("metrics", "attention")),
    "attention.py": Target(("metrics", "attention"), ("attention_stats", "join_layers")),
    "cache.py": Target(("model", "branch")),
    "slots.py": Target(("slots", "engine")),
    "decode_state.py": Target(("decode_state", "decode_sampling", "hooks", "branch")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this part."""
    parser.add_argument("--mutants", type=int, default=300, metavar="N", help="size of the sample")
    parser.add_argument("--mutants-seed", type=int, default=0, metavar="N", help="of the sample")
    parser.add_argument(
        "--mutants-workers", type=int, default=1, metavar="N", help="mutants tried side by side"
    )
    parser.add_argument(
        "--mutants-slack",
        type=float,
        default=3.0,
        metavar="X",
        help="a mutant has timed out after X times what its tests take without it",
    )
    parser.add_argument(
        "--mutants-of",
        nargs="+",
        choices=list(TARGETS),
        default=list(TARGETS),
        metavar="MODULE",
        help="tries those of some modules alone, in this order",
    )
    parser.add_argument(
        "--survivors-again", action="store_true", help="tries those that survived once more"
    )
    parser.add_argument(
        "--mutants-report-only", action="store_true", help="of what is there; nothing is run"
    )


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Tries what has no result yet, and reports.

    Raises:
        UserError: the tests fail without any mutation.
    """
    home = folder / "mutants"
    home.mkdir(parents=True, exist_ok=True)
    sources = {module: (ROOT / PACKAGE / module).read_text() for module in TARGETS}
    equivalents = _read_equivalents(sources)
    chosen = _sampled(sources, args.mutants, args.mutants_seed)

    def verdict(mutant: Mutant) -> str:
        source, result = sources[mutant.module], results.get(mutant.key)
        return _verdict(mutant, source, result, equivalents)

    with use_db(home / "session.sqlite") as session:
        results = _results(session)
        if not args.mutants_report_only:
            again = {"survived"} if args.survivors_again else set()
            pending = [
                mutant
                for module in args.mutants_of
                for mutant in chosen
                if mutant.module == module
                and (mutant.key not in results or verdict(mutant) in again)
            ]
            _add(session, chosen)
            _try_all(session, pending, sources, home, args.mutants_workers, args.mutants_slack)
            results = _results(session)
    lines = _report(chosen, sources, results, equivalents)
    _write_table(home / "mutants.json", chosen, sources, results, equivalents)
    return lines


def _sampled(sources: Mapping[str, str], size: int, seed: int) -> list[Mutant]:
    possible = {
        module: mutants_of(module, source, TARGETS[module].definitions)
        for module, source in sources.items()
    }

    def valid(mutant: Mutant) -> bool:
        source = sources[mutant.module]
        return is_valid(source, mutant.apply(source))

    return sample(possible, size, seed, valid)


# --- results -------------------------------------------------------------------------------------


def _add(session: WorkDB, chosen: list[Mutant]) -> None:
    known = {item.job_id for item in session.work_items}
    session.add_work_items(
        WorkItem.single(
            mutant.key,
            MutationSpec(
                module_path=Path(PACKAGE) / mutant.module,
                operator_name=mutant.operator,
                occurrence=mutant.occurrence,
                start_pos=mutant.start,
                end_pos=mutant.end,
                definition_name=mutant.definition,
            ),
        )
        for mutant in chosen
        if mutant.key not in known
    )


def _results(session: WorkDB) -> dict[str, dict[str, Any]]:
    """What became of each mutant, by its key."""
    return {key: json.loads(result.output or "{}") for key, result in session.results}


def _keep(session: WorkDB, mutant: Mutant, source: str, result: Mapping[str, Any]) -> None:
    survived = result["outcome"] == "passed"
    session.set_result(
        mutant.key,
        WorkResult(
            worker_outcome=WorkerOutcome.NORMAL,
            output=json.dumps(result),
            test_outcome=TestOutcome.SURVIVED if survived else TestOutcome.KILLED,
            diff=difference(mutant, source, 2),
        ),
    )


def difference(mutant: Mutant, source: str, context: int) -> str:
    """The mutation as a unified diff."""
    path = f"{PACKAGE}/{mutant.module}"
    return "\n".join(
        difflib.unified_diff(
            source.splitlines(),
            mutant.apply(source).splitlines(),
            fromfile=f"a/{path}",
            tofile=f"b/{path}",
            lineterm="",
            n=context,
        )
    )


def _change(mutant: Mutant, source: str) -> tuple[str, str]:
    """The changed lines before and after, without their indentation."""
    lines = difference(mutant, source, 0).splitlines()[3:]
    before, after = (
        "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    return before, after


# --- equivalents ---------------------------------------------------------------------------------


Judged = Mapping[tuple[str, str, str, str], str]  # the reason of what `_saying` says


def _saying(module: str, definition: str, before: str, after: str) -> tuple[str, str, str, str]:
    """What a mutation says, whatever the spaces."""
    return module, definition, "".join(before.split()), "".join(after.split())


def _read_equivalents(sources: Mapping[str, str]) -> Judged:
    """The mutations that were judged equivalent, each with its reason."""
    judged: dict[tuple[str, str, str, str], str] = {}
    for module, entries in tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8")).items():
        source = "".join(sources.get(module, "").split())
        for entry in entries:
            saying = _saying(module, entry.get("in", ""), entry["before"], entry["after"])
            if saying[2] not in source:
                _say(f"{EQUIVALENTS}: {module} has no {entry['before']!r} any more")
            judged[saying] = entry["reason"]
    return judged


# --- running -------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A copy of the tree, and a process that runs tests in it."""

    tree: Path
    _process: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def compiled(self) -> Path:
        """Where its tests keep compiled programs: see tests/conftest.py."""
        return self.tree / ".pytest_cache" / "d" / "jax"

    def prepare(self) -> None:
        """Makes the copy anew, as the repository is now."""
        self.tree.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            there = self.tree / name
            if (ROOT / name).is_dir():
                shutil.rmtree(there, ignore_errors=True)
                shutil.copytree(ROOT / name, there, ignore=_NOT_COPIED)
            else:
                shutil.copy2(ROOT / name, there)

    def take_compiled(self, other: "Worker") -> None:
        """Takes what another one has compiled, and this one has not."""

        def known(folder: str, names: list[str]) -> set[str]:
            return {name for name in names if (self.compiled / name).exists()}

        shutil.copytree(other.compiled, self.compiled, ignore=known, dirs_exist_ok=True)

    def test(
        self, names: tuple[str, ...], timeout: float, likely: list[str] | None = None
    ) -> dict[str, Any]:
        """Runs test files until one test fails; some tests of them first, if so wished."""
        if not self._process:
            self._process.append(self._start())
        process = self._process[0]
        assert process.stdin is not None
        assert process.stdout is not None
        files = [f"tests/test_{name}.py" for name in names]
        job = {"tests": files, "likely": likely or [], "timeout": timeout}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker of {self.tree} ended with {process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "OPENBLAS_NUM_THREADS": "1",  # a process with threads cannot be forked
            "ENTROPIX_REQUIRE_ALL": "1",  # nothing is skipped, and the same examples are drawn
        }
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(self.tree)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def stop(self) -> None:
        """Ends the process."""
        for process in self._process:
            with suppress(BrokenPipeError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()

    @contextmanager
    def mutated(self, mutant: Mutant, source: str) -> Iterator[None]:
        """The copy with one mutation."""
        path = self.tree / PACKAGE / mutant.module
        self._write(path, mutant.apply(source))
        try:
            yield
        finally:
            self._write(path, source)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        # Python compares a source's second and size with those that its bytecode was made of.
        for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            bytecode.unlink()
        path.write_text(text)


def _try_all(
    session: WorkDB,
    pending: list[Mutant],
    sources: Mapping[str, str],
    home: Path,
    number: int,
    slack: float,
) -> None:
    """Tries mutants and keeps each result as soon as it is there."""
    if not pending:
        return
    workers = [Worker(home / f"worker-{index}") for index in range(number)]
    # Which tests of a module have killed how many.
    killers: dict[str, Counter[str]] = {module: Counter() for module in TARGETS}
    for item, kept in session.completed_work_items:
        module = item.mutations[0].module_path.relative_to(PACKAGE).as_posix()
        killers[module].update(_killer(json.loads(kept.output or "{}")))
    done = 0
    try:
        for worker in workers:
            worker.prepare()
        for module, group in groupby(pending, lambda mutant: mutant.module):
            tests = TARGETS[module].tests
            seconds = _baseline(workers[0], home / "baseline.json", tests)
            for worker in workers[1:]:
                worker.take_compiled(workers[0])
            free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
            for worker in workers:
                free.put(worker)

            with ThreadPoolExecutor(number) as pool:
                attempt = partial(
                    _attempt, free, tests, 60 + slack * seconds, killers[module], sources[module]
                )
                attempts = [pool.submit(attempt, mutant) for mutant in group]
                try:
                    for future in as_completed(attempts):
                        mutant, result = future.result()
                        if result["outcome"] == "broken":
                            raise UserError(f"{mutant.module}: {result['message']}")
                        _keep(session, mutant, sources[mutant.module], result)
                        killers[module].update(_killer(result))
                        done += 1
                        _say(f"{done}/{len(pending)} {_summary(mutant, sources, result)}")
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
    finally:
        for worker in workers:
            worker.stop()


def _attempt(
    free: queue.SimpleQueue[Worker],
    tests: tuple[str, ...],
    timeout: float,
    killers: Counter[str],
    source: str,
    mutant: Mutant,
) -> tuple[Mutant, dict[str, Any]]:
    """What becomes of a mutant, by the next worker that is free."""
    worker = free.get()
    try:
        with worker.mutated(mutant, source):
            return mutant, worker.test(tests, timeout, _most(killers))
    finally:
        free.put(worker)


def _most(killers: Counter[str]) -> list[str]:
    # A copy: the results of others come in meanwhile.
    return [test for test, _ in Counter(dict(killers)).most_common(_LIKELY)]


def _killer(result: Mapping[str, Any]) -> list[str]:
    return [result["test"]] if "test" in result else []


def _baseline(worker: Worker, path: Path, tests: tuple[str, ...]) -> float:
    """How many seconds these test files take without a mutation; all of them must pass.

    Each is kept until the package or a test changes.
    """
    state = hashlib.sha256()
    for file in sorted([*worker.tree.glob(f"{PACKAGE}/**/*.py"), *worker.tree.glob("tests/*.py")]):
        state.update(file.read_bytes())
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if known.get("state") != state.hexdigest():
        known = {"state": state.hexdigest(), "seconds": {}}
    seconds: dict[str, float] = known["seconds"]
    for name in tests:
        if name not in seconds:
            result = worker.test((name,), 3600)
            if result["outcome"] != "passed":
                raise UserError(f"tests/test_{name}.py fails without a mutation: {result}")
            seconds[name] = result["seconds"]
            path.write_text(json.dumps(known, indent=1))
            _say(f"unmutated: {name} {result['seconds']} s")
    return sum(seconds[name] for name in tests)


# --- reporting -----------------------------------------------------------------------------------


def _verdict(
    mutant: Mutant,
    source: str,
    result: Mapping[str, Any] | None,
    equivalents: Judged,
) -> str:
    """ "killed", "survived", "equivalent" or "not tried"."""
    if result is not None and result["outcome"] != "passed":
        return "killed"
    if result is not None and _is_judged(mutant, source, equivalents):
        return "equivalent"
    return "not tried" if result is None else "survived"


def _is_judged(mutant: Mutant, source: str, equivalents: Judged) -> bool:
    return _saying(mutant.module, mutant.definition, *_change(mutant, source)) in equivalents


def _report(
    chosen: list[Mutant],
    sources: Mapping[str, str],
    results: Mapping[str, dict[str, Any]],
    equivalents: Judged,
) -> list[Line]:
    verdicts = {
        mutant: _verdict(mutant, sources[mutant.module], results.get(mutant.key), equivalents)
        for mutant in chosen
    }
    counts = Counter(verdicts.values())
    tried = [mutant for mutant in chosen if verdicts[mutant] != "not tried"]
    killed, equal = counts["killed"], counts["equivalent"]
    by = Counter(
        _how(results[mutant.key]) for mutant in tried if verdicts[mutant] == "killed"
    ).most_common()
    rate = 100 * killed / max(len(tried) - equal, 1)
    note = (
        f"{killed} killed ({', '.join(f'{number} by {how}' for how, number in by)}), "
        f"{counts['survived']} survived, {equal} equivalent: {rate:.1f} % of those that are not, "
        f"{100 * killed / max(len(tried), 1):.1f} % of all"
    )
    if wrong := sum(
        _is_judged(mutant, sources[mutant.module], equivalents)
        for mutant in tried
        if verdicts[mutant] == "killed"
    ):
        note += f"; {wrong} of the killed were judged equivalent"
    if counts["not tried"]:
        note += f"; {counts['not tried']} not tried yet"
    details = [
        {
            "module": mutant.module,
            "definition": mutant.definition,
            "line": mutant.start[0],
            "diff": difference(mutant, sources[mutant.module], 0),
        }
        for mutant in chosen
        if verdicts[mutant] == "survived"
    ]
    return [
        Line(
            what="mutants of the sampler, the metrics and the cache",
            tried=len(tried),
            unit="mutants",
            failures=counts["survived"] if rate < WANTED else 0,
            wanted=f"at least {WANTED:g} % killed of those that are not equivalent",
            note=note,
            details=details,
        )
    ]


def _how(result: Mapping[str, Any]) -> str:
    """What killed a mutant, in a word or two."""
    if result["outcome"] != "failed":
        return {"timeout": "a time-out", "crashed": "a crash"}[result["outcome"]]
    if "::" not in result["test"]:
        return "the import"
    return "an assertion" if result["error"] == "AssertionError" else "an error in a test"


def _write_table(
    path: Path,
    chosen: list[Mutant],
    sources: Mapping[str, str],
    results: Mapping[str, dict[str, Any]],
    equivalents: Judged,
) -> None:
    """Every mutant of the sample and what became of it."""
    table = []
    for mutant in chosen:
        source, result = sources[mutant.module], results.get(mutant.key)
        before, after = _change(mutant, source)
        table.append(
            {
                "module": mutant.module,
                "definition": mutant.definition,
                "before": before,
                "after": after,
                "verdict": _verdict(mutant, source, result, equivalents),
                "reason": equivalents.get(
                    _saying(mutant.module, mutant.definition, before, after), ""
                ),
                "result": result,
            }
        )
    path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _summary(mutant: Mutant, sources: Mapping[str, str], result: Mapping[str, Any]) -> str:
    before, after = _change(mutant, sources[mutant.module])
    what = f"{mutant.module} {mutant.definition}: {before} -> {after}"
    return f"{result['outcome']} {result['seconds']} s {result.get('test', '')} | {what}"


def _say(line: str) -> None:
    print(line.replace("\n", " "), file=sys.stderr, flush=True)
