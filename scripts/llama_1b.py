"""Llama-3.2-1B's shape."""

from entropix_jax.model.config import ModelConfig, RopeScaling

LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256,
    width=2048,
    mlp_width=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    ),
    tied_head=True,
    dtype="bfloat16",
)


def transformers_config(config: ModelConfig) -> dict[str, object]:
    """A configuration in the format of `transformers` and of a checkpoint's `config.json`."""
    scaling = config.rope_scaling
    rope: dict[str, object] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if scaling is not None:
        assert isinstance(scaling, RopeScaling)  # divisors have no place in such a file
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": config.dtype,
    }
