"""Timing in turns, the rates of the machine, and the table of what was measured."""

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

Timed = Callable[[], float]  # runs once and returns the seconds of one unit of work


def seconds_of(call: Callable[[], Any]) -> float:
    """The time of one call, its arrays included."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def take_turns(contestants: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
    """Warms each up, then gives each its turn in every round, so that noise falls on all alike."""
    rounds = [{name: run() for name, run in contestants.items()} for _ in range(1 + repeats)]
    return {name: [one[name] for one in rounds[1:]] for name in contestants}


def describe_machine() -> dict[str, Any]:
    """Device, versions, and the rates that bound every figure: bytes and operations per second."""
    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    return {
        "device": name,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "read": read_bandwidth(),
        "copy": copy_bandwidth(),
        **{kind: matrix_rate(kind) for kind in ("float32", "bfloat16")},
    }


def _best(call: Callable[[], Any]) -> float:
    return min([seconds_of(call) for _ in range(10)][1:])


def read_bandwidth() -> float:
    """Bytes per second that a product of a 1 GiB float32 matrix and a vector reads."""
    matrix, vector = _random(1 << 17, 2048), _random(2048)
    multiply = jax.jit(jnp.dot)
    return matrix.nbytes / _best(lambda: multiply(matrix, vector))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of adding 1 to 1 GiB."""
    array = _random(1 << 17, 2048)
    add = jax.jit(lambda x: x + 1)
    return 2 * array.nbytes / _best(lambda: add(array))


def matrix_rate(dtype: str) -> float:
    """Operations per second of a product [2048, 2048] x [2048, 8192]."""
    rows, matrix = _random(2048, 2048, dtype=dtype), _random(8192, 2048, dtype=dtype)
    multiply = jax.jit(lambda x, w: jnp.dot(x, w.T))
    return 2 * rows.size * 8192 / _best(lambda: multiply(rows, matrix))


def _random(*shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


class Figures:
    """The figures of a run, printed as they come and as a table at the end."""

    def __init__(self, repeats: int, machine: dict[str, Any]) -> None:
        self.repeats, self.machine = repeats, machine
        self.rows: list[dict[str, Any]] = []
        self.console = Console(width=110)

    def measure(
        self,
        contestants: Mapping[str, Timed],
        *,
        tokens: int = 0,
        floor: float | None = None,
        **what: Any,
    ) -> None:
        """Times contestants; ratios are over the first of them. `tokens` are those of one unit of
        work, and `floor` its fewest seconds."""
        seconds = take_turns(contestants, self.repeats)
        first = next(iter(seconds.values()))
        for name, times in seconds.items():
            median = statistics.median(times)
            row = {**what, "engine": name, "seconds": median}
            row["spread"] = (max(times) - min(times)) / median
            row["times"] = statistics.median(a / b for a, b in zip(times, first, strict=True))
            row |= {"tokens_per_second": tokens / median} if tokens else {}
            row |= {"of_floor": floor / median} if floor is not None else {}
            self.rows.append(row)
            where = " · ".join(str(value) for value in what.values())
            self.console.print(f"{where} · {name}: {1e3 * median:.1f} ms ({row['spread']:.0%})")

    def table(self) -> Table:
        """All figures."""
        m = self.machine
        title = (
            f"{m['device']}, {m['cores']} cores, JAX {m['jax']}: reads {m['read'] / 1e9:.1f} GB/s, "
            f"copies {m['copy'] / 1e9:.1f} GB/s, multiplies {m['float32'] / 1e9:.0f} GFLOP/s in "
            f"float32, {m['bfloat16'] / 1e9:.0f} in bfloat16"
        )
        keys = ("kind", "weights", "batch", "context")
        table = Table(*("" if key == "kind" else key for key in keys), title=title)
        for name in ("engine", "ms", "spread", "tok/s", "of floor", "times the first"):
            table.add_column(name)
        for where, group in itertools.groupby(self.rows, lambda row: [row.get(k) for k in keys]):
            for row in group:
                table.add_row(
                    *("" if part is None else str(part) for part in where),
                    row["engine"],
                    f"{1e3 * row['seconds']:.2f}",
                    f"{row['spread']:.0%}",
                    f"{row['tokens_per_second']:.1f}" if "tokens_per_second" in row else "",
                    f"{row['of_floor']:.0%}" if "of_floor" in row else "",
                    f"{row['times']:.2f}",
                )
            table.add_section()
        return table
