"""What an arm sees of its row, and the proposal that it returns: a handful of scalars."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import SamplerSettings


@struct.dataclass
class Proposal:
    """How a row's next token is to be drawn; every field a scalar (or [B], for a batch)."""

    action: jax.Array  # int32, index into `SamplerSettings.mechanisms`
    temperature: jax.Array  # float32; 0: the most likely token
    top_k: jax.Array  # int32; 0: off
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32; 0: off
    draws: jax.Array  # int32, candidates
    rule: jax.Array  # int32, index into RULES; top_k, top_p and min_p belong to `nucleus`


@struct.dataclass
class RowView:
    """What an arm may know of its row besides the metrics."""

    may: dict[str, jax.Array]  # bool, by action: whether the row may do it now
    own: dict[str, Any]  # each mechanism's part of the row's state, by its name
    vocab_size: int = struct.field(pytree_node=False)


# One row's metrics, settings and view to a proposal, in JAX. The metrics are those of
# `[metrics]` in the sampler's file: normalised or raw, corrected or published.
Arm = Callable[[Metrics, SamplerSettings, RowView], Proposal]


def draw(
    action: str,
    settings: SamplerSettings,
    *,
    temperature: float | jax.Array | None = None,
    top_k: int | jax.Array | None = None,
    top_p: float | jax.Array | None = None,
    min_p: float | jax.Array | None = None,
    draws: int | jax.Array = 1,
) -> Proposal:
    """A proposal under the name of an action, with the base values for whatever is not given."""
    base = settings.base
    return Proposal(
        action=jnp.int32(settings.action(action)),
        temperature=jnp.maximum(base.temperature if temperature is None else temperature, 0.0),
        top_k=base.top_k if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=base.top_p if top_p is None else jnp.asarray(top_p, jnp.float32),
        min_p=base.min_p if min_p is None else jnp.asarray(min_p, jnp.float32),
        draws=jnp.asarray(draws, jnp.int32),
        rule=settings.truncation.rule,
    )


def either(condition: jax.Array, one: Proposal, other: Proposal) -> Proposal:
    """`one` where the condition, a bool, holds, else `other`."""
    chosen: Proposal = jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
    return chosen


def scaled_top_k(settings: SamplerSettings, top_k: jax.Array) -> jax.Array:
    """`top_k`, or 0 where the base top-k is: "off" has no width that could be scaled."""
    return jnp.where(settings.base.top_k == 0, 0, top_k)


def to_int(x: jax.Array) -> jax.Array:
    """A float32 as int32, clipped to 0 to 2^30."""
    return jnp.clip(x, 0.0, 2.0**30).astype(jnp.int32)
