"""The architecture of a model: a static argument of every compiled function.

All numbers are stated here; model functions have no defaults. `model.config_file` reads it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's RoPE scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class RopeDivisors:
    """RoPE scaling by a divisor for each pair's frequency, [H/2]: in linear scaling all are the
    same, in GGUF files they can be any."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a Llama model or a relative. Letters: see the legend in
    `entropix_jax.model.llama`."""

    vocab_size: int  # V
    width: int  # D
    mlp_width: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_positions: int  # the longest context, at most the sliding window if there is one
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | RopeDivisors | None
    tied_head: bool
    dtype: str | None  # of the checkpoint's tensors, where the files say
    qkv_bias: bool = False  # queries, keys and values have biases (Qwen2)
    qk_norm: bool = False  # each head's queries and keys are RMS-normalized before RoPE (Qwen3)
    layers_without_rope: tuple[int, ...] = ()  # their indices (SmolLM3)
