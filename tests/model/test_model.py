"""The forward pass against float64: of whole texts and of a generation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import FINISHED_LENGTH, RUNNING
from entropix_jax.model.cache import init_cache
from entropix_jax.model.llama import forward
from tests.support import reference
from tests.support.models import (
    TINY,
    all_metrics,
    fill_unused,
    generate,
    logits_of,
    random_params,
    random_tokens,
    run,
    teacher_forced,
    tiny_config,
)

LONG = 200  # tokens: enough to see an error of the rotary embedding
run_every = jax.jit(forward, static_argnames=("config", "window", "every"))


def same(a, b, tolerance: float = 1e-5) -> None:
    """Two pytrees of numbers, to a tolerance relative to their size."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, np.abs(y).max()))


def row_of(tree, row: int):
    return jax.tree.map(lambda x: x[row : row + 1], tree)


@pytest.fixture(scope="module")
def params():
    return random_params(TINY)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return random_tokens(TINY, LONG)[None]


# --- against the formulas ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        tiny_config(num_kv_heads=4, tied_head=False),
        tiny_config(num_kv_heads=1, rope_scaling=None, head_dim=12),
    ],
    ids=["GQA, tied, scaled", "MHA, untied", "MQA, unscaled, wide heads"],
)
def test_against_float64(config) -> None:
    """Logits of every position and each statistic of the last, from weights and tokens alone."""
    params = random_params(config, seed=2)
    tokens = random_tokens(config, 70)
    logits, stats, _ = teacher_forced(params, config, tokens[None])
    want, attention = reference.forward(params, config, tokens)
    assert want.std() > 0.5  # not a test of zeros
    same(logits[0], want, 2e-5)
    for field in ("entropy", "varentropy", "divergence", "interaction"):
        same(getattr(stats, field)[0], getattr(attention[-1], field), 5e-5)
    metrics = all_metrics(config, logits[:, -1], stats)
    for name, value in attention[-1].metrics(np.ones(config.num_layers)).items():
        assert float(getattr(metrics, name)[0]) == pytest.approx(value, abs=5e-5), name


@pytest.mark.parametrize("activations", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}], ids=str)
def test_bfloat16_weights(tokens, changes: dict[str, bool], activations) -> None:
    """Wide activations compute what float32 weights of the same values do; narrow ones nearly."""
    config = tiny_config(**changes)
    narrow = random_params(config, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    want, _, _ = teacher_forced(wide, config, tokens[:, :64])
    cache = init_cache(config, 1, 64, jnp.dtype(activations))
    count = jnp.asarray([64], jnp.int32)
    hidden, stats, _ = run(narrow, config, jnp.asarray(tokens[:, :64]), count, cache, window=64)
    assert hidden.dtype == activations
    assert cache.keys[0].dtype == jnp.float32
    logits = logits_of(narrow, hidden)
    for leaf in jax.tree.leaves((logits, stats)):
        assert leaf.dtype == jnp.float32
    if activations == jnp.float32:
        same(logits, want)
    else:
        error = np.asarray(logits) - want
        assert np.sqrt((error**2).mean()) < 0.05 * want.std()


# --- every position -------------------------------------------------------------------------------


def test_every_position_has_its_own_statistics(params, tokens) -> None:
    """Of a chunk in the middle of a text: those of the passes that end at each position."""
    cache = fill_unused(init_cache(TINY, 2, 64, jnp.dtype(jnp.float32)), np.nan)
    batch = jnp.asarray(np.stack([tokens[0, :20], random_tokens(TINY, 20, seed=5)]))
    first = jnp.asarray([9, 4], jnp.int32)
    _, _, cache = run(params, TINY, batch[:, :9], first, cache, window=64)
    rest = jnp.stack([batch[0, 9:20], jnp.roll(batch[1], -4)[:11]])
    count = jnp.asarray([11, 6], jnp.int32)
    hidden, stats, grown = run_every(params, TINY, rest, count, cache, window=64, every=True)
    plain_hidden, last, plain = run(params, TINY, rest, count, cache, window=64)
    for row, (cached, number) in enumerate([(9, 11), (4, 6)]):
        _, attention = reference.forward(params, TINY, np.asarray(batch[row, : cached + number]))
        for i in range(number):
            one = jax.tree.map(lambda x, i=i, row=row: x[row * 11 + i], stats)
            assert float(one.keys) == cached + i + 1
            for field in ("entropy", "varentropy", "divergence", "interaction"):
                same(getattr(one, field), getattr(attention[cached + i], field), 5e-5)
        same(row_of(stats, row * 11 + number - 1), row_of(last, row))
        np.testing.assert_array_equal(hidden[row, :number], plain_hidden[row, :number])
    for got, want in zip(grown.keys + grown.values, plain.keys + plain.values, strict=True):
        np.testing.assert_array_equal(got, want)


# --- generation ----------------------------------------------------------------------------------

PROMPTS = [list(map(int, random_tokens(TINY, n, seed=n))) for n in (70, 5, 1)]
BUDGETS = [12, 20, 1]


@pytest.fixture(scope="module")
def generated(params):
    """Three greedy rows, in one loop: the final state and the records."""
    return generate(params, TINY, PROMPTS, BUDGETS, capacity=96)


@pytest.mark.parametrize("row", range(3))
def test_generation_against_float64(params, generated, row: int) -> None:
    """Every token, log-probability and metric of a row, from one pass over its finished text."""
    state, records = generated
    prompt, budget = len(PROMPTS[row]), BUDGETS[row]
    text = np.asarray(state.history[row, : prompt + budget])
    assert text[:prompt].tolist() == PROMPTS[row]
    logits, attention = reference.forward(params, TINY, text)
    log_probs = reference.log_softmax(logits)
    for i in range(budget):
        record = jax.tree.map(lambda x, i=i: np.asarray(x[i, row]), records)
        at = prompt + i
        assert record.live
        assert (record.position, record.forwards) == (at, i)
        assert record.finish == (FINISHED_LENGTH if i == budget - 1 else RUNNING)
        assert record.choice.token == text[at] == logits[at - 1].argmax()
        assert float(record.choice.logprob) == pytest.approx(log_probs[at - 1].max(), abs=2e-5)
        p = np.exp(log_probs[at - 1])
        want = attention[at - 1].metrics(np.ones(TINY.num_layers))
        want |= {"entropy": reference.entropy_bits(p), "varentropy": reference.varentropy_bits(p)}
        for name, value in want.items():
            got = float(getattr(record.choice.observation.metrics, name))
            assert got == pytest.approx(value, abs=1e-4), (i, name)
    assert not np.any(records.live[budget:, row])
    assert int(state.finish[row]) == FINISHED_LENGTH
    assert int(state.cache.length[row]) == prompt + budget - 1
