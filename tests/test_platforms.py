"""Computations that differ between a CPU and other platforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from entropix_jax.accelerators.gpu_graphs import puts_loops_in_graphs
from entropix_jax.platforms import for_platform, traced_for_all
from entropix_jax.stats import sum_last


def doubled(x: jax.Array) -> jax.Array:
    return for_platform(x, cpu=lambda x: x + x, otherwise=lambda x: x * 3.0)


def in_branch(x: jax.Array) -> Any:
    return lax.cond(jnp.all(x > 0), doubled, lambda x: x, x)


WAYS = (doubled, jax.vmap(doubled), jax.vmap(in_branch), lambda x: lax.map(in_branch, x))


@pytest.mark.parametrize("way", WAYS)
def test_for_platform_on_a_cpu(way: Any) -> None:
    """Chooses the CPU's variant inside and outside of a program, and of a branch."""
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
    for call in (way, jax.jit(way)):
        np.testing.assert_array_equal(call(x), 2 * x)


def test_compiled_programs_contain_no_choice() -> None:
    text = jax.jit(doubled).lower(np.ones(3, np.float32)).compile().as_text()
    assert text is not None
    assert "conditional" not in text
    assert "multiply" not in text


def test_unused_variants_are_not_traced() -> None:
    """Only the CPU's variant is traced if all devices are CPUs."""

    def refuse(x: jax.Array) -> jax.Array:
        raise AssertionError("traced")

    def choose(x: jax.Array) -> jax.Array:
        return for_platform(x, tpu=refuse, otherwise=lambda x: -x)

    assert jax.jit(choose)(1.0) == -1.0
    with traced_for_all(True), pytest.raises(AssertionError, match="traced"):
        jax.jit(choose).trace(1.0)


@pytest.mark.parametrize(("platform", "lanes"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_programs_for_other_platforms(platform: str, lanes: bool) -> None:
    """A program that is lowered for an absent device has the sum of that device."""
    with traced_for_all(True):
        traced = jax.jit(sum_last).trace(jax.ShapeDtypeStruct((2, 512), jnp.float32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("tensor<2x4x128xf32>" in text) == lanes


@pytest.mark.parametrize(
    ("backend", "flags", "puts"),
    [
        ("gpu", "", True),
        ("cpu", "", False),
        ("tpu", "", False),
        ("gpu", "--xla_gpu_enable_command_buffer=", False),
    ],
)
def test_loops_are_put_in_graphs_on_a_gpu_by_default(
    monkeypatch: pytest.MonkeyPatch, backend: str, flags: str, puts: bool
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert puts_loops_in_graphs() is puts
