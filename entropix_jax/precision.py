"""Which number types a run computes in: one choice per backend, made once when a model is
loaded."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

INT8 = "int8"
WEIGHTS = ("float32", "bfloat16", INT8)  # the types that weights may take in memory


@dataclass(frozen=True)
class Precision:
    """Static. `weights` is how matrices lie in memory; `activations` is the type of the hidden
    state and of the key/value cache. Norms, softmax, logits and metrics are float32 whatever stands
    here.
    """

    weights: jnp.dtype
    activations: jnp.dtype

    def to_json(self) -> dict[str, str]:
        """The types by name."""
        return {"weights": str(self.weights), "activations": str(self.activations)}


def choose_precision(weights: str, backend: str | None = None) -> Precision:
    """The precision for weights of the named type on a backend (default: JAX's default backend).

    A CPU's activations are float32: with bfloat16 ones products are rounded more, and those of a
    single vector are twenty times slower in XLA, while bfloat16 weights cost half the bytes with
    float32 activations, too (see `linear`). GPUs and TPUs compute in the weights' own type, or in
    bfloat16 where weights have 8 bits, with float32 accumulation.
    """
    weights_dtype = jnp.dtype(weights)
    backend = backend or jax.default_backend()
    if backend == "cpu":
        activations = jnp.dtype(jnp.float32)
    else:
        activations = jnp.dtype(jnp.bfloat16) if weights == INT8 else weights_dtype
    return Precision(weights=weights_dtype, activations=activations)
