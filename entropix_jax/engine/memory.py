"""Minimum memory per device, checked before anything is allocated.

A lower bound from the shapes: weights, cache, and the logits while a token is drawn. Asking XLA for
the rest (`memory_analysis`) would compile the largest programs before the first token.
"""

import gc
from dataclasses import dataclass

from jax.sharding import Mesh

from entropix_jax.errors import UserError
from entropix_jax.host.memory import as_size, free_share
from entropix_jax.model.cache import cache_dtype
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.mesh import DATA, MODEL, weights_bytes
from entropix_jax.model.precision import Precision

# Float32 arrays [rows, V] that a step holds: the logits, and what the sampler makes of them.
_LOGITS = 8


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device."""

    weights: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits

    def __str__(self) -> str:
        return ", ".join(f"{name} {as_size(number)}" for name, number in vars(self).items())


def plan_memory(
    config: ModelConfig, precision: Precision, *, slots: int, capacity: int, mesh: Mesh | None
) -> MemoryPlan:
    """Computes the minimum memory of `slots` rows with `capacity` cache positions each, per device
    of a mesh or on one device. UserError if the mesh cannot split the model."""
    data, model = (1, 1) if mesh is None else (mesh.shape[DATA], mesh.shape[MODEL])
    rows = -(-slots // data)
    heads = 2 * config.num_layers * config.num_kv_heads // model  # of keys and of values
    cache = rows * capacity * heads * config.head_dim * cache_dtype(precision.activations).itemsize
    logits = _LOGITS * rows * config.vocab_size * 4
    return MemoryPlan(weights_bytes(config, precision.weights, mesh), cache, logits)


def check_memory(
    config: ModelConfig, precision: Precision, *, slots: int, capacity: int, mesh: Mesh | None
) -> str:
    """Checks, before weights are loaded, that a batch can fit, and returns a line for the user.
    Otherwise raises UserError, which names the maximum number of slots."""
    plan = plan_memory(config, precision, slots=slots, capacity=capacity, mesh=mesh)
    free = free_share(mesh)
    share = "" if free is None else f" of {as_size(free)}"
    needs = f"at least {as_size(plan.total)}{share} ({plan})"
    if free is None or plan.total <= free:
        return f"memory of each device: {needs}"
    if fitting := _count_fitting(plan, slots, free, mesh):
        advice = f"at most {fitting} slots fit (--slots {fitting})"
    elif plan.weights <= free:
        advice = "not even one slot per device fits: lower --context"
    else:
        advice = "not even the weights fit"
    raise UserError(
        f"{slots} slots of {capacity} tokens do not fit into a device: {needs}; {advice}"
    )


def max_slots(model: LanguageModel, *, slots: int, capacity: int) -> int:
    """Returns how many slots, up to `slots`, fit next to loaded weights if a fifth of free memory
    is left for prompts: a multiple of the `data` devices; `slots` if free memory is unknown."""
    config, precision, mesh = model.config, model.precision, model.mesh
    plan = plan_memory(config, precision, slots=slots, capacity=capacity, mesh=mesh)
    free = free_share(mesh, plan.weights)
    if free is None:
        return slots
    return _count_fitting(plan, slots, plan.weights + free * 4 // 5, mesh)


def check_cache(model: LanguageModel, *, slots: int, capacity: int) -> None:
    """Raises UserError unless the cache and logits of rows fit next to loaded weights."""
    config, precision, mesh = model.config, model.precision, model.mesh
    plan = plan_memory(config, precision, slots=slots, capacity=capacity, mesh=mesh)
    needed, free = plan.cache + plan.logits, free_share(mesh, plan.weights)
    if free is not None and needed > free:
        gc.collect()  # an earlier run's cache may be part of a reference cycle
        free = free_share(mesh, plan.weights)
    if free is not None and needed > free:
        rows = "1 row" if slots == 1 else f"{slots} rows side by side"
        raise UserError(
            f"{rows} of {capacity} tokens would not fit into memory: cache {as_size(plan.cache)}, "
            f"logits {as_size(plan.logits)}: {as_size(needed)} of {as_size(free)}; use fewer "
            "rows, or fewer tokens per row"
        )


def _count_fitting(plan: MemoryPlan, slots: int, free: int, mesh: Mesh | None) -> int:
    """Returns the maximum number of slots that fit, a multiple of the `data` devices."""
    data = 1 if mesh is None else mesh.shape[DATA]
    each = (plan.cache + plan.logits) // -(-slots // data)  # of a slot, on its device
    return max(min((free - plan.weights) // each * data, slots // data * data), 0)
