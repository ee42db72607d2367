"""`think_end`, `budget_forcing` and `confidence`: when thinking ends, or a row.

They are no arms: whatever the regimes' arms propose, they see the drawn token, an end token too.
They do not act within forced text or in branches.

`think_end` writes a text once the model has been sure of itself for a while, in the manner of
HALT-CoT (2025), which reads the entropy of an answer; here it is that of the text. `budget_forcing`
(Muennighoff et al. 2025, "s1: Simple test-time scaling") keeps the thinking from ending early, and
ends it when it is long. Both act only until the row has written the text that ends thinking.

`confidence` ends a row that has become unsure (Fu et al. 2025, "Deep Think with Confidence"). A
row's group confidence is the mean token confidence (`metrics.measure_confidence`) of its last
`window` tokens, forced ones included. The row ends with the token whose group, the first full one
at the earliest, is below the threshold.
"""

import jax
import jax.numpy as jnp

from entropix_jax.names import LARGEST
from entropix_jax.sampler.context import Context, if_any
from entropix_jax.sampler.control import Verdict, end, force, when
from entropix_jax.sampler.history import ends_in
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms.inject import holds_banned
from entropix_jax.sampler.settings import COUNT, number, section, texts
from entropix_jax.stats import sum_last

MAX_TEXT = 32  # tokens of a text


def end_thinking(ctx: Context, token: jax.Array) -> Verdict:
    """Forces `text` after `patience` drawn tokens in a row of an entropy below the bound. The state
    is their number, int32."""
    own = ctx.settings.own["think_end"]
    text = own.text[0]
    calm = (own.patience > 0) & (ctx.states["think_end"] >= own.patience)
    return when(_may_write(ctx, calm, text, text), force(text))


def count_calm(ctx: Context) -> jax.Array:
    """Returns the number of successive drawn tokens below the bound. Forced ones reset it."""
    own = ctx.settings.own["think_end"]
    calm = (ctx.metrics.entropy < own.entropy) & (ctx.queued == 0)
    return jnp.where(calm, ctx.states["think_end"] + 1, 0)


def force_budget(ctx: Context, token: jax.Array) -> Verdict:
    """Forces `end` after `max_tokens` tokens, else `wait`, up to `times`, in place of a token that
    would end the row, or begin `end`, among the first `min_tokens`. The state is the number of
    times, int32."""
    own = ctx.settings.own["budget_forcing"]
    waited = ctx.states["budget_forcing"]
    last = own.end[0]
    stops = jnp.any(token == ctx.eos_ids) | (token == last[0])
    early = stops & (ctx.generated < own.min_tokens) & (waited < own.times)
    late = (own.max_tokens > 0) & (ctx.generated >= own.max_tokens)
    text = jnp.where(late, last, own.wait[0])
    acts = _may_write(ctx, early | late, text, last)
    return when(acts, force(text), waited + (~late).astype(jnp.int32))


def end_unsure(ctx: Context, token: jax.Array) -> Verdict:
    """Ends the row if the group that ends with this token is below the threshold."""
    settings = ctx.settings.confidence
    back = ctx.length - jnp.arange(ctx.confidences.shape[0], dtype=jnp.int32)
    in_group = (back >= 0) & (back < settings.window)
    total = sum_last(jnp.where(in_group, ctx.confidences, 0.0))
    is_low = total / settings.window.astype(jnp.float32) < settings.threshold
    return when((ctx.generated + 1 >= settings.window) & is_low, end())


def _may_write(ctx: Context, wanted: jax.Array, text: jax.Array, last: jax.Array) -> jax.Array:
    """Returns whether the row writes a text, int32 [n] padded with -1: it is wanted, not empty,
    holds no banned token, and the row has not generated the text `last` yet."""
    wanted &= (text[0] >= 0) & ~holds_banned(ctx.settings, text)
    written: jax.Array = if_any(wanted, lambda: _has_written(ctx, last), jnp.bool_(False))
    return wanted & ~written


def _has_written(ctx: Context, text: jax.Array) -> jax.Array:
    """Returns whether the row has generated a text; an empty one is never generated."""
    ends = jnp.arange(1, ctx.history.shape[0] + 1, dtype=jnp.int32)
    found = jax.vmap(lambda length: ends_in(ctx.history, length, text[None])[0])(ends)
    earliest = ctx.length - ctx.generated + jnp.sum(text >= 0, dtype=jnp.int32)
    return jnp.any(found & (earliest <= ends) & (ends <= ctx.length))


THINK_END = Mechanism(
    "think_end",
    settings=section(
        text=texts(1, MAX_TEXT),
        entropy=number(0.0, LARGEST),  # bits
        patience=number(*COUNT, integer=True),  # 0: off
    ),
    init=lambda: jnp.int32(0),
    control=end_thinking,
    active=lambda settings: settings.own["think_end"].patience > 0,
    advance=count_calm,
)
BUDGET_FORCING = Mechanism(
    "budget_forcing",
    settings=section(
        end=texts(1, MAX_TEXT),  # "": only end tokens count, and nothing ends the thinking
        wait=texts(1, MAX_TEXT),
        min_tokens=number(*COUNT, integer=True),  # 0: off
        max_tokens=number(*COUNT, integer=True),  # 0: off
        times=number(*COUNT, integer=True),
    ),
    init=lambda: jnp.int32(0),
    control=force_budget,
    active=lambda settings: (
        (settings.own["budget_forcing"].min_tokens > 0)
        | (settings.own["budget_forcing"].max_tokens > 0)
    ),
)
CONFIDENCE = Mechanism(
    "confidence", control=end_unsure, active=lambda settings: settings.confidence.threshold > 0
)
