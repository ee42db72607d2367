"""The number of examples of property tests."""

from collections.abc import Callable
from typing import Any

import hypothesis


def examples(number: int) -> Callable[[Any], Any]:
    """Sets `number` examples, times ENTROPIX_THOROUGH if it is set."""
    scale = hypothesis.settings().max_examples / 100
    return hypothesis.settings(max_examples=round(number * scale))
