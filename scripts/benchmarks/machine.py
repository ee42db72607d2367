"""What the machine itself reaches: the bounds that every figure is held against."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import seconds_of

_BYTES = 1 << 30
_WIDTH = 2048


def describe() -> dict[str, Any]:
    """Device, cores and versions."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def read_bandwidth() -> float:
    """Bytes a second that a product of a 1 GiB float32 matrix and a vector reads: the best of 9."""
    matrix = jnp.ones((_BYTES // (4 * _WIDTH), _WIDTH), jnp.float32)
    vector = jnp.ones(_WIDTH, jnp.float32)
    multiply = jax.jit(jnp.dot)
    seconds = [seconds_of(lambda: multiply(matrix, vector)) for _ in range(10)]
    return _BYTES / min(seconds[1:])


def copy_bandwidth() -> float:
    """Bytes a second, those read and those written, of adding 1 to 1 GiB: the best of 9."""
    array = jnp.ones(_BYTES // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    seconds = [seconds_of(lambda: add(array)) for _ in range(10)]
    return 2 * _BYTES / min(seconds[1:])


def matrix_rate(dtype: str) -> float:
    """Floating-point operations a second of a product of 2048 rows with an 8192 x 2048 matrix: the
    best of 5."""
    rows, matrix = jnp.ones((2048, _WIDTH), dtype), jnp.ones((8192, _WIDTH), dtype)
    multiply = jax.jit(lambda x, w: jnp.dot(x, w.T))
    seconds = [seconds_of(lambda: multiply(rows, matrix)) for _ in range(6)]
    return 2 * rows.size * 8192 / min(seconds[1:])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "CPU"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"
