"""`think_end` and `budget_forcing`: when a model that thinks aloud stops.

They are no arms: whatever the regimes' arms propose, they look at the token that was drawn, an end
token too, and may write a text in its place. `think_end` ends the thinking once the model has been
sure of itself for a while, in the manner of HALT-CoT (2025), which reads the entropy of an answer;
here it is that of the text. `budget_forcing` (Muennighoff et al. 2025, "s1: Simple test-time
scaling") keeps the thinking from ending early, and ends it when it is long. Both act only until the
row has written the text that ends thinking. What a branch draws they leave as it is.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.names import LARGEST
from entropix_jax.sampler.filters import holds_banned
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.settings import COUNT, SamplerSettings, number, texts
from entropix_jax.sampler.state import Observation, Rows, Step, Tally

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


def ends_thinking(settings: SamplerSettings, step: Step, token: jax.Array) -> jax.Array:
    """Whether each row has been sure for long enough: bool [B]."""
    own: ThinkEndSettings = settings.own["think_end"]
    row: ThinkEndState = step.tally.own["think_end"]
    calm = (own.patience > 0) & (row.calm >= own.patience) & (own.text[:, 0, 0] >= 0)
    calm &= ~holds_banned(settings, own.text[:, 0])
    return _unless_written(calm, step.rows, own.text[:, 0])


def write_end(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Forces the text."""
    return _force(acts, step, settings.own["think_end"].text[:, 0])


def count_calm(settings: SamplerSettings, tally: Tally, observation: Observation) -> ThinkEndState:
    """Counts drawn tokens in a row below the bound. Forced ones reset the count."""
    own: ThinkEndSettings = settings.own["think_end"]
    row: ThinkEndState = tally.own["think_end"]
    calm = (observation.metrics.entropy < own.entropy) & (tally.queued == 0)
    return ThinkEndState(calm=jnp.where(calm, row.calm + 1, 0))


def forces_budget(settings: SamplerSettings, step: Step, token: jax.Array) -> jax.Array:
    """Whether each row's `token`, int32 [B], ends its thinking too early, or it is too long: bool
    [B]. A text `end` is known by its first token."""
    own: BudgetForcingSettings = settings.own["budget_forcing"]
    row: BudgetForcingState = step.tally.own["budget_forcing"]
    rows, end = step.rows, own.end[:, 0]
    stops = jnp.any(token[:, None] == rows.eos_ids, axis=-1) | (token == end[:, 0])
    early = stops & (rows.generated < own.min_tokens) & (row.waited < own.times)
    late = _is_late(own, rows)
    text = jnp.where(late[:, None], end, own.wait[:, 0])
    allowed = (text[:, 0] >= 0) & ~holds_banned(settings, text)
    return _unless_written((early | late) & allowed, rows, end)


def force_budget(acts: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """Forces `end` where the thinking is too long, else `wait`, and counts that."""
    own: BudgetForcingSettings = settings.own["budget_forcing"]
    row: BudgetForcingState = step.tally.own["budget_forcing"]
    late = _is_late(own, step.rows)
    step = _force(acts, step, jnp.where(late[:, None], own.end[:, 0], own.wait[:, 0]))
    waited = BudgetForcingState(waited=row.waited + (acts & ~late).astype(jnp.int32))
    tally = replace(step.tally, own={**step.tally.own, "budget_forcing": waited})
    return replace(step, tally=tally)


def _is_late(own: BudgetForcingSettings, rows: Rows) -> jax.Array:
    return (own.max_tokens > 0) & (rows.generated >= own.max_tokens)


def _force(acts: jax.Array, step: Step, text: jax.Array) -> Step:
    """`text` is int32 [B, n], padded with -1."""
    return step.force(acts, text, jnp.sum(text >= 0, axis=-1, dtype=jnp.int32))


def _unless_written(wanted: jax.Array, rows: Rows, text: jax.Array) -> jax.Array:
    """`wanted`, bool [B], in the rows that have not generated their `text[B, n]` yet."""
    look = partial(jax.vmap(_has_written), rows, text)
    written: jax.Array = lax.cond(jnp.any(wanted), look, lambda: wanted)
    return wanted & ~written


def _has_written(row: Rows, text: jax.Array) -> jax.Array:
    """Whether one row has generated a text; none is never written."""
    start = jnp.arange(row.history.shape[0], dtype=jnp.int32)
    offset = jnp.arange(text.shape[0], dtype=jnp.int32)
    tokens = jnp.take(row.history, start[:, None] + offset[None, :], mode="clip")  # [S, n]
    same = jnp.all((tokens == text[None, :]) | (text < 0)[None, :], axis=-1)
    count = jnp.sum(text >= 0, dtype=jnp.int32)
    generated = (row.length - row.generated <= start) & (start <= row.length - count)
    return jnp.any(same & generated & (count > 0))


THINK_END = Mechanism(
    "think_end",
    settings=ThinkEndSettings,
    init=lambda: ThinkEndState(calm=jnp.int32(0)),
    replaces=ends_thinking,
    active=lambda settings: settings.own["think_end"].patience > 0,
    apply=write_end,
    advance=count_calm,
)
BUDGET_FORCING = Mechanism(
    "budget_forcing",
    settings=BudgetForcingSettings,
    init=lambda: BudgetForcingState(waited=jnp.int32(0)),
    replaces=forces_budget,
    active=lambda settings: (
        (settings.own["budget_forcing"].min_tokens > 0)
        | (settings.own["budget_forcing"].max_tokens > 0)
    ),
    apply=force_budget,
)
