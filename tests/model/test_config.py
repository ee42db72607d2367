"""Configurations parsed from the `config.json` of published models, with each file's relevant
keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.model.config import RopeDivisors, RopeScaling
from entropix_jax.model.config_file import KEYS, MODEL_TYPES, load_eos_ids, parse_model_config

Raw = dict[str, Any]

PATH = Path("model") / "config.json"
SHAPE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
}
# `name=value`, the values in JSON.
COMMON = """hidden_act="silu" initializer_range=0.02 rms_norm_eps=1e-05 rope_theta=10000.0
    torch_dtype="bfloat16" use_cache=true bos_token_id=1 eos_token_id=2 transformers_version="4" """
UNBIASED = "attention_bias=false mlp_bias=false attention_dropout=0.0"
NO_WINDOW = "attention_dropout=0.0 rms_norm_eps=1e-06 use_sliding_window=false"
LLAMA_2 = 'architectures=["LlamaForCausalLM"] model_type="llama" pretraining_tp=1 rope_scaling=null'
MISTRAL = 'architectures=["MistralForCausalLM"] model_type="mistral" tie_word_embeddings=false'
LLAMA_3 = f"{LLAMA_2} {UNBIASED} rope_theta=500000.0"
# Their window, which may be shorter than the context, is disabled.
QWEN2 = f"""architectures=["Qwen2ForCausalLM"] model_type="qwen2" {NO_WINDOW}
    sliding_window=32768 max_window_layers=24"""


def keys(text: str) -> Raw:
    return {key: json.loads(value) for key, value in (word.split("=", 1) for word in text.split())}


def published(text: str, shape: str, **changes: Any) -> Raw:
    """Returns a file's keys and values. A change to `...` removes a key."""
    numbers = {key: int(number) for key, number in zip(SHAPE, shape.split(), strict=True)}
    raw = {**keys(f"{COMMON} {text}"), **numbers, **changes}
    return without(raw)


def without(raw: Raw) -> Raw:
    """Returns a file without the keys whose value is `...`."""
    return {key: value for key, value in raw.items() if value is not ...}


def in_transformers_5(old: Raw, **added: Any) -> Raw:
    """Returns the file in the format of transformers 5."""
    raw = {"pad_token_id": None, **old, **added, "dtype": old["torch_dtype"]}
    del raw["torch_dtype"]
    rope = raw.pop("rope_scaling", None) or {"rope_type": "default"}
    raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta", 10000.0), **rope}
    return raw


def llama3(factor: float) -> Raw:
    text = "low_freq_factor=1.0 high_freq_factor=4.0 original_max_position_embeddings=8192"
    return {"factor": factor, **keys(text), "rope_type": "llama3"}


LLAMA_2_7B = published(
    f'{LLAMA_2} torch_dtype="float16" _name_or_path="a/name" tie_word_embeddings=false',
    "32 4096 11008 32 32 32000 4096",
    rope_theta=...,
)
LLAMA_3_2_1B = published(
    f"{LLAMA_3} head_dim=64 tie_word_embeddings=true",
    "16 2048 8192 32 8 128256 131072",
    rope_scaling=llama3(32.0),
)
QWEN2_5 = published(
    f"{QWEN2} rope_theta=1000000.0 use_mrope=false tie_word_embeddings=true",
    "24 896 4864 14 2 151936 32768",
)
QWEN3_0_6B = published(
    f"""architectures=["Qwen3ForCausalLM"] model_type="qwen3" {NO_WINDOW} sliding_window=null
    max_window_layers=28 attention_bias=false head_dim=128 rope_scaling=null rope_theta=1000000
    tie_word_embeddings=true""",
    "28 1024 3072 16 8 151936 40960",
)
SMOLLM3_3B = published(
    f"""architectures=["SmolLM3ForCausalLM"] model_type="smollm3" {UNBIASED} {NO_WINDOW}
    sliding_window=null max_window_layers=28 no_rope_layer_interval=4 pad_token_id=128004
    pretraining_tp=2 rope_scaling=null rope_theta=5000000.0 tie_word_embeddings=true
    use_cache=false""",
    "36 2048 11008 16 4 128256 65536",
    no_rope_layers=[1, 1, 1, 0] * 9,
    layer_types=["full_attention"] * 36,
)
MISTRAL_0_1 = published(f"{MISTRAL} sliding_window=4096", "32 4096 14336 32 8 32000 32768")
EVERY_FOURTH = {"layers_without_rope": tuple(range(3, 36, 4))}

# File, head width, RoPE theta, and the fields that differ from Llama 2.
LOADED: Mapping[str, tuple[Raw, int, float, Raw]] = {
    "Llama-2-7b-hf": (LLAMA_2_7B, 128, 1e4, {"dtype": "float16"}),
    "Llama-3.2-1B": (LLAMA_3_2_1B, 64, 5e5, {"rope_scaling": 32.0}),
    "Qwen2.5-0.5B": (QWEN2_5, 64, 1e6, {"qkv_bias": True}),
    "Qwen3-0.6B": (QWEN3_0_6B, 128, 1e6, {"qk_norm": True}),
    "SmolLM3-3B": (SMOLLM3_3B, 128, 5e6, EVERY_FOURTH),
    "Mistral-7B-v0.1": (MISTRAL_0_1, 128, 1e4, {"max_positions": 4096}),
}
# Keys that transformers 5 adds.
NEWER: Mapping[str, Raw] = {
    "Llama-2-7b-hf": keys(f"{UNBIASED} head_dim=128"),
    "Qwen2.5-0.5B": {"sliding_window": None, "layer_types": ["full_attention"] * 24},
    "Qwen3-0.6B": {"layer_types": ["full_attention"] * 28},
    "Mistral-7B-v0.1": keys("head_dim=128 attention_dropout=0.0"),
}


@pytest.mark.parametrize("name", LOADED)
def test_published_models_are_read(name: str) -> None:
    """Reads each file as published, and in the format of transformers 5."""
    old, head_dim, theta, differs = LOADED[name]
    if factor := differs.get("rope_scaling"):
        bands: Raw = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = RopeScaling(factor=factor, **bands, original_max_positions=8192)
        differs = {**differs, "rope_scaling": asdict(scaling)}
    plain: Raw = {"rope_scaling": None, "dtype": "bfloat16", "layers_without_rope": ()}
    for raw in (old, in_transformers_5(old, **NEWER.get(name, {}))):
        assert asdict(parse_model_config(raw, PATH)) == {
            **{field: raw[key] for key, field in SHAPE.items()},
            "head_dim": head_dim,
            "rope_theta": theta,
            "norm_eps": raw["rms_norm_eps"],
            "tied_head": raw["tie_word_embeddings"],
            **dict.fromkeys(("qkv_bias", "qk_norm"), False),
            **plain,
            **differs,
        }
        assert KEYS.check(raw, PATH) == []


def test_unknown_keys_are_reported() -> None:
    raw = {**LLAMA_3_2_1B, "made_up_scale": 3.0, "a_note": None, "unsloth_version": "2026.1.1"}
    told = "unknown keys, taken to change nothing: 'a_note', 'made_up_scale'"
    assert KEYS.check(raw, PATH) == [f"{PATH}: {told}"]
    assert parse_model_config(raw, PATH) == parse_model_config(LLAMA_3_2_1B, PATH)


WINDOW = {"use_sliding_window": True, "sliding_window": 512}


@pytest.mark.parametrize(
    ("raw", "positions"),
    [
        ({**QWEN2_5, **WINDOW}, 512),
        ({**SMOLLM3_3B, **WINDOW, "layer_types": ...}, 512),
        ({**SMOLLM3_3B, **WINDOW}, 65536),  # all its layers have full attention
        ({**QWEN2_5, **WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 12}, 512),
        ({**QWEN2_5, **WINDOW, "sliding_window": 40000}, 32768),
        ({**QWEN2_5, **WINDOW, "sliding_window": None}, 32768),
        ({**MISTRAL_0_1, "use_sliding_window": False}, 4096),  # a key that Mistral does not have
        ({**MISTRAL_0_1, "layer_types": ["full_attention"] * 32}, 4096),
        ({**LLAMA_3_2_1B, "sliding_window": 512}, 512),
    ],
)
def test_a_window_bounds_the_context(raw: Raw, positions: int) -> None:
    assert parse_model_config(without(raw), PATH).max_positions == positions


def test_layers_without_rope() -> None:
    first, every_fifth = [0, *[1] * 35, 0, 0], tuple(range(4, 36, 5))
    for listed, interval, layers in ((..., 5, every_fifth), (first, 4, (0,)), ([True] * 36, 4, ())):
        raw = {**SMOLLM3_3B, "no_rope_layers": listed, "no_rope_layer_interval": interval}
        assert parse_model_config(without(raw), PATH).layers_without_rope == layers


ROPE = LLAMA_3_2_1B["rope_scaling"]


def llama(**changes: Any) -> Raw:
    return {**LLAMA_3_2_1B, **changes}


def llama_rope(**changes: Any) -> Raw:
    return llama(rope_scaling=without({**ROPE, **changes}))


HALVES = RopeDivisors(divisors=(2.0,) * 32)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({}, None),
        ({"rope_type": "", "type": None}, None),
        ({"type": "default"}, None),
        ({"type": "linear", "factor": 1.0}, None),
        ({"type": "linear", "factor": 2.0}, HALVES),
        ({"rope_type": "linear", "factor": 2}, HALVES),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_objects(key: str, rope: Raw, scaling: RopeDivisors | None) -> None:
    """A missing, null or empty type is the default."""
    own = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_scaling", "rope_theta")}
    raw = {**own, "rope_theta": 1e6, key: rope}
    config = parse_model_config(raw, PATH)
    assert (config.rope_theta, config.rope_scaling) == (1e6, scaling)
    raw = {**own, key: {**rope, "rope_theta": 1e6}}
    config = parse_model_config(raw, PATH)
    assert (config.rope_theta, config.rope_scaling) == (1e6, scaling)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        # Features that would change the computation.
        (llama(model_type="gemma3_text"), "model_type"),
        (llama(auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}), "auto_map"),
        (llama(quantization={"bits": 4}), "'quantization': {'bits': 4} is not implemented"),
        (llama(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
        (llama(num_local_experts=8), "num_local_experts"),
        (llama(hidden_act="gelu"), "hidden_act"),
        (llama(mlp_bias=True), "mlp_bias"),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (llama(pruned_heads={"0": [1]}), "pruned_heads"),
        (llama(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (llama(torch_dtype="float64"), "dtype"),
        ({**QWEN3_0_6B, "attention_bias": True}, "attention_bias"),
        ({**QWEN2_5, "use_mrope": True}, "use_mrope"),
        (llama_rope(rope_type="yarn"), "rope type 'yarn'"),
        (llama_rope(rope_type=None), "'rope_scaling': the key 'factor'"),
        (llama(rope_scaling={"type": "linear"}), "factor"),
        (llama(rope_scaling={"type": "linear", "factor": 0.0}), "factor"),
        *((llama_rope(**{key: 0.5}), key) for key in ("partial_rotary_factor", "beta_fast")),
        (llama(rope_scaling={"rope_type": "default", "attention_factor": 0.5}), "attention_factor"),
        # Contradictory keys.
        (llama(rope_parameters={**ROPE, "factor": 8.0, "rope_theta": 5e5}), "rope_parameters"),
        ({**in_transformers_5(LLAMA_3_2_1B), "rope_theta": 1e4}, "rope_theta"),
        (llama(dtype="float32"), "dtype"),
        (llama(original_max_position_embeddings=4096), "original_max_position_embeddings"),
        # Invalid shapes.
        (llama(num_hidden_layers=2.5), "num_hidden_layers"),
        (llama(num_hidden_layers=10**9), "num_hidden_layers"),
        (llama(head_dim=63), "head_dim 63 is odd"),
        (llama(head_dim=10**15, rope_scaling={"type": "linear", "factor": 2.0}), "above 65536"),
        (llama(num_key_value_heads=5), "'num_key_value_heads', 5"),
        (llama(num_attention_heads=24, head_dim=None), "'num_attention_heads', 24"),
        (llama(tie_word_embeddings=None), "tie_word_embeddings"),
        (llama(rope_scaling="llama3"), "rope_scaling"),
        (llama_rope(low_freq_factor=4.0), "low_freq_factor"),
        ({**SMOLLM3_3B, "no_rope_layers": []}, "no_rope_layers"),
        ({**SMOLLM3_3B, "no_rope_layers": [1, 1, 1, 2] * 9}, "no_rope_layers"),
        ({**SMOLLM3_3B, "no_rope_layers": "1110"}, "no_rope_layers"),
        ({**SMOLLM3_3B, "no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_int"),
        ({**QWEN2_5, "use_sliding_window": "no"}, "use_sliding_window"),
        ({**QWEN2_5, **WINDOW, "sliding_window": 0}, "sliding_window"),
        ({**QWEN2_5, "layer_types": "full_attention"}, "layer_types"),
        ({**QWEN2_5, "layer_types": ["chunked_attention"] * 24}, "layer_types"),
        # Required keys, since each class has another default for them.
        ({**QWEN3_0_6B, "head_dim": ...}, "head_dim"),
        ({**QWEN2_5, "num_key_value_heads": ...}, "num_key_value_heads"),
        ({**MISTRAL_0_1, "sliding_window": ...}, "sliding_window"),
        ({**SMOLLM3_3B, "rope_theta": ...}, "rope_theta"),
    ],
)
def test_unsupported_and_invalid_keys_are_reported(raw: Raw, key: str) -> None:
    with pytest.raises(UserError, match=rf"^{PATH}: .*{key}"):
        parse_model_config(without(raw), PATH)


NUMBERS = (*SHAPE, "rms_norm_eps", "rope_theta", *sorted(set(ROPE) - {"rope_type"}))


@pytest.mark.parametrize("key", sorted({*NUMBERS} - {"num_key_value_heads"}))
def test_errors_of_numbers_contain_the_key(key: str) -> None:
    for value in (..., None, 0, -1, "8", True, [8], float("nan"), float("inf")):
        if key == "rope_theta" and value is ...:
            continue  # it has a default
        raw = llama_rope(**{key: value}) if key in ROPE else without(llama(**{key: value}))
        with pytest.raises(UserError, match=f"'{key}'"):
            parse_model_config(raw, PATH)


def test_defaults_of_absent_keys() -> None:
    absent = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "torch_dtype", "rope_theta")
    config = parse_model_config(without(llama(**dict.fromkeys(absent, ...))), PATH)
    assert (config.num_kv_heads, config.head_dim) == (32, 2048 // 32)
    assert (config.tied_head, config.dtype, config.rope_theta) == (False, None, 1e4)
    for scaling in (None, {"rope_type": "default"}):
        plain = parse_model_config(llama(rope_scaling=scaling), PATH)
        assert (plain.rope_scaling, plain.rope_theta) == (None, 5e5)
    older = llama_rope(rope_type=..., type="llama3")
    both = {**LLAMA_3_2_1B, **in_transformers_5(LLAMA_3_2_1B)}
    whole = parse_model_config(LLAMA_3_2_1B, PATH)
    assert {parse_model_config(raw, PATH) for raw in (older, both)} == {whole}


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    for eos, ids in (
        (7, (7,)),
        ([128001, 128008], (128001, 128008)),
        (None, ()),
        ([], ()),
        (0, (0,)),
    ):
        (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
        assert load_eos_ids(tmp_path) == ids
    for wrong in ("2", True, [1, None], -1, 1.5, {"a": 1}, [[2]]):
        (tmp_path / file).write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(UserError, match=f"{file}: 'eos_token_id'"):
            load_eos_ids(tmp_path)


def test_all_model_types_are_tested() -> None:
    assert {raw["model_type"] for raw, *_ in LOADED.values()} == set(MODEL_TYPES)
