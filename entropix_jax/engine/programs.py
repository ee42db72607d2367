"""Compiled programs of a server: missing ones compile in a thread, while rows continue with the
compiled ones."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
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


class Programs:
    """Programs by key. One thread compiles them, urgent ones first."""

    def __init__(self) -> None:
        self.compiling: str | None = None  # what the thread is at, for people
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._errors: dict[Hashable, Exception] = {}
        self._wanted: set[Hashable] = set()
        # Queued programs by key: name, and function that compiles it. The first one compiles next.
        self._jobs: OrderedDict[Hashable, tuple[str, Callable[[], Any]]] = OrderedDict()
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
        with self._changed:
            if key not in self._wanted:
                self._wanted.add(key)
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
                self._jobs[key] = name, lambda: function.lower(*shapes, **static).compile()
                if self.compiling is None:
                    self.compiling = name
                    threading.Thread(target=self._compile, name="compiler").start()
            if urgent and key in self._jobs:
                self._jobs.move_to_end(key, last=False)

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
                key, (name, compile_program) = self._jobs.popitem(last=False)
                self.compiling = name
            began = time.perf_counter()
            _LOG.info("compiling %s ...", name)
            try:
                self._compiled[key] = compile_program()
                _LOG.info("compiled %s in %.1f s", name, time.perf_counter() - began)
            except Exception as error:
                _LOG.error("compiling %s failed", name, exc_info=error)
                self._errors[key] = error
            with self._changed:
                self._changed.notify_all()
