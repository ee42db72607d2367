"""How many examples a property test tries, and a count of what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis

TRIED: Counter[str] = Counter()  # of each kind of thing, how many were tried


def examples(number: int) -> Callable[[Any], Any]:
    """`number` examples where a property test has 100 by default, so that a thorough run has more
    of all of them."""
    scale = hypothesis.settings().max_examples / 100
    return hypothesis.settings(max_examples=round(number * scale))


def tried(kind: str, number: int = 1) -> None:
    """Counts what an example was; also those by which a failure is made small."""
    TRIED[kind] += number
