"""The truncated draw with any rule and any logits, against float64 oracles that sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from entropix_jax.replay import threefry
from entropix_jax.sampler import context
from entropix_jax.sampler.draw import (
    STREAM_CANDIDATE,
    STREAM_DRAW,
    STREAM_NOISE,
    STREAM_OBSERVE,
    STREAM_ROLLOUT,
    STREAM_XTC,
    row_key,
    uniforms,
)
from entropix_jax.sampler.prefix import HEAD, _bisect
from tests.support.draw_oracles import (
    LAST,
    LLAMA3,
    NUMBERS,
    Drawn,
    KeptTokens,
    draw_rows,
    nucleus_draw,
    settings_of,
    truncated_draw,
)
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples
from tests.support.samplers import proposal_of

DRAWS = 4
TINY = float(np.finfo(np.float32).tiny)


# Random rows


@dataclass(frozen=True)
class Setting:
    """Sampling settings of a row. `number` is the parameter of a rule other than `nucleus`."""

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
few = st.sampled_from((0.0, 1e-30, 1e-4, 0.5, 1.0)) | st.floats(0, 1, width=32)
uniform_numbers = st.sampled_from((0.0, 0.5, LAST)) | st.floats(0, LAST, width=32)


def nucleus_settings(vocab: int) -> st.SearchStrategy[Setting]:
    near = (0, 1, 2, HEAD - 1, HEAD, HEAD + 1, vocab - 1, vocab, vocab + 1, 2**31 - 1)
    top_k = st.sampled_from(near) | st.integers(0, vocab)
    return st.builds(Setting, temperatures, top_k, shares, few, st.just("nucleus"), st.just(0.0))


@st.composite
def rule_settings(draw: st.DrawFn) -> Setting:
    rule = draw(st.sampled_from(sorted(NUMBERS)))
    ranges = {
        "top_n_sigma": (0, 20),
        "typical": (2.0**-19, 1),
        "min_k": (0, 100),
        "mirostat": (-8, 40),
    }
    made_up = st.floats(*ranges.get(rule, (0, 1)), width=32, allow_subnormal=False)
    # The rule replaces the other settings of the proposal.
    temperature = draw(st.sampled_from((0.0, 0.3, 1.0, 2.0)) | st.floats(0.25, 8, width=32))
    known = st.sampled_from(NUMBERS[rule])
    number = draw(known if rule in ("p_less", "ees") else known | made_up)
    return Setting(temperature, 5, 0.5, 0.5, rule, number)


@dataclass(frozen=True)
class Batch:
    """Rows with their settings and uniform numbers."""

    logits: np.ndarray
    settings: list[Setting]
    uniforms: np.ndarray

    def drawn(self, how: Any) -> Drawn:
        columns = {name: [vars(s)[name] for s in self.settings] for name in vars(self.settings[0])}
        settings = settings_of(columns.pop("rule"), columns.pop("number"))
        proposal = proposal_of(**columns, num_candidates=DRAWS)
        logits, uniforms = jnp.asarray(self.logits), jnp.asarray(self.uniforms)
        return jax.device_get(how(logits, proposal, uniforms, settings))


@st.composite
def batches(draw: st.DrawFn, vocab: int) -> Batch:
    number = VOCABULARIES[vocab]
    setting = nucleus_settings(vocab) | rule_settings()
    numbers = st.lists(uniform_numbers, min_size=DRAWS, max_size=DRAWS)
    return Batch(
        np.stack([draw(rows_of(vocab)) for _ in range(number)]),
        [draw(setting) for _ in range(number)],
        np.array([draw(numbers) for _ in range(number)], np.float32),
    )


def check_row(logits: np.ndarray, setting: Setting, left: Any, ids: Any, uniforms: Any) -> None:
    assert left.any()
    assert np.all((ids >= 0) & (ids < logits.size))
    assert np.all(logits[ids] > -np.inf)
    if setting.rule == "nucleus" or setting.temperature == 0:
        proposal = proposal_of(setting.temperature, setting.top_k, setting.top_p, setting.min_p)
        KeptTokens.of_nucleus(logits, proposal).check(left, ids, uniforms)
    else:
        temperature, number = np.float32(setting.temperature), np.float32(setting.number)
        oracle = KeptTokens.of(setting.rule, logits, float(temperature), float(number))
        oracle.check(left, ids, uniforms)


def check(batch: Batch, how: Any = truncated_draw) -> None:
    drawn = batch.drawn(how)
    # Denormals count as 0, so that machines without denormals sample the same.
    logits = np.where(np.abs(batch.logits) < TINY, np.float32(0), batch.logits)
    for row, setting in enumerate(batch.settings):
        left, ids = np.asarray(drawn.left[row]) > -np.inf, np.asarray(drawn.ids[row])
        try:
            check_row(logits[row], setting, left, ids, batch.uniforms[row].astype(np.float64))
        except AssertionError as error:
            values, counts = np.unique(logits[row], return_counts=True)
            told = dict(zip(values[-9:].tolist(), counts[-9:].tolist(), strict=True))
            error.add_note(
                f"row {row}: {setting}, kept {left.sum()}: {ids}; highest logits: {told}"
            )
            raise


@examples(150)
@given(batches(2))
def test_draw_of_two_tokens(batch: Batch) -> None:
    check(batch)


@examples(100)
@given(batches(HEAD + 1))
def test_draw_of_one_token_more_than_the_head(batch: Batch) -> None:
    check(batch)


@examples(40)
@given(batches(LLAMA3))
def test_draw_of_the_vocabulary_of_llama_3(batch: Batch) -> None:
    check(batch)


@examples(15)
@given(batches(LLAMA3))
def test_draw_of_all_rows_at_once(batch: Batch) -> None:
    check(batch, gpu_draw)


@jax.jit
def gpu_draw(*args: Any) -> Drawn:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "for_platform", lambda *args, otherwise, cpu: otherwise(*args))
        return draw_rows(*args)


@pytest.mark.parametrize("order", [1, -1])
def test_two_tokens_that_tie_in_float32(order: int) -> None:
    """Either may come first. A difference of 1e-25 does not change their information content."""
    logits = np.array([[1.1e-25, 0.0]], np.float32)[:, ::order]
    setting = Setting(1.0, 0, 1.0, 0.0, "typical", 0.5)
    for number in (0.3, 0.5, 1.0):
        check(Batch(logits, [replace(setting, number=number)], np.array([[0.0, 0.4, 0.6, LAST]])))


def test_top_p_keeps_the_token_that_reaches_it_exactly() -> None:
    """Half of the equal tokens reach p = 0.5, in the head and in the whole vocabulary."""
    for vocab in (40, 1000):
        logits = np.zeros((1, vocab), np.float32)
        drawn = nucleus_draw(logits, proposal_of(top_p=0.5), np.zeros((1, 4), np.float32))
        assert int(drawn.kept[0]) == vocab // 2
    # 128 tokens, and 256 tokens that are half as likely: the first 128 are kept.
    half = np.float32(np.log(0.5))
    assert float(jax.jit(jnp.exp)(half)) == 0.5
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, 100:484] = half
    logits[0, 300:428] = 0.0
    numbers = np.array([[0.0, 0.5, LAST, LAST]], np.float32)
    drawn = nucleus_draw(logits, proposal_of(top_p=0.5, num_candidates=4), numbers)
    assert int(drawn.kept[0]) == 128
    assert drawn.ids[0].tolist() == [300, 364, 427, 427]


def test_a_target_beyond_the_sum_keeps_all_weighted_tokens() -> None:
    """Two sums of the same masses may differ in their last bit, so that no prefix reaches the
    target. The prefix then ends with the last token of nonzero weight."""
    order = jnp.asarray([3, -9, 3, 7, -5, 3], jnp.float32)

    def weigh(order: jax.Array) -> jax.Array:
        return jnp.where(order == 3, 0.5, jnp.where(order == 7, 2.0, 0.0))

    for target, last in ((2.9, 2), (3.5, 5), (3.500001, 5), (4.0, 5)):
        prefix = _bisect(weigh, order, jnp.float32(target))
        assert (float(prefix.value), int(prefix.last)) == (3, last)


# Uniform numbers

STREAMS = (STREAM_DRAW, STREAM_CANDIDATE, STREAM_ROLLOUT, STREAM_NOISE, STREAM_XTC)


@partial(jax.jit, static_argnums=4)
def uniforms_of(*names: Any) -> jax.Array:
    *path, number = names
    return jax.vmap(partial(uniforms, count=number))(*path)


def numbers(names: list[tuple[np.ndarray, int, int, int]], number: int = 4) -> np.ndarray:
    """Returns uniform numbers [B, number] for each (key, position, attempt, stream)."""
    keys, *path = zip(*names, strict=True)
    columns = [jnp.asarray(column, jnp.int32) for column in path]
    return np.asarray(uniforms_of(jnp.asarray(np.stack(keys)), *columns, number))


def test_uniform_numbers_never_change() -> None:
    """A change of the generator would change the text of every seed. Compares it with Threefry in
    NumPy."""
    assert (*STREAMS, STREAM_OBSERVE) == tuple(range(len(threefry.STREAMS)))
    rows = {(0, "0"): (0, 0, 0), (5, "récord"): (9, 2, 1), (-1, ""): (70_000, 1, 0)}
    rows |= {(1, str(stream)): (stream, 5, stream) for stream in STREAMS}
    drawn = numbers([(row_key(*row), *path) for row, path in rows.items()], 3)
    for (seed, row_id), path, found in zip(rows, rows.values(), drawn, strict=True):
        position, attempt, stream = path
        key, name = threefry.row_key(seed, row_id), threefry.STREAMS[stream]
        np.testing.assert_array_equal(found, threefry.uniforms(key, position, attempt, name, 3))


def test_numbers_are_uniform_along_each_part() -> None:
    """Numbers of adjacent positions, attempts, rows and indices are not correlated."""
    n = 4000
    key = row_key(0, "0")
    series = {
        "position": numbers([(key, i, 0, 0) for i in range(n)], 1)[:, 0],
        "attempt": numbers([(key, 9, i, 0) for i in range(n)], 1)[:, 0],
        "row": numbers([(row_key(0, str(i)), 9, 0, 0) for i in range(n)], 1)[:, 0],
        "index": numbers([(key, 9, 0, 0)], n)[0],
    }
    for name, values in series.items():
        assert values.dtype == np.float32
        assert 0 <= values.min() <= values.max() < 1, name
        assert stats.kstest(values, "uniform").pvalue > 1e-3, name
        assert stats.pearsonr(values[1:], values[:-1]).pvalue > 1e-3, name
