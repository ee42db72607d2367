"""Data and tensor parallelism on one mesh with the axes `data` and `model`.

Rows of a batch are sharded over `data`; heads, MLP and vocabulary over `model`. Parameters, cache
and decode state name their logical axes, and `_RULES` maps those names to mesh axes.

`split_rows` wraps a batch function in `shard_map` over `data`, so rows of different shards
communicate only where the function asks for it; XLA partitions the matrix products over `model`
from the shardings of the parameters. The collectives below (`any_shard`, `local_index`, ...) are
the identity outside of `shard_map`.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from entropix_jax.errors import UserError
from entropix_jax.model.cache import CACHE_AXES, KVCache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params, param_specs

DATA, MODEL = "data", "model"

# Logical axes to mesh axes; an axis that is not listed is replicated.
_RULES = {"batch": DATA, **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), MODEL)}

# Output specs for `split_rows`.
ROWS: Any = P(DATA)  # [B, ...]
STEPS: Any = P(None, DATA)  # [steps, B, ...]
ONCE: Any = P()  # replicated

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Tree = TypeVar("_Tree")


def parse_mesh(text: str | None, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh over all of `devices` that the option `--mesh` describes, such as "data=4,model=2":
    an omitted axis has size 1. None: all devices on `data`. UserError if it is not of this form, or
    not for this number of devices."""
    sizes = {DATA: len(devices) if text is None else 1, MODEL: 1}
    if text is not None:
        form = rf"\s*({DATA}|{MODEL})\s*=\s*0*([1-9]\d{{0,8}})\s*"
        found = [re.fullmatch(form, part, re.ASCII) for part in text.split(",")]
        given = {match[1]: int(match[2]) for match in found if match}
        if len(given) < len(found):
            raise UserError(f"mesh '{text}': not of the form {DATA}=N,{MODEL}=N")
        sizes |= given
    data, model = sizes[DATA], sizes[MODEL]
    if data * model != len(devices):
        there = f"but there are {len(devices)}"
        raise UserError(f"mesh '{text}': {data} x {model} = {data * model} devices, {there}")
    return jax.make_mesh((data, model), (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices)


def check_mesh(mesh: Mesh, config: ModelConfig, slots: int = 0) -> None:
    """Raises UserError if a mesh cannot split heads and MLP, or a batch of `slots` rows."""
    for axis, number, what in (
        (MODEL, config.num_kv_heads, "key/value heads"),
        (MODEL, config.num_heads, "query heads"),
        (MODEL, config.mlp_width, "units of the MLP"),
        (DATA, slots, "slots"),
    ):
        size = mesh.shape[axis]
        if number % size:
            sizes = ",".join(f"{name}={parts}" for name, parts in mesh.shape.items())
            problem = f"{number} {what} cannot be split evenly over {axis}={size}"
            raise UserError(f"mesh {sizes}: {problem}")


def param_shardings(mesh: Mesh, config: ModelConfig) -> Params:
    """Returns the sharding of each weight of a model: a tree of `NamedSharding`s. A vocabulary that
    `model` does not divide is replicated. UserError if `check_mesh` rejects the mesh."""
    check_mesh(mesh, config)
    whole = {"vocab"} if config.vocab_size % mesh.shape[MODEL] else set()
    rules = {axis: over for axis, over in _RULES.items() if axis not in whole}
    specs = param_specs(config)
    shardings: Params = jax.tree.map(lambda spec: _sharding(mesh, spec.axes, rules), specs)
    return shardings


def row_shardings(mesh: Mesh, tree: _Tree) -> _Tree:
    """Returns the sharding of each leaf [B, ...] of a tree. A `KVCache` in it has its own axes."""
    shardings: _Tree = _by_row(tree, _sharding(mesh, ["batch"]), _sharding(mesh, CACHE_AXES))
    return shardings


def weights_bytes(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> int:
    """Returns the bytes of a model's weights per device of a mesh, or on a single device."""
    whole: Any = AbstractMesh((1, 1), (DATA, MODEL))
    shardings = jax.tree.leaves(param_shardings(mesh or whole, config))
    specs = jax.tree.leaves(param_specs(config))
    parts = (s.shard_shape(spec.shape) for s, spec in zip(shardings, specs, strict=True))
    return sum(map(math.prod, parts)) * dtype.itemsize


def split_rows(
    returns: Any,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Decorates a batch function, under `jax.jit`, to run per data shard when its arguments are on
    a mesh. Inside it B is the shard's batch size, so a branch on "does any row need it" is decided
    per shard.

    The leaves of the argument `state` have a leading row axis, except scalars. Other positional
    arguments are replicated; keyword-only ones are static. `returns` is a prefix tree of the
    function's output, with `ROWS`, `STEPS` and `ONCE` at its leaves.
    """

    def decorate(call: Callable[..., _Result]) -> Callable[_Arguments, _Result]:
        state = [*inspect.signature(call).parameters].index("state")

        @wraps(call)
        def split(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args))
            if (mesh := next((mesh for mesh in meshes if mesh.size > 1), None)) is None:
                return call(*args, **kwargs)
            specs: list[Any] = [jax.tree.map(lambda _: ONCE, tree) for tree in args]
            specs[state] = jax.tree.map(lambda x: ROWS if jnp.ndim(x) else ONCE, args[state])
            whole = jax.shard_map(
                partial(call, **kwargs),
                mesh=mesh,
                axis_names={DATA},  # `model` is left to XLA
                in_specs=tuple(specs),
                out_specs=returns,
                check_vma=False,
            )(*args)
            kept: _Result = jax.tree.map(lambda spec, part: _keep(mesh, spec, part), returns, whole)
            return kept

        return split

    return decorate


def gather_logits(logits: jax.Array) -> jax.Array:
    """All-gathers `logits[..., V]` over `model`: sampling then needs no communication."""
    if MODEL not in jax.sharding.get_abstract_mesh().auto_axes:
        return logits
    whole: jax.Array = lax.with_sharding_constraint(logits, P())
    return whole


def any_shard(flag: jax.Array) -> jax.Array:
    """Logical or of a bool [] over the data shards."""
    return lax.pmax(flag.astype(jnp.int32), DATA) > 0 if in_shard() else flag


def sum_shards(number: jax.Array) -> jax.Array:
    """Sum of a scalar over the data shards."""
    return lax.psum(number, DATA) if in_shard() else number


def local_index(numbers: jax.Array, size: int) -> jax.Array:
    """Global row indices, int32 [...], as indices into this shard's `size` rows; else `size`."""
    if not in_shard():
        return numbers
    numbers = numbers - lax.axis_index(DATA) * size
    return jnp.where((numbers >= 0) & (numbers < size), numbers, size)


def local_rows(tree: _Tree, size: int) -> _Tree:
    """This shard's `size` rows of replicated leaves [B, ...]."""
    if not in_shard():
        return tree
    start = lax.axis_index(DATA) * size
    own: _Tree = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)
    return own


def broadcast_row(rows: jax.Array, index: jax.Array) -> jax.Array:
    """The row with the global index `index`, int32 [], of `rows[B, ...]`, on every shard."""
    if not in_shard():
        return rows[index]
    own = local_index(index, rows.shape[0])
    row = jnp.where(own < rows.shape[0], rows[own], jnp.zeros((), rows.dtype))
    # XLA fails on a sum over a single shard while it partitions the other axis.
    return row if lax.axis_size(DATA) == 1 else lax.psum(row, DATA)


def apply_if_any(mask: jax.Array, work: Callable[[_Tree], _Tree], value: _Tree) -> _Tree:
    """`work(value)` on the shards where any of `mask`, bool [...], is True; else `value`."""
    if not in_shard():
        return work(value)
    out: _Tree = lax.cond(jnp.any(mask), work, lambda value: value, value)
    return out


def _sharding(
    mesh: Mesh | AbstractMesh, axes: Sequence[str], rules: Mapping[str, str] = _RULES
) -> NamedSharding:
    """The sharding of an array with these logical axes. Its spec is canonical, as XLA returns it:
    no mesh axes of size 1, no trailing None. Two spellings would compile a program twice."""
    over = [axis if mesh.shape.get(axis, 1) > 1 else None for axis in map(rules.get, axes)]
    while over and over[-1] is None:
        over.pop()
    return NamedSharding(mesh, P(*over))


def _by_row(tree: Any, row: Any, cache: Any) -> Any:
    def one(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return row
        layers = (cache,) * len(node.keys)
        return replace(node, keys=layers, values=layers, length=row)

    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _keep(mesh: AbstractMesh, spec: P, tree: Any) -> Any:
    """Constrains outputs to the rules' shardings: buffers that the next call donates keep them."""
    rows = NamedSharding(mesh, spec if mesh.shape[DATA] > 1 else P())
    shardings = _by_row(tree, rows, _sharding(mesh, CACHE_AXES))
    return lax.with_sharding_constraint(tree, shardings)


def in_shard() -> bool:
    """Whether the trace is inside `shard_map` over `data`."""
    return DATA in jax.sharding.get_abstract_mesh().manual_axes
