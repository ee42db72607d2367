"""GGUF, llama.cpp's single-file format.

Metadata are translated to the decoded `config.json`, `generation_config.json`, `tokenizer.json` and
`tokenizer_config.json` of a Hugging Face folder and parsed as such; tensors get the names and row
order of that layout. The package `gguf` dequantizes them. The header is parsed here: the package's
reader takes seconds to make NumPy views of every token, and has no clear errors for torn files.

Format: `docs/gguf.md` (version 3) in the ggml repository; the metadata mean what llama.cpp makes of
them.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening
from entropix_jax.model.checkpoint import StoredTensor, check_names
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
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Scalar types of metadata, as `struct` formats.
_SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_MAX_AXES = 4
_ALIGNMENT = 32  # of tensors' data, where the file does not say

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates adjacent channels for these, so its converter permutes the rows of the query and
# key matrices.
_INTERLEAVED = ("llama", "smollm3")
# SmolLM3 has no RoPE in every fourth layer: hard-coded in llama.cpp, not in the file.
_SMOLLM3_INTERVAL = 4
# Keys that change the maths, with the values that are implemented.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("none",),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
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
    """A GGUF file with decoded metadata and memory-mapped tensors.

    Attributes:
        metadata: by key; arrays are lists.
        tensors: by their name in the Hugging Face layout.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            UserError: no such file, a damaged one, or an architecture or tensor type that is not
                implemented.
        """
        self.path = path
        data = _mapped(path)
        try:
            header = _Header(data)
        except _Torn as error:
            raise UserError(f"{path}: not a whole GGUF file: {error}") from None
        self.metadata = header.metadata
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise UserError(
                f"{path}: the architecture {architecture!r} is not implemented "
                f"(known: {', '.join(_ARCHITECTURES)})"
            )
        self._architecture: str = architecture
        for name, values in _FIXED.items():
            if (value := self._own(name)) is not None and value not in values:
                raise UserError(f"{path}: '{architecture}.{name}': {value!r} is not implemented")
        self._factors: np.ndarray | None = None
        self.tensors: Mapping[str, StoredTensor] = self._tensors(header, data)

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture. The default dtype of the weights in memory is bfloat16.

        Raises:
            UserError: a number is missing, or something is not implemented.
        """
        config = parse_model_config(self._raw_config(), self.path)
        if self._factors is not None:
            if self._factors.shape != (config.head_dim // 2,):
                raise UserError(f"{self.path}: '{_ROPE_FACTORS}' has another shape than its heads")
            divisors = RopeDivisors(divisors=tuple(map(float, self._factors)))
            config = replace(config, rope_scaling=divisors)
        check_names(self.path, self.tensors, config)
        return config

    @cached_property
    def generation(self) -> GenerationConfig:
        """The end tokens: end of text and end of turn.

        Raises:
            UserError: they are no token ids.
        """
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
        ids = [self.metadata[key] for key in keys if key in self.metadata]
        return parse_generation_config({"eos_token_id": list(dict.fromkeys(ids))}, self.path)

    def tokenizer(self) -> Tokenizer:
        """See `read_tokenizer`."""
        return read_tokenizer(self.metadata, self.path)

    def _own(self, name: str) -> Any:
        """A metadata value of the architecture; None where it is missing."""
        return self.metadata.get(f"{self._architecture}.{name}")

    def _raw_config(self) -> dict[str, Any]:
        """The equivalent of `config.json`."""
        # Heads whose values or rotated channels differ in size are not implemented.
        head_dim = self._own("attention.key_length")
        rotated = self._own("rope.dimension_count")
        if head_dim is None:
            head_dim = rotated
        for name, value in (
            ("attention.value_length", self._own("attention.value_length")),
            ("rope.dimension_count", rotated),
        ):
            if value not in (None, head_dim):
                raise UserError(
                    f"{self.path}: '{self._architecture}.{name}': {value} beside heads of "
                    f"{head_dim} is not implemented"
                )

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
            "no_rope_layer_interval": _SMOLLM3_INTERVAL,
            "dtype": "bfloat16",
        }
        # A missing key is then reported by its name in `config.json`.
        return {key: value for key, value in raw.items() if value is not None}

    def _tensors(self, header: "_Header", data: np.ndarray) -> dict[str, StoredTensor]:
        """Maps all tensors, under their names in the Hugging Face layout."""
        heads = {
            "attn_q": self._own("attention.head_count"),
            "attn_k": self._own("attention.head_count_kv") or self._own("attention.head_count"),
        }
        tensors: dict[str, StoredTensor] = {}
        kinds = {entry.kind: entry for entry in header.tensors}
        known = {number: _kind(entry, self.path) for number, entry in kinds.items()}
        for entry in header.tensors:
            # The tensor's bytes.
            kind = known[entry.kind]
            start = header.start + entry.offset
            size = kind.bytes_of(entry, self.path)
            if start + size > len(data):
                raise UserError(
                    f"{self.path}: not a whole GGUF file: tensor '{entry.name}' ends at byte "
                    f"{start + size:,} of {len(data):,}"
                )
            # Its name.
            stem, _, end = entry.name.rpartition(".")
            own, name = "", _OTHER_TENSORS.get(stem)
            if stem.startswith("blk."):
                _, number, own = [*stem.split(".", 2), ""][:3]
                if own in _LAYER_TENSORS and number.isdecimal():
                    name = f"model.layers.{int(number)}.{_LAYER_TENSORS[own]}"
            tensor = _GgufTensor(
                self.path,
                f"{name}.{end}" if name else entry.name,
                entry.shape,
                kind,
                data[start : start + size],
                heads.get(own) if self._architecture in _INTERLEAVED else None,
            )
            if entry.name == _ROPE_FACTORS:
                self._factors = tensor.values()
            elif tensor.name in tensors:
                raise UserError(f"{self.path}: tensor '{entry.name}' is there twice")
            else:
                tensors[tensor.name] = tensor
        return tensors


class _GgufTensor(StoredTensor):
    """One tensor of a memory-mapped GGUF file.

    Args:
        data: uint8, its bytes.
        interleaved: the number of heads with interleaved rows, where rows 2i and 2i + 1 of a head
            are rows i and i + H/2 in the Hugging Face layout; None for no such heads.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        shape: tuple[int, ...],
        kind: "_Kind",
        data: np.ndarray,
        interleaved: int | None,
    ) -> None:
        super().__init__(path, name, shape)
        self._kind = kind
        self._data = data
        self._interleaved = interleaved

    @property
    def dtype(self) -> np.dtype:
        return self._kind.dtype

    def values(self) -> np.ndarray:
        data = self._data
        if heads := self._interleaved:
            if self.shape[0] % (2 * heads):
                raise UserError(
                    f"{self.path}: tensor '{self.name}' has {self.shape[0]} rows for {heads} heads"
                )
            # Rows are quantized separately, so they can be permuted before dequantizing.
            rows = data.reshape(heads, self.shape[0] // heads // 2, 2, -1)
            data = rows.swapaxes(1, 2).reshape(-1)
        return self._kind.values(data).reshape(self.shape)


@dataclass(frozen=True)
class _Kind:
    """A tensor type: `block` elements take `size` bytes."""

    number: Any  # gguf.GGMLQuantizationType
    block: int
    size: int

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the decoded values."""
        dtype: np.dtype = np.dtype(_PLAIN.get(self.number.name, np.float32))
        return dtype

    def bytes_of(self, entry: "_Entry", path: Path) -> int:
        """The size of a tensor in bytes."""
        if entry.shape[-1] % self.block:
            raise UserError(
                f"{path}: tensor '{entry.name}' of type {self.number.name} has rows of "
                f"{entry.shape[-1]}, which are no whole blocks of {self.block}"
            )
        return math.prod(entry.shape) // self.block * self.size

    def values(self, data: np.ndarray) -> np.ndarray:
        """Decodes n blocks, uint8 [n * size], to [n * block]."""
        if self.number.name in _PLAIN:
            return np.ascontiguousarray(data).view(self.dtype)
        import gguf

        out = np.empty(len(data) // self.size * self.block, np.float32)
        step = max(_DEQUANTISED // self.block, 1)
        for first in range(0, len(out) // self.block, step):
            part = data[first * self.size : (first + step) * self.size]
            values = gguf.quants.dequantize(part.reshape(1, -1), self.number)
            out[first * self.block : (first + step) * self.block] = values.reshape(-1)
        return out


_PLAIN: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _kind(entry: "_Entry", path: Path) -> _Kind:
    import gguf

    try:
        number = gguf.GGMLQuantizationType(entry.kind)
    except ValueError:
        raise UserError(
            f"{path}: tensor '{entry.name}' has type {entry.kind}, which is not known"
        ) from None
    block, size = gguf.GGML_QUANT_SIZES[number]
    kind = _Kind(number, block, size)
    try:
        kind.values(np.zeros(size, np.uint8))
    except NotImplementedError:
        raise UserError(
            f"{path}: tensor '{entry.name}' has type {number.name}, which is not implemented"
        ) from None
    return kind


def _mapped(path: Path) -> np.ndarray:
    """Memory-maps a file."""
    if path.exists() and not path.is_file():  # a pipe would block
        raise UserError(f"{path}: cannot be read: not a regular file")
    with opening(path) as file:
        try:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except ValueError:  # an empty file cannot be mapped
            raise UserError(f"{path}: not a whole GGUF file: it is empty") from None


class _Torn(ValueError):
    """Raised for an incomplete or invalid header."""


@dataclass(frozen=True)
class _Entry:
    """A tensor's entry in the header; `offset` is relative to the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """The parsed header of a GGUF file: metadata, tensors, and the start of the data."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data.data
        self._at = 0
        if self._bytes(4) != _MAGIC:
            raise _Torn("it does not begin as one")
        version, number, keys = self._unpack("IQQ")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise _Torn(f"its format version is {version}, known are {known}")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("I")[0])
        self.tensors = [self._entry() for _ in range(number)]
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Torn(f"'general.alignment' is {alignment!r}")
        self.start = -(-self._at // alignment) * alignment

    def _entry(self) -> _Entry:
        name = self._string()
        (axes,) = self._unpack("I")
        if not 1 <= axes <= _MAX_AXES:
            raise _Torn(f"tensor '{name}' has {axes} axes")
        *lengths, kind, offset = self._unpack(f"{axes}QIQ")
        return _Entry(name, tuple(reversed(lengths)), kind, offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_scalar(kind))[0]
        inner, number = self._unpack("IQ")
        if inner in (_STRING, _ARRAY):
            return [self._value(inner) for _ in range(self._within(number, 8))]
        form = _scalar(inner)
        return list(self._unpack(f"{self._within(number, struct.calcsize(form))}{form}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError:
            raise _Torn(f"text before byte {self._at:,} is not UTF-8") from None

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, length: int) -> bytes:
        start, self._at = self._at, self._at + self._within(length, 1)
        return self._data[start : self._at].tobytes()

    def _within(self, number: int, size: int) -> int:
        """`number`, if that many elements of at least `size` bytes can still follow."""
        if self._at + number * size > len(self._data):
            raise _Torn(f"its header goes on after its last byte, {len(self._data):,}")
        return number


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Torn(f"a value of it has the type {kind}")
    return _SCALARS[kind]
