"""GGUF, llama.cpp's single-file format.

Metadata are translated to the decoded JSON files of a Hugging Face folder and parsed as such;
tensors get the names and row order of that layout. The package `gguf` has the names of tensors and
dequantizes them. The header is parsed here, because the package's reader takes seconds to make
NumPy views of every token, and has no clear errors for truncated files.

Format: `docs/gguf.md` (version 3) in the ggml repository; the metadata are interpreted as in
llama.cpp.
"""

import math
import re
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.model.checkpoint import STORED, ModelFiles, StoredTensor, map_file, own_memory
from entropix_jax.model.config import ModelConfig, RopeDivisors
from entropix_jax.model.config_file import KnownKeys, parse_eos_ids, parse_model_config
from entropix_jax.model.params import param_specs
from entropix_jax.text.gguf_tokenizer import read_tokenizer

_STRING, _ARRAY = 8, 9
# Scalar types of metadata, as `struct` formats.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates adjacent channels for these, so its converter permutes the rows of the query and
# key matrices.
_INTERLEAVED = ("llama", "smollm3")
# Keys of the architecture. llama.cpp does not use the second group for these architectures, or only
# for a RoPE type that is refused.
_KEYS = KnownKeys(
    {
        **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
        "rope.scaling.type": ("none", "linear"),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.0,)),
        **dict.fromkeys(
            (f"attention.{n}" for n in ("clamp_kqv", "max_alibi_bias", "scale")), (0.0,)
        ),
        **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0.0, 1.0)),
        "use_parallel_residual": (False,),
        "rope.scaling.attn_factor": (0.0, 1.0),
        "attention.causal": (True,),
    },
    """
    attention.head_count attention.head_count_kv attention.key_length
    attention.layer_norm_rms_epsilon attention.sliding_window attention.value_length block_count
    context_length embedding_length feed_forward_length rope.dimension_count rope.freq_base
    rope.scale_linear rope.scaling.factor

    attention.layer_norm_epsilon rope.scaling.finetuned rope.scaling.original_context_length
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scaling.yarn_ext_factor rope.scaling.yarn_log_multiplier tensor_data_layout vocab_size
    """,
)
_ROPE_FACTORS = "rope_freqs.weight"
# Elements that are dequantized at a time: few enough for the processor's cache. The package takes
# 16 rows at a time, which for short rows is mostly Python overhead.
_DEQUANTISED = 1 << 18


def open_gguf(path: Path) -> ModelFiles:
    """Opens a GGUF file. UserError if it is damaged, or its architecture is not implemented. The
    default dtype of its weights in memory is bfloat16."""
    try:
        data = map_file(path)
        header = _Header(data)
        stored, end = dict[str, StoredTensor](), 0
        for name, (shape, number, offset) in header.tensors.items():
            if offset != end:  # as llama.cpp, which expects them in the header's order
                raise ValueError(f"tensor '{name}' begins at {offset:,}, expected {end:,}")
            values = data[header.start + offset :]
            stored[name], size = _stored_tensor(path, values, name, shape, number)
            end = -(-(offset + size) // header.alignment) * header.alignment
    except (ValueError, NotImplementedError, RecursionError, struct.error) as error:
        raise UserError(f"{path}: invalid or truncated GGUF file: {error}") from None
    metadata = header.metadata

    # Other files than whole models, and unsupported features.
    if (kind := metadata.get("general.type", "model")) != "model":
        problem = f"is not a model but '{kind}': merge it with its model, or name the model's file"
        raise UserError(f"{path}: {problem}")
    if (parts := metadata.get("split.count")) not in (None, 0, 1):
        problem = f"is one of {parts} parts: merge them, `llama-gguf-split --merge FIRST OUTPUT`"
        raise UserError(f"{path}: {problem}")
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        problem = f"is not implemented (known: {', '.join(_ARCHITECTURES)})"
        raise UserError(f"{path}: the architecture {architecture!r} {problem}")
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    notes = _KEYS.check(own, path, prefix)

    # The configuration.
    config = parse_model_config(_raw_config(own, architecture, stored, path), path)
    if factors := stored.pop(_ROPE_FACTORS, None):
        if factors.shape != (config.head_dim // 2,):
            expected = f"{list(factors.shape)}, expected {[config.head_dim // 2]}"
            raise factors.error(f"has shape {expected}")
        divisors = factors.read(np.float32).astype(np.float64)
        if isinstance(config.rope_scaling, RopeDivisors):  # linear: llama.cpp applies both
            divisors *= config.rope_scaling.divisors
        config = replace(config, rope_scaling=RopeDivisors(divisors=tuple(divisors.tolist())))
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = {"eos_token_id": [metadata[key] for key in keys if key in metadata]}
    tokenizer = partial(read_tokenizer, metadata, path, notes)
    tensors = _renamed(stored, config, architecture)
    return ModelFiles(path, config, parse_eos_ids(ends, path), tensors, tokenizer, notes)


def _raw_config(
    own: Mapping[str, Any], architecture: str, stored: Mapping[str, StoredTensor], path: Path
) -> dict[str, Any]:
    """The equivalent of `config.json`."""
    # Heads whose values or rotated channels differ in size are not implemented.
    rotated = own.get("rope.dimension_count")
    head_dim = own.get("attention.key_length") or rotated
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name) not in (None, head_dim):
            problem = f"{own[name]} with heads of size {head_dim} is not implemented"
            raise UserError(f"{path}: '{architecture}.{name}': {problem}")

    heads, embedding = own.get("attention.head_count"), stored.get("token_embd.weight")
    raw = {
        "model_type": architecture,
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.get("context_length"),
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "sliding_window": own.get("attention.sliding_window") or None,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in stored,
        "no_rope_layer_interval": 4,  # SmolLM3's, hard-coded in llama.cpp, not in the file
        "dtype": "bfloat16",
    }
    # As in llama.cpp: without a type scaling is linear. Older files have `scale_linear`.
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear")
    if factor and own.get("rope.scaling.type") != "none":
        raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    # A missing key is then reported by its name in `config.json`.
    return {key: value for key, value in raw.items() if value is not None}


def _stored_tensor(
    path: Path, data: np.ndarray, name: str, shape: tuple[int, ...], number: int
) -> tuple[StoredTensor, int]:
    """Returns a tensor and its size in bytes. ValueError or NotImplementedError if it has none."""
    import gguf

    kind = _find_kind(number)
    size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
    if size > len(data):
        raise ValueError(f"tensor '{name}' ends {size - len(data):,} bytes after the file")
    stored = kind.name if kind.name in STORED else "F32"
    return StoredTensor(path, name, shape, stored, partial(_decode, data[:size], kind, shape)), size


@cache
def _find_kind(number: int) -> Any:
    """The `gguf.GGMLQuantizationType` of this number, if it can be decoded."""
    import gguf

    kind = gguf.GGMLQuantizationType(number)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    _decode(np.zeros(size, np.uint8), kind, (block,), np.float32)
    return kind


def _decode(data: np.ndarray, kind: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Dequantizes the blocks of a tensor, uint8, in parts: all of it in float32 is more memory than
    the processor's cache."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = own_memory((len(data) // size, block), dtype)
    step = max(_DEQUANTISED // block, 1)
    for first in range(0, len(out), step):
        part = data[first * size : (first + step) * size].reshape(1, -1)
        out[first : first + step] = gguf.quants.dequantize(part, kind).reshape(-1, block)
    return out.reshape(shape)


def _renamed(
    stored: Mapping[str, StoredTensor], config: ModelConfig, architecture: str
) -> dict[str, StoredTensor]:
    """The tensors under their names in the Hugging Face layout, with its order of rows."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
    tensors = dict(stored)
    for spec in jax.tree.leaves(param_specs(config)):
        written = names.get_name(spec.name, try_suffixes=(".weight", ".bias"))
        if (tensor := tensors.pop(str(written), None)) is None:
            continue  # reported as missing
        read = tensor.read
        if architecture in _INTERLEAVED and re.search(r"\.[qk]_proj\.", spec.name):
            read = partial(_read_halves, read, spec.shape[0] // config.head_dim)
        tensors[spec.name] = replace(tensor, name=spec.name, read=read)
    return tensors


def _read_halves(read: Callable[[Any], np.ndarray], heads: int, dtype: Any) -> np.ndarray:
    """Reads a matrix whose rows 2i and 2i + 1 of a head are rows i and i + H/2 in the Hugging Face
    layout."""
    values = read(dtype)
    return values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


class _Header:
    """The decoded header of a GGUF file. ValueError if it is damaged."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._at = data.data, 0
        if (start := self._bytes(4)) != b"GGUF":
            raise ValueError(f"it starts with {start!r}, not with b'GGUF'")
        version, number, keys = self._unpack("IQQ")
        if version & 0xFFFF == 0:
            raise ValueError("it is big-endian: convert the model again for little-endian machines")
        if version not in (2, 3):
            raise ValueError(f"format version {version} is not supported (known: 2, 3)")
        self.metadata = {self._string(): self._value(*self._unpack("I")) for _ in range(keys)}
        # By name: the shape, the type, and where it begins, counted from the start of the data.
        self.tensors = {self._string(): self._entry() for _ in range(number)}
        if len(self.tensors) < number or len(self.metadata) < keys:
            raise ValueError("two tensors or two keys have the same name")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"'general.alignment' is {alignment!r}")
        self.start, self.alignment = -(-self._at // alignment) * alignment, alignment

    def _entry(self) -> tuple[tuple[int, ...], int, int]:
        (axes,) = self._unpack("I")
        if axes not in (1, 2, 3, 4):
            raise ValueError(f"a tensor has {axes} axes, expected 1 to 4")
        *lengths, kind, offset = self._unpack(f"{axes}QIQ")
        return tuple(reversed(lengths)), kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, number = self._unpack("IQ")
            if inner in _SCALARS:  # a list would take up to 16 times the memory
                form = _SCALARS[inner].replace("?", "b")
                return array(form, self._bytes(number * struct.calcsize(form)))
            return [self._value(inner) for _ in range(number)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} is unknown")
        return self._unpack(_SCALARS[kind])[0]

    def _string(self) -> str:
        length = int.from_bytes(self._bytes(8), "little")  # a tokenizer has 100,000 of them
        return self._bytes(length).decode()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise ValueError(f"the header is cut off at byte {len(self._data):,}")
        return self._data[start : self._at].tobytes()
