"""Checkpoints in the Hugging Face layout: `model.safetensors`, or shards with an index.

Files are memory-mapped, and each tensor is copied straight into a JAX array, or to the devices of
its shards, so that the weights are in memory once. Nothing is unpickled. An index may name only
files in its folder, which may be symbolic links, as in the hub's cache.
"""

import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from entropix_jax.errors import UserError
from entropix_jax.host.files import check_regular, opening, read_json_object, replacing
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.config_file import CONFIG_FILE, KEYS, load_eos_ids, load_model_config
from entropix_jax.model.linear import Weight, arranged, quantized
from entropix_jax.model.params import Params, ParamSpec, param_specs
from entropix_jax.model.precision import INT8
from entropix_jax.platforms import on_cpu
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # names of tensors

# Files that count for a fingerprint, and how much of each end of a file is hashed.
_FINGERPRINTED = (".gguf", ".json", ".jinja", ".safetensors", ".model")
_SAMPLED_BYTES = 1 << 20
_READERS = 4  # threads, and tensors that are read ahead
_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")

# Types of numbers that are stored as they are.
STORED: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


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
        return STORED[self.kind]

    def error(self, problem: str) -> UserError:
        """Returns an error that names the file and the tensor."""
        return UserError(f"{self.path}: tensor '{self.name}' {problem}")


@dataclass(frozen=True, eq=False)
class ModelFiles:
    """The contents of a folder or a GGUF file, with memory-mapped tensors. UserError if a tensor is
    missing, unexpected, or of a wrong shape or unsupported type."""

    path: Path
    config: ModelConfig
    eos_ids: tuple[int, ...]  # the end tokens that the files name
    tensors: Mapping[str, StoredTensor]  # by name
    tokenizer: Callable[[], Tokenizer]
    notes: list[str]  # for the user, each with its file

    def __post_init__(self) -> None:
        check_tensors(self.path, self.tensors, self.config)


def open_folder(path: Path) -> ModelFiles:
    """Opens a folder in the Hugging Face layout."""
    adapter, file = path / "adapter_config.json", path / CONFIG_FILE
    if adapter.is_file() and not file.exists():
        base = read_json_object(adapter).get("base_model_name_or_path") or "its base model"
        problem = f"contains an adapter for {base}, but no model: merge the two with peft"
        raise UserError(f"{path}: {problem}, model.merge_and_unload().save_pretrained(NEW_FOLDER)")
    config, notes = load_model_config(path), KEYS.check(read_json_object(file), file)
    tokenizer = partial(load_tokenizer, path, ends := load_eos_ids(path))
    files = ModelFiles(path, config, ends, open_tensors(path), tokenizer, notes)
    if not config.tied_head or HEAD not in files.tensors:
        return files
    # `transformers` uses a stored head, whatever the configuration says.
    head, embedding = files.tensors[HEAD], files.tensors[EMBEDDING]
    if head.kind == embedding.kind:
        one, other = (each.read(each.dtype).view(np.uint8) for each in (head, embedding))
        if np.array_equal(one, other):
            return files
    note = f"'tie_word_embeddings' is ignored, since the stored '{HEAD}' differs from the embedding"
    notes.append(f"{file}: {note}")
    return replace(files, config=replace(config, tied_head=False))


def check_tensors(path: Path, stored: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Raises UserError unless `stored` has exactly the tensors of the model."""
    specs = {spec.name: spec for spec in jax.tree.leaves(param_specs(config))}
    if missing := sorted(set(specs) - set(stored)):
        raise UserError(f"{path}: tensor '{missing[0]}' is missing ({len(missing)} in all)")
    for name, tensor in sorted(stored.items()):
        if name in specs:
            if tensor.shape != specs[name].shape:
                shapes = f"{list(tensor.shape)}, expected {list(specs[name].shape)}"
                raise tensor.error(f"has shape {shapes}")
            if tensor.kind not in STORED:
                raise tensor.error(f"has type {tensor.kind}, which is not implemented")
        # Some files store a tied head, and older ones the rotary frequencies.
        elif not (name == HEAD and config.tied_head) and not name.endswith("rotary_emb.inv_freq"):
            raise tensor.error("has no place in this model")


def read_params(
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    dtype: str,
    shardings: Params | None = None,
    *,
    check: bool = False,
) -> Params:
    """Loads the weights of a model, from tensors that `check_tensors` accepts.

    Args:
        stored: the model's tensors by name.
        dtype: "float32", "bfloat16" or "int8": matrices as `Quantized`, norms in float32.
        shardings: a tree of shardings; None: the default device, see `arranged`.
        check: refuse NaN and infinity.
    """
    specs, tree = jax.tree.flatten(param_specs(config))
    placed = [None] * len(specs) if shardings is None else jax.tree.leaves(shardings)

    def read(spec: ParamSpec) -> np.ndarray:
        tensor = stored[spec.name]
        wide = tensor.dtype if len(spec.shape) == 2 else jnp.dtype(jnp.float32)
        return tensor.read(wide if dtype == INT8 else jnp.dtype(dtype))

    weights: list[Weight] = []
    with ThreadPoolExecutor(_READERS) as pool:
        ahead = deque(pool.submit(read, spec) for spec in specs[:_READERS])
        for i, (spec, sharding) in enumerate(zip(specs, placed, strict=True)):
            ahead += [pool.submit(read, later) for later in specs[i + _READERS :][:1]]
            read_values = jax.device_put(ahead.popleft().result(), sharding)
            if check and not _is_finite(read_values):
                finite = np.isfinite(np.asarray(read_values.astype(jnp.float32)))
                first = np.argwhere(~finite)[0].tolist()
                raise stored[spec.name].error(f"holds NaN or infinity, first at {first}")
            is_small = dtype == INT8 and len(spec.shape) == 2
            weight = quantized(read_values) if is_small else read_values
            weights.append(arranged(weight) if on_cpu() and sharding is None else weight)
    params: Params = jax.tree.unflatten(tree, weights)
    return params


@jax.jit
def _is_finite(weight: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(weight))


def save_params(folder: Path, params: Params, config: ModelConfig) -> None:
    """Writes weights that are plain arrays to `folder/model.safetensors`, atomically."""
    specs, weights = jax.tree.leaves(param_specs(config)), jax.tree.leaves(params)
    tensors = {spec.name: np.asarray(weight) for spec, weight in zip(specs, weights, strict=True)}
    path = folder / SINGLE_FILE
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, say
            raise UserError(f"{path}: cannot be written: {error}") from None


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Memory-maps all tensors of a folder, by name. UserError if a file is missing or damaged."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return _open_file(single)
    if not index.exists():
        if pickled := sorted(p.name for p in folder.glob("*") if p.suffix.lower() in _PICKLED):
            raise UserError(
                f"{folder}: {pickled[0]} is not read, because pickled weights can run code: if you "
                "trust their source, convert them to safetensors with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise UserError(f"{folder}: {SINGLE_FILE} is missing, and so is {INDEX_FILE}")
    weight_map: Any = read_json_object(index).get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(re.fullmatch(r"[^/\\]+\.safetensors", str(shard)) for shard in shards):
        raise UserError(
            f"{index}: 'weight_map' must map tensors to .safetensors files in its folder"
        )
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(shards)):
        found = _open_file(folder / shard)
        stored |= {name: found[name] for name in found if weight_map.get(name, shard) == shard}
    if lost := sorted(set(weight_map) - set(stored)):
        raise UserError(f"{folder / weight_map[lost[0]]}: tensor '{lost[0]}' is missing")
    return stored


def _open_file(path: Path) -> dict[str, StoredTensor]:
    try:
        data = map_file(path)
        # The library validates the header: offsets in range, not overlapping, and matching shapes.
        with safe_open(path, framework="numpy"):
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = json.loads(data[8:start].tobytes())
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a valid safetensors file: {error}") from None
    stored = {}
    for name in header.keys() - {"__metadata__"}:
        kind, shape = header[name]["dtype"], tuple(header[name]["shape"])
        values = data[start:][slice(*header[name]["data_offsets"])]
        stored[name] = StoredTensor(path, name, shape, kind, partial(_view, values, kind, shape))
    return stored


def _view(data: np.ndarray, kind: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    values = own_memory(shape, dtype)
    values[...] = data.view(STORED[kind]).reshape(shape)
    return values


def map_file(path: Path) -> np.ndarray:
    """Memory-maps the bytes of a file. UserError if there is no such file, ValueError if it is
    empty."""
    check_regular(path)
    with opening(path) as file:
        return np.memmap(file, mode="r", dtype=np.uint8)


def own_memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array for values of a file. An alias of the file would change, or
    crash, with it. The array is aligned to 64 bytes, because JAX copies other arrays."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    own: np.ndarray = memory[start : start + size].view(dtype).reshape(shape)
    return own


def fingerprint(path: Path) -> str:
    """Hashes a model's folder or GGUF file: the size and both ends of each file."""
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
