"""Platform-specific dispatch.

The branch is chosen when a program is lowered for a platform. A process whose default device is a
CPU traces only the CPU's branch, which saves a third of a second. It lowers for another platform
`with traced_for_all(True)`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

Out = TypeVar("Out")

traced_for_all = jax.make_user_context(False)


def for_platform(
    *args: Any,
    otherwise: Callable[..., Out],
    cpu: Callable[..., Out] | None = None,
    tpu: Callable[..., Out] | None = None,
) -> Out:
    """Returns `cpu(*args)` in a program for CPUs, `tpu(*args)` in one for TPUs, and
    `otherwise(*args)` in one for a platform without a function of its own."""
    if traces_cpu_alone():
        return (cpu or otherwise)(*args)
    ways = {name: way for name, way in (("cpu", cpu), ("tpu", tpu)) if way is not None}
    out: Out = lax.platform_dependent(*args, **ways, default=otherwise)
    return out


def on_cpu() -> bool:
    """Whether the default device is a CPU."""
    return jax.default_backend() == "cpu"


def traces_cpu_alone() -> bool:
    """Whether programs are traced for a CPU and no other platform."""
    return on_cpu() and not traced_for_all.value
