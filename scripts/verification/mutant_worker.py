"""A process that runs tests in forks of itself: `python mutant_worker.py TREE`.

It imports the libraries once, but neither the package under test nor anything that would start a
JAX backend: up to then JAX has no threads, and a fork is sound. Each fork imports the package anew,
as TREE holds it. Jobs come as lines of JSON on standard input, and what became of each goes to
standard output.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest


class FirstFailure:
    """Puts the tests that are likely to fail first, and remembers which one did, and by what."""

    def __init__(self, likely: list[str]) -> None:
        self.found: dict[str, str] = {}
        self._place = {test: place for place, test in enumerate(likely)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The likely ones first, the others as they are."""
        items.sort(key=lambda item: self._place.get(item.nodeid, len(self._place)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test. What fails has no exception of its own if it was skipped and may not be."""
        if report.failed and not self.found:
            self.found = {"test": report.nodeid, "error": "", "message": ""}

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        """Of a test after its report, or of a module that cannot be imported."""
        if not self.found.get("error") and self.found.get("test", node.nodeid) == node.nodeid:
            message = str(call.excinfo.exconly()).splitlines()[0]
            error = call.excinfo.typename
            self.found = {"test": node.nodeid, "error": error, "message": message[:300]}


def run_tests(job: dict[str, Any]) -> dict[str, Any]:
    """What pytest says of the job's `tests`, the `likely` ones first, in this process."""
    first = FirstFailure(job["likely"])
    status = pytest.main(["-x", "-q", "--tb=short", *job["tests"]], plugins=[first])
    package = sys.modules.get("entropix_jax")
    home = Path(str(package.__file__)).parent.parent if package else None
    if home not in (None, Path.cwd()):
        return {"outcome": "broken", "message": f"tested the package of {home}"}
    if status == pytest.ExitCode.OK:
        return {"outcome": "passed"}
    if first.found:
        return {"outcome": "failed", **first.found}
    return {"outcome": "broken", "message": f"pytest ended with {status!r} and no failure"}


def run_forked(job: dict[str, Any], log: Path) -> dict[str, Any]:
    """The same in a fork, which is ended after the job's `timeout` seconds."""
    started = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setsid()
            with log.open("wb") as file:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
            with os.fdopen(writer, "w") as pipe:
                json.dump(run_tests(job), pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], job["timeout"])
        answer = pipe.read() if ready else None
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer is None:
        result = {"outcome": "timeout"}
    elif answer:
        result = json.loads(answer)
    else:
        result = {"outcome": "crashed", "message": f"wait status {status}"}
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Serves jobs until standard input ends."""
    tree = Path(sys.argv[1]).resolve()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    # Configures JAX and imports it; pytest finds it imported already.
    importlib.import_module("tests.conftest")
    for name in ("chex", "flax.struct", "jax.numpy", "scipy.stats"):
        importlib.import_module(name)
    assert "entropix_jax" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.freeze()
    for line in sys.stdin:
        result = run_forked(json.loads(line), tree.with_suffix(".log"))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
