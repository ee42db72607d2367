"""A batch on a Ray cluster, as the command sees it."""

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from entropix_jax.batch.records import BadRecord, Record
from entropix_jax.batch.run import RecordRun, Write, file_name
from entropix_jax.engine.results import Rows
from entropix_jax.host.cluster import Cluster
from entropix_jax.host.files import replacing


def pass_trace(record: Record, rows: Rows) -> dict[str, Any]:
    """In an actor: returns a trace as a field of the result. See `BatchRun.save_trace`."""
    with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
        rows.save_trace(path := Path(folder) / "trace.jsonl")
        return {"trace": path.read_text(encoding="utf-8")}


class SpreadRun(RecordRun):
    """A run of records on a cluster, with the parts of a `BatchRun` that commands use. As its own
    `programs` it says what it waits for."""

    def __init__(self, cluster: Cluster, traces: Path | None = None) -> None:
        """`traces` is the folder of the records' traces, if wanted."""
        self.tokens = self.failed = 0
        self._cluster = cluster
        self.programs, self.waited = self, 0.0
        self._last = time.monotonic()  # time of the last result, or of the start
        self._traces = traces

    def run(
        self,
        records: Iterable[Record | BadRecord],
        write: Write,
        is_done: Callable[[Record | BadRecord], bool],
    ) -> None:
        """Runs the records; see `BatchRun.run`."""

        def finish(record: Any, result: dict[str, Any]) -> None:
            if (trace := result.pop("trace", None)) is not None and self._traces is not None:
                with replacing(self._traces / f"{file_name(record.id)}.jsonl") as scratch:
                    scratch.write_text(trace, encoding="utf-8")
            self.tokens += result.get("tokens", 0)
            self.failed += "error" in result
            self._last = time.monotonic()
            write(record, result)

        def fail(record: Any, problem: str) -> None:
            finish(record, {"error": problem, "finish_reason": "error"})

        todo = (record for record in self._read(iter(records)) if not is_done(record))
        self._cluster.run(todo, finish, fail, self.left)

    @property
    def waits(self) -> tuple[str, float]:
        """Description of the wait for actors and the next result, with its start."""
        return f"waiting for results of {self._cluster.summary}", self._last

    @property
    def usage(self) -> str:
        """The number of actors that run."""
        return self._cluster.summary

    def stop(self) -> None:
        """Ends the run soon. Safe to call in a signal handler."""
        self._cluster.stop()
        super().stop()
