"""Small GGUF files, written by the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import param_specs
from tests.support.models import random_params, tiny_config
from tests.support.tokenizers import vocabulary_metadata

NONE: Mapping[str, Any] = {}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tied_head": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"layers_without_rope": (3,), "num_layers": 4},
}


def config_of(family: str) -> ModelConfig:
    changes = {
        "vocab_size": len(vocabulary_metadata()["tokenizer.ggml.tokens"]),
        "rope_scaling": None,
    }
    return tiny_config(**changes, dtype="bfloat16", **FAMILIES[family])


def write(
    path: Path,
    family: str = "llama",
    changes: Mapping[str, Any] = NONE,
    tensors: Mapping[str, np.ndarray | None] = NONE,
) -> Path:
    """Writes a small model with changed metadata and tensors. `.x` is a key of the family, `...`
    and None remove a key or tensor."""
    config = config_of(family)
    own = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    metadata = {f".{name}": value for name, value in own.items()} | vocabulary_metadata()
    metadata["tokenizer.chat_template"] = "{{ messages[0]['content'] }}<|im_end|>"
    specs, params = jax.tree.leaves(param_specs(config)), random_params(config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_layers)
    stored: dict[str, np.ndarray | None] = {}
    for spec, leaf in zip(specs, jax.tree.leaves(params), strict=True):
        values = np.asarray(leaf)
        if family in ("llama", "smollm3") and ("q_proj" in spec.name or "k_proj" in spec.name):
            # The rows of each head are in the order of llama.cpp's converter.
            halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stored[str(names.get_name(spec.name, try_suffixes=(".weight", ".bias")))] = values
    writer = gguf.GGUFWriter(path, family)
    for name, value in {**metadata, **changes}.items():
        if value is not ...:
            key = f"{family}{name}" if name.startswith(".") else name
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in {**stored, **tensors}.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
