"""A sampler's settings as traced arrays: changing any of them compiles nothing.

The leaves are float32, int32 or bool, scalars and small arrays for one row. In a step each has a
leading row axis, so rows of a batch can be sampled differently. The kind, range and default of a
field are those of its key in a sampler file (`sampler.keys`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import struct

from entropix_jax.names import LARGEST

MAX_DRAWS = 16  # candidates of one step
MAX_BANS = 16  # tokens that are never drawn
MAX_BIASES = 64  # tokens with a logit bias
MAX_CONDITIONS = 16  # conditions of a regime
MAX_PERIOD = 32  # longest period that the loop guard looks for
MAX_WIDTH = 10  # W, branches of a fork
MAX_DEPTH = 64  # tokens of a branch
ENDS_BRANCH = 1  # flag of a token, see `mechanisms.clarify`
MAX_LIKELIEST = 20  # tokens that a token confidence is over
LOOP_WINDOW = 256  # tokens that the loop guard looks back


def number(low: float, high: float, *, integer: bool = False, default: float | None = None) -> Any:
    """A scalar setting and its range, both ends included. `default` is its value if no sampler file
    has it, as for a user's own mechanism or an older file."""
    kind = int if integer else float
    return field(metadata={"kind": kind, "low": low, "high": high, "default": default})


def flag(default: bool | None = None) -> Any:
    """A setting that is true or false."""
    return field(metadata={"kind": bool, "low": False, "high": True, "default": default})


def texts(count: int, length: int, default: str | list[str] | None = None) -> Any:
    """A setting that is a text, or a list of up to `count` texts, of `length` tokens each: traced
    as int32 [count, length], padded with -1, without the empty ones."""
    return field(metadata={"count": count, "length": length, "default": default})


def setting(
    fits: Callable[[Any], bool],
    expected: str,
    array: Callable[[Any, Any], Any],
    default: str | None = None,
) -> Any:
    """A setting of another kind. `fits` tests a value, `expected` says in an error what it must be,
    and `array(value, host)` returns its arrays, see `keys.Host`."""
    return field(metadata={"fits": fits, "expected": expected, "array": array, "default": default})


def choice(options: Sequence[str], array: Callable[[Any, Any], Any], default: str) -> Any:
    """A setting that is one of some names."""
    return setting(options.__contains__, f"one of {', '.join(options)}", array, default)


def section(**settings: Any) -> type:
    """Returns a flax dataclass of settings, for a mechanism whose formulas explain them."""
    annotations = dict.fromkeys(settings, jax.Array)
    made: type = struct.dataclass(type("Section", (), {**settings, "__annotations__": annotations}))
    return made


COEFFICIENT = (-100.0, 100.0)
TEMPERATURE = (0.0, 100.0)
COUNT = (0, 2**31 - 1)
BIAS = (-100.0, 100.0)  # of a logit, as in the API


@struct.dataclass
class BaseSettings:
    """Base values of all arms. 0 disables `top_k` and `min_p`, 1 disables `top_p`. With
    `temperature_last` truncation uses the distribution at temperature 1."""

    temperature: jax.Array = number(*TEMPERATURE)
    top_k: jax.Array = number(*COUNT, integer=True)
    top_p: jax.Array = number(1e-6, 1.0)
    min_p: jax.Array = number(0.0, 1.0)
    temperature_last: jax.Array = flag()


@struct.dataclass
class ThresholdSettings:
    """h1, h2 (bits), u1, u2 (bits^2). With `dynamic` each follows a quantile of the row's own
    tokens, at a `rate` per token; see `regimes.update_drift`."""

    dynamic: jax.Array = flag(False)
    rate: jax.Array = number(0.0, 1.0, default=0.02)
    values: jax.Array = field(default=None)  # type: ignore[assignment]  # float32 [4]
    # float32 [4], in [0, 1]: the quantile that each follows. -1: the threshold is fixed.
    quantiles: jax.Array = field(default=None)  # type: ignore[assignment]


@struct.dataclass
class LoopSettings:
    """The loop guard: if a row's generated tokens end in `repeats` copies of a stretch of at most
    `max_period` tokens, `arms.loop` serves it. Each further copy raises the temperature by
    `heating` times the arm's, up to `hottest`. Copies share `similarity` of their tokens.
    `max_period` 0 or `repeats` 1 disables it."""

    max_period: jax.Array = number(0, MAX_PERIOD, integer=True)
    repeats: jax.Array = number(0, LOOP_WINDOW, integer=True)
    similarity: jax.Array = number(0.5, 1.0)
    heating: jax.Array = number(0.0, 100.0)
    hottest: jax.Array = number(0.0, LARGEST, default=LARGEST)


@struct.dataclass
class StartSettings:
    """The start of an answer: `arms.start` serves its first `tokens`, whatever the regime. A token
    that decides the rest of the answer is likely to be there."""

    tokens: jax.Array = number(*COUNT, integer=True, default=0)


@struct.dataclass
class ConfidenceSettings:
    """Number of tokens that token confidence averages over (`metrics.measure_confidence`), and the
    group size and threshold of the mechanism `confidence`."""

    likeliest: jax.Array = number(2, MAX_LIKELIEST, integer=True)  # k, tokens of a distribution
    window: jax.Array = number(1, 2**31 - 1, integer=True)  # tokens of a group
    threshold: jax.Array = number(0.0, 1e6)  # nats; 0: no row ends


@struct.dataclass
class ConditionSettings:
    """Conditions `quantity > bound` or `quantity < bound` of BOXES: [4, MAX_CONDITIONS]."""

    quantity: jax.Array  # int32, index into QUANTITIES; -1: no condition
    above: jax.Array  # bool, whether the quantity must be above the bound, not below it
    bound: jax.Array  # float32
    threshold: jax.Array  # int32, index into THRESHOLDS, the one that is the bound; -1: `bound` is


@struct.dataclass
class SamplerSettings:
    """All settings of a sampler, for one row; with a leading axis on every leaf, for a batch."""

    conditions: ConditionSettings
    arms: jax.Array  # int32 [7], index into `mechanisms`, the arm of each of SERVED
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
    # int32 [MAX_BANS + MAX_BIASES], tokens that no text may hold: bans, and biases of -100, which
    # ban as in the API; -1: none
    unwritable: jax.Array
    thresholds: ThresholdSettings
    base: BaseSettings
    loop: LoopSettings
    start: StartSettings
    confidence: ConfidenceSettings
    own: dict[str, Any]  # the settings of each mechanism that has any, by its name


@dataclass(frozen=True)
class Parts:
    """The static parts of a compiled sampler step. Arms, rules and actions are indices into
    `mechanisms`. The step contains the `used` ones, by name."""

    mechanisms: tuple[Any, ...]
    used: frozenset[str] = frozenset()

    def action(self, name: str) -> int:
        """The index of the mechanism of that name, and so of its action. ValueError if there is
        none of that name."""
        return [mechanism.name for mechanism in self.mechanisms].index(name)

    @property
    def acts(self) -> bool:
        """Whether a row may act instead of committing its token: a control is compiled."""
        return any(True for _ in self.having("control"))

    def having(self, part: str) -> Iterator[tuple[int, Any]]:
        """The mechanisms of the step that have this part, with their indices."""
        for index, mechanism in enumerate(self.mechanisms):
            if mechanism.name in self.used and getattr(mechanism, part) is not None:
                yield index, mechanism


SHARED_SECTIONS: dict[str, type] = {
    "thresholds": ThresholdSettings,
    "base": BaseSettings,
    "loop": LoopSettings,
    "start": StartSettings,
    "confidence": ConfidenceSettings,
}
