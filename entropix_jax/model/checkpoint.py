"""Checkpoints in the Hugging Face layout: `model.safetensors`, or shards with an index.

Files are memory-mapped, and each tensor is copied straight into a JAX array, or to the devices of
its shards, so that the weights are in memory once. Nothing is unpickled. An index may name only
files beside it, which may be symbolic links, as in the hub's cache.
"""

import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_json_object, replacing
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.linear import Columns, Quantized, Weight, arranged, quantized, whole
from entropix_jax.model.params import Params, ParamSpec, pack, param_specs
from entropix_jax.model.precision import INT8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Files that count for a fingerprint, and how much of each end of a file is hashed.
_FINGERPRINTED = (".gguf", ".json", ".jinja", ".safetensors", ".model")
_SAMPLED_BYTES = 1 << 20
_AHEAD_BYTES = 1 << 30  # of tensors that are read ahead, if each is less

_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")

# Types of numbers that are stored as they are.
STORED: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a file, with its name and shape in the Hugging Face layout."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # the type of its values, a key of STORED or one that is not implemented
    read: Callable[[Any], np.ndarray]  # the values in a dtype, see `own_memory`

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        if self.kind not in STORED:
            told = f"has type {self.kind}, which is not implemented"
            raise UserError(f"{self.path}: tensor '{self.name}' {told}")
        dtype: np.dtype = np.dtype(STORED[self.kind])
        return dtype


def check_format(folder: Path) -> None:
    """Refuses weights that exist only as pickles, which can run code when they are loaded."""
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return
    if pickled := sorted(p.name for p in folder.glob("*") if p.suffix.lower() in _PICKLED):
        raise UserError(
            f"{folder}: weights in {pickled[0]}, which can run code when it is read, so it is not: "
            "convert them to safetensors where you trust their source, with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )


def load_params(folder: Path, config: ModelConfig, dtype: str, **options: Any) -> Params:
    """Loads the weights of a folder; see `open_tensors` and `read_params`."""
    return read_params(open_tensors(folder, config), config, dtype, **options)


def read_params(
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    dtype: str,
    shardings: Params | None = None,
    *,
    arrange: bool = False,
    check: bool = False,
    packed: bool = False,
) -> Params:
    """Loads the weights of a model.

    Args:
        stored: the model's tensors by name.
        dtype: "float32", "bfloat16" or "int8": matrices as `Quantized`, norms in float32.
        shardings: a tree of shardings; None: the default device.
        arrange: for a CPU, where there are no shardings, see `arranged`.
        check: refuse NaN and infinity.
        packed: layers as `params.pack` makes them, where there are no shardings.
    """
    specs = jax.tree.leaves(param_specs(config))
    for spec in specs:
        tensor = stored[spec.name]
        if tensor.shape != spec.shape:
            shapes = f"{list(tensor.shape)}, expected {list(spec.shape)}"
            raise UserError(f"{tensor.path}: tensor '{tensor.name}' has shape {shapes}")
    placed = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings)

    def read_values(spec: ParamSpec) -> np.ndarray:
        tensor = stored[spec.name]
        wide = tensor.dtype if len(spec.shape) == 2 else jnp.dtype(jnp.float32)
        return tensor.read(wide if dtype == INT8 else jnp.dtype(dtype))

    def load(spec: ParamSpec, sharding: Sharding | None, values: np.ndarray) -> Weight:
        tensor, is_matrix = stored[spec.name], len(spec.shape) == 2
        read = jax.device_put(values, sharding)
        if check and not _is_finite(read):
            first = np.argwhere(~np.isfinite(np.asarray(read.astype(jnp.float32))))[0].tolist()
            where = f"{tensor.path}: tensor '{tensor.name}'"
            raise UserError(f"{where} holds NaN or infinity, first at {first}")
        weight: Weight = quantized(read) if dtype == INT8 and is_matrix else read
        return arranged(weight) if arrange and sharding is None else weight

    # In the order of the tree; layer by layer, so that the parts of a packed one are not kept.
    order = param_specs(config)
    with closing(_read_ahead(read_values, specs)) as values:
        loaded = map(load, specs, placed, values)

        def take(tree: Any) -> Any:
            return jax.tree.map(lambda _: next(loaded), tree)

        return Params(
            embedding=take(order.embedding),
            layers=tuple(pack(take(one)) if packed else take(one) for one in order.layers),
            final_norm=take(order.final_norm),
            head=take(order.head),
        )


def _read_ahead(
    read: Callable[[ParamSpec], np.ndarray], specs: Iterable[ParamSpec]
) -> Generator[np.ndarray]:
    """What is read of each, in order: in threads, and a few of them ahead."""
    workers = min(os.cpu_count() or 1, 4)
    pool = ThreadPoolExecutor(workers)
    try:
        ahead: deque[tuple[int, Future[np.ndarray]]] = deque()
        for spec in specs:
            ahead.append((4 * math.prod(spec.shape), pool.submit(read, spec)))
            while len(ahead) > 2 * workers or sum(size for size, _ in ahead) > _AHEAD_BYTES:
                yield ahead.popleft()[1].result()
        while ahead:
            yield ahead.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


@jax.jit
def _is_finite(weight: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(weight))


def save_params(folder: Path, params: Params, config: ModelConfig) -> None:
    """Writes float weights to `folder/model.safetensors`, atomically; int8 and packed ones are
    refused."""
    if any(layer.key is None for layer in params.layers):
        raise UserError(f"{folder}: packed weights are not written: save those they came from")
    specs = jax.tree.leaves(param_specs(config))
    weights = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Columns | Quantized))
    if any(isinstance(weight, Quantized) for weight in weights):
        raise UserError(f"{folder}: weights of 8 bits are not written: save those they came from")
    tensors = {spec.name: whole(weight) for spec, weight in zip(specs, weights, strict=True)}
    path = folder / SINGLE_FILE
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, say
            raise UserError(f"{path}: cannot be written: {error}") from None


def open_tensors(folder: Path, config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Memory-maps all tensors of a folder, by name. UserError if a file is missing or damaged, or a
    tensor is missing, unexpected, duplicate, or of a type that is not implemented."""
    stored = _open_folder(folder)
    check_names(folder, stored, config)
    for spec in jax.tree.leaves(param_specs(config)):
        _ = stored[spec.name].dtype  # raises for a type that is not implemented
    return stored


def has_own_head(stored: Mapping[str, StoredTensor], config: ModelConfig) -> bool:
    """Returns whether a head is stored that differs from the embedding to which the configuration
    ties it. `transformers` uses the stored one."""
    head = stored.get("lm_head.weight")
    if head is None or not config.tied_head:
        return False
    embedding = stored[param_specs(config).embedding.name]
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return True
    one, other = (tensor.read(tensor.dtype).view(np.uint8) for tensor in (head, embedding))
    return not np.array_equal(one, other)


def _open_folder(folder: Path) -> dict[str, StoredTensor]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return _open_file(single)
    check_format(folder)
    if not index.exists():
        raise UserError(f"{folder}: {SINGLE_FILE} is missing, and so is {INDEX_FILE}")
    weight_map: Any = read_json_object(index).get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(re.fullmatch(r"[^/\\]+\.safetensors", str(shard)) for shard in shards):
        raise UserError(f"{index}: 'weight_map' must map tensors to .safetensors files beside it")
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(shards)):
        for name, tensor in _open_file(folder / shard).items():
            if weight_map.get(name) != shard:
                raise UserError(f"{tensor.path}: tensor '{name}' is not where {INDEX_FILE} says")
            stored[name] = tensor
    if lost := sorted(set(weight_map) - set(stored)):
        raise UserError(f"{folder / weight_map[lost[0]]}: tensor '{lost[0]}' is missing")
    return stored


def _open_file(path: Path) -> dict[str, StoredTensor]:
    if path.exists() and not path.is_file():  # a pipe would block
        raise UserError(f"{path}: not a regular file")
    try:
        # The library validates the header: offsets in range, not overlapping, and matching shapes.
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise UserError(f"{path.parent}: {path.name} is missing") from None
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a valid safetensors file: {error}") from None
    header.pop("__metadata__", None)
    body = np.memmap(path, mode="r", dtype=np.uint8)[8 + length :]
    stored = {}
    for name, entry in header.items():
        data, shape, kind = body[slice(*entry["data_offsets"])], entry["shape"], entry["dtype"]
        read = partial(_view, data, kind, shape)
        stored[name] = StoredTensor(path, name, tuple(shape), kind, read)
    return stored


def _view(data: np.ndarray, kind: str, shape: list[int], dtype: Any) -> np.ndarray:
    values = own_memory(tuple(shape), dtype)
    values[...] = data.view(STORED[kind]).reshape(shape)
    return values


def own_memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array for values of a file: one that aliases the file would change, or
    crash, with it. It is aligned to 64 bytes, since JAX copies what is not."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    own: np.ndarray = memory[start : start + size].view(dtype).reshape(shape)
    return own


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"tensor '{max(names, key=names.count)}' occurs twice")
    return dict(pairs)


def check_names(path: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Refuses a model whose tensors are not all there, or that has others."""
    wanted = {spec.name for spec in jax.tree.leaves(param_specs(config))}
    if missing := sorted(wanted - set(stored)):
        raise UserError(f"{path}: tensor '{missing[0]}' is missing ({len(missing)} in all)")
    # Some files store a tied head, and older ones the rotary frequencies.
    extra = {name for name in stored if not name.endswith("rotary_emb.inv_freq")} - wanted
    if config.tied_head:
        extra.discard("lm_head.weight")
    if extra:
        name = min(extra)
        raise UserError(f"{stored[name].path}: tensor '{name}' has no place in this model")


def fingerprint(path: Path) -> str:
    """A hash of a model's folder or GGUF file: of the size and both ends of each file."""
    hashed = hashlib.sha256()
    try:
        path.stat()  # raises if there is none
        for one in sorted(path.iterdir()) if path.is_dir() else [path]:
            if not one.is_file() or one.suffix.lower() not in _FINGERPRINTED:
                continue
            size = one.stat().st_size
            hashed.update(f"{one.name}\0{size}\0".encode())
            with one.open("rb") as file:
                hashed.update(file.read(_SAMPLED_BYTES))
                file.seek(max(size - _SAMPLED_BYTES, 0))
                hashed.update(file.read())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return hashed.hexdigest()[:16]
