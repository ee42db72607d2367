"""A tree of small arrays as one array, which a device writes and a host fetches at once.

On a GPU each array that a step keeps is a kernel, and each that the host reads is a transfer.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax


@struct.dataclass
class Packed:
    """Leaves [..., *shape] side by side: bools, and types of 32 bits by their bits."""

    bits: jax.Array | np.ndarray  # int32 [..., n]
    # Static: the tree, and each leaf's shape and type.
    structure: Any = struct.field(pytree_node=False)
    leaves: Any = struct.field(pytree_node=False)

    def unpack(self) -> Any:
        """The tree; its leaves are NumPy's where the bits are."""
        sizes = [math.prod(shape) for shape, _ in self.leaves]
        split = np.split if isinstance(self.bits, np.ndarray) else jnp.split
        parts: Sequence[Any] = split(self.bits, np.cumsum(sizes)[:-1], axis=-1)
        leaves = [
            _typed(part, dtype).reshape(*part.shape[:-1], *shape)
            for part, (shape, dtype) in zip(parts, self.leaves, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def pack(tree: Any) -> Packed:
    """Packs a tree whose leaves are [P, ...]."""
    leaves, structure = jax.tree.flatten(tree)
    columns = [
        x.astype(jnp.int32) if x.dtype == np.bool_ else lax.bitcast_convert_type(x, jnp.int32)
        for x in leaves
    ]
    return Packed(
        bits=lax.concatenate([x.reshape(x.shape[0], -1) for x in columns], 1),
        structure=structure,
        leaves=tuple((x.shape[1:], x.dtype) for x in leaves),
    )


def _typed(bits: Any, dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return bits != 0
    return bits if dtype == np.int32 else bits.view(dtype)
