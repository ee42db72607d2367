"""What an arm sees of its row, and the proposal that it returns: a handful of scalars."""

from collections.abc import Callable
from dataclasses import replace
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
    rule: jax.Array  # int32, index into the mechanisms; top_k, top_p and min_p are for `nucleus`


@struct.dataclass
class RowView:
    """What a mechanism may know of its row besides the metrics."""

    may: dict[str, jax.Array]  # bool, by action: whether the row may do it now
    own: dict[str, Any]  # each mechanism's part of the row's state, by its name
    thresholds: jax.Array  # float32 [4], h1, h2 (bits), u1, u2 (bits^2) as they are now
    history: jax.Array  # int32 [S], the tokens so far, prompt included, then anything
    length: jax.Array  # int32, how many so far
    generated: jax.Array  # int32, how many of them were generated
    key: jax.Array  # uint32 [2], see `sampler.keys`
    attempt: jax.Array  # int32, how many tokens were retracted at the next position
    branch: jax.Array  # int32, which branch of a fork the row is; -1: none
    vocab_size: int = struct.field(pytree_node=False)


def as_seen(metrics: Metrics, settings: SamplerSettings) -> Metrics:
    """What mechanisms see of one row's metrics: `attn_entropy_norm` and `agreement_published` under
    the plain names where the settings say so."""
    return replace(
        metrics,
        attn_entropy=jnp.where(
            settings.attn_entropy_normalised, metrics.attn_entropy_norm, metrics.attn_entropy
        ),
        agreement=jnp.where(
            settings.agreement_published, metrics.agreement_published, metrics.agreement
        ),
    )


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
        rule=settings.rule,
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
