"""Model configuration from `config.json` and `generation_config.json`.

A key that changes the maths is implemented or refused by name; an unknown key is assumed to change
nothing, and reported (`unknown_keys`).

A `ModelConfig` holds only the architecture, and is frozen and hashable: a static argument of every
compiled function. All numbers come from here; maths functions have no numeric defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.files import check_own_code, read_json_object

CONFIG_FILE = "config.json"
_MAX_LAYERS = 1024  # ten times the deepest Llama: more is a typing error, and would take hours
DTYPES = ("float32", "bfloat16", "float16")


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


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Ids of the end-of-text tokens, possibly none."""

    eos_ids: tuple[int, ...]


_ORIGINAL = "original_max_position_embeddings"  # inside the RoPE object, or beside it
# The types of RoPE scaling, with the keys that each reads.
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}
_Scaling = RopeScaling | RopeDivisors | None
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

# Keys that are read.
_READ = set(
    """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling
    rope_parameters no_rope_layers no_rope_layer_interval sliding_window use_sliding_window
    max_window_layers layer_types tie_word_embeddings torch_dtype dtype bos_token_id eos_token_id
    original_max_position_embeddings
    """.split()
)

# Keys that change the maths, with the values that are implemented.
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    """attention_bias mlp_bias rope_interleaved use_mrope is_encoder_decoder
    add_cross_attention tie_encoder_decoder""": (False,),
    """quantization_config mrope_section attention_chunk_size attn_logit_softcapping
    final_logit_softcapping query_pre_attn_scalar clip_qkv kv_lora_rank attention_multiplier
    scale_depth cross_attention_hidden_size""": (None,),
    """partial_rotary_factor embedding_multiplier residual_multiplier logits_scaling
    logit_scale scale_emb""": (None, 1, 1.0),
    "qk_layernorm use_qk_norm alibi parallel_attn use_parallel_residual": (None, False),
    "num_experts num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "is_decoder": (False, True),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (0,),
}
_FIXED = {key: values for keys, values in _IMPLEMENTED.items() for key in keys.split()}

# Keys of training, bookkeeping or other tasks, which do not affect the logits. `auto_map` is empty:
# see `check_own_code`.
_HARMLESS = set(
    """
    architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens
    decoder_start_token_id finetuning_task id2label initializer_range is_llama_config label2id
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type
    return_dict sep_token_id task_specific_params tokenizer_class torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache _attn_implementation_autoset _model_name_or_path _name_or_path
    """.split()
)


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `folder/config.json`."""
    path = folder / CONFIG_FILE
    return parse_model_config(read_json_object(path), path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The `ModelConfig` of a decoded `config.json`; `path` is only named in errors.
    UserError if a number is missing, or a key changes the maths and is not implemented."""
    # What changes the maths and is not implemented.
    check_own_code(raw, path)
    family = raw.get("model_type", "llama")
    if family not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UserError(f"{path}: 'model_type': {family!r} is not implemented (known: {known})")
    for key, values in _FIXED.items():
        if key in raw and raw[key] not in values:
            raise UserError(f"{path}: '{key}': {raw[key]!r} is not implemented")

    # Shapes, and whether they are consistent.
    width = _positive_int(raw, "hidden_size", path)
    num_heads = _positive_int(raw, "num_attention_heads", path)
    num_layers = _positive_int(raw, "num_hidden_layers", path)
    if num_layers > _MAX_LAYERS:
        raise UserError(f"{path}: 'num_hidden_layers': {num_layers} is past {_MAX_LAYERS}")
    # For Llama these two default to values that follow from the others. The other families' classes
    # have defaults of their own, which no published file relies on.
    num_kv_heads = num_heads
    if family != "llama" or raw.get("num_key_value_heads") is not None:
        num_kv_heads = _positive_int(raw, "num_key_value_heads", path)
    _check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads, path)
    if family == "qwen3" or raw.get("head_dim") is not None:
        head_dim = _positive_int(raw, "head_dim", path)
    else:
        _check_multiple("hidden_size", width, "num_attention_heads", num_heads, path)
        head_dim = width // num_heads
    if head_dim % 2:
        raise UserError(f"{path}: head_dim {head_dim} is odd, rotary embedding needs pairs")
    rope_theta, rope_scaling = _rope(raw, head_dim, path)

    # How the weights are stored.
    dtype = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if raw.get("torch_dtype") not in (None, dtype):
        raise UserError(f"{path}: 'dtype' and 'torch_dtype' disagree")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"{path}: dtype {dtype!r} is not implemented (known: {', '.join(DTYPES)})")
    unrotated = _layers_without_rope(raw, num_layers, path) if family == "smollm3" else ()
    return ModelConfig(
        vocab_size=_positive_int(raw, "vocab_size", path),
        width=width,
        mlp_width=_positive_int(raw, "intermediate_size", path),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(raw, path),
        norm_eps=_positive_float(raw, "rms_norm_eps", path),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=_bool(raw, "tie_word_embeddings", family == "smollm3", path),
        dtype=dtype,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        layers_without_rope=unrotated,
    )


def unknown_keys(raw: Mapping[str, Any]) -> list[str]:
    """Unknown keys of a decoded `config.json`, sorted."""
    return sorted(set(raw) - _READ - _HARMLESS - set(_FIXED))


def load_generation_config(folder: Path) -> GenerationConfig:
    """Reads the end tokens of `generation_config.json` and of `config.json`, in this order."""
    paths = (folder / "generation_config.json", folder / CONFIG_FILE)
    found = [parse_generation_config(read_json_object(p), p) for p in paths if p.exists()]
    ids = [token_id for each in found for token_id in each.eos_ids]
    return GenerationConfig(eos_ids=tuple(dict.fromkeys(ids)))


def parse_generation_config(raw: Mapping[str, Any], path: Path) -> GenerationConfig:
    """Returns the end tokens of a decoded `generation_config.json` or `config.json`. Errors name
    `path`."""
    eos = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{path}: 'eos_token_id' must be token ids, not {eos!r}")
    return GenerationConfig(eos_ids=tuple(ids))


def _max_positions(raw: Mapping[str, Any], path: Path) -> int:
    """The longest context that every layer attends to entirely."""
    positions = _positive_int(raw, "max_position_embeddings", path)
    kinds, known = raw.get("layer_types"), ("full_attention", "sliding_attention")
    if kinds is not None and not (isinstance(kinds, list) and all(k in known for k in kinds)):
        raise UserError(f"{path}: 'layer_types': {kinds!r} is not implemented")
    family = raw.get("model_type", "llama")
    slides = _bool(raw, "use_sliding_window", family in ("llama", "mistral"), path)
    if kinds is not None:
        slides = "sliding_attention" in kinds
    if family == "mistral":  # its class only reads `sliding_window`, which has a default
        slides = True
        if "sliding_window" not in raw:
            raise UserError(f"{path}: 'sliding_window' is missing (null for none)")
    if not slides or raw.get("sliding_window") is None:
        return positions
    return min(positions, _positive_int(raw, "sliding_window", path))


def _layers_without_rope(raw: Mapping[str, Any], num_layers: int, path: Path) -> tuple[int, ...]:
    """SmolLM3's: a list with 0 for each of them, or every n-th."""
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        interval = _positive_int(raw, "no_rope_layer_interval", path)
        return tuple(range(interval - 1, num_layers, interval))
    known = isinstance(rotated, list) and all(rotates in (0, 1) for rotates in rotated)
    if not known or len(rotated) < num_layers:
        raise UserError(f"{path}: 'no_rope_layers' must be 0 or 1 for each of {num_layers} layers")
    return tuple(i for i, rotates in enumerate(rotated[:num_layers]) if not rotates)


def _rope(raw: Mapping[str, Any], head_dim: int, path: Path) -> tuple[float, _Scaling]:
    """Reads both spellings: `rope_theta` + `rope_scaling`, or `rope_parameters` with both."""
    spellings = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    found = {_rope_object(raw, key, head_dim, path) for key in spellings}
    found = found or {(_rope_theta(raw, path), None)}
    if len(found) > 1:
        raise UserError(f"{path}: 'rope_parameters' and 'rope_scaling' disagree")
    return found.pop()


def _rope_object(
    raw: Mapping[str, Any], key: str, head_dim: int, path: Path
) -> tuple[float, _Scaling]:
    rope = raw[key]
    if not isinstance(rope, Mapping):
        raise UserError(f"{path}: '{key}' must be an object, not {rope!r}")
    theta = _rope_theta(rope if "rope_theta" in rope else raw, path)
    if raw.get("rope_theta") not in (None, theta):
        raise UserError(f"{path}: 'rope_theta' and the one in '{key}' disagree")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_NUMBERS:
        raise UserError(f"{path}: '{key}': rope type {kind!r} is not implemented")
    known = {"rope_type", "type", "rope_theta", *_ROPE_NUMBERS[kind]}
    if unknown := sorted(set(rope) - known):
        raise UserError(f"{path}: '{key}': the key '{unknown[0]}' is not implemented")
    if kind == "default":
        return theta, None
    if kind == "linear":
        factor = _positive_float(rope, "factor", path)
        return theta, None if factor == 1 else RopeDivisors(divisors=(factor,) * (head_dim // 2))
    scaling = RopeScaling(
        factor=_positive_float(rope, "factor", path),
        low_freq_factor=_positive_float(rope, "low_freq_factor", path),
        high_freq_factor=_positive_float(rope, "high_freq_factor", path),
        original_max_positions=_positive_int(rope, _ORIGINAL, path),
    )
    if raw.get(_ORIGINAL) not in (None, scaling.original_max_positions):
        raise UserError(f"{path}: '{_ORIGINAL}' and the one in '{key}' disagree")
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(f"{path}: '{key}': low_freq_factor must be below high_freq_factor")
    return theta, scaling


def _rope_theta(raw: Mapping[str, Any], path: Path) -> float:
    if "rope_theta" in raw:
        return _positive_float(raw, "rope_theta", path)
    if raw.get("model_type") == "smollm3":  # its class has another default
        raise UserError(f"{path}: 'rope_theta' is missing")
    return 10000.0  # the layout's default


def _check_multiple(name: str, number: int, divisor_name: str, divisor: int, path: Path) -> None:
    if number % divisor:
        raise UserError(f"{path}: {name} {number} is no multiple of {divisor_name} {divisor}")


def _bool(raw: Mapping[str, Any], key: str, default: bool, path: Path) -> bool:
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"{path}: '{key}' must be true or false, not {value!r}")
    return value


def _positive_float(raw: Mapping[str, Any], key: str, path: Path) -> float:
    if key not in raw:
        raise UserError(f"{path}: '{key}' is missing")
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise UserError(f"{path}: '{key}' must be a positive number, not {value!r}")
    return float(value)


def _positive_int(raw: Mapping[str, Any], key: str, path: Path) -> int:
    value = _positive_float(raw, key, path)
    if value != int(value):
        raise UserError(f"{path}: '{key}' must be an integer, not {value!r}")
    return int(value)
