"""The dtypes of a run, chosen once per backend when a model is loaded."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from entropix_jax.errors import UserError

INT8 = "int8"
WEIGHTS = ("float32", "bfloat16", INT8)  # dtypes of weights in memory
ACTIVATIONS = ("float32", "bfloat16")  # dtypes of hidden states


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
    weights: str, backend: str | None = None, activations: str | None = None
) -> Precision:
    """Returns the precision for weights of a dtype on a backend (default: JAX's default backend).

    `activations` None is the backend's default. On a CPU that is float32: rows then have the same
    tokens alone and in a batch, and bfloat16 weights save memory bandwidth either way (`linear`).
    GPUs and TPUs compute in the dtype of the weights, or in bfloat16 for int8 weights, with float32
    accumulation. UserError if the activations are unknown.
    """
    if activations is not None and activations not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UserError(f"activations cannot be of type {activations!r}, only {known}")
    if activations is None:
        activations = "bfloat16" if weights == INT8 else weights
        if (backend or jax.default_backend()) == "cpu":
            activations = "float32"
    return Precision(weights=jnp.dtype(weights), activations=jnp.dtype(activations))
