"""How many examples a property test tries."""

from collections.abc import Callable
from typing import Any

import hypothesis


def examples(number: int) -> Callable[[Any], Any]:
    """`number` examples, times ENTROPIX_THOROUGH where that is set."""
    scale = hypothesis.settings().max_examples / 100
    return hypothesis.settings(max_examples=round(number * scale))
