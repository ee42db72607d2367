"""Timing in turns, the rates of the machine, and the table of figures."""

import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

Timed = Callable[[], float]  # runs once and returns the seconds of one unit of work
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
WHERE = ("kind", "weights", "batch", "context")  # the conditions of a figure


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the seconds of one call, until its arrays are computed."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def take_turns(
    own: Mapping[str, Timed], repeats: int, others: Mapping[str, Timed] | None = None
) -> dict[str, list[float]]:
    """Runs each contestant once to warm it up, then once in each round, so that noise falls on all
    alike. Returns the seconds by contestant. One of `others` that fails is dropped with a note."""
    contestants = {**own, **(others or {})}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(1 + repeats):
        for name in [*seconds]:
            try:
                took = contestants[name]()
            except Exception as error:  # other engines raise errors of any class
                if name in own:
                    raise
                reason = " ".join(str(error).split()) or type(error).__name__
                print(f"note: {name} is skipped: {reason[:300]}", file=sys.stderr)
                del seconds[name]
                continue
            seconds[name] += [took] if turn else []
    return seconds


def describe_machine() -> dict[str, Any]:
    """Returns device, versions, and the rates that bound every figure: bytes per second that a
    product of a matrix and a vector reads, and operations per second of products of matrices."""
    device = jax.devices()[0]
    name = device.device_kind
    if device.platform == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
        flags = next((x.split() for x in lines if x.startswith("flags")), [])
        name += f" ({', '.join(flag for flag in _INSTRUCTIONS if flag in flags)})"
    wide = 1 << 17  # 1 GiB of float32
    return {
        "device": name,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "read": 4 * wide * 2048 / _fastest_product((2048,), (wide, 2048), "float32"),
        **{
            kind: 2 * 2048 * 2048 * 8192 / _fastest_product((2048, 2048), (8192, 2048), kind)
            for kind in ("float32", "bfloat16")
        },
    }


def _fastest_product(rows: tuple[int, ...], matrix: tuple[int, int], dtype: str) -> float:
    """Returns the least seconds of ten products of random rows and a transposed random matrix."""
    x, w = (jax.random.normal(jax.random.key(0), shape, dtype) for shape in (rows, matrix))
    multiply = jax.jit(lambda x, w: jnp.dot(x, w.T))
    return min([seconds_of(lambda: multiply(x, w)) for _ in range(10)][1:])


class Figures:
    """Medians of contestants, printed as they come and as a table at the end."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.machine: dict[str, Any] = {}  # see `describe_machine`
        self.rows: list[dict[str, Any]] = []
        self._console = Console(width=110)

    def measure(
        self, own: Mapping[str, Timed], others: Mapping[str, Timed] | None = None, **what: Any
    ) -> None:
        """Times contestants in turns, see `take_turns`; `what` is passed to `add`."""
        self.add(take_turns(own, self.repeats, others), **what)

    def add(
        self,
        seconds: Mapping[str, Sequence[float]],
        *,
        tokens: int = 0,
        floor: float | None = None,
        **where: Any,
    ) -> None:
        """Adds the figures of contestants.

        Args:
            seconds: by contestant, one number for each round. Ratios are over the first contestant.
            tokens: of one unit of work.
            floor: the fewest seconds that a unit of work can take.
            where: the conditions, see `WHERE`.
        """
        first = next(iter(seconds.values()))
        for name, times in seconds.items():
            median = statistics.median(times)
            row = {**where, "engine": name, "seconds": median}
            row["spread"] = (max(times) - min(times)) / median
            row["times"] = statistics.median(a / b for a, b in zip(times, first, strict=True))
            row |= {"tokens_per_second": tokens / median} if tokens else {}
            row |= {"of_floor": floor / median} if floor is not None else {}
            self.rows.append(row)
            title = " · ".join(map(str, [*where.values(), name]))
            self._console.print(f"{title}: {1e3 * median:.1f} ms ({row['spread']:.0%})")

    def print_table(self) -> None:
        """Prints all figures."""
        title, m = "", self.machine
        if m:
            title = (
                f"{m['device']}, {m['cores']} cores, JAX {m['jax']}: reads {m['read'] / 1e9:.1f}"
            )
            title += f" GB/s, multiplies {m['float32'] / 1e9:.0f} GFLOP/s in float32, "
            title += f"{m['bfloat16'] / 1e9:.0f} in bfloat16"
        table = Table(*WHERE, *("engine", "ms", "spread", "tok/s", "of floor"), title=title)
        table.add_column("times the first")
        for where, group in itertools.groupby(self.rows, lambda row: [row.get(k) for k in WHERE]):
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
        self._console.print(table)
