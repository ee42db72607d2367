"""Taking turns at the clock."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Seconds of one unit of work: a step, or a prefill.
Timed = Callable[[], float]


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call, its arrays waited for."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def take_turns(contestants: Mapping[str, Timed], repeats: int) -> dict[str, list[float]]:
    """Each once to warm up, then `repeats` rounds in which each has its turn: what else the machine
    does meanwhile falls on all of them."""
    for run in contestants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            seconds[name].append(run())
    return seconds


def figures(seconds: list[float]) -> dict[str, float]:
    """The median, and the spread as (max - min) / median."""
    median = statistics.median(seconds)
    return {"seconds": median, "spread": (max(seconds) - min(seconds)) / median}


def ratio(over: list[float], under: list[float]) -> float:
    """How many times as long `over` takes: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
