"""The parameter tree: shapes, logical axes and checkpoint names.

Initialisation, loading, saving and sharding all derive from `param_specs`. Matrices keep the
checkpoint's `[out, in]` layout: nothing is transposed on loading.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
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


def param_specs(config: ModelConfig) -> Params:
    """The abstract parameter tree of a configuration, with a `ParamSpec` at each leaf."""
    width, mlp, vocab = config.width, config.mlp_width, config.vocab_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def layer(i: int) -> LayerParams:
        def spec(name: str, shape: tuple[int, ...], *axes: str, kind: str = "weight") -> ParamSpec:
            return ParamSpec(f"model.layers.{i}.{name}.{kind}", shape, axes)

        def bias(name: str, size: int, axis: str) -> ParamSpec | None:
            return spec(name, (size,), axis, kind="bias") if config.qkv_bias else None

        def head_norm(name: str) -> ParamSpec | None:
            return spec(name, (config.head_dim,), "head_dim") if config.qk_norm else None

        return LayerParams(
            attention_norm=spec("input_layernorm", (width,), "width"),
            query=spec("self_attn.q_proj", (queries, width), "heads", "width"),
            key=spec("self_attn.k_proj", (keys, width), "kv_heads", "width"),
            value=spec("self_attn.v_proj", (keys, width), "kv_heads", "width"),
            output=spec("self_attn.o_proj", (width, queries), "width", "heads"),
            mlp_norm=spec("post_attention_layernorm", (width,), "width"),
            gate=spec("mlp.gate_proj", (mlp, width), "mlp", "width"),
            up=spec("mlp.up_proj", (mlp, width), "mlp", "width"),
            down=spec("mlp.down_proj", (width, mlp), "width", "mlp"),
            query_bias=bias("self_attn.q_proj", queries, "heads"),
            key_bias=bias("self_attn.k_proj", keys, "kv_heads"),
            value_bias=bias("self_attn.v_proj", keys, "kv_heads"),
            query_norm=head_norm("self_attn.q_norm"),
            key_norm=head_norm("self_attn.k_norm"),
        )

    return Params(
        embedding=ParamSpec("model.embed_tokens.weight", (vocab, width), ("vocab", "width")),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        final_norm=ParamSpec("model.norm.weight", (width,), ("width",)),
        head=None
        if config.tied_head
        else ParamSpec("lm_head.weight", (vocab, width), ("vocab", "width")),
    )


def count_params(config: ModelConfig) -> int:
    """The number of parameters, a tied head counted once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random weights: norms one, biases zero, matrices normal with standard deviation 0.02.

    `key` is consumed.
    """
    specs, tree = jax.tree.flatten(param_specs(config))
    keys = jax.random.split(key, len(specs))

    def init(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.full(spec.shape, not spec.name.endswith(".bias"), dtype)
        return jnp.asarray(0.02 * jax.random.normal(key, spec.shape, jnp.float32), dtype)

    leaves = [init(spec, key) for spec, key in zip(specs, keys, strict=True)]
    params: Params = jax.tree.unflatten(tree, leaves)
    return params
