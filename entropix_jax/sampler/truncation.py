"""Which tokens a draw may take: the nucleus of every proposal, and rules that stand in for it.

A rule orders a row's tokens and says how far down that order the draw may go; `sampler.draw` itself
knows no rule. Those of `mechanisms.rules` and of a user's own are compiled where a row has them.
Every quantity is one of the distribution that is drawn from, `p = softmax(logits / temperature)`
over the tokens that are possible at all, and each row is computed alone, whatever the rules of the
rows beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.errors import UserError
from entropix_jax.platforms import for_platform
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Tree, where_rows

NUCLEUS = "nucleus"
# Logits this far below the first are as good as infinitely far, and the sum of a vocabulary of
# their squares is still a float32.
FARTHEST = 1e15
# The axis over which rules are mapped. On a device it has all rows.
ROWS = "rows"


@struct.dataclass
class Cut:
    """What one row may draw, as a prefix of an order: from the top down, min-p first, then top-k,
    then top-p over what is left. With a leading axis on every field, what each row may draw."""

    order: jax.Array  # float32 [V], descending, ties by the lower id; -inf: never drawn
    temperature: jax.Array  # float32, above 0
    top_k: jax.Array  # int32, in [1, V]
    top_p: jax.Array  # float32; 1: off
    min_p: jax.Array  # float32, next to the likeliest; 0: off. Only where that one is the first


def truncate(
    logits: jax.Array,
    proposal: Proposal,
    metrics: Metrics,
    settings: SamplerSettings,
    views: RowView,
) -> Cut:
    """What each row may draw by its own rule, `proposal.rule`. The likeliest token alone where the
    temperature is 0, under any rule.

    Args:
        logits: float32 [B, V]; -inf is a token that is never drawn; at least one is finite.
        proposal, metrics, settings, views: leaves [B, ...].

    Returns:
        Fields [B], `order` [B, V].
    """
    nucleus_rule, greedy = settings.action(NUCLEUS), proposal.temperature <= 0
    proposal = replace(
        proposal,
        temperature=jnp.where(greedy, 1.0, proposal.temperature),
        top_k=jnp.where(greedy, 1, proposal.top_k),
        rule=jnp.where(greedy, nucleus_rule, proposal.rule),
    )
    rows = (logits, proposal, metrics, settings, views)
    rules = [(i, m.cut) for i, m in enumerate(settings.mechanisms) if m.name in settings.used]
    cuts = {nucleus_rule: nucleus, **{i: cut for i, cut in rules if cut is not None}}
    if len(cuts) == 1:
        return jax.vmap(nucleus)(*rows)

    # The nucleus leaves its passes over the vocabulary to the draw. What the others cost is paid
    # where rows have them.
    which = jnp.argmax(proposal.rule[:, None] == jnp.array([[*cuts]]), axis=-1)

    def by_rules(which: jax.Array, *rows: Any) -> Cut:
        cut: Cut = jax.vmap(nucleus)(*rows)
        for number, rule in enumerate([*cuts.values()][1:], 1):
            has = which == number

            def ruled(has: jax.Array = has, cut: Cut = cut, rule: Any = rule) -> Cut:
                own: Cut = jax.vmap(rule, axis_name=ROWS)(*rows)
                return where_rows(has, own, cut)

            cut = lax.cond(jnp.any(has), ruled, lambda cut=cut: cut)
        return cut

    def one_by_one(which: jax.Array, *rows: Any) -> Cut:
        # Mapped, a switch stays a switch.
        ways = [jax.vmap(cut, axis_name=ROWS) for cut in cuts.values()]
        cut: Cut = lax.cond(
            jnp.all(which == 0),
            lambda: jax.vmap(nucleus)(*rows),
            lambda: row_by_row(lambda which, *row: lax.switch(which[0], ways, *row), which, *rows),
        )
        return cut

    return for_platform(which, *rows, cpu=one_by_one, otherwise=by_rules)


def row_by_row(work: Callable[..., Tree], *rows: Any) -> Tree:
    """What `work` makes of all rows, which are given to it one after another: as batches of one."""

    def one(row: Any) -> Tree:
        alone = work(*jax.tree.map(lambda x: x[None], row))
        made: Tree = jax.tree.map(lambda x: x[0], alone)
        return made

    made: Tree = lax.map(one, rows)
    return made


def nucleus(
    logits: jax.Array, proposal: Proposal, metrics: Metrics, settings: SamplerSettings, row: RowView
) -> Cut:
    """Min-p, top-k and top-p of one row's proposal."""
    vocab = logits.shape[-1]
    return Cut(
        order=by_likelihood(logits),
        temperature=proposal.temperature,
        top_k=jnp.where(proposal.top_k <= 0, vocab, jnp.minimum(proposal.top_k, vocab)),
        top_p=proposal.top_p,
        min_p=proposal.min_p,
    )


@dataclass(frozen=True)
class Masked:
    """A rule that keeps the tokens where a mask holds; where it holds for none, the likeliest one.

    `mask` takes one row's logits, divided by the temperature, its metrics, settings and view to a
    bool [V].
    """

    mask: Callable[[jax.Array, Metrics, SamplerSettings, RowView], jax.Array]

    def __call__(
        self,
        logits: jax.Array,
        proposal: Proposal,
        metrics: Metrics,
        settings: SamplerSettings,
        row: RowView,
    ) -> Cut:
        keeps = self.mask(logits / proposal.temperature, metrics, settings, row)
        what = getattr(self.mask, "what", "the mask of a truncation rule")
        check_made(keeps, logits > -jnp.inf, what)
        order = jnp.where(keeps, logits, -jnp.inf)
        number = jnp.where(jnp.any(order > -jnp.inf), logits.shape[-1], 1)
        return likeliest(jnp.where(number > 1, order, logits), proposal, number)


def likeliest(logits: jax.Array, proposal: Proposal, number: jax.Array) -> Cut:
    """The `number` likeliest tokens of one row, at least one, of those that are possible."""
    return Cut(
        order=by_likelihood(logits),
        temperature=proposal.temperature,
        top_k=jnp.clip(number, 1, logits.shape[-1]),
        top_p=jnp.float32(1.0),
        min_p=jnp.float32(0.0),
    )


def everything(scores: jax.Array) -> Cut:
    """All tokens, in proportion to `exp(scores)`; float32 [B, V], -inf for none."""
    one, (batch, vocab) = jnp.ones(scores.shape[0], jnp.float32), scores.shape
    return Cut(
        order=by_likelihood(scores),
        temperature=one,
        top_k=jnp.full(batch, vocab, jnp.int32),
        top_p=one,
        min_p=0.0 * one,
    )


def check_made(made: Any, like: jax.Array, what: str) -> None:
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


def by_likelihood(logits: jax.Array) -> jax.Array:
    """The order of the likeliest first."""
    return jnp.where(logits == 0, 0.0, logits)  # -0 and 0 are a tie


def relative(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, ...]:
    """`y = (logits[..., V] - max) / temperature`, its mean under `p = exp(y) / Z`, and ln Z.

    So `ln p = y - ln Z`, and the entropy is `ln Z - mean`, in nats.
    """
    y = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[..., None]
    mass = jnp.exp(y)
    total = jnp.sum(mass, axis=-1)
    mean = jnp.sum(jnp.where(mass > 0, mass * y, 0.0), axis=-1) / total
    return y, mean, jnp.log(total)
