"""Any draw, under any rule: what may be drawn, from any logits, against float64 oracles that sort.

The other tests of the draw have the cases that were thought of; here they are made up.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.sampler.draw import HEAD, Drawn
from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import TruncationSettings
from tests.support.draw_oracles import (
    LAST,
    LLAMA3,
    NUMBERS,
    Kept,
    Oracle,
    settings_of,
    truncated_draw,
)
from tests.support.logit_strategies import (
    VOCABULARIES,
    rows_of,
)
from tests.support.properties import examples
from tests.support.samplers import proposal_of

DRAWS = 4
MARGIN = 1e-5  # of min-p, within which a token may fall either way
TINY = float(np.finfo(np.float32).tiny)


# Logits


uniform_numbers = st.lists(
    st.sampled_from((0.0, 0.5, LAST)) | st.floats(0, LAST, width=32),
    min_size=DRAWS,
    max_size=DRAWS,
)


# Settings


@dataclass(frozen=True)
class Setting:
    """What a row is drawn by; `number` is that of a rule which is not `nucleus`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    rule: str
    number: float


temperatures = st.sampled_from((0.0, 1e-3, 0.666, 1.0, 2.0, 100.0)) | st.floats(
    0.0625, 100, width=32
)
shares = st.sampled_from((1e-6, 0.5, 0.9, 0.999, 1.0)) | st.floats(2.0**-19, 1, width=32)


@st.composite
def nucleus_settings(draw: st.DrawFn, vocab: int) -> Setting:
    near = (0, 1, 2, HEAD - 1, HEAD, HEAD + 1, vocab - 1, vocab, vocab + 1, 2**31 - 1)
    return Setting(
        temperature=draw(temperatures),
        top_k=draw(st.sampled_from(near) | st.integers(0, vocab)),
        top_p=draw(shares),
        min_p=draw(st.sampled_from((0.0, 1e-30, 1e-4, 0.5, 1.0)) | st.floats(0, 1, width=32)),
        rule="nucleus",
        number=0.0,
    )


@st.composite
def rule_settings(draw: st.DrawFn) -> Setting:
    rule = draw(st.sampled_from(sorted(NUMBERS)))
    numbers = st.sampled_from(NUMBERS[rule])
    ranges = {"top_n_sigma": (0, 20), "typical": (2.0**-19, 1), "eta": (0, 1), "mirostat": (-8, 40)}
    made_up = st.floats(*ranges[rule], width=32, allow_subnormal=False)
    # Nothing else of the proposal counts: the rule stands in its place.
    temperature = draw(st.sampled_from((0.0, 0.3, 1.0, 2.0)) | st.floats(0.25, 8, width=32))
    return Setting(temperature, 5, 0.5, 0.5, rule, draw(numbers | made_up))


def proposals(settings: list[Setting]) -> tuple[Proposal, TruncationSettings, jax.Array]:
    rules = [setting.rule for setting in settings]
    proposal = proposal_of(
        temperature=[setting.temperature for setting in settings],
        top_k=[setting.top_k for setting in settings],
        top_p=[setting.top_p for setting in settings],
        min_p=[setting.min_p for setting in settings],
        draws=DRAWS,
        rule=rules,
    )
    return proposal, *settings_of(rules, [setting.number for setting in settings])


@dataclass(frozen=True)
class Batch:
    """Rows with their settings and uniform numbers, and what was drawn."""

    logits: np.ndarray
    settings: list[Setting]
    uniforms: np.ndarray

    def drawn(self) -> Drawn:
        given = jnp.asarray(self.logits), jnp.asarray(self.uniforms)
        proposal, *truncation = proposals(self.settings)
        return jax.device_get(truncated_draw(given[0], proposal, given[1], *truncation))


@st.composite
def batches(draw: st.DrawFn, vocab: int) -> Batch:
    number = VOCABULARIES[vocab]
    setting = nucleus_settings(vocab) | rule_settings()
    return Batch(
        np.stack([draw(rows_of(vocab)) for _ in range(number)]),
        [draw(setting) for _ in range(number)],
        np.array([draw(uniform_numbers) for _ in range(number)], np.float32),
    )


# Oracles


def check_nucleus(logits: np.ndarray, setting: Setting, kept: int, ids: Any, uniforms: Any) -> None:
    """The row's set and draws are those of its min-p; of tokens that lie right at that bound any
    number may have fallen either way."""
    proposal = proposals([setting])[0]
    try:
        return Oracle(logits, proposal).check(kept, ids, uniforms)
    except AssertionError as error:
        failure = error
    fewest, most = (
        Oracle(logits, proposals([replace(setting, min_p=min_p, top_p=1.0)])[0]).most
        for min_p in (setting.min_p * (1 + MARGIN), setting.min_p * (1 - MARGIN))
    )
    numbers = range(max(fewest, 1), most + 1)

    def limited(number: int) -> Oracle:
        return Oracle(logits, proposals([replace(setting, min_p=0.0, top_k=number)])[0])

    # The more tokens pass min-p, the more of them top-p keeps.
    place = bisect_left(numbers, kept, key=lambda number: limited(number).most)
    if place == len(numbers):
        raise failure
    limited(numbers[place]).check(kept, ids, uniforms)


def check(batch: Batch, drawn: Drawn) -> None:
    # A denormal is a 0: a machine that knows none of them draws the same.
    logits = np.where(np.abs(batch.logits) < TINY, np.float32(0), batch.logits)
    for row, setting in enumerate(batch.settings):
        kept, ids = int(drawn.kept[row]), np.asarray(drawn.ids[row])
        try:
            check_row(logits[row], setting, kept, ids, batch.uniforms[row].astype(np.float64))
        except AssertionError as error:
            values, counts = np.unique(logits[row], return_counts=True)
            told = dict(zip(values[-9:].tolist(), counts[-9:].tolist(), strict=True))
            error.add_note(f"row {row}: {setting}, kept {kept}: {ids}; highest logits: {told}")
            raise


def check_row(logits: np.ndarray, setting: Setting, kept: int, ids: Any, uniforms: Any) -> None:
    assert 1 <= kept <= logits.size
    assert np.all((ids >= 0) & (ids < logits.size))
    assert np.all(logits[ids] > -np.inf)
    if setting.rule == "nucleus" or setting.temperature == 0:
        check_nucleus(logits, replace(setting, rule="nucleus"), kept, ids, uniforms)
    else:
        temperature, number = np.float32(setting.temperature), np.float32(setting.number)
        oracle = Kept.of(setting.rule, logits, float(temperature), float(number))
        oracle.check(kept, ids, uniforms)


@examples(60)
@given(batches(2))
def test_two_tokens(batch: Batch) -> None:
    check(batch, batch.drawn())


@examples(40)
@given(batches(HEAD + 1))
def test_one_token_more_than_the_head(batch: Batch) -> None:
    check(batch, batch.drawn())


@examples(12)
@given(batches(LLAMA3))
def test_the_vocabulary_of_llama_3(batch: Batch) -> None:
    check(batch, batch.drawn())
