"""The attention kernel for a GPU, compared with the plain form. Runs interpreted on a CPU, and
compiled on a GPU (`JAX_PLATFORMS=cuda pytest tests/model/test_gpu_kernels.py`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.accelerators.gpu_kernels import BLOCK, attend_next, is_enabled
from entropix_jax.model.attention import attend

pytest.importorskip("jax.experimental.pallas.triton")
# Later versions of JAX warn about it.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
INTERPRET = jax.default_backend() == "cpu"
ROWS, LANES, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 6, 2, 16, 4 * BLOCK
# At the start, in the middle and at the end of a block, and in the last block.
POSITIONS = np.array([[0], [BLOCK + 7], [2 * BLOCK - 1], [3 * BLOCK]], np.int32)


def inputs() -> tuple[jax.Array, ...]:
    """Returns queries, keys, values and positions."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape), jnp.bfloat16)

    cached = (ROWS + LANES, KV_HEADS, WINDOW + BLOCK, HEAD_DIM)
    queries = 2 * normal(ROWS, 1, HEADS, HEAD_DIM)
    return queries, normal(*cached), normal(*cached), jnp.asarray(POSITIONS)


def test_the_kernel_equals_the_plain_form() -> None:
    args = inputs()
    mixed, scores = attend_next(*args, window=WINDOW, interpret=INTERPRET)
    expected, expected_scores = attend(*args, window=WINDOW)
    assert (mixed.shape, mixed.dtype) == (expected.shape, expected.dtype)
    assert (scores.shape, scores.dtype) == (expected_scores.shape, expected_scores.dtype)
    found, wanted = (np.asarray(x, np.float32) for x in (mixed, expected))
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=1e-2)  # two digits of bfloat16
    for row, position in enumerate(POSITIONS[:, 0]):
        one, other = (x[row, :, :, : position + 1] for x in (scores, expected_scores))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

    # NaN in a key affects only the rows that attend to it.
    queries, keys, values, positions = args
    keys = keys.at[1, :, 3].set(jnp.nan).at[2, :, 2 * BLOCK].set(jnp.nan)
    mixed, _ = attend_next(queries, keys, values, positions, window=WINDOW, interpret=INTERPRET)
    finite = np.isfinite(np.asarray(mixed, np.float32))
    assert not finite[1].any()
    assert finite[[0, 2, 3]].all()


@pytest.mark.parametrize("shape", [(32, 8, 64, 2048), (24, 8, 128, 1000), (9, 3, 64, 100)])
def test_all_shapes_are_lowered_to_triton(shape: tuple[int, ...]) -> None:
    """Lowers shapes that the interpreter does not support, too."""
    heads, kv_heads, head_dim, window = shape
    cached = jax.ShapeDtypeStruct((3, kv_heads, window, head_dim), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((2, 1, heads, head_dim), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    traced = attend_next.trace(queries, cached, cached, positions, window=window)
    try:
        lowered = traced.lower(lowering_platforms=("cuda",))
    except RuntimeError as error:  # JAX 0.11 and later query the GPU
        pytest.skip(str(error))
    assert "__gpu$xla.gpu.triton" in lowered.as_text()


def test_the_kernel_needs_bfloat16_one_device_and_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = jnp.zeros((1, 1, BLOCK, 64), jnp.bfloat16)
    monkeypatch.delenv("ENTROPIX_GPU_KERNELS", raising=False)
    assert not is_enabled(keys)
    monkeypatch.setenv("ENTROPIX_GPU_KERNELS", "1")
    assert is_enabled(keys)
    assert not is_enabled(keys.astype(jnp.float32))
    assert not is_enabled(keys[..., :48])
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"))):
        assert not is_enabled(keys)
