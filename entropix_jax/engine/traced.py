"""Traced programs in the user's cache folder: a second start neither traces nor lowers them.

A file holds a program's StableHLO and the structure of its results. Its name is the hash of all
that the program is made from: the package's sources, versions, the processor, JAX's settings in the
environment, static arguments, and shapes. So one that is stale or foreign is never found. XLA reads
its executable from JAX's own cache, as without the file.
"""

import hashlib
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from entropix_jax.host import compile_cache
from entropix_jax.host.files import replacing
from entropix_jax.packed import Packed
from entropix_jax.platforms import traces_cpu_alone
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.version import __version__

_DAYS = 30  # a file that no run has used for longer is removed
_PROGRAMS: dict[Hashable, "Traced"] = {}


@dataclass
class Traced:
    """A jitted function with its static arguments, or a function of the arguments' leaves with the
    structure of its results."""

    function: Any
    static: Mapping[str, Any]
    results: Any = None
    compiled: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self.results is None:
            return self.function(*arguments, **self.static)
        return self.compile(*arguments)(*arguments)

    def compile(self, *arguments: Any) -> Callable[..., Any]:
        """Returns the compiled program for arguments, or shapes, like these."""
        if self.results is None:
            compiled: Callable[..., Any] = self.function.lower(*arguments, **self.static).compile()
            return compiled
        if self.compiled is None:
            # Of shapes alone: results of an exported program have a sharding of their own kind.
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(arguments)]
            self.compiled = self.function.lower(*shapes).compile()

        def call(*arguments: Any) -> Any:
            return jax.tree.unflatten(self.results, self.compiled(*jax.tree.leaves(arguments)))

        return call


def find_traced(function: Any, arguments: tuple[Any, ...], static: Mapping[str, Any]) -> Traced:
    """Returns the program of a jitted function for arguments, or shapes, like these: from this
    process, from its file, or else traced now. Without a file where no folder is kept, on other
    devices than a CPU, and with a user's own mechanisms, whose code no hash covers."""
    plain, folder = Traced(function, static), compile_cache.traced_folder()
    if folder is None or not traces_cpu_alone():
        return plain
    leaves, structure = jax.tree.flatten(arguments)
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    key = function.__name__, tuple(sorted(static.items())), structure, kinds
    if key not in _PROGRAMS:
        _PROGRAMS[key] = _find(function, arguments, static, folder) or plain
    return _PROGRAMS[key]


def _find(
    function: Any, arguments: tuple[Any, ...], static: Mapping[str, Any], folder: Path
) -> Traced | None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    kinds = [(x.shape, x.dtype.name) for x in jax.tree.leaves(shapes)]
    structure = str(jax.tree.structure(shapes))
    try:
        own = json.dumps([function.__name__, structure, kinds, static], default=_describe)
    except TypeError:  # from `_describe`
        return None
    path = folder / hashlib.sha256(f"{_environment()}{own}".encode()).hexdigest()
    if (program := _read(path, arguments)) is None:
        _write(path, function, shapes, static)
        program = _read(path, arguments)
    return program


def _describe(value: Any) -> Any:
    if isinstance(value, Mechanism) and any(value is one for one in MECHANISMS):
        return value.name
    if isinstance(value, frozenset):
        return sorted(value)
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mechanism):
        return vars(value)
    raise TypeError


@cache
def _environment() -> str:
    """All but the program's own arguments."""
    package = Path(sys.modules["entropix_jax"].__path__[0])
    sources = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sources.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    processor = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    settings = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(("JAX_", "XLA_")) and "CACHE" not in name
    )
    options = "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion"
    settings += [str(getattr(jax.config, name)) for name in options]
    versions = __version__, jax.__version__, version("jaxlib"), sys.version
    machine = platform.machine(), os.cpu_count(), processor
    return json.dumps([versions, sources.hexdigest(), machine, settings])


def _write(path: Path, function: Any, shapes: tuple[Any, ...], static: Mapping[str, Any]) -> None:
    """Traces a program and writes its file. After a failure there is no file, and the call traces
    the program or raises the error."""
    leaves, structure = jax.tree.flatten(shapes)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves), **static))

    try:
        traced = function.trace(*shapes, **static)
        donated = [i for i, one in enumerate(jax.tree.leaves(traced.args_info)) if one.donated]
        results = _write_structure(traced.out_tree, [*_nodes(structure)])
        exported = export.export(jax.jit(flat, donate_argnums=donated))(*leaves).serialize()
        content = json.dumps([donated, results]).encode() + b"\n" + exported
        with replacing(path) as scratch:
            scratch.write_bytes(hashlib.sha256(content).digest() + content)
        for old in path.parent.iterdir():
            if old.stat().st_mtime < time.time() - _DAYS * 86_400:
                old.unlink()
    except Exception:
        return


def _read(path: Path, arguments: Any) -> Traced | None:
    """Reads a program's file, None if there is none or it is damaged."""
    try:
        content = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        note = f"note: {path}: a damaged file of the cache: the program is traced again"
        print(note, file=sys.stderr)
        return None
    head, _, exported = content[32:].partition(b"\n")
    donated, written = json.loads(head)
    known = [*_nodes(jax.tree.structure(arguments))]
    results = jax.tree.structure(_read_structure(written, known))
    flat = jax.jit(export.deserialize(bytearray(exported)).call, donate_argnums=donated)
    return Traced(flat, {}, results)


def _nodes(structure: Any) -> Iterator[Any]:
    """Returns a structure and those of its parts, without the leaves."""
    if structure.node_data() is not None:
        yield structure
        for part in structure.children():
            yield from _nodes(part)


def _write_structure(structure: Any, known: list[Any]) -> Any:
    """Returns a structure as JSON: one in the arguments as its index, a class of the package as its
    name, and its parts. TypeError if another has static fields."""
    if structure in known:
        return known.index(structure)
    node = structure.node_data()
    parts = [_write_structure(part, known) for part in structure.children()]
    if node is None:
        return "leaf"
    kind, static = node
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind is Packed:
        inner, kinds = static
        own = _write_structure(inner, known), [(shape, dtype.name) for shape, dtype in kinds]
        return [name, parts, own]
    if kind is not dict and static:
        raise TypeError(name)
    return [name, parts, sorted(static) if kind is dict else None]


def _read_structure(written: Any, known: list[Any]) -> Any:
    """Returns a tree of that structure, with zeros as leaves."""
    if isinstance(written, int):
        return jax.tree.unflatten(known[written], [0] * known[written].num_leaves)
    if written == "leaf":
        return 0
    name, parts, static = written
    parts = [_read_structure(part, known) for part in parts]
    module, _, qualname = name.partition(":")
    if module == "builtins":
        made: dict[str, Any] = {"NoneType": None, "tuple": tuple(parts), "list": parts}
        return dict(zip(static, parts, strict=True)) if qualname == "dict" else made[qualname]
    kind = getattr(importlib.import_module(module), qualname)
    if kind is Packed:
        inner = jax.tree.structure(_read_structure(static[0], known))
        kinds = tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in static[1])
        words, large = parts
        return Packed(words, large, inner, kinds)
    return kind(*parts)
