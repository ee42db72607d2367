"""The cache and the forward pass: one pass, chunks and steps must be the same computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import (
    FINISHED_LENGTH,
    RUNNING,
)
from entropix_jax.model.cache import init_cache, init_suffixes
from entropix_jax.model.llama import forward, forward_branches, rms_norm
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
CAPACITY = 256

run_every = jax.jit(forward, static_argnames=("config", "window", "every"))
run_branches = jax.jit(forward_branches, static_argnames=("config", "window"))


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


@pytest.fixture(scope="module")
def whole(params, tokens):
    """One teacher-forced pass: logits [1, T, V], statistics, cache."""
    return teacher_forced(params, TINY, tokens)


# --- against the formulas ------------------------------------------------------------------------


def test_rms_norm_against_float64() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 16)), rng.normal(size=16)
    for eps in (1e-5, 0.5):
        want = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
        got = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), eps)
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


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


# --- chunks and steps ----------------------------------------------------------------------------


def in_chunks(params, tokens: np.ndarray, sizes: list[int], cache, *, padded: int, pad: int):
    """Logits of every position, from padded chunks; the last statistics; the cache."""
    parts, at = [], int(cache.length[0])
    for size in sizes:
        chunk = np.full((1, padded), pad, np.int32)
        chunk[0, :size] = tokens[0, at : at + size]
        count = jnp.asarray([size], jnp.int32)
        hidden, stats, cache = run(
            params, TINY, jnp.asarray(chunk), count, cache, window=cache.capacity
        )
        parts.append(np.asarray(logits_of(params, hidden))[:, :size])
        at += size
        assert int(cache.length[0]) == at
    return np.concatenate(parts, axis=1), stats, cache


@pytest.mark.parametrize("cached", [0, 1, 150])
def test_steps_after_a_prefill_are_one_pass(params, tokens, whole, cached: int) -> None:
    """Chunks, then steps, whatever pads the chunks and whatever lay in the cache."""
    cache = fill_unused(init_cache(TINY, 1, CAPACITY, jnp.dtype(jnp.float32)), np.nan)
    if cached:
        sizes = [min(32, cached - a) for a in range(0, cached, 32)]
        logits, _, cache = in_chunks(params, tokens, sizes, cache, padded=32, pad=7)
        same(logits, whole[0][:, :cached])
    steps = [1] * (LONG - cached)
    logits, stats, cache = in_chunks(params, tokens, steps, cache, padded=1, pad=0)
    same((logits, stats), (whole[0][:, cached:], whole[1]))
    for got, want in zip(cache.keys + cache.values, whole[2].keys + whole[2].values, strict=True):
        same(got[:, :, :LONG], want)
        assert np.isnan(got[:, :, LONG:]).all()


def test_a_row_alone_is_the_row_in_a_ragged_batch(params, tokens, whole) -> None:
    """Three rows at once: a long prompt, a short one, and one that has nothing new."""
    counts = [LONG, 37, 0]
    other = random_tokens(TINY, LONG, seed=5)
    batch = np.stack([tokens[0], other, other])
    cache = fill_unused(init_cache(TINY, 3, CAPACITY, jnp.dtype(jnp.float32)), np.nan)
    hidden, stats, cache = run(
        params,
        TINY,
        jnp.asarray(batch),
        jnp.asarray(counts, jnp.int32),
        cache,
        window=CAPACITY,
    )
    logits = np.asarray(logits_of(params, hidden))
    short_logits, short_stats, _ = teacher_forced(params, TINY, batch[1:2, :37])
    same((logits[:1], row_of(stats, 0)), whole[:2])
    same((logits[1:2, :37], row_of(stats, 1)), (short_logits, short_stats))
    np.testing.assert_array_equal(cache.length, counts)

    # Then one more token each, but for the second row.
    step = jnp.asarray([[1], [2], [3]], jnp.int32)
    count = jnp.asarray([1, 0, 1], jnp.int32)
    before = cache
    hidden, stats, cache = run(params, TINY, step, count, cache, window=CAPACITY)
    logits = np.asarray(logits_of(params, hidden))
    for row, text in ((0, [*tokens[0], 1]), (2, [3])):
        want = teacher_forced(params, TINY, np.array([text], np.int32))
        same((logits[row, 0], row_of(stats, row)), (want[0][0, -1], want[1]))
    np.testing.assert_array_equal(cache.length, [LONG + 1, 37, 1])
    for got, want in zip(cache.keys + cache.values, before.keys + before.values, strict=True):
        np.testing.assert_array_equal(got[1], want[1])  # NaN and all


@pytest.mark.parametrize("junk", [0.0, 1e30, -np.inf, np.nan])
@pytest.mark.parametrize(("capacity", "window"), [(40, 40), (512, 512), (512, 64)])
def test_metrics_do_not_see_the_cache(params, capacity: int, window: int, junk: float) -> None:
    """Twice the cache, another window, junk in it: the same step."""
    text = random_tokens(TINY, 40, seed=8)[None]
    want_logits, want_stats, _ = teacher_forced(params, TINY, text)
    want = all_metrics(TINY, want_logits[:, -1], want_stats)
    cache = fill_unused(init_cache(TINY, 1, capacity, jnp.dtype(jnp.float32)), junk)
    for at, size in ((0, 30), (30, 10)):  # padded to 32
        chunk = np.zeros((1, 32), np.int32)
        chunk[0, :size] = text[0, at : at + size]
        count = jnp.asarray([size], jnp.int32)
        hidden, stats, cache = run(params, TINY, jnp.asarray(chunk), count, cache, window=window)
    logits = logits_of(params, hidden)[:, size - 1]
    same(logits, want_logits[:, -1])
    same(all_metrics(TINY, logits, stats), want)


@pytest.mark.parametrize("activations", [jnp.float32, jnp.bfloat16])
def test_bfloat16_weights(params, tokens, activations) -> None:
    """Wide activations compute what float32 weights of the same values do; narrow ones nearly."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    want, _, _ = teacher_forced(wide, TINY, tokens[:, :64])
    cache = init_cache(TINY, 1, 64, jnp.dtype(activations))
    count = jnp.asarray([64], jnp.int32)
    hidden, stats, _ = run(narrow, TINY, jnp.asarray(tokens[:, :64]), count, cache, window=64)
    assert hidden.dtype == activations
    logits = logits_of(narrow, hidden)
    for leaf in jax.tree.leaves((logits, stats)):
        assert leaf.dtype == jnp.float32
    if activations == jnp.float32:
        same(logits, want)
    else:
        error = np.asarray(logits) - want
        assert np.sqrt((error**2).mean()) < 0.05 * want.std()


# --- every position, and branches -----------------------------------------------------------------


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


@pytest.mark.parametrize("junk", [0.0, 1e30, np.nan])
def test_branches_are_passes_of_their_own(params, junk: float) -> None:
    """Two rows with three branches of four tokens each: what each text alone would give."""
    prefixes = [random_tokens(TINY, 70), random_tokens(TINY, 3, seed=1)]
    branches = np.random.default_rng(2).integers(0, TINY.vocab_size, (2, 3, 4), dtype=np.int32)
    cache = fill_unused(init_cache(TINY, 2, 96, jnp.dtype(jnp.float32)), junk)
    batch = np.zeros((2, 70), np.int32)
    for row, prefix in enumerate(prefixes):
        batch[row, : len(prefix)] = prefix
    count = jnp.asarray([70, 3], jnp.int32)
    _, _, cache = run(params, TINY, jnp.asarray(batch), count, cache, window=96)
    suffixes = init_suffixes(cache, 3, 4)
    for depth in range(4):
        hidden, stats, suffixes = run_branches(
            params,
            TINY,
            jnp.asarray(branches[:, :, depth]),
            jnp.int32(depth),
            cache,
            suffixes,
            window=96,
        )
        logits = np.asarray(logits_of(params, hidden))
        for row, prefix in enumerate(prefixes):
            for w in range(3):
                text = np.concatenate([prefix, branches[row, w, : depth + 1]])
                want, attention = reference.forward(params, TINY, text)
                same(logits[row, w], want[-1], 2e-5)
                one = row_of(stats, 3 * row + w)
                assert float(one.keys[0]) == len(text)
                for field in ("entropy", "varentropy", "divergence", "interaction"):
                    same(getattr(one, field)[0], getattr(attention[-1], field), 5e-5)
    # The suffixes hold what the cache of that text alone holds.
    for row, prefix in enumerate(prefixes):
        text = np.concatenate([prefix, branches[row, 1]])
        _, _, alone = teacher_forced(params, TINY, text[None])
        for own, whole in zip(
            suffixes.keys + suffixes.values, alone.keys + alone.values, strict=True
        ):
            same(own[row, 1], whole[0, :, len(prefix) :])


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
