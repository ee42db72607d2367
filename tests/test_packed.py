"""Packed trees: unpacking returns each array bit by bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.packed import pack

RNG = np.random.default_rng(0)


def tree(*lead: int) -> dict[str, Any]:
    """Returns arrays of every dtype of a state, with the leading axes."""
    bits = RNG.integers(0, 2**32, (*lead, 5), np.uint32)
    return {
        "bits": bits,
        "any bits": bits.view(np.float32),  # NaNs among them
        "flag": RNG.integers(0, 2, lead).astype(bool),
        "flags": RNG.integers(0, 2, (*lead, 2, 3)).astype(bool),
        "empty": np.zeros((*lead, 0), np.int32),
        "number": RNG.integers(-9, 9, lead).astype(np.int32),
        "large": RNG.standard_normal((*lead, 300)).astype(np.float32),
        "bytes": RNG.integers(0, 255, (*lead, 4), np.uint8),
    }


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("on_host", [True, False])
def test_unpack(lead: tuple[int, ...], on_host: bool) -> None:
    """On the host, in a compiled program, and in one that is mapped over the first axis; the packed
    trees have one form."""
    given = tree(*lead)
    packed = pack(given, len(lead))
    if not on_host:
        arrays = jax.tree.map(jnp.asarray, given)
        make = jax.jit(lambda one: pack(one, len(lead)))
        packed = make(arrays)
        if lead:
            mapped = jax.jit(jax.vmap(lambda one: pack(one, len(lead) - 1).unpack()))(arrays)
            jax.tree.map(np.testing.assert_array_equal, mapped, given)
    assert packed.words.shape == (*lead, 18)
    assert jax.tree.map(np.shape, packed) == jax.tree.map(np.shape, pack(given, len(lead)))
    found = packed.unpack()
    for name, leaf in found.items():
        assert (leaf.shape, leaf.dtype) == (given[name].shape, given[name].dtype)
        assert np.asarray(leaf).tobytes() == given[name].tobytes(), name
