"""Products with narrow weights, exact in every form, and close to float32 in a model."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import entropix_jax.model.linear as linear_module
from entropix_jax.model.cache import init_cache
from entropix_jax.model.linear import arranged, linear, padded_dot, product, quantized, rows
from entropix_jax.model.loading import LanguageModel, load
from tests.support import reference
from tests.support.models import logits_of, run
from tests.support.runs import Spec, run_specs


@pytest.fixture(params=[True, False], ids=["multiplied", "widened"])
def multiplied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a few vectors are split. Tests run both forms on any machine, slowly on one without
    bfloat16 products."""
    monkeypatch.setattr(linear_module, "multiplies_bfloat16", lambda: request.param)
    return request.param


def compiled_product(*operands: Any) -> Any:
    """Computes the product with a new trace, since JAX may have cached the other form."""
    return jax.jit(lambda x, weight: product(x, weight))(*operands)


SMALL, LARGE = 2048, 2056  # a vector of float32 on either side of 8 KiB
BF16, F32 = jnp.bfloat16, jnp.float32


def operands(shape: tuple[int, ...], out: int, x_dtype, w_dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), x_dtype)
    return x, jnp.asarray(rng.normal(size=(out, shape[-1])), w_dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """Returns the product of the stored values, in float64."""
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("lead", [(1,), (2, 3)], ids=str)
@pytest.mark.parametrize(("width", "out"), [(SMALL, 24), (LARGE, 24), (64, 600)])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [(F32, F32), (F32, BF16), (F32, jnp.float16), (BF16, BF16)],
    ids=["f32 f32", "f32 bf16", "f32 f16", "bf16 bf16"],
)
def test_product_is_exact_to_float32(
    lead: tuple[int, ...], width: int, out: int, x_dtype, w_dtype, multiplied: bool
) -> None:
    """Only the float32 sum rounds (1e-6 of the size of its terms), in every form. How weights are
    read and widened is tested in `engine.test_compiled`."""
    x, weight = operands((*lead, width), out, x_dtype, w_dtype)
    got = compiled_product(x, weight)
    assert got.dtype == F32
    assert got.shape == (*lead, out)
    np.testing.assert_allclose(got, exact(x, weight), atol=1e-6 * np.sqrt(width) * 8, rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(lambda *of: linear(*of))(x, weight), got.astype(x_dtype))


@pytest.mark.parametrize("lead", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_few_vectors_are_padded(lead: tuple[int, ...], dtype) -> None:
    """The padded product, used on a TPU, equals the plain one."""
    x, weight = operands((*lead, 64), 24, dtype, dtype)
    got = jax.jit(padded_dot)(x, weight)
    assert (got.dtype, got.shape) == (F32, (*lead, 24))
    np.testing.assert_allclose(got, product(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [2, 7, 16, 17])
def test_a_few_vectors_are_exact_to_float32_in_either_form(count: int, multiplied: bool) -> None:
    """Entries have any magnitude."""
    x, weight = operands((count, 256), 40, F32, BF16)
    rng = np.random.default_rng(1)
    x = x * jnp.asarray(10 ** rng.uniform(-12, 12, x.shape), F32)
    got = compiled_product(x, weight)
    terms = exact(jnp.abs(x), jnp.abs(weight))
    assert np.all(np.abs(np.asarray(got, np.float64) - exact(x, weight)) <= 2e-6 * terms)
    text = jax.jit(lambda *of: product(*of)).lower(x, weight).as_text()
    assert ("bf16>, tensor<40x256xbf16>" in text) == (multiplied and count <= 16)


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("count", [1, 16, 17, 64, 65])
def test_bfloat16_vectors_are_multiplied_exactly(count: int, small: bool, multiplied: bool) -> None:
    """The result equals that of widened vectors, in every form. A single vector is widened."""
    x, weight = operands((count, 256), 40, BF16, BF16)
    weight = quantized(weight) if small else weight
    got = compiled_product(x, weight)
    assert got.shape == (count, 40)
    want = compiled_product(x.astype(F32), weight)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-6)
    if count == 1:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("count", [2, 16, 17])
def test_a_few_vectors_times_int8_are_exact_to_float32(count: int, multiplied: bool) -> None:
    """The error bound is relative to each vector's largest entry."""
    x, weight = operands((count, 256), 40, F32, F32)
    x, small = x.at[:, 3].mul(1e3), quantized(weight)
    got = compiled_product(x, small)
    stored = small.values.astype(F32) * small.scale[:, None]
    bound = 3e-7 * np.abs(x).max(1)[:, None] * np.abs(stored).sum(1)
    assert np.all(np.abs(got - exact(x, stored)) <= bound)
    text = jax.jit(lambda *of: product(*of)).lower(x, small).as_text()
    assert ("i8>, tensor<40x256xi8>" in text) == (multiplied and count <= 16)


@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_non_finite_vector_changes_only_its_own_result(
    number: float, small: bool, multiplied: bool
) -> None:
    x, weight = operands((4, 64), 24, F32, BF16)
    whole = quantized(weight) if small else weight
    clean = np.asarray(compiled_product(x, whole))
    got = np.asarray(compiled_product(x.at[2, 5].set(number), whole))
    assert not np.any(np.isfinite(got[2]))
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(clean, 2, 0))
    if not small:
        got = np.asarray(compiled_product(x, weight.at[7, 5].set(number)))
        assert not np.any(np.isfinite(got[:, 7]))
        np.testing.assert_array_equal(np.delete(got, 7, 1), np.delete(clean, 7, 1))


# Narrow weights in blocks of columns.


@pytest.mark.parametrize("width", [2048, 2049, 5000])
@pytest.mark.parametrize("lead", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "int8"])
def test_blocks_of_columns_are_the_same_matrix(
    width: int, lead: tuple[int, ...], small: bool, multiplied: bool
) -> None:
    x, weight = operands((*lead, width), 24, F32, BF16)
    plain = quantized(weight) if small else weight
    laid_out = arranged(plain)
    blocks = jax.tree.leaves(laid_out)[: -1 if small else None]
    assert all(4 * block.shape[1] <= 8192 for block in blocks)
    assert (len(blocks) > 1) == (width > 2048)
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), jax.tree.leaves(plain)[0])
    got, want = (np.asarray(compiled_product(x, w)) for w in (laid_out, plain))
    np.testing.assert_allclose(got, want, atol=1e-6 * np.sqrt(width) * 8, rtol=1e-6)
    ids = jnp.asarray([[3, 0]], jnp.int32)
    got, want = (np.asarray(rows(w, ids, jnp.dtype(F32))) for w in (laid_out, plain))
    np.testing.assert_array_equal(got, want)


# Weights of 8 bits.


@pytest.mark.parametrize(
    ("lead", "out", "dtype"), [((1, 1), 24, F32), ((2, 3), 600, F32), ((2, 3), 24, BF16)], ids=str
)
def test_int8_weights_are_rounded_by_row(lead: tuple[int, ...], out: int, dtype: Any) -> None:
    """The rounding error is at most half a step of the row's scale. The product uses the rounded
    values."""
    x, weight = operands((*lead, 64), out, dtype, F32)
    weight = weight.at[0].set(0.0).at[1].mul(100.0)
    small = quantized(weight)
    assert small.values.dtype == jnp.int8
    wide = np.asarray(weight, np.float64)
    scale = np.abs(wide).max(axis=1) / 127
    np.testing.assert_allclose(small.scale, scale, rtol=1e-6)
    stands_for = np.asarray(small.values, np.float64) * np.asarray(small.scale, np.float64)[:, None]
    assert np.all(np.abs(stands_for - wide) <= 0.5001 * scale[:, None])
    assert np.abs(small.values).max(axis=1)[1:].min() == 127
    got = jax.jit(product)(x, small)
    assert got.dtype == F32
    want = np.asarray(x, np.float64) @ stands_for.T
    bound = 1e-6 * 64 * np.abs(stands_for).max(axis=1)
    assert np.all(np.abs(np.asarray(got) - want) <= bound + 1e-6 * np.abs(want))
    looked_up = rows(small, jnp.asarray([[2, 0]], jnp.int32), jnp.dtype(F32))
    np.testing.assert_allclose(looked_up, stands_for[[[2, 0]]], rtol=1e-6)


# Divergence of narrow weights from float32.

# Mean KL(float32 || narrow) per token, in nats, on the embedded model's own texts: about three
# times the measured value.
TOLERANCE = {"bfloat16": 1.5e-5, "int8": 1.5e-4}
LENGTH = 256


@cache
def embedded(weights: str) -> LanguageModel:
    return load("tiny", weights)


@cache
def texts() -> np.ndarray:
    """Returns texts of the embedded model at temperature 1, int32 [4, LENGTH]."""
    model = embedded("float32")
    start = model.tokenizer.encode("The ", add_bos=True)
    requests = [Spec(start, str(i), LENGTH - len(start)) for i in range(4)]
    rows = run_specs(model, requests, "temperature", ignore_eos=True).run()
    return np.asarray([[*start, *(token.token_id for token in row.tokens)] for row in rows])


def log_probs(model: LanguageModel) -> np.ndarray:
    """Returns log-probabilities at every position of the texts, float64 [4 * LENGTH, V]."""
    tokens = jnp.asarray(texts(), jnp.int32)
    cache = init_cache(model.config, 4, LENGTH, model.precision.activations)
    count = jnp.full(4, LENGTH, jnp.int32)
    hidden, _, _ = run(model.params, model.config, tokens, count, cache, window=LENGTH)
    logits = np.asarray(logits_of(model.params, hidden), np.float64)
    return reference.log_softmax(logits.reshape(-1, logits.shape[-1]))


@pytest.mark.parametrize("weights", list(TOLERANCE))
def test_narrow_weights_stay_close_to_float32(weights: str) -> None:
    true, narrow = log_probs(embedded("float32")), log_probs(embedded(weights))
    divergence = np.sum(np.exp(true) * (true - narrow), axis=-1)
    assert 0 < divergence.mean() < TOLERANCE[weights]
    # Where the most likely token changes, both tokens have similar probabilities.
    changed = true.argmax(-1) != narrow.argmax(-1)
    rows = np.arange(len(true))[changed]
    gap = true[rows, true[rows].argmax(-1)] - true[rows, narrow[rows].argmax(-1)]
    assert changed.mean() < 0.08
    assert gap.max(initial=0.0) < 0.2
