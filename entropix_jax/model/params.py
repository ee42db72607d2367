"""The parameter tree: shapes, logical axes and checkpoint names.

Initialisation, loading, saving and sharding all derive from `param_specs`. Matrices keep the
checkpoint's `[out, in]` layout: nothing is transposed on loading.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

from entropix_jax.model.config import ModelConfig


@struct.dataclass
class LayerParams:
    """One decoder layer. Leaves are arrays, or `ParamSpec`s in an abstract tree; None is a weight
    that the model does not have."""

    attention_norm: Any  # [D]
    query: Any  # [N*H, D]
    key: Any  # [K*H, D]
    value: Any  # [K*H, D]
    output: Any  # [D, N*H]
    mlp_norm: Any  # [D]
    gate: Any  # [F, D]
    up: Any  # [F, D]
    down: Any  # [D, F]
    query_bias: Any = None  # [N*H]
    key_bias: Any = None  # [K*H]
    value_bias: Any = None  # [K*H]
    query_norm: Any = None  # [H]
    key_norm: Any = None  # [H]


@struct.dataclass
class Params:
    """All weights of a model. `head` is None where it is tied to the embedding."""

    embedding: Any  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: Any  # [D]
    head: Any  # [V, D] or None

    @property
    def unembedding(self) -> Any:
        """The output matrix, [V, D]."""
        return self.embedding if self.head is None else self.head


@dataclass(frozen=True)
class ParamSpec:
    """One tensor: its checkpoint name, shape, and logical axes."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


# Of each weight of a layer: its name in the checkpoint and its logical axes.
_LAYER = {
    "attention_norm": ("input_layernorm.weight", "width"),
    "query": ("self_attn.q_proj.weight", "heads", "width"),
    "key": ("self_attn.k_proj.weight", "kv_heads", "width"),
    "value": ("self_attn.v_proj.weight", "kv_heads", "width"),
    "output": ("self_attn.o_proj.weight", "width", "heads"),
    "mlp_norm": ("post_attention_layernorm.weight", "width"),
    "gate": ("mlp.gate_proj.weight", "mlp", "width"),
    "up": ("mlp.up_proj.weight", "mlp", "width"),
    "down": ("mlp.down_proj.weight", "width", "mlp"),
    "query_bias": ("self_attn.q_proj.bias", "heads"),
    "key_bias": ("self_attn.k_proj.bias", "kv_heads"),
    "value_bias": ("self_attn.v_proj.bias", "kv_heads"),
    "query_norm": ("self_attn.q_norm.weight", "head_dim"),
    "key_norm": ("self_attn.k_norm.weight", "head_dim"),
}
_BIASES, _HEAD_NORMS = ("query_bias", "key_bias", "value_bias"), ("query_norm", "key_norm")


def param_specs(config: ModelConfig) -> Params:
    """The abstract parameter tree of a configuration, with a `ParamSpec` at each leaf."""
    sizes = {
        "vocab": config.vocab_size,
        "width": config.width,
        "mlp": config.mlp_width,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }

    def spec(name: str, *axes: str) -> ParamSpec:
        return ParamSpec(name, tuple(sizes[axis] for axis in axes), axes)

    absent = (() if config.qkv_bias else _BIASES) + (() if config.qk_norm else _HEAD_NORMS)
    fields = {field: own for field, own in _LAYER.items() if field not in absent}

    def layer(i: int) -> LayerParams:
        specs = {k: spec(f"model.layers.{i}.{name}", *axes) for k, (name, *axes) in fields.items()}
        return LayerParams(**specs)

    return Params(
        embedding=spec("model.embed_tokens.weight", "vocab", "width"),
        layers=tuple(map(layer, range(config.num_layers))),
        final_norm=spec("model.norm.weight", "width"),
        head=None if config.tied_head else spec("lm_head.weight", "vocab", "width"),
    )


def count_params(config: ModelConfig) -> int:
    """The number of parameters, a tied head counted once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))
