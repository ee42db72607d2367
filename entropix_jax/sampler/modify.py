"""What is done to the logits before anything is drawn from them."""

import jax
import jax.numpy as jnp
from jax import lax

from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows


def modify(
    logits: jax.Array, floored: jax.Array, settings: SamplerSettings, rows: Rows, bans: jax.Array
) -> jax.Array:
    """The logits that are drawn from: repetition penalty, bans, noise floor.

    `floored` is float32 [B, V], -inf below the noise floor; `bans` int32 [B, n], those of a row's
    position beside the sampler's own, -1 for none.
    """
    batch, vocab = logits.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def penalise() -> jax.Array:
        position = jnp.arange(rows.history.shape[1], dtype=jnp.int32)[None, :]
        tokens = jnp.where(position < rows.length[:, None], rows.history, vocab)
        seen = jnp.zeros((batch, vocab), bool).at[row, tokens].set(True, mode="drop")
        penalty = settings.repetition.penalty[:, None]
        return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)

    logits = lax.cond(jnp.any(settings.repetition.penalty != 1.0), penalise, lambda: logits)
    bans = jnp.concatenate([settings.bans, bans], axis=1)
    logits = logits.at[row, jnp.where(bans < 0, vocab, bans)].set(-jnp.inf, mode="drop")
    above = jnp.where(floored > -jnp.inf, logits, -jnp.inf)
    # If the bans remove everything above the noise floor, the draw is from what is below it.
    return jnp.where(jnp.any(above > -jnp.inf, axis=-1, keepdims=True), above, logits)
