"""The kernels for a GPU compared with the plain form: interpreted on a CPU, compiled on a GPU
(`JAX_PLATFORMS=cuda pytest tests/model/test_gpu_kernels.py`)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model import attention, gpu_kernels
from entropix_jax.model.gpu_kernels import BLOCK
from entropix_jax.model.llama import rms_norm

# Later versions of JAX say so; without Triton the plain forms are taken.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
INTERPRET = jax.default_backend() == "cpu"
ROWS, LANES, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 3, 6, 2, 16, 4 * BLOCK
# At the start, in the middle and at the end of a block, and one row that does not run.
START, COUNT = (0, BLOCK + 7, 2 * BLOCK - 1, 3 * BLOCK), (1, 1, 1, 0)


def inputs() -> tuple[Any, ...]:
    """Keys, values, scores, queries, key, value, cos, sin, layer, start, count."""
    generator = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(generator.normal(size=shape), dtype)

    cached = (ROWS + LANES, KV_HEADS, WINDOW + BLOCK, HEAD_DIM)
    angles = generator.normal(size=(ROWS, 1, 1, HEAD_DIM // 2))
    return (
        normal(*cached),
        normal(*cached),
        jnp.full((ROWS, LAYERS, HEADS, WINDOW), jnp.nan),
        2 * normal(ROWS, HEADS, HEAD_DIM),
        normal(ROWS, KV_HEADS, HEAD_DIM),
        normal(ROWS, KV_HEADS, HEAD_DIM),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.int32(1),
        jnp.array(START, jnp.int32),
        jnp.array(COUNT, jnp.int32),
    )


def plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    keys, values, scores, queries, key, value, cos, sin, layer, start, count = args
    mixed, (keys, values), scores, log_mass = attention.attend_next(
        queries, key, value, (cos, sin), (keys, values), scores, layer, start, count
    )
    return mixed, keys, values, scores, log_mass


def agree(found: jax.Array, expected: jax.Array) -> None:
    """That two arrays are the same but for a digit or two of bfloat16."""
    one, other = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(one, other, rtol=2e-2, atol=1e-2)


def test_attention_of_the_next_token_is_that_of_the_plain_form() -> None:
    args = inputs()
    mixed, keys, values, scores, log_mass = gpu_kernels.attend_next(*args, interpret=INTERPRET)
    expected = plain(args)
    agree(keys, expected[1])
    np.testing.assert_array_equal(values, expected[2])
    assert np.isnan(scores[:, ::2]).all()  # of the other layers
    for row, (start, count) in enumerate(zip(START, COUNT, strict=True)):
        if count:
            seen = np.asarray(scores)[row, 1, :, : start + 1]
            wanted = np.asarray(expected[3])[row, 1, :, : start + 1]
            np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(log_mass[row], expected[4][row], rtol=1e-5, atol=1e-5)
            agree(mixed[row], expected[0][row])


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_value_that_is_not_finite_spoils_its_row_alone(number: float) -> None:
    args = [*inputs()]
    args[5] = args[5].at[1, 0, 3].set(number)
    mixed, keys, values, *_ = gpu_kernels.attend_next(*args, interpret=INTERPRET)
    expected = plain(tuple(args))
    agree(keys, expected[1])
    np.testing.assert_array_equal(values, expected[2])
    assert np.isfinite(np.asarray(values, np.float32)).all()
    assert np.isnan(np.asarray(mixed[1], np.float32)).any()
    assert np.isfinite(np.asarray(mixed[::2], np.float32)).all()


@pytest.mark.parametrize("heads", [4, 9])
def test_statistics_are_those_of_the_plain_form(heads: int) -> None:
    generator = np.random.default_rng(heads)
    keys = np.array([1, 300, WINDOW])
    scores = (
        generator.normal(size=(3, LAYERS, heads, WINDOW))
        * np.array([1, 3, 30])[:, None, None, None]
    )
    valid = np.arange(WINDOW) < keys[:, None]
    scores[~np.broadcast_to(valid[:, None, None], scores.shape)] = np.nan
    scores = jnp.asarray(scores, jnp.float32)
    visible = jnp.asarray(valid)[:, None, None]
    log_mass = jax.nn.logsumexp(jnp.where(visible, scores, -jnp.inf), axis=-1)
    found = gpu_kernels.measure(scores, log_mass, jnp.asarray(keys, jnp.int32), interpret=INTERPRET)
    stats = attention.attention_stats(scores, jnp.asarray(valid))
    expected = stats.entropy, stats.varentropy, stats.divergence, stats.interaction
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_the_sum_and_its_norm_are_those_of_the_plain_form() -> None:
    generator = np.random.default_rng(0)
    x, y = (jnp.asarray(generator.normal(size=(3, 64)), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(generator.normal(size=64), jnp.bfloat16)
    whole, normed = gpu_kernels.add_and_norm(x, y, weight, jnp.float32(1e-5), interpret=INTERPRET)
    np.testing.assert_array_equal(whole, x + y)
    agree(normed, rms_norm(x + y, weight, 1e-5))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "width"),
    [(32, 8, 64, 2048, 2048), (24, 8, 128, 1000, 3072), (9, 3, 64, 100, 576), (4, 4, 256, 768, 96)],
)
def test_all_shapes_are_lowered(
    heads: int, kv_heads: int, head_dim: int, window: int, width: int
) -> None:
    """To Triton, for a GPU that is not there: also those that the interpreter does not take."""

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    numbers, wide = partial(array, dtype=jnp.int32), partial(array, dtype=jnp.float32)
    cached, new = array(3, kv_heads, window, head_dim), array(2, kv_heads, head_dim)
    angles, scores = wide(2, 1, 1, head_dim // 2), wide(2, 3, heads, window)
    step = (cached, cached, scores, array(2, heads, head_dim), new, new, angles, angles)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (gpu_kernels.attend_next, (*step, numbers(), numbers(2), numbers(2))),
        (gpu_kernels.measure, (scores, wide(2, 3, heads), numbers(2))),
        (gpu_kernels.add_and_norm, (array(2, width), array(2, width), array(width), wide())),
        (jax.jit(partial(gpu_kernels.allocate, (2, 3))), ()),
    ]
    for function, args in calls:
        try:
            lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
        except RuntimeError as error:  # from JAX 0.11 on it asks which GPU there is
            pytest.skip(str(error))
        assert "__gpu$xla.gpu.triton" in lowered.as_text()


def test_kernels_are_for_bfloat16_and_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = jnp.zeros((1, 1, BLOCK, 64), jnp.bfloat16)
    assert gpu_kernels.take(cached)
    assert not gpu_kernels.take(cached.astype(jnp.float32))
    assert not gpu_kernels.take(cached[..., :48])
    assert gpu_kernels.are_there()
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"))):
        assert not gpu_kernels.are_there()
    monkeypatch.setenv("ENTROPIX_GPU_KERNELS", "0")
    assert not gpu_kernels.are_there()


@pytest.mark.parametrize(
    ("capabilities", "runs"),
    [(["9.0", "8.0"], True), (["9.0", "7.5"], False), (["gfx942"], False), ([], True)],
)
def test_gpus_that_run_no_triton_take_the_plain_forms(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[str], runs: bool
) -> None:
    """Without a GPU kernels are compiled for one that is elsewhere."""

    def local_devices(backend: str) -> list[Any]:
        if not capabilities:
            raise RuntimeError(f"no {backend}")
        return [SimpleNamespace(compute_capability=one) for one in capabilities]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    gpu_kernels._runs_triton.cache_clear()
    try:
        assert gpu_kernels.are_there() is runs
    finally:
        gpu_kernels._runs_triton.cache_clear()
