"""Model configuration from `config.json` and `generation_config.json`.

A key that changes the computation is implemented or rejected by name. An unknown key is ignored and
reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from entropix_jax.errors import UserError
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.files import check_own_code, read_json_object
from entropix_jax.model.config import ModelConfig, RopeDivisors, RopeScaling

CONFIG_FILE = "config.json"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_MAX_LAYERS = 1024  # ten times the deepest Llama: more is a typing error, and would take hours
_ORIGINAL = "original_max_position_embeddings"  # inside the RoPE object, or next to it
# The types of RoPE scaling, with the keys that each reads.
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}
_Scaling = RopeScaling | RopeDivisors | None


@dataclass(frozen=True)
class KnownKeys:
    """The keys of a kind of configuration that are read, rejected or ignored."""

    implemented: Mapping[str, tuple[Any, ...]]  # keys that change the maths: values that may stand
    others: str  # keys that are read, or do not affect the logits

    def check(self, raw: Mapping[str, Any], path: Path, prefix: str = "") -> list[str]:
        """Raises UserError for a value that is not implemented. Returns a note that names the
        unknown keys, if there are any. `prefix` comes before the keys' names in both."""
        for key, values in self.implemented.items():
            if key in raw and raw[key] not in values:
                known = ", ".join(map(repr, values))
                problem = f"{raw[key]!r} is not implemented (known: {known})"
                raise UserError(f"{path}: '{prefix}{key}': {problem}")
        unknown_keys = sorted({*raw} - {*self.implemented, *self.others.split()})
        unknown = ", ".join(f"'{prefix}{key}'" for key in unknown_keys)
        note = f"{path}: unknown keys, taken to change nothing: {unknown}"
        return [note] if unknown else []


_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "model_type": MODEL_TYPES,
    "torch_dtype dtype": (None, "float32", "bfloat16", "float16"),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": (None, "silu", "swish"),
    """attention_bias mlp_bias rope_interleaved use_mrope is_encoder_decoder
    add_cross_attention tie_encoder_decoder""": (False,),
    """quantization quantization_config mrope_section attention_chunk_size attn_logit_softcapping
    final_logit_softcapping query_pre_attn_scalar clip_qkv kv_lora_rank attention_multiplier
    scale_depth cross_attention_hidden_size""": (None,),
    """partial_rotary_factor embedding_multiplier residual_multiplier logits_scaling
    logit_scale scale_emb""": (None, 1, 1.0),
    "qk_layernorm use_qk_norm alibi parallel_attn use_parallel_residual": (None, False),
    "num_experts num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "is_decoder use_sliding_window tie_word_embeddings": (False, True),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (0,),
}
# The second group is of training and other tasks. `auto_map` is empty, see `check_own_code`.
KEYS = KnownKeys(
    {key: values for keys, values in _IMPLEMENTED.items() for key in keys.split()},
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling
    rope_parameters no_rope_layers no_rope_layer_interval sliding_window max_window_layers
    layer_types bos_token_id eos_token_id original_max_position_embeddings

    architectures attention_dropout auto_map bad_words_ids begin_suppress_tokens
    decoder_start_token_id finetuning_task id2label initializer_range is_llama_config label2id
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type
    return_dict sep_token_id task_specific_params tokenizer_class torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache _attn_implementation_autoset _model_name_or_path _name_or_path
    """,
)


@dataclass(frozen=True)
class _Object:
    """A decoded JSON object. Errors name the file and the key."""

    raw: Mapping[str, Any]
    path: Path

    def refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: {problem}")

    def number(self, key: str) -> float:
        """A positive number."""
        if key not in self.raw:
            self.refuse(f"'{key}' is missing")
        value = self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
            self.refuse(f"'{key}' must be a positive number, not {value!r}")
        return float(value)

    def size(
        self, key: str, most: int = 10**18, of: int | None = None, default: int | None = None
    ) -> int:
        """A positive integer up to `most` that divides `of`; `default` if it is null or missing."""
        if default is not None and self.raw.get(key) is None:
            return default
        value = self.number(key)
        if value != int(value) or value > most:
            self.refuse(f"'{key}' must be an integer up to {most}, not {self.raw[key]!r}")
        if of is not None and of % value:
            self.refuse(f"{of} is not a multiple of '{key}', {self.raw[key]!r}")
        return int(value)


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `folder/config.json`."""
    path = folder / CONFIG_FILE
    return parse_model_config(read_json_object(path), path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """Returns the `ModelConfig` of a decoded `config.json`; `path` is for errors. UserError if a
    number is missing, or a key that changes the computation is not implemented."""
    check_own_code(raw, path)
    KEYS.check(raw, path)
    file, family = _Object(raw, path), raw.get("model_type", "llama")

    # Shapes. For Llama these two default to values that follow from the others. The other families'
    # classes have defaults of their own, which no published file relies on.
    width, num_heads = file.size("hidden_size"), file.size("num_attention_heads")
    num_layers = file.size("num_hidden_layers", most=_MAX_LAYERS)
    default = num_heads if family == "llama" else None
    num_kv_heads = file.size("num_key_value_heads", of=num_heads, default=default)
    if family == "qwen3" or raw.get("head_dim") is not None:
        head_dim = file.size("head_dim")
    else:
        head_dim = width // file.size("num_attention_heads", of=width)
    if head_dim % 2 or head_dim > 2**16:
        file.refuse(f"head_dim {head_dim} is odd or above 65536, rotary embedding needs pairs")
    rope_theta, rope_scaling = _rope(file, family, head_dim)

    # How the weights are stored.
    dtype = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if raw.get("torch_dtype") not in (None, dtype):
        file.refuse("'dtype' and 'torch_dtype' disagree")
    return ModelConfig(
        vocab_size=file.size("vocab_size"),
        width=width,
        mlp_width=file.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(file, family),
        norm_eps=file.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=bool(raw.get("tie_word_embeddings", family == "smollm3")),
        dtype=dtype,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        layers_without_rope=_layers_without_rope(file, num_layers) if family == "smollm3" else (),
    )


def load_eos_ids(folder: Path) -> tuple[int, ...]:
    """Reads the end tokens of `generation_config.json` and of `config.json`, in this order."""
    paths = (folder / "generation_config.json", folder / CONFIG_FILE)
    found = [parse_eos_ids(read_json_object(path), path) for path in paths if path.exists()]
    return tuple(dict.fromkeys(chain(*found)))


def parse_eos_ids(raw: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    """Returns the end tokens of a decoded `generation_config.json` or `config.json`. Errors name
    `path`."""
    eos = raw.get("eos_token_id")
    found = [] if eos is None else [*map(as_integer, eos if isinstance(eos, list) else [eos])]
    ids = [i for i in found if i is not None and i >= 0]
    if len(ids) < len(found):
        raise UserError(f"{path}: 'eos_token_id' must be token ids, not {eos!r}")
    return tuple(dict.fromkeys(ids))


def _max_positions(file: _Object, family: str) -> int:
    """Returns the longest context to which every layer attends entirely."""
    positions, kinds = file.size("max_position_embeddings"), file.raw.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is None:
        slides = file.raw.get("use_sliding_window", family == "llama")
    elif isinstance(kinds, list) and all(kind in known for kind in kinds):
        slides = "sliding_attention" in kinds
    else:
        file.refuse(f"'layer_types': {kinds!r} is not implemented")
    if family == "mistral":  # its class only reads `sliding_window`, which has a default
        slides = True
        if "sliding_window" not in file.raw:
            file.refuse("'sliding_window' is missing (null for none)")
    return min(positions, file.size("sliding_window", default=positions)) if slides else positions


def _layers_without_rope(file: _Object, num_layers: int) -> tuple[int, ...]:
    """SmolLM3's: a list with 0 for each of them, or every n-th."""
    rotated = file.raw.get("no_rope_layers")
    if rotated is None:
        interval = file.size("no_rope_layer_interval")
        return tuple(range(interval - 1, num_layers, interval))
    known = isinstance(rotated, list) and all(rotates in (0, 1) for rotates in rotated)
    if not known or len(rotated) < num_layers:
        file.refuse(f"'no_rope_layers' must be 0 or 1 for each of {num_layers} layers")
    return tuple(i for i, rotates in enumerate(rotated[:num_layers]) if not rotates)


def _rope(file: _Object, family: str, head_dim: int) -> tuple[float, _Scaling]:
    """Reads both spellings: `rope_theta` + `rope_scaling`, or `rope_parameters` with both."""
    outer = {} if family == "smollm3" else {"rope_theta": 10000.0}  # the layout's default
    outer |= {key: file.raw[key] for key in ("rope_theta",) if key in file.raw}
    both = ("rope_parameters", "rope_scaling")
    spellings = [key for key in both if file.raw.get(key) is not None]
    found = {_rope_object(file, key, outer, head_dim) for key in spellings or [""]}
    if len(found) > 1:
        file.refuse("'rope_parameters' and 'rope_scaling' disagree")
    return found.pop()


def _rope_object(
    file: _Object, key: str, outer: Mapping[str, Any], head_dim: int
) -> tuple[float, _Scaling]:
    """Reads RoPE's base and scaling from the object `key`, or from `outer` without one."""
    own = file.raw.get(key, {})
    if not isinstance(own, Mapping):
        file.refuse(f"'{key}' must be an object, not {own!r}")
    kind = own.get("rope_type") or own.get("type") or "default"
    if kind not in tuple(_ROPE_NUMBERS):
        file.refuse(f"'{key}': rope type {kind!r} is not implemented")
    known = {"rope_type", "type", "rope_theta", *_ROPE_NUMBERS[kind]}
    if unknown := sorted({*own} - known):
        file.refuse(f"'{key}': the key '{unknown[0]}' is not implemented")
    for name in known & {"rope_theta", _ORIGINAL} & {*own}:
        if file.raw.get(name) not in (None, own[name]):
            file.refuse(f"'{name}' and the one in '{key}' disagree")
    rope = _Object({**outer, **own}, file.path)
    theta = rope.number("rope_theta")
    if kind == "default":
        return theta, None
    if kind == "linear":
        factor = rope.number("factor")
        return theta, None if factor == 1 else RopeDivisors(divisors=(factor,) * (head_dim // 2))
    numbers = {name: rope.number(name) for name in _ROPE_NUMBERS[kind] if name != _ORIGINAL}
    if numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        file.refuse(f"'{key}': low_freq_factor must be below high_freq_factor")
    return theta, RopeScaling(**numbers, original_max_positions=rope.size(_ORIGINAL))
