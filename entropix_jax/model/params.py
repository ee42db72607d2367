"""The parameter tree: shapes, logical axes and checkpoint names.

Initialisation, loading, saving and sharding all derive from `param_specs`. Matrices keep the
checkpoint's `[out, in]` layout: nothing is transposed on loading.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.model.config import ModelConfig


@struct.dataclass
class LayerParams:
    """One decoder layer. Leaves are arrays, or `ParamSpec`s in an abstract tree; None is a weight
    that the model does not have, or that `pack` has put below another one."""

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

    def layer(i: int) -> LayerParams:
        def weight(name: str, *axes: str) -> ParamSpec:
            return spec(f"model.layers.{i}.{name}.weight", *axes)

        def bias(name: str, axis: str) -> ParamSpec | None:
            return spec(f"model.layers.{i}.{name}.bias", axis) if config.qkv_bias else None

        def head_norm(name: str) -> ParamSpec | None:
            return weight(name, "head_dim") if config.qk_norm else None

        return LayerParams(
            attention_norm=weight("input_layernorm", "width"),
            query=weight("self_attn.q_proj", "heads", "width"),
            key=weight("self_attn.k_proj", "kv_heads", "width"),
            value=weight("self_attn.v_proj", "kv_heads", "width"),
            output=weight("self_attn.o_proj", "width", "heads"),
            mlp_norm=weight("post_attention_layernorm", "width"),
            gate=weight("mlp.gate_proj", "mlp", "width"),
            up=weight("mlp.up_proj", "mlp", "width"),
            down=weight("mlp.down_proj", "width", "mlp"),
            query_bias=bias("self_attn.q_proj", "heads"),
            key_bias=bias("self_attn.k_proj", "kv_heads"),
            value_bias=bias("self_attn.v_proj", "kv_heads"),
            query_norm=head_norm("self_attn.q_norm"),
            key_norm=head_norm("self_attn.k_norm"),
        )

    return Params(
        embedding=spec("model.embed_tokens.weight", "vocab", "width"),
        layers=tuple(map(layer, range(config.num_layers))),
        final_norm=spec("model.norm.weight", "width"),
        head=None if config.tied_head else spec("lm_head.weight", "vocab", "width"),
    )


# Platforms, as JAX names them, whose weights are packed: one row's step is then fewer launches. A
# CPU copies the parts of what such a product makes, and a TPU takes longer for it.
PACKED = ("gpu", "cuda", "rocm")


def pack(layer: LayerParams) -> LayerParams:
    """Query, key and value as one matrix [(N+2K)*H, D], in the place of the query, and gate and up
    as one [2*F, D], in that of the gate."""

    def below(*weights: Any) -> Any:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *weights)

    return replace(
        layer,
        query=below(layer.query, layer.key, layer.value),
        query_bias=below(layer.query_bias, layer.key_bias, layer.value_bias),
        gate=below(layer.gate, layer.up),
        **dict.fromkeys(("key", "value", "up", "key_bias", "value_bias")),
    )


def count_params(config: ModelConfig) -> int:
    """The number of parameters, a tied head counted once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(config)))


def init_params(config: ModelConfig, key: jax.Array, dtype: jnp.dtype) -> Params:
    """Random weights: norms one, biases zero, matrices normal with standard deviation 0.02."""
    specs, tree = jax.tree.flatten(param_specs(config))
    keys = jax.random.split(key, len(specs))

    def init(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.full(spec.shape, not spec.name.endswith(".bias"), dtype)
        return jnp.asarray(0.02 * jax.random.normal(key, spec.shape, jnp.float32), dtype)

    params: Params = jax.tree.unflatten(tree, map(init, specs, keys))
    return params
