"""The forward pass against float64, over whole texts and in chunks."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model import attention
from entropix_jax.model.cache import init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward
from entropix_jax.model.rope import inverse_frequencies, rotations
from tests.support import reference
from tests.support.models import (
    SCALING,
    TINY,
    fill_unused,
    logits_of,
    metrics_of,
    random_params,
    random_tokens,
    run,
    teacher_forced,
    tiny_config,
)

LONG = 200  # tokens: enough to see an error of the rotary embedding
run_every = jax.jit(forward, static_argnames=("config", "window", "every"))


def same(a, b, tolerance: float = 1e-5) -> None:
    """Compares two pytrees of arrays, with a tolerance relative to their magnitude."""
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


# Against the formulas.


def rope_of(factor: float | None, *, head_dim: int = 64, theta: float = 500000.0) -> ModelConfig:
    scaling = factor and replace(SCALING, factor=factor, original_max_positions=8192)
    return tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize(
    "config",
    [
        rope_of(None, theta=10000.0),
        rope_of(None, head_dim=128),
        rope_of(8.0, head_dim=128),
        rope_of(32.0),
    ],
    ids=["unscaled", "Llama 3", "Llama 3.1", "Llama 3.2"],
)
def test_rotations_to_the_end_of_the_context(config: ModelConfig) -> None:
    """The error is at most that of rounding the frequency and the product to float32."""
    frequencies = reference.inverse_frequencies(config)
    np.testing.assert_allclose(inverse_frequencies(config), frequencies, rtol=1e-7)
    positions = np.array([[0, 1, 2, 63, 200, 8191], [8192, 16384, 50001, 99999, 131070, 131071]])
    angles = positions[:, :, None, None] * frequencies
    bound = angles * 2.0**-23 + 2.0**-23
    found = rotations(config, jnp.asarray(positions, jnp.int32))
    for values, function in zip(found, (np.cos, np.sin), strict=True):
        assert (values.shape, values.dtype) == ((2, 6, 1, config.head_dim // 2), jnp.float32)
        assert np.all(np.abs(np.asarray(values, np.float64) - function(angles)) <= bound)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        tiny_config(num_kv_heads=4, tied_head=False),
        tiny_config(num_kv_heads=1, rope_scaling=None, head_dim=12),
        tiny_config(norm_eps=0.1, rope_theta=500.0),
        tiny_config(rope_scaling=replace(SCALING, factor=8.0)),
        tiny_config(rope_scaling=replace(SCALING, original_max_positions=16)),
    ],
    ids=lambda config: str(config)[:160],
)
def test_forward_equals_float64(config) -> None:
    """Compares logits of every position, and the statistics of the last one.

    Defect 10: epsilon and the parameters of RoPE were constants in the code.
    """
    params = random_params(config, seed=2)
    tokens = random_tokens(config, 70)
    logits, stats, _ = teacher_forced(params, config, tokens[None])
    want, attention = reference.forward(params, config, tokens)
    assert want.std() > 0.5  # not a test of zeros
    same(logits[0], want, 2e-5)
    for field in ("entropy", "varentropy", "divergence", "interaction"):
        same(getattr(stats, field)[0], getattr(attention[-1], field), 5e-5)
    metrics = metrics_of(logits[:, -1], stats, jnp.ones((1, config.num_layers)))
    for name, value in attention[-1].metrics(np.ones(config.num_layers)).items():
        assert float(getattr(metrics, name)[0]) == pytest.approx(value, abs=5e-5), name


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("new", [256, 48], ids=["blocks", "part of a block"])
def test_attention_of_many_tokens(new: int, large: bool, monkeypatch) -> None:
    """Rows start at different positions. Compares blocks and a single pass with float64."""
    monkeypatch.setattr(attention, "_LARGE", 0 if large else 1 << 40)
    rng, window = np.random.default_rng(0), 300
    query = rng.normal(size=(2, new, 6, 8))
    key, value = (rng.normal(size=(3, 2, window + 20, 8)) for _ in range(2))  # three groups
    at, last = np.arange(new) + np.array([[0], [44]]), np.array([new - 1, 3])
    given = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
    given += [jnp.asarray(x, jnp.int32) for x in (at, last)]
    mixed, scores = attention.attend(*given, window=window)
    key, value = (np.repeat(x[:2, :, :window], 3, axis=1) for x in (key, value))
    exact = np.einsum("btnh,bnsh->bnts", query, key) / np.sqrt(8)
    weights = np.exp(exact) * (np.arange(window) <= at[:, None, :, None])
    weights /= weights.sum(-1, keepdims=True)
    same(mixed, np.einsum("bnts,bnsh->btnh", weights, value).reshape(2, new, -1))
    same(scores[:, :, 0], exact[np.arange(2), :, last])


@pytest.mark.parametrize("activations", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True, "qk_norm": True}], ids=str)
def test_bfloat16_weights(tokens, changes: dict[str, bool], activations) -> None:
    """Float32 activations equal float32 weights with the same values. bfloat16 ones are close."""
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


# Every position.


def test_every_position_has_its_own_statistics(params, tokens) -> None:
    """In a chunk within a text, they equal those of passes that end at each position."""
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
