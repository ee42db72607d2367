"""Compiled programs of an engine, and the one thread that compiles them ahead of their calls.

By default each call waits for exactly the program that its rows need, so results do not depend on
other programs. A server has a closed list, and its calls use the smallest compiled one that covers
their rows.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from entropix_jax.accelerators.gpu_graphs import LOOPS_IN_GRAPHS, puts_loops_in_graphs
from entropix_jax.engine.decode import decode, jit_decode
from entropix_jax.engine.shapes import MAX_STEPS
from entropix_jax.engine.state import DecodeState, Program, Recording
from entropix_jax.engine.traced import Traced, find_traced
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.settings import Parts

_LOG = logging.getLogger(__name__)

# On a GPU: one CUDA graph, the loop of steps included.
decode_in_graph = jit_decode(decode.__wrapped__, compiler_options=LOOPS_IN_GRAPHS)  # type: ignore[attr-defined]


def decode_for_backend() -> Any:
    """Returns the variant of `decode` for the default backend."""
    return decode_in_graph if puts_loops_in_graphs() else decode


@dataclass(frozen=True)
class Steps:
    """The key of a program of decode steps: mechanisms, cache positions, and whether the lanes take
    part."""

    used: frozenset[str]
    window: int
    lanes: bool = False

    def covers(self, other: "Steps") -> bool:
        """Returns whether this program can run rows that need the other one."""
        lanes = other.lanes <= self.lanes
        return lanes and other.window <= self.window and other.used <= self.used

    @property
    def cost(self) -> tuple[int, ...]:
        """The order of programs: lanes are further rows, and a window is read in every layer."""
        return self.lanes, self.window, len(self.used)

    def __str__(self) -> str:
        forks = " with forks" if self.lanes else ""
        return f"steps{forks} of {self.window} positions, {len(self.used)} mechanisms"


@dataclass(frozen=True)
class PromptPart:
    """The key of a prefill program: tokens and cache positions of each row, and number of rows."""

    size: int
    window: int
    rows: int = 1

    def covers(self, other: "PromptPart") -> bool:
        """Returns whether this program can read what the other one reads."""
        size, window = other.size <= self.size, other.window <= self.window
        return size and window and other.rows == self.rows

    @property
    def cost(self) -> tuple[int, ...]:
        """The order of programs."""
        return self.size, self.window

    def __str__(self) -> str:
        rows = "" if self.rows == 1 else f" of {self.rows} rows"
        return f"prompts of {self.size} tokens{rows} in {self.window} positions"


class Programs:
    """Programs by key, compiled by one thread in the order of `add`.

    `sets` are those of a list, empty without one. `required` programs must be compiled before a
    server accepts requests. `largest` has the key of the program of each set that covers all rows.
    `waits` describes what the engine waits for, with the time since when (None while it runs), and
    `waited` is the time that it has waited for programs, both in seconds of `time.monotonic`.
    """

    def __init__(
        self, model: LanguageModel, recording: Recording, sets: Sequence[frozenset[str]] = ()
    ) -> None:
        self.sets = tuple(sets)
        self.required: list[Hashable] = []
        self.largest: dict[frozenset[str], Steps] = {}
        self.waits: tuple[str, float] | None = None
        self.waited = 0.0
        self._called: set[Hashable] = set()  # without a list
        self._model = model
        self._recording = recording
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._failed: dict[Hashable, BaseException] = {}
        # Queued programs by key, with functions that compile them. The first one compiles next.
        self._queue: OrderedDict[Hashable, Callable[[], Any]] = OrderedDict()
        self._current: Hashable = None
        self._changed = threading.Condition()

    def add(
        self, key: Hashable, function: Any, arguments: tuple[Any, ...], static: Mapping[str, Any]
    ) -> None:
        """Queues a program of a jitted function for compilation, and returns at once. Only shapes
        of the traced arguments are kept."""
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), arguments
        )
        with self._changed:
            self._queue[key] = lambda: self._program(function, shapes, static).compile(*shapes)
            if self._current is None:
                self._current = key
                threading.Thread(target=self._compile, name="compiler").start()

    def call(self, key: Hashable, function: Any, arguments: tuple[Any, ...], **static: Any) -> Any:
        """Calls a compiled program, or else the function once the thread has compiled it."""
        if (program := self._compiled.get(key)) is not None:
            return program(*arguments)
        if key not in self._called:
            self._await(key, lambda: self._program(function, arguments, static).compile(*arguments))
        return self._program(function, arguments, static)(*arguments)

    def _program(
        self, function: Any, arguments: tuple[Any, ...], static: Mapping[str, Any]
    ) -> Traced:
        if self._model.mesh is not None:
            return Traced(function, static)
        return find_traced(function, arguments, static)

    def _await(self, key: Hashable, compile_program: Callable[[], Any]) -> None:
        """Waits until a program is compiled, in a thread, since the compiler blocks signals, and a
        program of steps also for those that are queued: a text does not stop for them later. An
        error is raised by the call. On a mesh, the call compiles it."""
        began, outer = time.monotonic(), self.waits
        self._called.add(key)
        with self._changed:
            queued = [one for one in (self._current, *self._queue) if one is not None]
        number, total = len(self._called), len(self._called.union(queued))
        ahead = [one for one in queued if one != key] if isinstance(key, Steps) else []
        try:
            for index, one in enumerate((key, *ahead), number):
                of = f" of {total}" if queued else ""
                self.waits = f"compiling or loading program {index}{of}: {one}", began
                self.wait(one)
            if key not in queued and self._model.mesh is None:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(compile_program)
        finally:
            self.waited += time.monotonic() - began
            self.waits = outer

    def add_steps(self, key: Steps, parts: Parts, state: DecodeState) -> None:
        """Queues a program of decode steps. `parts` has the mechanisms, used or not."""
        count = np.int32(1)
        arguments = self._model.params, state, count, count, np.bool_(True)
        self.add(key, decode_for_backend(), arguments, self._static(key, parts))

    def run_steps(self, key: Steps, parts: Parts, state: DecodeState, *counts: Any) -> Any:
        """Runs decode steps. `counts` and the result are those of `decode`."""
        arguments = self._model.params, state, *counts
        return self.call(key, decode_for_backend(), arguments, **self._static(key, parts))

    def _static(self, key: Steps, parts: Parts) -> dict[str, Any]:
        parts = replace(parts, used=key.used)
        program = Program(parts, key.window, self._recording, key.lanes)
        return {"config": self._model.config, "max_steps": MAX_STEPS, "program": program}

    def find(self, needed: Any) -> Any:
        """Returns `needed` without a list, else the key of the cheapest compiled program that
        covers it, None if there is none."""
        if not self.sets:
            return needed
        with self._changed:
            keys = [key for key in self._compiled if isinstance(key, type(needed))]
        covering: list[Any] = [key for key in keys if key.covers(needed)]
        return min(covering, key=lambda key: key.cost, default=None)

    def set_of(self, used: frozenset[str]) -> frozenset[str] | None:
        """Returns the first set that contains the mechanisms, None if there is none."""
        return next((one for one in self.sets if used <= one), None)

    def has(self, used: frozenset[str]) -> bool:
        """Returns whether every batch of rows of a set can run. UserError if the set's largest
        program, or a required one, failed to compile."""
        self._check(self.largest[used])
        return self.missing() is None and self.largest[used] in self._compiled

    @property
    def counts(self) -> tuple[int, int]:
        """Number of compiled programs, and of those that are not compiled yet."""
        with self._changed:
            queued = len(self._queue) + (self._current is not None)
            return len(self._compiled), queued

    def missing(self) -> Hashable:
        """Returns the key of a required program that is not compiled yet, None if all are.
        UserError if one failed to compile."""
        for key in self.required:
            self._check(key)
        return next((key for key in self.required if key not in self._compiled), None)

    def wait(self, key: Hashable, seconds: float | None = None) -> None:
        """Waits until a program is no longer queued, or for the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: key != self._current and key not in self._queue, seconds)

    def close(self) -> None:
        """Compiles no further programs. The current one is finished."""
        with self._changed:
            self._queue.clear()

    def _check(self, key: Hashable) -> None:
        if (error := self._failed.get(key)) is not None:
            raise UserError(f"compiling {key} failed: {_reason(error)}") from error

    def _compile(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                # A process that ends waits for one program at most.
                if not (self._queue and threading.main_thread().is_alive()):
                    self._queue.clear()  # so that no thread waits for them
                    self._current = None
                    return
                self._current, compile_program = self._queue.popitem(last=False)
            key = self._current
            try:
                program = compile_program()
                if self.sets:
                    with self._changed:
                        self._compiled[key] = program
            except BaseException as error:  # a panic of a library, too: else the thread ends
                self._failed[key] = error
                # Else the call raises it, or `missing` does.
                if self.sets and key not in self.required:
                    _LOG.error("compiling %s failed, it is not used: %s", key, _reason(error))


def _reason(error: BaseException) -> str:
    """Returns the first line of an error."""
    return next(iter(str(error).splitlines()), type(error).__name__)
