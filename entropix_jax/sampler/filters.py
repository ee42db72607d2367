"""Logit processing: biases, bans, penalties, truncation and reweighing.

biases, bans -> `logits` filters -> noise floor -> temperature -> rule -> `reweigh` filters

With `base.temperature_last` the division by the temperature comes last.

A filter returns logits, with -inf for a token that it removes. No filter restores a removed token,
and a filter that would remove all tokens is skipped. A mechanism's filter is compiled once a row
uses it, and runs only in steps in which a row does.

Prefixes (the first tokens of an order) are found without sorting the vocabulary. Usually the first
`HEAD` tokens suffice. Otherwise bisection over the bits of the values finds the prefix's end. A
row's result depends only on the row.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.context import Context, Filter, if_any, if_needed, where
from entropix_jax.sampler.metrics import noise_floor
from entropix_jax.stats import sortable, sum_last, top

NUCLEUS = "nucleus"
HEAD = 64  # on a CPU, top_k(64) of 128,256 takes 0.2 ms and a full sort 26 ms


def penalise(logits: jax.Array, ctx: Context) -> jax.Array:
    """Returns one row's logits, float32 [V], with biases, bans, penalties and the noise floor."""
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
    token is left. Also returns the input of each `reweigh` filter, by its name."""
    proposal, settings = ctx.proposal, ctx.settings
    greedy, is_last = proposal.temperature <= 0, settings.base.temperature_last
    temperature = jnp.where(greedy, 1.0, proposal.temperature)

    def keep_argmax() -> jax.Array:
        token = jnp.arange(logits.shape[0], dtype=jnp.int32)
        # The first of the largest. On a CPU an argmax is not vectorised.
        tied = jnp.where(logits == jnp.max(logits), token, logits.shape[0])
        return jnp.where(token == jnp.min(tied), logits, -jnp.inf)

    left = if_any(greedy, keep_argmax, logits)
    # Relative to the maximum: at a low temperature the logits would overflow.
    left = (left - jnp.max(logits)) / jnp.where(is_last, 1.0, temperature)
    left = jnp.where(left == 0, 0.0, left)  # -0 and 0 are a tie
    left = nucleus(left, ctx)
    for index, mechanism in ctx.parts.having("rule"):
        if mechanism.name != NUCLEUS:
            acts = settings.rule == index
            left = _filtered(partial(_rule, mechanism.rule, acts), acts, left, ctx)
    left, given = _run("reweigh", left, ctx)

    def divide() -> jax.Array:
        return (left - jnp.max(left)) / temperature

    return if_any(is_last, divide, left), given


def nucleus(logits: jax.Array, ctx: Context) -> jax.Array:
    """Keeps `p >= min_p * p_max`, of these the `top_k` first, and of these the shortest prefix that
    reaches `top_p` of their mass. `logits` are 0 for the most likely token, which is always kept.
    Rows with another rule are unchanged."""
    proposal, vocab = ctx.proposal, logits.shape[0]
    acts = ctx.settings.rule == ctx.parts.action(NUCLEUS)
    has_k = acts & (proposal.top_k > 0) & (proposal.top_k < vocab)
    has_p = acts & (proposal.top_p < 1)
    least = jnp.minimum(jnp.log(jnp.where(acts, proposal.min_p, 0.0)), 0.0)
    logits = jnp.where(logits < least, -jnp.inf, logits)

    def cut() -> jax.Array:
        head = head_of(logits)
        number = jnp.where(has_k, proposal.top_k.astype(jnp.float32), jnp.inf)
        in_top_k = first_k(logits, head, number).holds(logits)
        mass = sum_last(jnp.where(in_top_k, jnp.exp(logits), 0.0))
        share = jnp.where(has_p, proposal.top_p * mass, jnp.inf)
        in_top_p = shortest(logits, head, jnp.exp, share, mass).holds(logits)
        return jnp.where(in_top_k & in_top_p, logits, -jnp.inf)

    return if_any(has_k | has_p, cut, logits)


def _run(kind: str, logits: jax.Array, ctx: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the logits after all filters of a kind that rows use, one after another, and those
    that each was given."""
    given = {}
    for _, mechanism in ctx.parts.having(kind):
        given[mechanism.name] = logits
        active = jnp.asarray(mechanism.active is None or mechanism.active(ctx.settings))
        logits = _filtered(getattr(mechanism, kind), active, logits, ctx)
    return logits, given


def _rule(rule: Filter, acts: jax.Array, logits: jax.Array, ctx: Context) -> jax.Array:
    """Applies a rule. A row that has another one looks certain: nothing is searched for it."""
    token = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return rule(jnp.where(acts, logits, jnp.where(token == 0, 0.0, -jnp.inf)), ctx)


def _filtered(filter_: Filter, active: jax.Array, logits: jax.Array, ctx: Context) -> jax.Array:
    """Applies a filter to one row's logits where it is active. A result without a possible token is
    ignored."""

    def change() -> jax.Array:
        changed = jnp.where(logits > -jnp.inf, filter_(logits, ctx), -jnp.inf)
        return jnp.where(jnp.any(changed > -jnp.inf), changed, logits)

    return if_any(active, change, logits)


@struct.dataclass
class Prefix:
    """The first tokens of one row's order, identified by the last of them."""

    value: jax.Array  # float32, its place in the order
    last: jax.Array  # int32, its id: those of the same value go by their ids

    def holds(self, order: jax.Array) -> jax.Array:
        """Returns which tokens of `order`, float32 [V], are inside: bool [V]."""
        token = jnp.arange(order.shape[0], dtype=jnp.int32)
        return (order > self.value) | ((order == self.value) & (token <= self.last))


def head_of(order: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values of an order's first tokens, and their ids: float32 and int32 [HEAD], fewer
    where the vocabulary is smaller."""
    return top(order, min(HEAD, order.shape[0]))


def shortest(
    order: jax.Array,
    head: tuple[jax.Array, jax.Array],
    weigh: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    total: jax.Array,
) -> Prefix:
    """Returns the shortest prefix of one row's tokens whose weights reach `target`.

    Args:
        order: float32 [V], the highest first, equal ones by id. Zeros have one sign.
        head: `head_of(order)`.
        weigh: returns tokens' weights, at least 0, from their values in the order: float32 [...].
        target: float32, above 0.
        total: float32, the sum of the weights. All tokens are inside if the target is not below it.
    """
    values, ids = head
    sums = cumulate(weigh(values))
    place = jnp.minimum(jnp.sum(sums < target, dtype=jnp.int32), ids.shape[0] - 1)
    found = Prefix(values[place], ids[place])
    whole = target >= total
    if ids.shape[0] < order.shape[0]:
        beyond = ~whole & (sums[-1] < target)
        found = if_needed(beyond, partial(_bisect, weigh), found, order, target)
    everything = Prefix(jnp.float32(-jnp.inf), jnp.int32(order.shape[0]))
    return where(whole, everything, found)


def first_k(order: jax.Array, head: tuple[jax.Array, jax.Array], k: jax.Array) -> Prefix:
    """Returns the first `k` tokens of one row's order, or all if no more than `k` are above -inf.

    `k` is float32, above 0; `order` and `head` are those of `shortest`.
    """

    def is_possible(order: jax.Array) -> jax.Array:
        return (order > -jnp.inf).astype(jnp.float32)

    return shortest(order, head, is_possible, k, sum_last(is_possible(order)))


def cumulate(mass: jax.Array) -> jax.Array:
    """Returns the running sums of `mass[..., n]`, n small: n sums are one kernel where a scan is
    dozens."""
    upto = jnp.tri(mass.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(upto, mass[..., None, :], jnp.float32(0.0)), axis=-1)


def _bisect(weigh: Callable[[jax.Array], jax.Array], order: jax.Array, target: jax.Array) -> Prefix:
    """Returns the prefix that `shortest` does, wherever it ends."""
    keys, weights = sortable(order), weigh(order)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at `low` the sum reaches the target, at `high` it does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the mean, without overflow
        reached = sum_last(jnp.where(keys >= middle, weights, 0.0)) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    # If rounding leaves the whole sum below the target, the last token with a weight is the end.
    lowest = jnp.min(jnp.where(weights > 0, keys, jnp.iinfo(jnp.int32).max))
    key, _ = lax.fori_loop(0, 32, halve, (lowest, jnp.max(keys) + 1))
    above = sum_last(jnp.where(keys > key, weights, 0.0))
    tied = keys == key
    rank = jnp.cumsum(tied, dtype=jnp.int32)
    needed = jnp.ceil((target - above) / jnp.max(jnp.where(tied, weights, 0.0)))
    needed = jnp.clip(needed.astype(jnp.int32), 1, rank[-1])
    last = jnp.argmax(rank >= needed).astype(jnp.int32)
    return Prefix(order[last], last)
