"""Logit processing: biases, bans, penalties, truncation and reweighing.

biases, bans -> `logits` filters -> noise floor -> temperature -> rule -> `reweigh` filters

With `base.temperature_last` the division by the temperature comes last.

A filter returns logits, with -inf for a token that it removes. No filter restores a removed token,
and a filter that would remove all tokens is skipped. A mechanism's filter is compiled once a row
uses it, and runs only in steps in which a row does. A row's result depends only on the row.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp

from entropix_jax.sampler.context import Context, Filter, if_any
from entropix_jax.sampler.metrics import noise_floor
from entropix_jax.sampler.prefix import first_k, head_of, shortest
from entropix_jax.stats import sum_last

NUCLEUS = "nucleus"


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Returns one row's logits, float32 [V], with biases, bans, penalties and the noise floor."""
    chex.assert_equal_shape((logits, ctx.log_probs))
    settings, vocab = ctx.settings, logits.shape[0]
    biased = jnp.where(settings.biased < 0, vocab, settings.biased)
    logits = logits.at[biased].add(settings.biases, mode="drop")
    bans = jnp.concatenate([settings.bans, ctx.bans])
    logits = logits.at[jnp.where(bans < 0, vocab, bans)].set(-jnp.inf, mode="drop")
    logits, _ = _run("logits", logits, ctx)

    def above_floor() -> jax.Array:
        floor = noise_floor(settings.noise_epsilon, vocab)
        above = jnp.where(ctx.log_probs >= floor, logits, -jnp.inf)
        # Where bans remove everything above the floor, the draw is from what is below it.
        remains = jnp.any(above > -jnp.inf)
        # The floor is of the model's logits. A token that the user raises may be drawn for that
        # reason, whatever the model says of it: it stays, with its modified logit.
        raised = jnp.where(settings.biases > 0, biased, vocab)
        kept = logits.at[raised].get(mode="fill", fill_value=-jnp.inf)
        return jnp.where(remains, above.at[raised].set(kept, mode="drop"), logits)

    return if_any(settings.noise_epsilon > 0, above_floor, logits)


def truncate(logits: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the logits that one row draws from, `softmax` of which are the probabilities: divided
    by the temperature, and truncated by the row's rule. At temperature 0 only the most likely
    token remains. Also returns the input of each `reweigh` filter, by its name."""
    chex.assert_equal_shape((logits, ctx.log_probs))
    proposal, settings = ctx.proposal, ctx.settings
    greedy, is_last = proposal.temperature <= 0, settings.base.temperature_last
    temperature = jnp.where(greedy, 1.0, proposal.temperature)

    def keep_argmax() -> jax.Array:
        token = jnp.arange(logits.shape[0], dtype=jnp.int32)
        # The first of the largest. On a CPU an argmax is not vectorised.
        tied = jnp.where(logits == jnp.max(logits), token, logits.shape[0])
        return jnp.where(token == jnp.min(tied), logits, -jnp.inf)

    kept = if_any(greedy, keep_argmax, logits)
    # Relative to the maximum: at a low temperature the logits would overflow.
    kept = (kept - jnp.max(logits)) / jnp.where(is_last, 1.0, temperature)
    kept = jnp.where(kept == 0, 0.0, kept)  # -0 and 0 are a tie
    kept = nucleus(kept, ctx)
    for index, mechanism in ctx.parts.having("rule"):
        if mechanism.name != NUCLEUS:
            acts = settings.rule == index
            kept = _filtered(partial(_rule, mechanism.rule, acts), acts, kept, ctx)
    kept, inputs = _run("reweigh", kept, ctx)

    def divide() -> jax.Array:
        return (kept - jnp.max(kept)) / temperature

    return if_any(is_last, divide, kept), inputs


def nucleus(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps `p >= min_p * p_max`, of these the `top_k` first, and of these the shortest prefix that
    reaches `top_p` of their mass. `logits` are 0 for the most likely token, which is always kept.
    Rows with another rule are unchanged."""
    chex.assert_rank(logits, 1)
    proposal, vocab = ctx.proposal, logits.shape[0]
    acts = ctx.settings.rule == ctx.parts.action(NUCLEUS)
    has_k = acts & (proposal.top_k > 0) & (proposal.top_k < vocab)
    has_p = acts & (proposal.top_p < 1)
    least = jnp.minimum(jnp.log(jnp.where(acts, proposal.min_p, 0.0)), 0.0)
    logits = jnp.where(logits < least, -jnp.inf, logits)

    def cut() -> jax.Array:
        head = head_of(logits)
        k = jnp.where(has_k, proposal.top_k.astype(jnp.float32), jnp.inf)
        in_top_k = first_k(logits, head, k).holds(logits)
        mass = sum_last(jnp.where(in_top_k, jnp.exp(logits), 0.0))
        share = jnp.where(has_p, proposal.top_p * mass, jnp.inf)
        in_top_p = shortest(logits, head, jnp.exp, share, mass).holds(logits)
        return jnp.where(in_top_k & in_top_p, logits, -jnp.inf)

    return if_any(has_k | has_p, cut, logits)


def _run(kind: str, logits: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Applies the filters of one kind that rows use, in order. Returns the logits, and the input of
    each filter."""
    inputs = {}
    for _, mechanism in ctx.parts.having(kind):
        inputs[mechanism.name] = logits
        active = jnp.asarray(mechanism.active is None or mechanism.active(ctx.settings))
        logits = _filtered(getattr(mechanism, kind), active, logits, ctx)
    return logits, inputs


def _rule(rule: Filter, acts: jax.Array, logits: jax.Array, ctx: Context) -> jax.Array:
    """Applies a rule. Rows with another rule get a one-hot input, which needs no search."""
    token = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return rule(jnp.where(acts, logits, jnp.where(token == 0, 0.0, -jnp.inf)), ctx)


def _filtered(filter_: Filter, active: jax.Array, logits: jax.Array, ctx: Context) -> jax.Array:
    """Applies a filter to one row's logits where it is active. A result without a possible token is
    ignored."""

    def change() -> jax.Array:
        changed = jnp.where(logits > -jnp.inf, filter_(logits, ctx), -jnp.inf)
        return jnp.where(jnp.any(changed > -jnp.inf), changed, logits)

    return if_any(active, change, logits)
