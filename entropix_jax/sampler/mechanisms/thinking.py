"""`think_end` and `budget_forcing`: when a model that thinks aloud stops.

They are no arms: whatever the regimes' arms propose, they look at the token that was drawn, an end
token too, and may write a text in its place. `think_end` ends the thinking once the model has been
sure of itself for a while, in the manner of HALT-CoT (2025), which reads the entropy of an answer;
here it is that of the text. `budget_forcing` (Muennighoff et al. 2025, "s1: Simple test-time
scaling") keeps the thinking from ending early, and ends it when it is long. Both act only until the
row has written the text that ends thinking. What a branch draws they leave as it is.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, Verdict, any_row, force, when
from entropix_jax.sampler.filters import holds_banned
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, number, texts

MAX_TEXT = 32  # tokens of a text


@struct.dataclass
class ThinkEndSettings:
    """After `patience` drawn tokens in a row of an entropy below the bound, `text` is written."""

    text: jax.Array = texts(1, MAX_TEXT)
    entropy: jax.Array = number(0.0, LARGEST)  # bits
    patience: jax.Array = number(*COUNT, integer=True)  # 0: off


@struct.dataclass
class ThinkEndState:
    """Of one row."""

    calm: jax.Array  # int32, drawn tokens in a row below the bound


@struct.dataclass
class BudgetForcingSettings:
    """Of the first `min_tokens` tokens, one that would end the row, or begin `end`, becomes `wait`,
    up to `times`; after `max_tokens` tokens `end` is written."""

    end: jax.Array = texts(1, MAX_TEXT)  # "": end tokens alone count, and nothing ends the thinking
    wait: jax.Array = texts(1, MAX_TEXT)
    min_tokens: jax.Array = number(*COUNT, integer=True)  # 0: off
    max_tokens: jax.Array = number(*COUNT, integer=True)  # 0: off
    times: jax.Array = number(*COUNT, integer=True)


@struct.dataclass
class BudgetForcingState:
    """Of one row."""

    waited: jax.Array  # int32, how often it was told to


def end_thinking(ctx: Context, token: jax.Array) -> Verdict:
    """Forces the text once the row has been sure for long enough."""
    own: ThinkEndSettings = ctx.settings.own["think_end"]
    row: ThinkEndState = ctx.own["think_end"]
    text = own.text[0]
    calm = (own.patience > 0) & (row.calm >= own.patience)
    return when(_unless_written(calm & _allowed(ctx, text), ctx, text), force(text))


def count_calm(ctx: Context) -> ThinkEndState:
    """Counts drawn tokens in a row below the bound. Forced ones reset the count."""
    own: ThinkEndSettings = ctx.settings.own["think_end"]
    row: ThinkEndState = ctx.own["think_end"]
    calm = (ctx.metrics.entropy < own.entropy) & (ctx.queued == 0)
    return ThinkEndState(calm=jnp.where(calm, row.calm + 1, 0))


def force_budget(ctx: Context, token: jax.Array) -> Verdict:
    """Forces `end` where the thinking is too long, else `wait` where the token ends it too early,
    and counts that. A text `end` is known by its first token."""
    own: BudgetForcingSettings = ctx.settings.own["budget_forcing"]
    row: BudgetForcingState = ctx.own["budget_forcing"]
    end = own.end[0]
    stops = jnp.any(token == ctx.eos_ids) | (token == end[0])
    early = stops & (ctx.generated < own.min_tokens) & (row.waited < own.times)
    late = (own.max_tokens > 0) & (ctx.generated >= own.max_tokens)
    text = jnp.where(late, end, own.wait[0])
    acts = _unless_written((early | late) & _allowed(ctx, text), ctx, end)
    waited = BudgetForcingState(waited=row.waited + (~late).astype(jnp.int32))
    return when(acts, force(text), waited)


def _allowed(ctx: Context, text: jax.Array) -> jax.Array:
    """Whether there is a text, int32 [n] padded with -1, without a banned token."""
    return (text[0] >= 0) & ~holds_banned(ctx.settings, text)


def _unless_written(wanted: jax.Array, ctx: Context, text: jax.Array) -> jax.Array:
    """`wanted`, a bool, if the row has not generated the text, int32 [n], yet."""
    written: jax.Array = lax.cond(
        any_row(wanted), lambda: _has_written(ctx, text), lambda: jnp.bool_(False)
    )
    return wanted & ~written


def _has_written(ctx: Context, text: jax.Array) -> jax.Array:
    """Whether the row has generated a text; none is never written."""
    start = jnp.arange(ctx.history.shape[0], dtype=jnp.int32)
    offset = jnp.arange(text.shape[0], dtype=jnp.int32)
    tokens = jnp.take(ctx.history, start[:, None] + offset[None, :], mode="clip")  # [S, n]
    same = jnp.all((tokens == text[None, :]) | (text < 0)[None, :], axis=-1)
    count = jnp.sum(text >= 0, dtype=jnp.int32)
    generated = (ctx.length - ctx.generated <= start) & (start <= ctx.length - count)
    return jnp.any(same & generated & (count > 0))


THINK_END = Mechanism(
    "think_end",
    settings=ThinkEndSettings,
    init=lambda: ThinkEndState(calm=jnp.int32(0)),
    control=end_thinking,
    active=lambda settings: settings.own["think_end"].patience > 0,
    advance=count_calm,
)
BUDGET_FORCING = Mechanism(
    "budget_forcing",
    settings=BudgetForcingSettings,
    init=lambda: BudgetForcingState(waited=jnp.int32(0)),
    control=force_budget,
    active=lambda settings: (
        (settings.own["budget_forcing"].min_tokens > 0)
        | (settings.own["budget_forcing"].max_tokens > 0)
    ),
)
