"""What a model folder says about the model: `config.json` and `generation_config.json`, read
strictly.

A `ModelConfig` is frozen and hashable, so it is a static argument of every compiled function: all
that is in it is architecture. Every number of the model comes from here; no maths function has a
default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.files import read_json_object

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_MAX_LAYERS = 1024  # ten times the deepest Llama: a slip of the pen would take hours to refuse
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a Llama model. Letters are the legend's (see `entropix_jax.model`).

    `dtype` is the type that the checkpoint's tensors are stored in, where the folder names one.
    """

    vocab_size: int  # V
    width: int  # D
    mlp_width: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_head: bool
    dtype: str | None


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Where a text ends: the ids of the end tokens, in the folder's order (possibly none)."""

    eos_ids: tuple[int, ...]


# Keys that are read.
_READ = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
}

# Keys that would change the maths, with the only values under which they do not.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "layer_types": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (0,),
}

# Keys that concern training, bookkeeping or other tasks, and never the logits.
_HARMLESS = {
    "architectures",
    "attention_dropout",
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
    "auto_map",  # empty: see check_own_code
    "_attn_implementation_autoset",
    "_name_or_path",
}


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `folder/config.json`.

    Raises:
        UserError: the file is missing, not JSON, lacks a number, or holds a key that would change
            the maths and is not implemented (named in the message).
    """
    path = folder / CONFIG_FILE
    raw = read_json_object(path)
    return parse_model_config(raw, path)


def parse_model_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The `ModelConfig` of a decoded `config.json`; `path` is only named in errors.

    Raises:
        UserError: as `load_model_config`.
    """
    check_own_code(raw, path)
    for key, value in raw.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                raise UserError(f"{path}: '{key}': {value!r} is not implemented")
        elif key not in _READ and key not in _HARMLESS:
            raise UserError(
                f"{path}: the key '{key}' is not known here and might change the maths; "
                "remove it if it does not"
            )

    width = _positive_int(raw, "hidden_size", path)
    num_heads = _positive_int(raw, "num_attention_heads", path)
    # Absent or null, these two follow from the others: the layout's own rule, not a number of ours.
    num_kv_heads = num_heads
    if raw.get("num_key_value_heads") is not None:
        num_kv_heads = _positive_int(raw, "num_key_value_heads", path)
    if raw.get("head_dim") is not None:
        head_dim = _positive_int(raw, "head_dim", path)
    elif width % num_heads:
        raise UserError(
            f"{path}: hidden_size {width} is no multiple of num_attention_heads {num_heads}"
        )
    else:
        head_dim = width // num_heads
    if num_heads % num_kv_heads:
        raise UserError(
            f"{path}: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise UserError(f"{path}: head_dim {head_dim} is odd, rotary embedding needs pairs")
    rope_theta, rope_scaling = _rope(raw, path)
    tied_head = raw.get("tie_word_embeddings", False)
    if not isinstance(tied_head, bool):
        raise UserError(f"{path}: 'tie_word_embeddings' must be true or false, not {tied_head!r}")
    dtype = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if raw.get("torch_dtype") not in (None, dtype):
        raise UserError(f"{path}: 'dtype' and 'torch_dtype' disagree")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"{path}: dtype {dtype!r} is not implemented (known: {', '.join(DTYPES)})")
    return ModelConfig(
        vocab_size=_positive_int(raw, "vocab_size", path),
        width=width,
        mlp_width=_positive_int(raw, "intermediate_size", path),
        num_layers=_num_layers(raw, path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=_positive_int(raw, "max_position_embeddings", path),
        norm_eps=_positive_float(raw, "rms_norm_eps", path),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_head=tied_head,
        dtype=dtype,
    )


def check_own_code(raw: Mapping[str, Any], path: Path) -> None:
    """Refuses a file that names Python code of the folder's own; `path` is only named in errors.

    Raises:
        UserError: it does.
    """
    if raw.get("auto_map"):
        raise UserError(
            f"{path}: 'auto_map' names code of the folder's own, which is not run: "
            "remove it if the model is a plain Llama without that code"
        )


def load_generation_config(folder: Path) -> GenerationConfig:
    """The end tokens: from `generation_config.json`, or from `config.json` where that file is
    absent.

    Raises:
        UserError: a file is not JSON, or the ids are no integers.
    """
    path = folder / GENERATION_FILE
    if not path.exists():
        path = folder / CONFIG_FILE
    eos = read_json_object(path).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{path}: 'eos_token_id' must be token ids, not {eos!r}")
    return GenerationConfig(eos_ids=tuple(ids))


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters` that holds the two."""
    spellings = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    if not spellings:
        return _positive_float(raw, "rope_theta", path), None
    rope, *again = [_rope_object(raw, key, path) for key in spellings]
    if again and again != [rope]:
        raise UserError(f"{path}: 'rope_parameters' and 'rope_scaling' disagree")
    return rope


def _rope_object(raw: Mapping[str, Any], key: str, path: Path) -> tuple[float, RopeScaling | None]:
    rope = raw[key]
    if not isinstance(rope, Mapping):
        raise UserError(f"{path}: '{key}' must be an object, not {rope!r}")
    theta = _positive_float(rope if "rope_theta" in rope else raw, "rope_theta", path)
    if raw.get("rope_theta") not in (None, theta):
        raise UserError(f"{path}: 'rope_theta' and the one in '{key}' disagree")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: '{key}': rope type {kind!r} is not implemented")
    known = {"rope_type", "type", "rope_theta"}
    if kind == "llama3":
        known |= {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    if unknown := sorted(set(rope) - known):
        raise UserError(f"{path}: '{key}': the key '{unknown[0]}' is not implemented")
    if kind == "default":
        return theta, None
    scaling = RopeScaling(
        factor=_positive_float(rope, "factor", path),
        low_freq_factor=_positive_float(rope, "low_freq_factor", path),
        high_freq_factor=_positive_float(rope, "high_freq_factor", path),
        original_max_positions=_positive_int(rope, "original_max_position_embeddings", path),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(f"{path}: '{key}': low_freq_factor must be below high_freq_factor")
    return theta, scaling


def _number(raw: Mapping[str, Any], key: str, path: Path) -> float:
    if key not in raw:
        raise UserError(f"{path}: '{key}' is missing")
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise UserError(f"{path}: '{key}' must be a positive number, not {value!r}")
    return value


def _num_layers(raw: Mapping[str, Any], path: Path) -> int:
    layers = _positive_int(raw, "num_hidden_layers", path)
    if layers > _MAX_LAYERS:
        raise UserError(f"{path}: 'num_hidden_layers': {layers} is past {_MAX_LAYERS}")
    return layers


def _positive_float(raw: Mapping[str, Any], key: str, path: Path) -> float:
    return float(_number(raw, key, path))


def _positive_int(raw: Mapping[str, Any], key: str, path: Path) -> int:
    value = _number(raw, key, path)
    if value != int(value):
        raise UserError(f"{path}: '{key}' must be an integer, not {value!r}")
    return int(value)
