"""Many devices: one mesh with the axes `data` and `model`, and what is split over which.

Rows are split over `data`, heads, MLP and vocabulary over `model`. Parameters, cache and decode
state carry the names of their axes; a `Rules` says on which mesh axis a name lies.

A compiled function of a batch runs on each data shard's rows alone (`split_rows`), so rows in
different shards meet only where the function asks for it; within a shard XLA splits the products
over `model` as the parameters lie. The functions here that a step calls (`anywhere`, `here`, ...)
are the identity where nothing is split: on one device a step is compiled as if there were none.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from entropix_jax.cache import CACHE_AXES, KVCache
from entropix_jax.config import ModelConfig
from entropix_jax.errors import UserError
from entropix_jax.params import Params, param_specs

DATA, MODEL = "data", "model"

# Logical axes to mesh axes; one that is not named here lies whole on every device.
_RULES: Mapping[str, str] = {
    "batch": DATA,
    "vocab": MODEL,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
}

# What `split_rows` is told of the axes of what a function returns, in a tree's leaves.
ROWS: Any = P(DATA)  # [B, ...]
STEPS: Any = P(None, DATA)  # [steps, B, ...]
ONCE: Any = P()  # the same for all rows

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Tree = TypeVar("_Tree")


@dataclass(frozen=True)
class Rules:
    """Where the parts of a model lie on a mesh."""

    mesh: Mesh
    split: Mapping[str, str]  # logical axes to mesh axes; one that is not named is not split

    def sharding(self, axes: Sequence[str]) -> NamedSharding:
        """Of an array whose axes have these names."""
        return NamedSharding(self.mesh, _spec(self.mesh, self.split, axes))

    def params(self, config: ModelConfig) -> Params:
        """Of each weight: a tree of `NamedSharding`s."""
        shardings: Params = jax.tree.map(lambda spec: self.sharding(spec.axes), param_specs(config))
        return shardings

    def rows(self, tree: _Tree) -> _Tree:
        """Of each leaf [B, ...] of a tree: a `DecodeState`, a batch's `SamplerParams`, end tokens;
        a `KVCache` in it by its own axes."""
        shardings: _Tree = _by_row(tree, self.sharding(["batch"]), self.sharding(CACHE_AXES))
        return shardings


def parse_mesh(text: str | None, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh that a user asks for.

    Args:
        text: such as "data=4,model=2"; an axis that is left out has size 1. None: all devices on
            `data`.
        devices: each is used.

    Raises:
        UserError: not of this form, an unknown axis, a size under 1, or sizes whose product is not
            the number of devices.
    """
    sizes = {DATA: len(devices), MODEL: 1}
    if text is not None:
        sizes = {DATA: 1, MODEL: 1} | _sizes(text)
        if sizes[DATA] * sizes[MODEL] != len(devices):
            raise UserError(
                f"mesh '{text}': {sizes[DATA]} x {sizes[MODEL]} = {sizes[DATA] * sizes[MODEL]} "
                f"devices, but there are {len(devices)}"
            )
    return jax.make_mesh(
        (sizes[DATA], sizes[MODEL]), (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices
    )


def check_mesh(mesh: Mesh, config: ModelConfig, slots: int | None = None) -> None:
    """Checks that a model, and a batch of `slots` rows, can be split over a mesh.

    Raises:
        UserError: heads, the MLP or slots cannot be split evenly. A vocabulary that cannot is no
            error: see `rules_for`.
    """
    parts = [
        (MODEL, config.num_kv_heads, "key/value heads"),
        (MODEL, config.num_heads, "query heads"),
        (MODEL, config.mlp_width, "units of the MLP"),
    ]
    if slots is not None:
        parts.append((DATA, slots, "slots"))
    for axis, number, what in parts:
        if number % mesh.shape[axis]:
            raise UserError(
                f"mesh {describe(mesh)}: {number} {what} cannot be split evenly over "
                f"{axis}={mesh.shape[axis]}"
            )


def rules_for(mesh: Mesh, config: ModelConfig) -> Rules:
    """The rules by which a model lies on a mesh.

    A vocabulary that `model` does not divide is not split: each device then holds the embedding and
    the output matrix whole, and computes all logits of its rows.

    Raises:
        UserError: see `check_mesh`.
    """
    check_mesh(mesh, config)
    whole = {"vocab"} if config.vocab_size % mesh.shape[MODEL] else set()
    return Rules(mesh, {axis: over for axis, over in _RULES.items() if axis not in whole})


def weights_bytes(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> int:
    """What a model's weights take of each device of a mesh, or of one device alone.

    Raises:
        UserError: see `check_mesh`.
    """
    whole: Any = AbstractMesh((1, 1), (DATA, MODEL))
    shardings = jax.tree.leaves(rules_for(mesh or whole, config).params(config))
    specs = jax.tree.leaves(param_specs(config))
    parts = (s.shard_shape(spec.shape) for s, spec in zip(shardings, specs, strict=True))
    return sum(map(math.prod, parts)) * dtype.itemsize


def describe(mesh: Mesh) -> str:
    """A mesh as `parse_mesh` reads it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def place(tree: _Tree, shardings: _Tree) -> _Tree:
    """The tree with each leaf's parts on their devices."""
    placed: _Tree = jax.device_put(tree, shardings)
    return placed


def split_rows(
    *, rows: Mapping[str, int], returns: Any
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Makes a function of a batch work on each data shard's rows alone, where its arguments lie on
    a mesh; elsewhere the function stays as it is.

    It stands under `jax.jit`, which needs to be told nothing: a mesh is part of the arguments'
    types. Within the function the batch is the shard's, so a condition on "does any row need it"
    costs a shard only what its own rows need.

    Args:
        rows: the arguments whose leaves have a leading row axis, and the fewest axes of a leaf
            that has one (end tokens are [B, E], or [E] for all rows). The other positional ones are
            the same for all rows; keyword-only ones are static.
        returns: a tree of `ROWS`, `STEPS` and `ONCE`, a prefix of what the function returns.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        call: Callable[..., _Result] = function

        @wraps(function)
        def split(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            bound = signature.bind(*args, **kwargs)
            traced = dict(zip(signature.parameters, bound.args, strict=False))
            mesh = _mesh_of(traced)
            if mesh is None:
                return call(*args, **kwargs)

            def spec(name: str, leaf: jax.Array) -> P:
                axes: P = ROWS if jnp.ndim(leaf) >= rows.get(name, math.inf) else ONCE
                return axes

            whole = jax.shard_map(
                partial(call, **bound.kwargs),
                mesh=mesh,
                axis_names={DATA},  # `model` is left to XLA
                in_specs=tuple(jax.tree.map(partial(spec, name), x) for name, x in traced.items()),
                out_specs=returns,
                check_vma=False,
            )(*bound.args)
            kept: _Result = jax.tree.map(lambda spec, part: _keep(mesh, spec, part), returns, whole)
            return kept

        return split

    return decorate


def gathered(logits: jax.Array) -> jax.Array:
    """`logits[..., V]` whole on each device of `model`, so that what is drawn from them is computed
    there without another word between the devices."""
    if MODEL not in jax.sharding.get_abstract_mesh().auto_axes:
        return logits
    whole: jax.Array = lax.with_sharding_constraint(logits, P())
    return whole


def anywhere(flag: jax.Array) -> jax.Array:
    """Whether a bool [] is True in any data shard: all of them go on, or none."""
    return lax.pmax(flag.astype(jnp.int32), DATA) > 0 if _is_split() else flag


def total(number: jax.Array) -> jax.Array:
    """The sum of a number over the data shards."""
    return lax.psum(number, DATA) if _is_split() else number


def here(numbers: jax.Array, size: int) -> jax.Array:
    """Rows of the whole batch, int32 [...], as rows of this data shard, which has `size`; one of
    another shard becomes `size`, which is nobody's."""
    if not _is_split():
        return numbers
    numbers = numbers - lax.axis_index(DATA) * size
    return jnp.where((numbers >= 0) & (numbers < size), numbers, size)


def ours(tree: _Tree, size: int) -> _Tree:
    """The part of this data shard, which has `size` rows, of leaves [B, ...] of the whole batch."""
    if not _is_split():
        return tree
    start = lax.axis_index(DATA) * size
    own: _Tree = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)
    return own


def row_of(rows: jax.Array, number: jax.Array) -> jax.Array:
    """The row `number`, int32 [], of the whole batch, of this shard's `rows[B, ...]`, which may be
    in another shard."""
    if not _is_split():
        return rows[number]
    own = here(number, rows.shape[0])
    row = jnp.where(own < rows.shape[0], rows[own], jnp.zeros((), rows.dtype))
    # XLA fails on a sum over one shard beside an axis that is its own to split.
    return row if lax.axis_size(DATA) == 1 else lax.psum(row, DATA)


def where_any(ours: jax.Array, work: Callable[[_Tree], _Tree], value: _Tree) -> _Tree:
    """`work(value)` in the data shards in which any of `ours`, bool [...], is True; the others have
    nothing to do, and `value` stays as it is."""
    if not _is_split():
        return work(value)
    out: _Tree = lax.cond(jnp.any(ours), work, lambda value: value, value)
    return out


def everywhere(numbers: jax.Array, size: int) -> jax.Array:
    """The inverse of `here`: rows of this data shard, or -1 for none, as rows of all of them."""
    if not _is_split():
        return numbers
    return jnp.where(numbers < 0, numbers, numbers + lax.axis_index(DATA) * size)


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([+-]?\d{1,9})\s*", part, re.ASCII)
        if match is None:
            raise UserError(f"mesh '{text}': '{part}' is not of the form data=N or model=N")
        axis, size = match[1], int(match[2])
        if axis not in (DATA, MODEL):
            raise UserError(f"mesh '{text}': no such axis: '{axis}' (there are {DATA} and {MODEL})")
        if axis in sizes:
            raise UserError(f"mesh '{text}': '{axis}' is given twice")
        if size < 1:
            raise UserError(f"mesh '{text}': {axis} must be at least 1, not {size}")
        sizes[axis] = size
    return sizes


def _spec(mesh: Mesh | AbstractMesh, split: Mapping[str, str], axes: Sequence[str]) -> P:
    """As XLA would write it, without mesh axes of size 1 and without what is not split at the end:
    of two values for one sharding a program would be compiled twice."""
    over = [axis if mesh.shape.get(axis, 1) > 1 else None for axis in map(split.get, axes)]
    while over and over[-1] is None:
        over.pop()
    return P(*over)


def _by_row(tree: Any, row: Any, cache: Any) -> Any:
    def one(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return row
        layers = (cache,) * len(node.keys)
        return KVCache(keys=layers, values=layers, length=row)

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _mesh_of(tree: Any) -> AbstractMesh | None:
    """The mesh that a function's arguments lie on; None for no more than one device."""
    for leaf in jax.tree.leaves(tree):
        mesh: AbstractMesh = jax.typeof(leaf).sharding.mesh
        if mesh.size > 1:
            return mesh
    return None


def _keep(mesh: AbstractMesh, spec: P, tree: Any) -> Any:
    """Holds what a function returns to where the rules would put it: what is donated to the next
    call must lie as it did."""
    cache = NamedSharding(mesh, _spec(mesh, _RULES, CACHE_AXES))
    rows = spec if mesh.shape[DATA] > 1 else P()
    shardings = _by_row(tree, NamedSharding(mesh, rows), cache)
    return lax.with_sharding_constraint(tree, shardings)


def _is_split() -> bool:
    """Whether this is traced for one data shard's rows."""
    return DATA in jax.sharding.get_abstract_mesh().manual_axes
