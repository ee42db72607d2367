"""Logit processing: biases, bans, penalties, truncation and reweighing.

biases, bans -> `logits` filters -> noise floor -> temperature -> rule -> `reweigh` filters

With `base.temperature_last` the division by the temperature comes last.

A filter returns logits, with -inf for a token that it rules out. None brings a token back, and one
that would leave no token changes nothing. A mechanism's filter is compiled if a row uses it, and
computed in steps in which one does.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entropix_jax.errors import UserError
from entropix_jax.sampler.context import Context, Filter, any_row
from entropix_jax.sampler.metrics import noise_floor
from entropix_jax.sampler.prefix import head_of, shortest
from entropix_jax.sampler.settings import BIAS, SamplerSettings
from entropix_jax.stats import sum_last

NUCLEUS = "nucleus"


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Returns one row's logits, float32 [V], with biases, bans, penalties and the noise floor."""
    settings, vocab = ctx.settings, logits.shape[0]
    biased = jnp.where(settings.biased < 0, vocab, settings.biased)
    logits = logits.at[biased].add(settings.biases, mode="drop")
    bans = jnp.concatenate([settings.bans, ctx.bans])
    logits = logits.at[jnp.where(bans < 0, vocab, bans)].set(-jnp.inf, mode="drop")
    logits, _ = _run("logits", logits, ctx)

    has_floor = settings.noise_epsilon > 0

    def above_floor(logits: jax.Array) -> jax.Array:
        floor = noise_floor(settings.noise_epsilon, vocab)
        above = jnp.where(ctx.log_probs >= floor, logits, -jnp.inf)
        # Where bans remove everything above the floor, the draw is from what is below it.
        remains = has_floor & jnp.any(above > -jnp.inf)
        # The floor is of the model's logits. A token that the user raises may be drawn for that
        # reason, whatever the model says of it: it stays, with its modified logit.
        raised = jnp.where(settings.biases > 0, biased, vocab)
        own = logits.at[raised].get(mode="fill", fill_value=-jnp.inf)
        return jnp.where(remains, above.at[raised].set(own, mode="drop"), logits)

    floored: jax.Array = lax.cond(any_row(has_floor), above_floor, lambda logits: logits, logits)
    return floored


def truncate(logits: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the logits that one row draws from, `softmax` of which are the probabilities: divided
    by the temperature, and truncated by the row's rule. At temperature 0 only the most likely
    token is left. Also returns the input of each `reweigh` filter, by its name."""
    proposal, settings = ctx.proposal, ctx.settings
    greedy, is_last = proposal.temperature <= 0, settings.base.temperature_last
    temperature = jnp.where(greedy, 1.0, proposal.temperature)

    def keep_argmax() -> jax.Array:
        token = jnp.arange(logits.shape[0], dtype=jnp.int32)
        return jnp.where(greedy & (token != jnp.argmax(logits)), -jnp.inf, logits)

    left = lax.cond(any_row(greedy), keep_argmax, lambda: logits)
    # Relative to the maximum: at a low temperature the logits would overflow.
    left = (left - jnp.max(logits)) / jnp.where(is_last, 1.0, temperature)
    left = jnp.where(left == 0, 0.0, left)  # -0 and 0 are a tie
    left = nucleus(left, ctx)
    for index, mechanism in enumerate(settings.mechanisms):
        if mechanism.rule not in (None, nucleus) and mechanism.name in settings.used:
            what, acts = f"mechanism '{mechanism.name}': `rule`", proposal.rule == index
            left = _filtered(partial(_rule, mechanism.rule, acts), what, acts, left, ctx)
    left, given = _run("reweigh", left, ctx)

    def divide() -> jax.Array:
        return (left - jnp.max(left)) / jnp.where(is_last, temperature, 1.0)

    return lax.cond(any_row(is_last), divide, lambda: left), given


def nucleus(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps `p >= min_p * p_max`, of these the `top_k` first, and of these the shortest prefix
    that reaches `top_p` of their mass. `logits` are 0 for the most likely token, which is always
    kept. Rows that have another rule are left as they are."""
    proposal, vocab = ctx.proposal, logits.shape[0]
    acts = proposal.rule == ctx.settings.action(NUCLEUS)
    has_k = acts & (proposal.top_k > 0) & (proposal.top_k < vocab)
    has_p = acts & (proposal.top_p < 1)
    least = jnp.minimum(jnp.log(jnp.where(acts, proposal.min_p, 0.0)), 0.0)
    logits = jnp.where(logits < least, -jnp.inf, logits)

    def cut(logits: jax.Array) -> jax.Array:
        head = head_of(logits)
        number = jnp.where(has_k, proposal.top_k.astype(jnp.float32), jnp.inf)
        possible = sum_last(_is_possible(logits))
        in_top_k = shortest(logits, head, _is_possible, number, possible).holds(logits)
        mass = sum_last(jnp.where(in_top_k, jnp.exp(logits), 0.0))
        share = jnp.where(has_p, proposal.top_p * mass, jnp.inf)
        in_top_p = shortest(logits, head, jnp.exp, share, mass).holds(logits)
        return jnp.where(in_top_k & in_top_p, logits, -jnp.inf)

    cut_off: jax.Array = lax.cond(any_row(has_k | has_p), cut, lambda logits: logits, logits)
    return cut_off


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Returns one row's logits with all but the `k` highest, at least one, at -inf."""
    number = jnp.maximum(k, 1).astype(jnp.float32)
    possible = sum_last(_is_possible(logits))
    first = shortest(logits, head_of(logits), _is_possible, number, possible)
    return jnp.where(first.holds(logits), logits, -jnp.inf)


def _is_possible(logits: jax.Array) -> jax.Array:
    """Returns 1 for a token that is possible, else 0: float32."""
    return (logits > -jnp.inf).astype(jnp.float32)


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


def _run(kind: str, logits: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the logits after all filters of a kind that rows use, one after another, and those
    that each was given."""
    given, settings = {}, ctx.settings
    for mechanism in settings.mechanisms:
        filter_: Filter | None = getattr(mechanism, kind)
        if filter_ is None or mechanism.name not in settings.used:
            continue
        given[mechanism.name] = logits
        active = jnp.asarray(mechanism.active is None or mechanism.active(settings))
        what = f"mechanism '{mechanism.name}': `{kind}`"
        logits = _filtered(filter_, what, active, logits, ctx)
    return logits, given


def _rule(rule: Filter, acts: jax.Array, logits: jax.Array, ctx: Context) -> jax.Array:
    """Applies a rule. A row that has another one looks certain: nothing is searched for it."""
    token = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return rule(jnp.where(acts, logits, jnp.where(token == 0, 0.0, -jnp.inf)), ctx)


def _filtered(
    filter_: Filter, what: str, active: jax.Array, logits: jax.Array, ctx: Context
) -> jax.Array:
    """Applies a filter to one row's logits where it is active. A result without a possible token is
    ignored."""

    def change(logits: jax.Array) -> jax.Array:
        changed = filter_(logits, ctx)
        _check(changed, logits, what)
        changed = jnp.where(logits > -jnp.inf, changed, -jnp.inf)
        leaves = active & jnp.any(changed > -jnp.inf)
        return jnp.where(leaves, changed, logits)

    filtered: jax.Array = lax.cond(any_row(active), change, lambda logits: logits, logits)
    return filtered


def _check(made: Any, like: jax.Array, what: str) -> None:
    """Raises a UserError if what a user's function made is not an array of that shape and type."""
    try:
        made = jnp.asarray(made)
    except (TypeError, ValueError):
        raise UserError(f"{what} must return an array, not {type(made).__name__}") from None
    if (made.shape, made.dtype) != (like.shape, like.dtype):
        raise UserError(
            f"{what} must return {like.dtype} {list(like.shape)}, not {made.dtype} "
            f"{list(made.shape)} (of one row)"
        )
