"""`view`: entropy and varentropy of another distribution than the model's own.

Published methods measure the distribution at their temperature, or only the most likely tokens of
it. The regimes and arms of a sampler with a view see that entropy and varentropy, in bits and
bits^2. A trace records those of the model's own distribution.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.sampler.context import Context, if_any
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import MAX_LIKELIEST, SamplerSettings, number
from entropix_jax.stats import entropy_and_varentropy, top


@struct.dataclass
class ViewSettings:
    """The measured distribution: softmax(logits / temperature) over the top `likeliest` tokens,
    renormalised. 0 means the whole vocabulary."""

    temperature: jax.Array = number(0.01, 100.0, default=1.0)
    likeliest: jax.Array = number(0, MAX_LIKELIEST, integer=True, default=0)


def observe(ctx: Context) -> Metrics:
    """Returns the metrics with the entropy and varentropy of the view."""
    own: ViewSettings = ctx.settings.own["view"]

    def few() -> tuple[jax.Array, jax.Array]:
        most, _ = top(ctx.logits, min(MAX_LIKELIEST, ctx.logits.shape[0]))
        counts = jnp.arange(most.shape[0], dtype=jnp.int32) < own.likeliest
        return _measure(jnp.where(counts, most, -jnp.inf) / own.temperature)

    seen = ctx.metrics.entropy, ctx.metrics.varentropy
    seen = if_any(own.temperature != 1.0, lambda: _measure(ctx.logits / own.temperature), seen)
    entropy, varentropy = if_any(own.likeliest > 0, few, seen)
    return replace(ctx.metrics, entropy=entropy, varentropy=varentropy)


def _measure(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return entropy_and_varentropy(jax.nn.log_softmax(logits))


def is_active(settings: SamplerSettings) -> bool:
    """Returns whether entropy and varentropy are replaced."""
    own: ViewSettings = settings.own["view"]
    return bool((own.temperature != 1.0) | (own.likeliest > 0))


VIEW = Mechanism("view", observe=observe, settings=ViewSettings, active=is_active)
