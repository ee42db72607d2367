"""What is computed in another way on another platform.

Which way is taken is settled where a program is lowered for a platform, whether a device of it is
there or not: the others are traced, and never compiled.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jax import lax

Out = TypeVar("Out")


def for_platform(
    *args: Any,
    otherwise: Callable[..., Out],
    cpu: Callable[..., Out] | None = None,
    gpu: Callable[..., Out] | None = None,
    tpu: Callable[..., Out] | None = None,
) -> Out:
    """`cpu(*args)` in a program for CPUs, `gpu(*args)` in one for GPUs, `tpu(*args)` in one for
    TPUs, `otherwise(*args)` in one for a platform that has no function of its own."""
    named = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
    ways = {platform: way for platform, way in named.items() if way is not None}
    out: Out = lax.platform_dependent(*args, **ways, default=otherwise)
    return out
