"""Tables and numbers of the Markdown pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from entropix_jax.lab.statistics import Interval

_NAMES = {
    "logprob": "ln p per token",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "self_bleu": "Self-BLEU",
    "repeated_4grams": "repeated 4-grams",
}


def format_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; pipes and line breaks in cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def format_name(measure: str) -> str:
    """A measure's name in headings."""
    return _NAMES.get(measure, measure.replace("_", " "))


def format_estimate(interval: Interval) -> str:
    """A value with its interval; empty without one."""
    return "" if math.isnan(interval.value) else str(interval)


def format_difference(interval: Interval | None) -> tuple[str, str]:
    """A difference with its interval and its verdict; both empty without one."""
    if interval is None or math.isnan(interval.value):
        return "", ""
    return (f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]", interval.verdict)


def format_share(part: float, whole: float) -> str:
    """A share in per cent; empty of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else ""
