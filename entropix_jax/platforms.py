"""What XLA compiles well differs by platform: the one place where this package asks for it."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

_Result = TypeVar("_Result")


def on_cpu_or_elsewhere(
    on_cpu: Callable[..., _Result], elsewhere: Callable[..., _Result], *args: jax.Array
) -> _Result:
    """`on_cpu(*args)` in a program for a CPU, `elsewhere(*args)` in one for any other platform.

    Both are traced, and lowering keeps one: nothing of the choice is left in the compiled program,
    also of one that is compiled for a platform that is not there. The two differ by no more than
    rounding.
    """
    result: _Result = lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)
    return result
