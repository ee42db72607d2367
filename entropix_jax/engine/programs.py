"""Compiled programs of a server: missing ones compile in a thread, while rows continue with the
compiled ones."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from entropix_jax.accelerators.gpu_graphs import LOOPS_IN_GRAPHS, puts_loops_in_graphs
from entropix_jax.engine.decode import decode, jit_decode

_LOG = logging.getLogger(__name__)

# On a GPU: one CUDA graph, the loop of steps included.
decode_in_graph = jit_decode(decode.__wrapped__, compiler_options=LOOPS_IN_GRAPHS)  # type: ignore[attr-defined]


def decode_for_backend() -> Any:
    """Returns the variant of `decode` for the default backend."""
    return decode_in_graph if puts_loops_in_graphs() else decode


class CompileError(Exception):
    """A program could not be compiled. The compiler's own error is the cause."""


@dataclass(frozen=True)
class _Job:
    key: Hashable
    name: str
    function: Any  # jitted
    arguments: tuple[Any, ...]  # shapes of the traced ones
    static: Mapping[str, Any]


class Programs:
    """Programs by key. One thread compiles them, urgent ones first."""

    def __init__(self) -> None:
        self.compiling: str | None = None  # what the thread is at, for people
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._errors: dict[Hashable, Exception] = {}
        self._wanted: set[Hashable] = set()
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()

    def __contains__(self, key: Hashable) -> bool:
        """Whether the program is compiled."""
        return key in self._compiled

    def get(self, key: Hashable) -> Callable[..., Any]:
        """Returns a compiled program, a function of the traced arguments."""
        return self._compiled[key]

    def request(
        self,
        key: Hashable,
        name: str,
        function: Any,
        arguments: tuple[Any, ...],
        static: Mapping[str, Any],
        *,
        urgent: bool = False,
        ahead: bool = False,
    ) -> None:
        """Queues a program for compilation unless it is compiled or queued. Returns at once.

        Args:
            name: of the program, for the log.
            function: jitted.
            arguments: the traced ones; only their shapes are kept.
            static: the static ones, by name.
            urgent: running rows need it.
            ahead: no row needs it yet, so an error is left for a later request.

        Raises:
            CompileError: the last compilation failed. The next request tries again.
        """
        if key in self._errors and not ahead:
            self._wanted.discard(key)
            raise CompileError(f"compiling {name} failed") from self._errors.pop(key)
        if key in self._wanted:
            if urgent:
                self._move_forward(key)
            return
        self._wanted.add(key)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        with self._changed:
            job = _Job(key, name, function, shapes, static)
            self._jobs.insert(0 if urgent else len(self._jobs), job)
            if self.compiling is None:
                self.compiling = name
                threading.Thread(target=self._compile, name="compiler").start()

    def _move_forward(self, key: Hashable) -> None:
        with self._changed:
            for job in [job for job in self._jobs if job.key == key]:
                self._jobs.remove(job)
                self._jobs.appendleft(job)

    def wait(self, seconds: float) -> None:
        """Waits until a program is compiled, or for the timeout."""
        with self._changed:
            if self.compiling is not None:
                self._changed.wait(seconds)

    def _compile(self) -> None:
        while True:
            with self._changed:
                # A process that ends waits for one program at most.
                if not (self._jobs and threading.main_thread().is_alive()):
                    self.compiling = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
                self.compiling = job.name
            began = time.perf_counter()
            _LOG.info("compiling %s ...", job.name)
            try:
                program = job.function.lower(*job.arguments, **job.static).compile()
                self._compiled[job.key] = program
                _LOG.info("compiled %s in %.1f s", job.name, time.perf_counter() - began)
            except Exception as error:
                _LOG.error("compiling %s failed", job.name, exc_info=error)
                self._errors[job.key] = error
            with self._changed:
                self._changed.notify_all()
