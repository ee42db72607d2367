"""Random weights."""

import jax
import jax.numpy as jnp

from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params, ParamSpec, param_specs


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random weights: norms one, biases zero, matrices normal with standard deviation 0.02."""
    specs, tree = jax.tree.flatten(param_specs(config))

    def init(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.full(spec.shape, not spec.name.endswith(".bias"), dtype)
        return jnp.asarray(0.02 * jax.random.normal(key, spec.shape, jnp.float32), dtype)

    return jax.tree.unflatten(tree, map(init, specs, jax.random.split(key, len(specs))))  # type: ignore[no-any-return]
