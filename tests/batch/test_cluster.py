"""Runs on a Ray cluster of two nodes on this machine: what actors do, and whole commands."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.host.cluster import Cluster
from tests.support.commands import run_command

pytest.importorskip("ray", reason="needs the extra ray")
from ray.cluster_utils import Cluster as Nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes of one core each, whose processes run at the priority of this one."""
    size = {"num_cpus": 1, "object_store_memory": 80_000_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        nodes = Nodes(initialize_head=True, head_node_args=size | {"include_dashboard": False})
        nodes.add_node(**size)
        yield nodes
        nodes.shutdown()


class Squares:
    """Work that squares numbers, two at a time. A number may kill its process, once or always."""

    slots = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, items: Iterator[Any], write: Callable[[Any, Any], None]) -> None:
        """Runs the items."""
        for item in items:
            if item is None:
                return
            number, does = item
            done = self._folder / str(number)
            if does == "die" or (does == "die once" and not done.exists()):
                done.touch()
                os._exit(1)
            if does == "wait":
                time.sleep(0.05)
            if does == "full":
                raise OSError(28, "No space left on device")
            write(item, number * number)


def make(folder: Path) -> tuple[Squares, str]:
    return Squares(folder), "squares"


def run(
    nodes: Nodes, folder: Path, items: list[tuple[int, str]]
) -> tuple[dict[int, int], dict[int, str]]:
    """Returns the results and the failures of items, by number."""
    found, failed = dict[int, int](), dict[int, str]()

    def write(item: Any, result: int) -> None:
        assert item[0] not in found
        found[item[0]] = result

    def fail(item: Any, problem: str) -> None:
        failed[item[0]] = problem

    with Cluster(partial(make, folder), address=nodes.address) as cluster:
        assert cluster.describe(lambda line: None) == "squares"
        cluster.run(iter(items), write, fail)
    return found, failed


def test_items_of_an_actor_that_dies_run_again(nodes: Nodes, tmp_path: Path) -> None:
    """An item that kills its actor three times fails. The items next to it have results."""
    does = {0: "die once", 14: "die once", 20: "die"}
    items = [(number, does.get(number, "wait")) for number in range(24)]
    found, failed = run(nodes, tmp_path, items)
    assert found == {number: number**2 for number in range(24) if number != 20}
    assert [*failed] == [20]
    assert failed[20].startswith("its process died 3 times: ")


def test_an_error_of_an_actor_names_its_node(nodes: Nodes, tmp_path: Path) -> None:
    """Ray's handler of SIGTERM does not replace the command's own."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match=r"^[\d.]+: \[Errno 28\] No space left on device$"):
        run(nodes, tmp_path, [(1, "full")])
    assert signal.getsignal(signal.SIGTERM) == handler


def read(path: Path) -> dict[str, Any]:
    """Returns results by line, without timings."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["line"]: line | {"timings": None} for line in lines}


def test_a_batch_equals_that_of_one_machine(nodes: Nodes, tmp_path: Path, folder: str) -> None:
    """Results and traces are equal but for times. The run on the cluster is continued here."""
    given = [{"prompt": "Once", "seed": seed, "id": f"r{seed}"} for seed in range(9)]
    given[2]["sampler"], given[5]["max_new_tokens"] = "greedy", 3
    lines = [*map(json.dumps, given), '{"prompt": 5}']
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines))
    own = ["--input", str(tmp_path / "in.jsonl"), "--model", folder, "--slots", "2"]
    own += ["--max-new-tokens", "8", "--precision", "float32"]
    for name, more in (("here", []), ("there", ["--ray", nodes.address, "--cpus-per-actor", "1"])):
        paths = ["--output", str(tmp_path / f"{name}.jsonl"), "--trace", str(tmp_path / name)]
        result = run_command("batch", *own, *paths, *more)
        assert (result.status, result.out) == (0, "")
    here, there = read(tmp_path / "here.jsonl"), read(tmp_path / "there.jsonl")
    assert there == here
    traces = [
        sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("here", "there")
    ]
    assert traces[0] == traces[1] == sorted(f"r{seed}.jsonl" for seed in range(9))
    again = run_command("batch", *own, "--output", str(tmp_path / "there.jsonl"))
    assert "note: 10 records done already" in again.err


def test_an_ablation_equals_that_of_one_machine(nodes: Nodes, tmp_path: Path) -> None:
    """With tuning: the actors get the tuned sampler by the name of its candidate."""
    own = "--task sums --model tiny --sampler temperature greedy --items 3".split()
    own += "--seeds 1 --tune 2 --tune-items 2 --slots 4".split()
    for name, more in (("here", []), ("there", ["--ray", nodes.address])):
        folder = tmp_path / name
        assert run_command("evaluate", *own, "--output", str(folder), *more).status == 0
    for phase in ("tuning", "test"):
        here, there = (read(tmp_path / name / f"{phase}.jsonl") for name in ("here", "there"))
        assert there == here
