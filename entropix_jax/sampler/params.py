"""What can be set in a sampler, as traced arrays: changing any of it compiles nothing.

The leaves are float32, int32 or bool; in a step each carries a leading row axis, so rows of one
batch may be sampled in different ways. `number` states the range of a scalar, once, for files and
command line.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
from flax import struct

RULES = ("nucleus", "top_n_sigma", "typical", "eta", "mirostat")  # of truncation

MAX_THOUGHT = 64  # tokens of an injected thought
MAX_THOUGHTS = 4  # thoughts that alternate
MAX_DRAWS = 16  # candidates of one step
MAX_WIDTH = 8  # W, branches of one step
MAX_DEPTH = 32  # R, tokens of a branch
MAX_ATTEMPTS = 8  # tokens that may be taken back at one position
MAX_BANS = 16  # tokens that are never drawn
MAX_PERIOD = 32  # longest period that the loop guard looks for
LOOP_WINDOW = 256  # tokens that the loop guard looks back


def number(low: float, high: float, *, integer: bool = False) -> Any:
    """A scalar parameter with its allowed range, both ends included."""
    return struct.field(metadata={"low": low, "high": high, "type": int if integer else float})


def flag() -> Any:
    """A parameter that is true or false."""
    return struct.field(metadata={"low": False, "high": True, "type": bool})


_COEFFICIENT = (-100.0, 100.0)
_TEMPERATURE = (0.0, 100.0)
_COUNT = (0, 2**31 - 1)


@struct.dataclass
class BaseParams:
    """Where every arm starts from. 0 switches `top_k` and `min_p` off, 1 switches `top_p` off."""

    temperature: jax.Array = number(*_TEMPERATURE)
    top_k: jax.Array = number(*_COUNT, integer=True)
    top_p: jax.Array = number(1e-6, 1.0)
    min_p: jax.Array = number(0.0, 1.0)


@struct.dataclass
class TruncationParams:
    """Which rule truncates the distribution, and the rules' own numbers; `nucleus` is min-p, top-k
    and top-p of the proposal. See `sampler.truncation` for the formulas."""

    rule: jax.Array  # int32, index into RULES
    sigmas: jax.Array = number(0.0, 1e4)  # top_n_sigma: n
    typical_mass: jax.Array = number(1e-6, 1.0)  # typical: tau
    eta_epsilon: jax.Array = number(0.0, 1.0)  # eta: epsilon
    mirostat_target: jax.Array = number(0.0, 100.0)  # mirostat: tau, bits
    mirostat_rate: jax.Array = number(0.0, 100.0)  # mirostat: eta


@struct.dataclass
class InjectParams:
    """Thoughts for HELV, which take turns, and the draw while one cools down.

    Cooldown draw: T = min(temperature_max, T0 * (temperature_scale + temperature_attn_entropy *
    Ea)).
    """

    thoughts: jax.Array  # int32 [MAX_THOUGHTS, MAX_THOUGHT]
    lengths: jax.Array  # int32 [MAX_THOUGHTS], of the thoughts; those of length 0 come last
    per_row: jax.Array = number(*_COUNT, integer=True)  # thoughts of a row, asked for ones too
    cooldown: jax.Array = number(*_COUNT, integer=True)
    until_confident: jax.Array = flag()  # the first LELV token ends the cooldown
    temperature_scale: jax.Array = number(*_COEFFICIENT)
    temperature_attn_entropy: jax.Array = number(*_COEFFICIENT)
    temperature_max: jax.Array = number(*_TEMPERATURE)


@struct.dataclass
class ExploreParams:
    """T = min(temperature_max, T0 * (temperature_scale + temperature_interaction * I));
    k = max(top_k_min, floor(k0 * (1 + top_k_disagreement * (1 - A))))."""

    temperature_scale: jax.Array = number(*_COEFFICIENT)
    temperature_interaction: jax.Array = number(*_COEFFICIENT)
    temperature_max: jax.Array = number(*_TEMPERATURE)
    top_k_disagreement: jax.Array = number(*_COEFFICIENT)
    top_k_min: jax.Array = number(1, 2**31 - 1, integer=True)


@struct.dataclass
class BranchParams:
    """Several futures, of which the best is kept; score = mean(log p) - entropy_weight * mean(h) -
    varentropy_weight * mean(u), over the tokens of a branch."""

    width: jax.Array = number(1, MAX_WIDTH, integer=True)  # most candidates
    depth: jax.Array = number(1, MAX_DEPTH, integer=True)  # most tokens, the candidate included
    temperature: jax.Array = number(0.01, 100.0)  # of the distribution of the candidates
    noise: jax.Array = number(0.0, 100.0)  # Gumbel noise on its logits, times this; 0: off
    min_p: jax.Array = number(0.0, 1.0)  # candidates at least so likely, next to the likeliest
    top_p: jax.Array = number(1e-6, 1.0)  # candidates that make up this mass
    rollout_temperature: jax.Array = number(*_TEMPERATURE)  # 0: greedy
    entropy_weight: jax.Array = number(*_COEFFICIENT)  # nats per bit
    varentropy_weight: jax.Array = number(*_COEFFICIENT)  # nats per bit^2
    commit_all: jax.Array = flag()  # all tokens of the best branch, or its first alone
    margin: jax.Array = number(0.0, 1e6)  # of two scores this close the choice is ambiguous
    per_row: jax.Array = number(*_COUNT, integer=True)  # steps of a row that branch


@struct.dataclass
class BackspaceParams:
    """How often the last token may be taken back and its position be drawn again."""

    per_position: jax.Array = number(0, MAX_ATTEMPTS, integer=True)
    per_row: jax.Array = number(*_COUNT, integer=True)


@struct.dataclass
class EdtParams:
    """Dynamic temperature: T = T0 * base^(theta / h), h in nats (Zhang et al. 2024, EDT)."""

    base: jax.Array = number(1e-6, 1.0)
    theta: jax.Array = number(0.0, 100.0)


@struct.dataclass
class ResampleParams:
    """T = max(temperature_min, T0 * (temperature_scale + temperature_attn_varentropy * Va));
    top_p = max(top_p_min, p0 - top_p_attn_entropy * Ea)."""

    temperature_scale: jax.Array = number(*_COEFFICIENT)
    temperature_attn_varentropy: jax.Array = number(*_COEFFICIENT)
    temperature_min: jax.Array = number(*_TEMPERATURE)
    top_p_attn_entropy: jax.Array = number(*_COEFFICIENT)
    top_p_min: jax.Array = number(1e-6, 1.0)


@struct.dataclass
class AdaptiveParams:
    """With U = h + u and Ua = Ea + Va:

    T = T0 * (1 + temperature_logits * U + temperature_attn * Ua - temperature_agreement * A);
    top_p = clip(p0 * (1 + top_p_attn_varentropy * Va), top_p_min, 1);
    k = clip(round(k0 * (1 + top_k_interaction * I - top_k_agreement * A)), 1, top_k_max);
    min_p = clip(m0 * (1 - min_p_logits * U), min_p_min, min_p_max).

    `draws` candidates; the one that is likeliest under the unmodified logits is kept. The
    `confidence_*` weights make the reported confidence, which is the same for every candidate.
    """

    draws: jax.Array = number(1, MAX_DRAWS, integer=True)
    temperature_logits: jax.Array = number(*_COEFFICIENT)
    temperature_attn: jax.Array = number(*_COEFFICIENT)
    temperature_agreement: jax.Array = number(*_COEFFICIENT)
    top_p_attn_varentropy: jax.Array = number(*_COEFFICIENT)
    top_p_min: jax.Array = number(1e-6, 1.0)
    top_k_interaction: jax.Array = number(*_COEFFICIENT)
    top_k_agreement: jax.Array = number(*_COEFFICIENT)
    top_k_max: jax.Array = number(1, 2**31 - 1, integer=True)
    min_p_logits: jax.Array = number(*_COEFFICIENT)
    min_p_min: jax.Array = number(0.0, 1.0)
    min_p_max: jax.Array = number(0.0, 1.0)
    confidence_entropy: jax.Array = number(*_COEFFICIENT)
    confidence_attn_entropy: jax.Array = number(*_COEFFICIENT)
    confidence_varentropy: jax.Array = number(*_COEFFICIENT)
    confidence_attn_varentropy: jax.Array = number(*_COEFFICIENT)
    confidence_agreement: jax.Array = number(*_COEFFICIENT)
    confidence_interaction: jax.Array = number(*_COEFFICIENT)


@struct.dataclass
class RepetitionParams:
    """`penalty` divides the positive and multiplies the negative logits of tokens that the row
    already holds (Keskar et al. 2019, CTRL); 1 switches it off."""

    penalty: jax.Array = number(0.01, 100.0)


@struct.dataclass
class LoopParams:
    """The loop guard: a row whose generated tokens end in `repeats` copies of a stretch of at most
    `max_period` tokens is treated as LEHV. 0 switches it off, and so does a `repeats` of 1."""

    max_period: jax.Array = number(0, MAX_PERIOD, integer=True)
    repeats: jax.Array = number(0, LOOP_WINDOW, integer=True)


@struct.dataclass
class SamplerParams:
    """A whole sampler, for one row; with a leading axis on every leaf, for each row of a batch."""

    low: jax.Array  # float32 [4 boxes, 4 quantities], open lower bounds of BOXES
    high: jax.Array  # float32 [4, 4], open upper bounds
    arms: jax.Array  # int32 [5], the arm that serves each regime
    layer_weights: jax.Array  # float32 [L], weights of the mean over layers
    attn_entropy_normalised: jax.Array  # bool: the arms see attn_entropy_norm as attn_entropy
    agreement_published: jax.Array  # bool: the arms see agreement_published as agreement
    noise_epsilon: jax.Array  # float32, machine epsilon of the logits; 0: no noise floor
    bans: jax.Array  # int32 [MAX_BANS], tokens that are never drawn; -1: none
    base: BaseParams
    truncation: TruncationParams
    inject: InjectParams
    explore: ExploreParams
    branch: BranchParams
    resample: ResampleParams
    backspace: BackspaceParams
    adaptive: AdaptiveParams
    edt: EdtParams
    repetition: RepetitionParams
    loop: LoopParams


SECTIONS: dict[str, type] = {
    "base": BaseParams,
    "truncation": TruncationParams,
    "inject": InjectParams,
    "explore": ExploreParams,
    "branch": BranchParams,
    "resample": ResampleParams,
    "backspace": BackspaceParams,
    "adaptive": AdaptiveParams,
    "edt": EdtParams,
    "repetition": RepetitionParams,
    "loop": LoopParams,
}


@cache
def scalars() -> Mapping[str, Mapping[str, Any]]:
    """Every scalar parameter by its dotted key, with its `type` and its range, `low` to `high`."""
    return MappingProxyType(
        {
            f"{section}.{field.name}": field.metadata
            for section, params in SECTIONS.items()
            for field in fields(params)
            if "low" in field.metadata
        }
    )
