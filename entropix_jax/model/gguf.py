"""GGUF, llama.cpp's single-file format.

Metadata are translated to the decoded JSON files of a Hugging Face folder and parsed as such;
tensors get the names and row order of that layout. The package `gguf` dequantizes them. The header
is parsed here: the package's reader takes seconds to make NumPy views of every token, and has no
clear errors for torn files.

Format: `docs/gguf.md` (version 3) in the ggml repository; the metadata mean what llama.cpp makes of
them.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening
from entropix_jax.model.checkpoint import STORED, StoredTensor, check_names, own_memory
from entropix_jax.model.config import (
    GenerationConfig,
    ModelConfig,
    RopeDivisors,
    parse_generation_config,
    parse_model_config,
)
from entropix_jax.text.gguf_tokenizer import read_tokenizer
from entropix_jax.text.tokenizer import Tokenizer

SUFFIX = ".gguf"
_STRING, _ARRAY = 8, 9
# Scalar types of metadata, as `struct` formats.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates adjacent channels for these, so its converter permutes the rows of the query and
# key matrices.
_INTERLEAVED = ("llama", "smollm3")
# Keys that change the maths, with the values that are implemented.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("none", "linear"),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0.0, 1.0)),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "attention.causal": (True,),
    "expert_used_count": (0,),
}
# Keys that are read.
_READ = frozenset(
    """
    attention.head_count attention.head_count_kv attention.key_length
    attention.layer_norm_rms_epsilon attention.sliding_window attention.value_length block_count
    context_length embedding_length feed_forward_length rope.dimension_count rope.freq_base
    rope.scale_linear rope.scaling.factor
    """.split()
)
# Keys that llama.cpp does not use for these architectures, or only for a RoPE type that is refused.
_HARMLESS = frozenset(
    """
    attention.layer_norm_epsilon rope.scaling.finetuned rope.scaling.original_context_length
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scaling.yarn_ext_factor rope.scaling.yarn_log_multiplier tensor_data_layout vocab_size
    """.split()
)
# Names of tensors in a layer, and outside of layers; the suffixes (.weight, .bias) are the same.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Elements that are dequantized at a time: few enough for the processor's cache. The package takes
# 16 rows at a time, which for short rows is mostly Python overhead.
_DEQUANTISED = 1 << 18


class GgufFile:
    """A GGUF file with decoded metadata and memory-mapped tensors, by their name in the Hugging
    Face layout."""

    def __init__(self, path: Path) -> None:
        """Reads the header. UserError if there is no such file, it is damaged, or its architecture
        or a tensor's type is not implemented."""
        self.path = path
        self.notes: list[str] = []
        data = _map_file(path)
        header = _Header(data, path)
        self.metadata = header.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            told = f"is not implemented (known: {', '.join(_ARCHITECTURES)})"
            raise UserError(f"{path}: the architecture {architecture!r} {told}")
        self._architecture: str = architecture
        self._check_kind()
        for name, values in _FIXED.items():
            if (value := self._own(name)) is not None and value not in values:
                raise UserError(f"{path}: '{architecture}.{name}': {value!r} is not implemented")
        own = f"{architecture}."
        found = {key.removeprefix(own) for key in self.metadata if key.startswith(own)}
        if unknown := sorted(found - _READ - _HARMLESS - set(_FIXED)):
            names = ", ".join(f"'{own}{name}'" for name in unknown)
            self.notes.append(f"{path}: not known here, taken to change nothing: {names}")
        self.tensors = self._tensors(header, data)
        self._factors = self.tensors.pop(_ROPE_FACTORS, None)

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture. The default dtype of the weights in memory is bfloat16."""
        config = parse_model_config(self._raw_config(), self.path)
        if self._factors is not None:
            if self._factors.shape != (config.head_dim // 2,):
                raise UserError(f"{self.path}: '{_ROPE_FACTORS}' has another shape than its heads")
            divisors = self._factors.read(np.float32).astype(np.float64)
            if isinstance(config.rope_scaling, RopeDivisors):  # linear: llama.cpp applies both
                divisors *= config.rope_scaling.divisors
            config = replace(config, rope_scaling=RopeDivisors(divisors=tuple(divisors.tolist())))
        check_names(self.path, self.tensors, config)
        return config

    @cached_property
    def generation(self) -> GenerationConfig:
        """The end tokens: end of text, of a turn, and of a message."""
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        ids = [self.metadata[key] for key in keys if key in self.metadata]
        return parse_generation_config({"eos_token_id": list(dict.fromkeys(ids))}, self.path)

    def tokenizer(self) -> Tokenizer:
        """See `read_tokenizer`, whose notes it adds."""
        return read_tokenizer(self.metadata, self.path, self.notes)

    def _check_kind(self) -> None:
        """Refuses a file that is a part of a model, by its name."""
        kind, parts = self.metadata.get("general.type", "model"), self.metadata.get("split.count")
        if kind != "model":
            told = f"is not a model but '{kind}': merge it with its model, or name the model's file"
            raise UserError(f"{self.path}: {told}")
        if parts not in (None, 0, 1):
            told = f"is one of {parts} parts: merge them, `llama-gguf-split --merge FIRST OUTPUT`"
            raise UserError(f"{self.path}: {told}")

    def _own(self, name: str) -> Any:
        """A metadata value of the architecture; None where it is missing."""
        return self.metadata.get(f"{self._architecture}.{name}")

    def _raw_config(self) -> dict[str, Any]:
        """The equivalent of `config.json`."""
        # Heads whose values or rotated channels differ in size are not implemented.
        rotated = self._own("rope.dimension_count")
        head_dim = self._own("attention.key_length") or rotated
        for name in ("attention.value_length", "rope.dimension_count"):
            if (value := self._own(name)) not in (None, head_dim):
                told = f"{value} beside heads of {head_dim} is not implemented"
                raise UserError(f"{self.path}: '{self._architecture}.{name}': {told}")

        heads = self._own("attention.head_count")
        embedding = self.tensors.get("model.embed_tokens.weight")
        raw = {
            "model_type": self._architecture,
            "hidden_size": self._own("embedding_length"),
            "intermediate_size": self._own("feed_forward_length"),
            "num_hidden_layers": self._own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._own("attention.head_count_kv") or heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._own("context_length"),
            "rms_norm_eps": self._own("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._own("rope.freq_base") or 10000.0,
            "sliding_window": self._own("attention.sliding_window") or None,
            "vocab_size": None if embedding is None else embedding.shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "no_rope_layer_interval": 4,  # SmolLM3's, hard-coded in llama.cpp, not in the file
            "dtype": "bfloat16",
        }
        # As in llama.cpp: without a type scaling is linear. Older files have `scale_linear`.
        factor = self._own("rope.scaling.factor") or self._own("rope.scale_linear")
        if factor and self._own("rope.scaling.type") != "none":
            raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        # A missing key is then reported by its name in `config.json`.
        return {key: value for key, value in raw.items() if value is not None}

    def _tensors(self, header: "_Header", data: np.ndarray) -> dict[str, StoredTensor]:
        """Maps all tensors, under their names in the Hugging Face layout."""
        import gguf

        heads = {}
        if self._architecture in _INTERLEAVED:
            heads["attn_q"] = self._own("attention.head_count")
            heads["attn_k"] = self._own("attention.head_count_kv") or heads["attn_q"]
        tensors: dict[str, StoredTensor] = {}
        kinds: dict[int, Any] = {}
        for written, shape, number, offset in header.tensors:
            # Its name.
            stem, _, end = written.rpartition(".")
            own, name = "", _OTHER_TENSORS.get(stem)
            if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem, re.ASCII):
                own = found[2]
                if own in _LAYER_TENSORS:
                    name = f"model.layers.{int(found[1])}.{_LAYER_TENSORS[own]}"
            name = f"{name}.{end}" if name else written
            where = f"{self.path}: tensor '{written}'"
            # Its bytes.
            if number not in kinds:
                kinds[number] = _find_kind(number, written, self.path)
            kind = kinds[number]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                told = f"has rows of {shape[-1]}, which are no whole blocks of {block}"
                raise UserError(f"{where} of type {kind.name} {told}")
            start = header.start + offset
            stop = start + math.prod(shape) // block * size
            if stop > len(data):
                header.refuse(f"tensor '{written}' ends at byte {stop:,} of {len(data):,}")
            if name in tensors:
                raise UserError(f"{where} is there twice")
            read = partial(_read_values, where, shape, kind, data[start:stop], heads.get(own))
            stored = kind.name if kind.name in STORED else "F32"
            tensors[name] = StoredTensor(self.path, name, shape, stored, read)
        return tensors


def _read_values(
    where: str, shape: tuple[int, ...], kind: Any, data: np.ndarray, heads: int | None, dtype: Any
) -> np.ndarray:
    """The values of a tensor from its bytes, uint8. With `heads` their rows are interleaved: rows
    2i and 2i + 1 of a head are rows i and i + H/2 in the Hugging Face layout."""
    if heads:
        if shape[0] % (2 * heads):
            raise UserError(f"{where} has {shape[0]} rows for {heads} heads")
        # Rows are quantized separately, so they can be permuted before dequantizing.
        rows = data.reshape(heads, shape[0] // heads // 2, 2, -1)
        data = rows.swapaxes(1, 2).reshape(-1)
    return _decode(data, kind, dtype).reshape(shape)


def _find_kind(number: int, name: str, path: Path) -> Any:
    """The `gguf.GGMLQuantizationType` of this number, if it can be decoded."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        _decode(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind, np.float32)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"{path}: tensor '{name}' has an unknown type: {error}") from None
    return kind


def _decode(data: np.ndarray, kind: Any, dtype: Any) -> np.ndarray:
    """Decodes the blocks of a tensor, uint8 [n * bytes of a block], to [n * size of a block], in
    memory of its own."""
    if kind.name in STORED:
        values = np.ascontiguousarray(data).view(STORED[kind.name])
        out = own_memory(values.shape, dtype)
        out[...] = values
        return out
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    # Rounded part by part: all of a tensor in float32 is more memory than the processor's cache.
    out = own_memory((len(data) // size, block), dtype)
    step = max(_DEQUANTISED // block, 1)
    for first in range(0, len(out), step):
        part = data[first * size : (first + step) * size].reshape(1, -1)
        out[first : first + step] = gguf.quants.dequantize(part, kind).reshape(-1, block)
    return out.reshape(-1)


def _map_file(path: Path) -> np.ndarray:
    if path.exists() and not path.is_file():  # a pipe would block
        raise UserError(f"{path}: cannot be read: not a regular file")
    with opening(path) as file:
        try:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except ValueError:  # an empty file cannot be mapped
            raise UserError(f"{path}: not a whole GGUF file: it is empty") from None


class _Header:
    """The parsed header of a GGUF file: metadata, tensors, and the start of the data."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self._data = data.data
        self._path = path
        self._at = 0
        if self._bytes(4) != b"GGUF":
            self.refuse("it does not begin as one")
        version, number, keys = self._unpack("IQQ")
        if version not in (2, 3):
            self.refuse(f"its format version is {version}, known are 2 and 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I")[0])
        # Each one's name, shape, type, and where it begins, counted from the start of the data.
        self.tensors = [self._entry() for _ in range(number)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self.refuse(f"'general.alignment' is {alignment!r}")
        self.start = -(-self._at // alignment) * alignment

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (axes,) = self._unpack("I")
        if axes not in (1, 2, 3, 4):
            self.refuse(f"tensor '{name}' has {axes} axes")
        *lengths, kind, offset = self._unpack(f"{axes}QIQ")
        return name, tuple(reversed(lengths)), kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(self._scalar(kind))[0]
        inner, number = self._unpack("IQ")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(self._within(number, 8))]
        form = self._scalar(inner)
        return list(self._unpack(f"{self._within(number, struct.calcsize(form))}{form}"))

    def _string(self) -> str:
        length = int.from_bytes(self._bytes(8), "little")  # a tokenizer has 100,000 of them
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            self.refuse(f"text before byte {self._at:,} is not UTF-8")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, length: int) -> bytes:
        start, self._at = self._at, self._at + self._within(length, 1)
        return self._data[start : self._at].tobytes()

    def _within(self, number: int, size: int) -> int:
        """`number`, if that many elements of at least `size` bytes can still follow."""
        if self._at + number * size > len(self._data):
            self.refuse(f"its header goes on after its last byte, {len(self._data):,}")
        return number

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            self.refuse(f"a value of it has the type {kind}")
        return _SCALARS[kind]

    def refuse(self, problem: str) -> NoReturn:
        """Raises the error of a damaged file."""
        raise UserError(f"{self._path}: not a whole GGUF file: {problem}") from None
