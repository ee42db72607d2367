"""The dtypes of a run, chosen once per backend when a model is loaded."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from entropix_jax.errors import UserError

AUTO = "auto"
INT8 = "int8"
WEIGHTS = ("float32", "bfloat16", INT8)  # dtypes of weights in memory
ACTIVATIONS = (AUTO, "float32", "bfloat16")  # values of --precision


@dataclass(frozen=True)
class Precision:
    """Dtypes of the matrices in memory, and of hidden states and key/value cache (see
    `cache_dtype`). Norms, softmax, logits and metrics are always float32."""

    weights: jnp.dtype
    activations: jnp.dtype

    def to_json(self) -> dict[str, str]:
        """The dtypes by name."""
        return {"weights": str(self.weights), "activations": str(self.activations)}


def choose_precision(
    weights: str, backend: str | None = None, activations: str = AUTO
) -> Precision:
    """Returns the precision for weights of a dtype on a backend (default: JAX's default backend).

    Hidden states of "auto" have the dtype of the weights, or bfloat16 for int8 weights, with
    float32 accumulation. A CPU without bfloat16 products computes in float32, and so does every CPU
    with int8 weights, for which bfloat16 would not be faster (`linear`). UserError for unknown
    activations.
    """
    if activations not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"precision must be one of {known}, not {activations!r}")
    if activations == AUTO:
        activations = "bfloat16" if weights == INT8 else weights
        if (backend or jax.default_backend()) == "cpu":
            is_fast = weights == "bfloat16" and multiplies_bfloat16()
            activations = "bfloat16" if is_fast else "float32"
    return Precision(weights=jnp.dtype(weights), activations=jnp.dtype(activations))


@cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 dot products; without them XLA widens both factors on
    every use. Only x86 is detected."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in known
