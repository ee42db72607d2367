"""Runs work on a Ray cluster: actors that each hold a model, and take items as they finish others.

An actor runs its items as one continuous batch, and has a few more of them than slots. It gets as
many new items as it returns results, so a faster actor takes more. An actor or node that dies is
replaced while the run continues, and its unfinished items run again.
"""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

from entropix_jax.errors import Note, UserError, require
from entropix_jax.host.heap import GC_THRESHOLD, ONE_ARENA, reuse_memory
from entropix_jax.version import __version__

ANY = "auto"  # the cluster of RAY_ADDRESS or of this machine, else a new one on this machine
_MAX_DEATHS = 3  # of actors with an item, or of those that were started in one place
_LOOK_SECONDS = 0.2  # between looks at a request to stop
_BURST_SECONDS = 0.25  # in which other results follow the first one, unless items run out
_NODES_SECONDS = 1.0  # between looks for nodes that came or died
_CONNECT_SECONDS = 20.0
_SPARE = 2  # for this many slots an actor has one item more than slots
_CARRIED = re.compile("(ENTROPIX|HF|JAX)_(?!PLATFORM|.*DEVICES)")  # variables that actors get

Item = tuple[int, Any]  # its number in the input, and what the work gets


class Work(Protocol):
    """Items that an actor runs as one batch."""

    slots: int  # items that run at once

    def run(self, items: Iterator[Any], write: Callable[[Any, Any], None]) -> None:
        """Runs items, fetched as slots become free, and passes each with its result to `write`.
        None stands for no item yet. It ends the run if no item runs."""


# Called in each actor, pickled. Returns the work, and its description, the same in all actors.
Make = Callable[[], tuple[Work, Any]]


class _Host:
    """An actor. Its work runs in a thread, which takes items from a queue."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._runs_out = threading.Event()  # the queue of items is empty

    def version(self) -> str:
        """Returns the version of the package. Another one may fail to read the arguments of
        `load`."""
        return __version__

    def load(
        self, make: Make, cpus: int, folder: str, variables: Mapping[str, str]
    ) -> tuple[str, int, Any]:
        """Makes the work, in the driver's working directory and with its variables. Returns an
        error or "", the number of slots, and the description."""
        if cpus:
            os.environ["NPROC"] = str(cpus)  # for XLA, which else takes all cores
        gc.set_threshold(GC_THRESHOLD)
        reuse_memory()
        os.environ.update(variables)
        with suppress(OSError):  # absolute paths are valid without it, too
            os.chdir(folder)
        try:
            work, about = make()
        except (UserError, OSError, ImportError) as error:
            lacks = "" if os.path.isdir(folder) else f" (there is no folder {folder} either)"
            return f"{error}{lacks}", 0, None
        threading.Thread(target=self._run, args=(work,), daemon=True).start()
        return "", work.slots, about

    def exchange(self, items: list[Item]) -> list[Item]:
        """Queues items, waits for a result, then a moment for more unless the queue runs empty.
        Returns the results since the last call. Raises what the work raised."""
        self._runs_out.clear()
        for item in items:
            self._items.put(item)
        results = [self._results.get()]
        self._runs_out.wait(_BURST_SECONDS)
        results += [self._results.get() for _ in range(self._results.qsize())]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _run(self, work: Work) -> None:
        running: dict[int, Item] = {}  # by the id of what the work got

        def available(item: Item | None) -> Iterator[Any]:
            while True:
                if item is not None:
                    running[id(item[1])] = item
                yield None if item is None else item[1]
                item = None if self._items.empty() else self._items.get()
                if self._items.empty():
                    self._runs_out.set()

        def write(item: Any, result: Any) -> None:
            self._results.put((running.pop(id(item))[0], result))

        try:
            while True:
                work.run(available(self._items.get()), write)
        except BaseException as error:
            self._results.put(error)


@dataclass(eq=False)
class _Actor:
    """An actor as the driver sees it."""

    handle: Any
    place: tuple[str, int]  # the node's id, and a number on that node
    address: str  # of the node
    cpus: int
    call: Any  # what to wait for; None: the actor is idle
    has_started: bool = False  # it has its CPUs and a process
    slots: int = 0  # 0 until it has loaded
    items: dict[int, Any] = field(default_factory=dict)  # unfinished ones, by number


class Cluster:
    """A connection to a Ray cluster with its actors, as a context manager."""

    def __init__(
        self, make: Make, *, address: str = ANY, cpus: int | None = None, devices: int = 1
    ) -> None:
        """Starts nothing. `address` is HOST:PORT of the cluster's head, or ANY. An actor has
        `devices` GPUs, all chips of a TPU host, or `cpus` cores, by default all of its node."""
        require("ray", "ray")
        self._ray: Any = None  # the module, within the context
        self._make, self._address = make, address
        self._cpus, self._devices = cpus, devices
        self._actors: list[_Actor] = []
        self._items: Iterator[Item] = iter(())
        self._more = False  # whether there may be more of them
        self._left = 0  # items without a result
        self._again: deque[Item] = deque()  # of actors that died
        self._suspects: deque[Item] = deque()  # of two that died
        self._deaths: Counter[Any] = Counter()  # by an item's number, or by place while loading
        self._reason = ""  # of the last death
        self._about: Any = None
        self._looked = -_NODES_SECONDS
        self._stopping = False

    @property
    def summary(self) -> str:
        """The state of the cluster in a line of progress."""
        ready = sum(actor.slots > 0 for actor in self._actors)
        waiting = sum(not actor.has_started for actor in self._actors)
        busy = f" ({waiting} not started: CPUs or devices in use?)" if waiting else ""
        return f"{ready} of {len(self._actors)} actors{busy}"

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray's telemetry
        os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here
        import ray
        import ray.util.scheduling_strategies

        self._ray = ray
        on_sigterm = signal.getsignal(signal.SIGTERM)  # which Ray replaces
        head = None if self._address == ANY else self._address
        if head is not None:
            _check_address(head)
        try:
            ray.init(head, log_to_driver=False, logging_level="critical", include_dashboard=False)
        except Exception as error:  # Ray raises the bare class, too
            raise UserError(f"--ray {self._address}: {_reason(error)}") from None
        finally:
            with suppress(ValueError):  # not in the main thread: Ray did not replace it either
                signal.signal(signal.SIGTERM, on_sigterm)
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._ray.shutdown()

    def stop(self) -> None:
        """Ends the run soon; unfinished items have no result. Safe to call in a signal handler."""
        self._stopping = True

    def describe(self, show: Callable[[str], None]) -> Any:
        """Waits for the first actor, and returns the description of its work; None after `stop`.
        `show` gets lines that say what it waits for. UserError as `run`."""
        while self._about is None and not self._stopping:
            self._start_actors()
            show(f"starting actors: {self.summary}")
            for actor in self._answered():
                self._receive(actor)
        return self._about

    def run(
        self,
        items: Iterable[Any],
        write: Callable[[Any, Any], None],
        fail: Callable[[Any, str], None],
        total: int | None = None,
    ) -> None:
        """Runs items, fetched as actors take them, and passes each with its result to `write`, in
        order of completion.

        The last ones are shared evenly if the number of items, `total`, is known. An item that dies
        with its actor for the third time, then alone in it, goes to `fail` with a message. Deaths
        of nodes do not count. UserError if the first actor cannot load, the work raised it, or no
        actor can be started."""
        self._items, self._more = iter(enumerate(items)), True
        self._left = sys.maxsize if total is None else total
        while not self._stopping:
            self._start_actors()
            for actor in self._answered():
                for number, result in self._receive(actor):
                    write(actor.items.pop(number), result)
                    self._left -= 1
            for number, item in [*self._again]:
                if self._deaths[number] >= _MAX_DEATHS:
                    self._again.remove((number, item))
                    fail(item, f"its process died {_MAX_DEATHS} times: {self._reason}")
            for actor in self._actors:
                if actor.slots and actor.call is None:
                    self._give(actor)
            unfinished = any(actor.items for actor in self._actors)
            if not (self._more or self._again or self._suspects or unfinished):
                return

    def _start_actors(self) -> None:
        """Starts the actors that the nodes have room for. UserError if no actor can be started."""
        if time.monotonic() < self._looked + _NODES_SECONDS:
            return
        self._looked = time.monotonic()
        taken = {actor.place for actor in self._actors}
        strategies = self._ray.util.scheduling_strategies
        environment = {"env_vars": ONE_ARENA}
        for node in self._ray.nodes():
            needs, number = self._needs(node["Resources"]) if node["Alive"] else ({}, 0)
            for index in range(number):
                place = node["NodeID"], index
                if place in taken or self._deaths[place] >= _MAX_DEATHS:
                    continue
                here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {"scheduling_strategy": here, "runtime_env": environment, **needs}
                handle = self._ray.remote(_Host).options(**options).remote()
                where = place, node["NodeManagerAddress"], needs["num_cpus"]
                self._actors.append(_Actor(handle, *where, handle.version.remote()))
        if not self._actors:
            own = f"{self._cpus} CPUs" if self._cpus else "a device or core"
            reason = f"; the last actor died: {self._reason}" if self._reason else ""
            raise UserError(f"--ray {self._address}: no usable node has {own}{reason}")

    def _needs(self, node: Mapping[str, float]) -> tuple[dict[str, Any], int]:
        """Returns what an actor takes of a node's resources, and the number of actors for it."""
        if chips := node.get("TPU"):
            return {"resources": {"TPU": chips}, "num_cpus": 0}, 1
        if gpus := node.get("GPU"):
            return {"num_gpus": self._devices, "num_cpus": 0}, int(gpus) // self._devices
        cores = int(node.get("CPU", 0))
        cpus = self._cpus or cores
        return {"num_cpus": cpus}, cores // cpus if cpus else 0

    def _answered(self) -> list[_Actor]:
        """Waits a moment for an actor whose call has ended."""
        calls = {actor.call: actor for actor in self._actors if actor.call is not None}
        if not calls:
            time.sleep(_LOOK_SECONDS)
            return []
        ended, _ = self._ray.wait([*calls], num_returns=1, timeout=_LOOK_SECONDS)
        return [calls[call] for call in ended]

    def _receive(self, actor: _Actor) -> list[Item]:
        """Returns an actor's results, none if it has only now started or loaded, or has died."""
        call, actor.call = actor.call, None
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | OSError | MemoryError):
                raise UserError(f"{actor.address}: {error.cause}") from None
            raise
        except self._ray.exceptions.RayError as error:  # the actor or its node died
            self._bury(actor, error)
            return []
        if actor.slots:
            return list(answer)
        if not actor.has_started:
            actor.has_started = True
            carried = {name: value for name, value in os.environ.items() if _CARRIED.match(name)}
            if answer == __version__:
                actor.call = actor.handle.load.remote(self._make, actor.cpus, os.getcwd(), carried)
                return []
            answer = f"has entropix-jax {answer}, not {__version__}: install the same", 0, None
        problem, slots, about = answer
        if not problem and self._about not in (None, about):
            problem = "the model or its settings differ from other nodes"
        if not problem:
            actor.slots, self._about = slots, about
        elif self._about is not None:  # others have loaded
            self._deaths[actor.place] = _MAX_DEATHS - 1
            self._bury(actor, UserError(problem))
        else:
            raise UserError(f"{actor.address}: {problem}")
        return []

    def _bury(self, actor: _Actor, error: Exception) -> None:
        """Takes the items of an actor that died. One that died twice runs alone the next time. The
        place of an actor that died while it loaded is given up after the third time."""
        self._ray.kill(actor.handle)  # it may only be out of reach
        self._actors.remove(actor)
        self._reason = f"{actor.address}: {_reason(error)}"
        if not actor.slots:
            self._deaths[actor.place] += 1
            if self._deaths[actor.place] == _MAX_DEATHS:
                warnings.warn(f"--ray: not used: {self._reason}", Note, stacklevel=2)
        elif not re.search("is unavailable|its node has died", str(error)):
            self._deaths.update([*actor.items])
        for item in actor.items.items():
            again = self._suspects if self._deaths[item[0]] == _MAX_DEATHS - 1 else self._again
            again.append(item)

    def _give(self, actor: _Actor) -> None:
        """Gives an idle actor items. Of the last ones it has at most an even share."""
        given = list[Item]()
        if self._suspects and not actor.items:
            given = [self._suspects.popleft()]
        elif all(self._deaths[number] < _MAX_DEATHS - 1 for number in actor.items):
            sharing = sum(other.has_started for other in self._actors)
            most = min(actor.slots + -(-actor.slots // _SPARE), max(-(-self._left // sharing), 1))
            room = max(most - len(actor.items), 0)
            again = (self._again.popleft() for _ in range(len(self._again)))
            given = [*islice(chain(again, self._items), room)]
            self._more &= len(given) == room
        actor.items.update(given)
        if actor.items:
            actor.call = actor.handle.exchange.remote(given)


def _check_address(address: str) -> None:
    """UserError unless something answers at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in address:
        raise UserError(f"--ray {address}: must be HOST:PORT, the address of the cluster's head")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise UserError(f"--ray {address}: no cluster answers: {error}") from None


def _reason(error: Exception) -> str:
    """Returns the last exception that an error's text names, else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = re.compile(r"\w+(Error|Exception): |The actor (is dead|died) because")
    named = [line for line in lines if telling.match(line)]
    return (named[-1:] or lines or [type(error).__name__])[0]
