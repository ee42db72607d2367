"""The small arrays of a tree, as one array of 32-bit words.

Each copy or choice of a tree costs a kernel per array. Packed, it costs one. Unpacking costs none,
because the slices fuse with the operations that read them.
"""

import math
import operator
from functools import reduce
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

Tree = TypeVar("Tree")

_MOST = 256  # words of a small array


@struct.dataclass
class Packed(Generic[Tree]):
    """A tree whose leaves have common leading axes; see `pack`. NumPy or JAX."""

    words: jax.Array  # uint32 [..., K]
    large: tuple[jax.Array, ...]  # the leaves that are not small
    # Static: the tree's structure, and the leaves' own shapes and dtypes.
    structure: Any = struct.field(pytree_node=False)
    kinds: tuple[tuple[tuple[int, ...], np.dtype], ...] = struct.field(pytree_node=False)

    def unpack(self) -> Tree:
        """Returns the tree."""
        words: Any = self.words
        large, leaves, start = iter(self.large), [], 0
        for shape, dtype in self.kinds:
            if not _is_small(shape, dtype):
                leaves.append(next(large))
                continue
            part = words[..., start : (start := start + math.prod(shape))]
            leaf = part != 0 if dtype.kind == "b" else part.view(dtype)
            leaves.append(leaf.reshape((*words.shape[:-1], *shape)))
        tree: Tree = jax.tree.unflatten(self.structure, leaves)
        return tree


def pack(tree: Tree, axes: int = 0) -> Packed[Tree]:
    """Packs a tree whose leaves have `axes` common leading axes. A tree of NumPy stays NumPy's."""
    leaves, structure = jax.tree.flatten(tree)
    xp: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in leaves) else np
    leaves = [xp.asarray(leaf, jax.dtypes.result_type(leaf)) for leaf in leaves]
    kinds = tuple((leaf.shape[axes:], leaf.dtype) for leaf in leaves)
    words, large = [], []
    for leaf, kind in zip(leaves, kinds, strict=True):
        if _is_small(*kind):
            part = leaf.astype(np.uint32) if leaf.dtype == bool else leaf.view(np.uint32)
            words.append(part.reshape((*leaf.shape[:axes], -1)))
        else:
            large.append(leaf)
    joined: Any = np.concatenate(words, axis=-1) if xp is np else _join(words)
    return Packed(joined, tuple(large), structure, kinds)


def _is_small(shape: tuple[int, ...], dtype: np.dtype) -> bool:
    return math.prod(shape) <= _MOST and (dtype.kind == "b" or dtype.itemsize == 4)


def _join(parts: list[jax.Array]) -> jax.Array:
    """Concatenates at the last axis in one kernel. XLA on a CPU copies each operand of a
    concatenation in a kernel of its own."""
    ends = np.cumsum([part.shape[-1] for part in parts])

    def pad(part: jax.Array, end: int) -> jax.Array:
        edges = [(0, 0, 0)] * (part.ndim - 1), (end - part.shape[-1], ends[-1] - end, 0)
        return lax.pad(part, jnp.uint32(0), [*edges[0], edges[1]])

    return reduce(operator.or_, map(pad, parts, ends))
