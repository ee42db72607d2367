from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.linear import linear, product, rows

SMALL, LARGE = 2048, 2056  # a vector of float32 on either side of 8 KiB
BF16, F32 = jnp.bfloat16, jnp.float32


def operands(shape: tuple[int, ...], out: int, x_dtype, w_dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), x_dtype)
    return x, jnp.asarray(rng.normal(size=(out, shape[-1])), w_dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """The product of the numbers as they are stored, in float64."""
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("lead", [(1, 1), (1,), (2, 3), (1, 5), (7,)], ids=str)
@pytest.mark.parametrize(("width", "out"), [(SMALL, 24), (LARGE, 24), (64, 256), (64, 600)])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [(F32, F32), (F32, BF16), (F32, jnp.float16), (BF16, BF16)],
    ids=["f32 f32", "f32 bf16", "f32 f16", "bf16 bf16"],
)
def test_product_is_exact_to_float32(
    lead: tuple[int, ...], width: int, out: int, x_dtype, w_dtype
) -> None:
    """In whatever form: the only rounding is that of a float32 sum (1e-6 of its terms' size)."""
    x, weight = operands((*lead, width), out, x_dtype, w_dtype)
    got = jax.jit(product)(x, weight)
    assert got.dtype == F32
    assert got.shape == (*lead, out)
    np.testing.assert_allclose(got, exact(x, weight), atol=1e-6 * np.sqrt(width) * 8, rtol=1e-6)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)])
def test_linear_returns_the_type_of_its_input(x_dtype, w_dtype) -> None:
    x, weight = operands((2, 3, 40), 24, x_dtype, w_dtype)
    got = linear(x, weight)
    assert got.dtype == x_dtype
    np.testing.assert_array_equal(got, product(x, weight).astype(x_dtype))


def test_bfloat16_sums_are_not_rounded_on_the_way() -> None:
    """512 ones: summed up in bfloat16 they stick at 256."""
    x, weight = jnp.ones((1, 512), BF16), jnp.ones((2, 512), BF16)
    np.testing.assert_array_equal(product(x, weight), np.full((1, 2), 512.0))


@pytest.mark.parametrize("w_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_are_the_rows(w_dtype, dtype) -> None:
    _, table = operands((1, 8), 12, F32, w_dtype)
    ids = np.array([[11, 0, 3], [3, 3, 7]], np.int32)
    got = jax.jit(rows, static_argnums=2)(table, jnp.asarray(ids), jnp.dtype(dtype))
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(table)[ids].astype(dtype))


def assert_carried_narrow(loop, inputs: tuple[jax.Array, ...], shape: str) -> None:
    """No loop of the compiled program carries a wide copy of the weight, made before it began."""
    text = jax.jit(loop).lower(*inputs).compile().as_text() or ""
    carried = [line for line in text.splitlines() if " while(" in line]
    assert carried
    for line in carried:
        assert f"bf16[{shape}]" in line
        assert f" f32[{shape}]" not in line


@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_narrow_weight_stays_narrow_in_a_loop(batch: int, size: int) -> None:
    def loop(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, y: linear(y, weight) * 0.01, x)

    inputs = operands((batch, size), size, F32, BF16)
    assert_carried_narrow(loop, inputs, f"{size},{size}")


def test_a_narrow_table_stays_narrow_in_a_loop() -> None:
    def loop(ids: jax.Array, table: jax.Array) -> jax.Array:
        def step(_: int, ids: jax.Array) -> jax.Array:
            return jnp.argmax(rows(table, ids, jnp.dtype(F32)), axis=1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 10, step, ids)

    _, table = operands((1, 64), 96, F32, BF16)
    assert_carried_narrow(loop, (jnp.arange(3, dtype=jnp.int32), table), "96,64")
