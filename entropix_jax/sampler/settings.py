"""A sampler's settings as traced arrays: changing any of them compiles nothing.

The leaves are float32, int32 or bool. Those of one row are scalars and small arrays; in a step each
has a leading row axis, so the rows of a batch may be sampled in different ways. A field's range is
stated here once, for sampler files and the command line alike.
"""

from dataclasses import field
from typing import Any

import jax
from flax import struct

from entropix_jax.names import LARGEST

MAX_DRAWS = 16  # candidates of one step
MAX_BANS = 16  # tokens that are never drawn
MAX_BIASES = 64  # tokens with a logit bias
MAX_PERIOD = 32  # longest period that the loop guard looks for
LOOP_WINDOW = 256  # tokens that the loop guard looks back


def number(low: float, high: float, *, integer: bool = False, default: float | None = None) -> Any:
    """A scalar setting and its range, both ends included. `default` is its value where no sampler
    file has it, as for a mechanism of the user's."""
    kind = int if integer else float
    return field(metadata={"low": low, "high": high, "type": kind, "default": default})


def flag(default: bool | None = None) -> Any:
    """A setting that is true or false."""
    return field(metadata={"low": False, "high": True, "type": bool, "default": default})


def marks(default: str | list[str] | None = None) -> Any:
    """A setting that is a list of characters that end a sentence: traced as
    `sentences.SentenceFlags`."""
    return field(metadata={"marks": True, "default": default})


def texts(most: int, longest: int, default: str | list[str] | None = None) -> Any:
    """A setting that is a text, or a list of up to `most` texts, of `longest` tokens each: traced
    as int32 [most, longest], padded with -1, without the empty ones."""
    return field(metadata={"most": most, "longest": longest, "default": default})


COEFFICIENT = (-100.0, 100.0)
TEMPERATURE = (0.0, 100.0)
COUNT = (0, 2**31 - 1)
BIAS = (-100.0, 100.0)  # of a logit, as in the API


@struct.dataclass
class BaseSettings:
    """Where every arm starts from. 0 switches `top_k` and `min_p` off, 1 switches `top_p` off.
    Where the temperature is last, truncation sees the distribution at temperature 1."""

    temperature: jax.Array = number(*TEMPERATURE)
    top_k: jax.Array = number(*COUNT, integer=True)
    top_p: jax.Array = number(1e-6, 1.0)
    min_p: jax.Array = number(0.0, 1.0)
    temperature_last: jax.Array = flag()


@struct.dataclass
class ThresholdSettings:
    """h1, h2 (bits), u1, u2 (bits^2). With `dynamic` each follows a quantile of the row's own
    tokens, at a `rate` per token; see `regimes.update_drift`."""

    dynamic: jax.Array = flag()
    rate: jax.Array = number(0.0, 1.0)
    values: jax.Array = field(default=None)  # type: ignore[assignment]  # float32 [4]
    # float32 [4], in [0, 1]: the quantile that each follows. -1: the threshold is fixed.
    quantiles: jax.Array = field(default=None)  # type: ignore[assignment]


@struct.dataclass
class LoopSettings:
    """The loop guard: a row whose generated tokens end in `repeats` copies of a stretch of at most
    `max_period` tokens is served by an arm of its own, at a temperature that rises with each
    further copy, by `heating` times the arm's, at most to `hottest`. Copies have `similarity` of
    their tokens in common. `max_period` 0 switches it off, and so does a `repeats` of 1."""

    max_period: jax.Array = number(0, MAX_PERIOD, integer=True)
    repeats: jax.Array = number(0, LOOP_WINDOW, integer=True)
    similarity: jax.Array = number(0.5, 1.0)
    heating: jax.Array = number(0.0, 100.0)
    hottest: jax.Array = number(0.0, LARGEST)


@struct.dataclass
class SamplerSettings:
    """A whole sampler, for one row; with a leading axis on every leaf, for each row of a batch."""

    # Bounds of BOXES: open numbers, and indices into THRESHOLDS whose values also bound (-1: none).
    low: jax.Array  # float32 [4 boxes, 5 quantities]
    high: jax.Array  # float32 [4, 5]
    low_thresholds: jax.Array  # int32 [4, 5]
    high_thresholds: jax.Array  # int32 [4, 5]
    arms: jax.Array  # int32 [6], index into `mechanisms`, the arms of the regimes and of a loop
    rule: jax.Array  # int32, index into `mechanisms`, the truncation rule
    layer_weights: jax.Array  # float32 [L], weights of the mean over layers
    # Bools: mechanisms see attn_entropy_norm, agreement_published under the plain names.
    attn_entropy_normalised: jax.Array
    agreement_published: jax.Array
    in_thresholds: jax.Array  # bool: `adaptive` sees h / h2 and u / u2 in place of bits
    noise_epsilon: jax.Array  # float32, machine epsilon of the logits; 0: no noise floor
    bans: jax.Array  # int32 [MAX_BANS], tokens that are never drawn; -1: none
    biased: jax.Array  # int32 [MAX_BIASES], tokens with a bias; -1: none
    biases: jax.Array  # float32 [MAX_BIASES], what is added to their logits; 0: none
    thresholds: ThresholdSettings
    base: BaseSettings
    loop: LoopSettings
    own: dict[str, Any]  # the settings of each mechanism that has any, by its name
    # Static, `Mechanism`s: part of the compiled step. Arms, rules and actions are indices into it.
    mechanisms: tuple[Any, ...] = struct.field(pytree_node=False)
    # Static, what the compiled step contains beside the arms, by name.
    used: frozenset[str] = struct.field(pytree_node=False)

    def action(self, name: str) -> int:
        """The index of the mechanism of that name, and so of its action. ValueError if the
        sampler has none of that name."""
        return [mechanism.name for mechanism in self.mechanisms].index(name)


SHARED_SECTIONS: dict[str, type] = {
    "thresholds": ThresholdSettings,
    "base": BaseSettings,
    "loop": LoopSettings,
}
