"""Truncated draws of rows without history, and the sets that the formulas of a replay keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.replay import formulas
from entropix_jax.replay.formulas import Place
from entropix_jax.replay.threefry import row_key
from entropix_jax.sampler.draw import draw_tokens
from entropix_jax.sampler.filters import truncate
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import Proposal
from tests.support.samplers import LITERAL, NAMES, PARTS, contexts_of, params_of

TOLERANCE = 1e-5  # rounding errors within which a token may be kept or dropped
LAST = float(np.float32(1 - 2**-24))  # the largest number below 1
LLAMA3 = 128_256


@struct.dataclass
class Drawn:
    """Sampled ids, and the truncated logits."""

    ids: jax.Array  # int32 [B, n]
    left: jax.Array  # float32 [B, V], -inf for dropped tokens

    @property
    def kept(self) -> np.ndarray:
        """The number of kept tokens, [B]."""
        return np.sum(np.asarray(self.left) > -np.inf, axis=-1)


def draw_rows(
    logits: jax.Array,
    proposal: Proposal,
    uniforms: jax.Array,
    settings: SamplerSettings,
    parts: Parts = PARTS,
) -> Drawn:
    """Truncates and samples for rows without history."""
    contexts = replace(contexts_of(proposal, settings, logits), parts=parts)
    left = jax.vmap(lambda *row: truncate(*row)[0])(logits, contexts)
    return Drawn(jax.vmap(draw_tokens)(left, uniforms), left)


truncated_draw = jax.jit(draw_rows, static_argnames="parts")


# Rows


def place_of(v: Mapping[str, Any], tokens: Sequence[int] = (1,), **fields: Any) -> Place:
    """Returns a row's place in its text as the formulas of a replay read it."""
    base: dict[str, Any] = {
        "generated": len(tokens),
        "log_probs": np.zeros(1),
        "bans": (),
        "branch": -1,
    }
    base |= {"key": row_key(0, "0"), "states": {}, "breakers": (), "epsilon": 0.0}
    return Place(v, tokens=tokens, **{**base, **fields})


def below_one(uniforms: np.ndarray) -> np.ndarray:
    """Converts uniform numbers to float32, without rounding up to 1."""
    return np.minimum(uniforms.astype(np.float32), np.float32(LAST))


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Returns flat and peaked rows, a third with ties, a third with logits of -inf."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0, 0.1, 1, 3, 8], size=(rows, 1))
    logits[::3] = np.round(2 * logits[::3]) / 2
    holes = rng.random((rows, vocab)) < rng.choice([0.3, 0.9], size=(rows, 1))
    holes[np.arange(rows), rng.integers(0, vocab, rows)] = False
    holes[np.arange(rows) % 3 != 1] = False
    return np.where(holes, -np.inf, logits).astype(np.float32)


# The field of each rule's parameter. For mirostat the parameter is mu, twice the target. For p_less
# it is a flag, and ees has no parameter.
NUMBER = {
    "top_n_sigma": "sigmas",
    "typical": "mass",
    "eta": "epsilon",
    "epsilon": "epsilon",
    "top_a": "factor",
    "p_less": "norm",
    "top_h": "alpha",
    "min_k": "tau",
    "mirostat": "target",
}


def settings_of(rules: Any, numbers: Any) -> SamplerSettings:
    """Returns settings of rows with these rules and parameters. Those of other rules are NaN."""
    rules, numbers = np.broadcast_arrays(np.atleast_1d(rules), np.atleast_1d(numbers))

    settings = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (rules.size, *np.shape(x))), params_of(LITERAL)
    )
    own = dict(settings.own)
    for rule, field in NUMBER.items():
        given = numbers / 2 if rule == "mirostat" else numbers
        column = jnp.asarray(
            np.where(rules == rule, given, np.nan), getattr(own[rule], field).dtype
        )
        own[rule] = replace(own[rule], **{field: column})
    return replace(settings, own=own, rule=jnp.asarray(np.vectorize(NAMES.index)(rules)))


def nucleus_draw(logits: Any, proposal: Proposal, uniforms: Any) -> Drawn:
    """Truncates by min-p, top-k and top-p, and samples."""
    settings = settings_of(["nucleus"] * logits.shape[0], np.nan)
    return truncated_draw(jnp.asarray(logits), proposal, jnp.asarray(uniforms), settings)


# The rules' formulas


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    mass = np.exp((logits - logits.max()) / temperature)
    return mass / mass.sum()


NUMBERS: dict[str, list[float]] = {
    "top_n_sigma": [0, 0.3, 1, 2.5, 10],
    "typical": [1e-6, 0.2, 0.5, 0.9, 0.95, 0.999, 1],
    "eta": [0, 3e-4, 2e-3, 0.05, 0.9],
    "epsilon": [0, 3e-4, 0.02, 0.9],
    "top_a": [0, 0.02, 0.2, 1],
    "p_less": [0, 1],
    "top_h": [0, 0.1, 0.4, 0.9, 1],
    "ees": [0],
    "min_k": [0, 3, 300],
    "mirostat": [-2, 0, 1, 3, 6, 12, 30],
}


@dataclass
class KeptTokens:
    """The tokens that a rule keeps of one row, and those that it keeps with any rounding, or may
    keep: bool [V]."""

    rule: str
    gaps: np.ndarray  # logits below the highest, divided by the temperature, float64
    left: np.ndarray
    fewest: np.ndarray
    most: np.ndarray

    @classmethod
    def of(cls, rule: str, logits: np.ndarray, temperature: float, *numbers: float) -> KeptTokens:
        """Applies a rule's formula to logits minus their maximum, divided by the temperature in
        float32. Overflow counts as -inf."""
        with np.errstate(over="ignore"):
            gaps = (logits - logits.max()).astype(np.float32) / np.float32(temperature)
        z = gaps.astype(np.float64)
        v: dict[str, Any] = {"base.temperature_last": False, "truncation.rule": rule}
        if rule in NUMBER:
            v[f"{rule}.{NUMBER[rule]}"] = numbers[0] / 2 if rule == "mirostat" else numbers[0]
        top_k, top_p, min_p = numbers if rule == "nucleus" else (0, 1.0, 0.0)
        proposal = formulas.Proposal("", temperature, (int(top_k),), top_p, min_p)
        place, sets = place_of(v, states={"mirostat": 0.0}), np.zeros((3, z.size), bool)
        for kept, slack in zip(sets, (0.0, TOLERANCE, -TOLERANCE), strict=True):
            kept[formulas.RULES[rule](z, place, proposal, slack)] = True
        return cls(rule, z, sets[0], np.all(sets, axis=0), np.any(sets, axis=0))

    @classmethod
    def of_nucleus(cls, logits: np.ndarray, proposal: Proposal) -> KeptTokens:
        """Applies the formula of the nucleus to the float32 values of a proposal's first row."""
        columns = (proposal.temperature, proposal.top_k, proposal.top_p, proposal.min_p)
        temperature, top_k, top_p, min_p = (float(column[0]) for column in columns)
        if temperature == 0:
            temperature, top_k = 1.0, 1
        return cls.of("nucleus", logits, temperature, top_k, top_p, min_p)

    @property
    def decided(self) -> bool:
        """Whether the kept tokens do not depend on rounding."""
        return bool(np.all(self.fewest == self.most))

    def check(self, left: np.ndarray, ids: np.ndarray, uniforms: np.ndarray) -> None:
        """Raises AssertionError if `left`, bool [V], is not a valid kept set, or if `ids` are not
        the tokens for `uniforms`."""
        left = np.asarray(left)
        if self.rule == "typical":  # tokens at equal distances may be in either order
            log_probs = formulas.log_softmax(self.gaps)
            distance = np.abs(log_probs + formulas.entropies(log_probs)[0] * formulas.LN2)
            assert self.fewest.sum() <= left.sum() <= self.most.sum()
            nearest = distance[~left].min(initial=np.inf)
            assert distance[left].max() <= nearest + 2 * TOLERANCE
        else:
            assert np.all(self.fewest <= left)
            assert np.all(left <= self.most)
            # The most likely tokens, of equal ones those of low ids.
            order = np.argsort(-self.gaps, kind="stable")
            assert np.all(left[order[: np.count_nonzero(left)]])
        assert np.all(left[ids])
        mass = np.where(left, np.exp(self.gaps), 0.0)
        through = np.cumsum(mass) / mass.sum()
        assert np.all(through[ids] - mass[ids] / mass.sum() <= uniforms + TOLERANCE)
        assert np.all(through[ids] >= uniforms - TOLERANCE)
