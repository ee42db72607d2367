"""Small arrays as one: each comes back bit by bit, on a device and on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.packed import Packed, pack

TREE = {
    "bool": np.array([True, False]),
    "int": np.array([[-1, 2**31 - 1], [0, -(2**31)]], np.int32),
    "float": np.array([[[-0.0], [np.nan]], [[-np.inf], [1e-45]]], np.float32),
    "bits": np.array([[2**32 - 1], [0]], np.uint32),
    "empty": np.zeros((2, 0), np.float32),
    "none": None,
}


def check(tree: dict[str, np.ndarray | None]) -> None:
    assert tree.keys() == TREE.keys()
    assert tree["none"] is None
    for name, expected in TREE.items():
        if expected is not None:
            found = np.asarray(tree[name])
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            assert found.tobytes() == expected.tobytes(), name


def test_what_is_packed_comes_back() -> None:
    check(jax.jit(lambda tree: pack(tree).unpack())(TREE))
    packed: Packed = jax.jit(pack)(TREE)
    assert (packed.bits.dtype, packed.bits.shape) == (jnp.int32, (2, 1 + 2 + 2 + 1))
    unpacked = jax.device_get(packed).unpack()
    assert isinstance(unpacked["float"], np.ndarray)
    check(unpacked)
