"""Logit processing before and after truncation."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entropix_jax.sampler.draw import truncated_draw
from entropix_jax.sampler.mechanism import Transform
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.settings import BIAS, LAST, SamplerSettings
from entropix_jax.sampler.truncation import Cut, check_made, everything, truncate


def modify(
    logits: jax.Array,
    floored: jax.Array,
    metrics: Metrics,
    settings: SamplerSettings,
    views: RowView,
    bans: jax.Array,
) -> jax.Array:
    """The logits that are truncated and drawn from: biases, bans, penalties and the like, noise
    floor.

    `floored` is float32 [B, V], -inf below the noise floor; `bans` int32 [B, n], those of a row's
    position beside the sampler's own, -1 for none; `metrics` are `as_seen`.
    """
    batch, vocab = logits.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    biased = jnp.where(settings.biased < 0, vocab, settings.biased)
    logits = logits.at[row, biased].add(settings.biases, mode="drop")
    bans = jnp.concatenate([settings.bans, bans], axis=1)
    logits = logits.at[row, jnp.where(bans < 0, vocab, bans)].set(-jnp.inf, mode="drop")
    logits, _ = _apply("logits", logits, metrics, settings, views)
    above = jnp.where(floored > -jnp.inf, logits, -jnp.inf)
    # If the bans remove everything above the noise floor, the draw is from what is below it.
    remains = jnp.any(above > -jnp.inf, axis=-1, keepdims=True)
    # The floor is of the model's logits. A token that the user raises may be drawn for that reason,
    # whatever the model says of it: it stays, with its modified logit.
    raised = jnp.where(settings.biases > 0, biased, vocab)
    own = logits.at[row, raised].get(mode="fill", fill_value=-jnp.inf)
    above = above.at[row, raised].set(own, mode="drop")
    return jnp.where(remains, above, logits)


def holds_banned(settings: SamplerSettings, text: jax.Array) -> jax.Array:
    """Returns whether each row's text, int32 [B, n] padded with -1, holds a token that is never
    drawn: bool [B]. A bias of -100 bans, as in the API."""
    biased_out = jnp.where(settings.biases <= BIAS[0], settings.biased, -1)
    never = jnp.concatenate([settings.bans, biased_out], axis=1)
    same = (text[:, :, None] == never[:, None, :]) & (text >= 0)[:, :, None]
    return jnp.any(same, axis=(1, 2))


def never_drawn(settings: SamplerSettings) -> set[int]:
    """Returns the ids that one row never draws: bans, and biases of -100. Runs on the host."""
    biased_out = np.asarray(settings.biased)[np.asarray(settings.biases) <= BIAS[0]]
    return {*np.asarray(settings.bans).tolist(), *biased_out.tolist()} - {-1}


def cut_and_reweigh(
    logits: jax.Array,
    proposal: Proposal,
    metrics: Metrics,
    settings: SamplerSettings,
    views: RowView,
) -> tuple[Cut, jax.Array, dict[str, jax.Array]]:
    """What each row may draw, the logits, [B, V], that it is drawn from, and those that each
    transform on the way was given; see `truncate`.

    Where a row uses a transform of what its rule leaves, or the temperature comes last, that is
    found first, and then drawn from as it is.
    """
    reweighs = any(m.reweigh and m.name in settings.used for m in settings.mechanisms)
    if not reweighs and LAST not in settings.used:
        return truncate(logits, proposal, metrics, settings, views), logits, {}

    hot = proposal.temperature > 0
    waits = hot & settings.base.temperature_last
    early = replace(proposal, temperature=jnp.where(waits, 1.0, proposal.temperature))
    cut = truncate(logits, early, metrics, settings, views)
    none = jnp.zeros((logits.shape[0], 1), jnp.float32)
    last = truncated_draw(cut, logits, none).last
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    bound = jnp.take_along_axis(cut.order, last[:, None], axis=1)
    left = (cut.order > bound) | ((cut.order == bound) & (ids <= last[:, None]))
    # From the likeliest down, as the draw itself: at a low temperature the logits would overflow.
    left_logits = jnp.where(left, logits, -jnp.inf)
    gaps = left_logits - jnp.max(left_logits, axis=-1, keepdims=True)
    scores = gaps / cut.temperature[:, None]
    scores, given = _apply("reweigh", scores, metrics, settings, views)
    peak = jnp.where(waits[:, None], jnp.max(scores, axis=-1, keepdims=True), 0.0)
    scores = (scores - peak) / jnp.where(waits, proposal.temperature, 1.0)[:, None]
    return everything(scores), scores, given


def _apply(
    kind: str, logits: jax.Array, metrics: Metrics, settings: SamplerSettings, views: RowView
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The logits after all transforms of a kind that the rows use, one after another, and those
    that each was given. None brings back a token, and one that would leave no token does nothing.
    """
    given = {}
    for mechanism in settings.mechanisms:
        transform: Transform | None = getattr(mechanism, kind)
        if transform is None or mechanism.name not in settings.used:
            continue
        given[mechanism.name] = logits
        active = jnp.ones(logits.shape[0], bool)
        if mechanism.active is not None:
            active = mechanism.active(settings)

        def change(logits: jax.Array, active: jax.Array, of_row: Transform) -> jax.Array:
            changed = jax.vmap(of_row)(logits, metrics, settings, views)
            changed = jnp.where(logits > -jnp.inf, changed, -jnp.inf)
            leaves = active & jnp.any(changed > -jnp.inf, axis=-1)
            return jnp.where(leaves[:, None], changed, logits)

        of_row = _checked(transform, f"mechanism '{mechanism.name}': `{kind}`")
        change_all = partial(change, active=active, of_row=of_row)
        logits = lax.cond(jnp.any(active), change_all, lambda logits: logits, logits)
    return logits, given


def _checked(transform: Transform, what: str) -> Transform:
    """The transform, which a user may have written, with a check of what it makes."""

    def checked(logits: jax.Array, *rest: Any) -> jax.Array:
        changed = transform(logits, *rest)
        check_made(changed, logits, what)
        return changed

    return checked
