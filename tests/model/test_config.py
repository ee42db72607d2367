from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.model.config import (
    GenerationConfig,
    ModelConfig,
    RopeScaling,
    load_generation_config,
    load_model_config,
)
from tests.support.models import LLAMA_3_2_1B, write_config

ROPE = LLAMA_3_2_1B["rope_scaling"]
NEW_SPELLING = {
    "rope_scaling": ...,
    "rope_theta": ...,
    "torch_dtype": ...,
    "dtype": "bfloat16",
    "rope_parameters": {**ROPE, "rope_theta": 500000.0},
}


def refusal(folder: Path, changes: dict[str, Any]) -> str:
    """The message for the published file with these changes: one line that names the file."""
    write_config(folder, changes)
    with pytest.raises(UserError) as error:
        load_model_config(folder)
    message = str(error.value)
    assert message.startswith(str(folder / "config.json"))
    assert "\n" not in message
    return message


def test_the_published_file_says_what_is_published(tmp_path: Path) -> None:
    assert load_model_config(write_config(tmp_path)) == ModelConfig(
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


def test_both_spellings_are_one_configuration(tmp_path: Path) -> None:
    old = load_model_config(write_config(tmp_path))
    new = load_model_config(write_config(tmp_path, NEW_SPELLING))
    assert old == new
    assert hash(old) == hash(new)
    both = {k: v for k, v in NEW_SPELLING.items() if v is not ...}
    assert load_model_config(write_config(tmp_path, both)) == old
    for scaling in (None, ..., {"rope_type": "default"}):
        plain = load_model_config(write_config(tmp_path, {"rope_scaling": scaling}))
        assert (plain.rope_scaling, plain.rope_theta) == (None, 500000.0)
    older = {**ROPE, "type": ROPE["rope_type"]}
    del older["rope_type"]
    assert load_model_config(write_config(tmp_path, {"rope_scaling": older})) == old


def test_what_is_absent_follows_from_the_rest(tmp_path: Path) -> None:
    absent = {"num_key_value_heads": ..., "head_dim": ..., "tie_word_embeddings": ...}
    config = load_model_config(write_config(tmp_path, {**absent, "torch_dtype": ...}))
    assert config.num_kv_heads == 32  # every head its own keys
    assert config.head_dim == 2048 // 32
    assert config.tied_head is False  # the layout's default
    assert config.dtype is None
    assert load_model_config(write_config(tmp_path, {"head_dim": 128})).head_dim == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("model_type", "mixtral"),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("layer_types", ["linear_attention"]),
        ("pruned_heads", {"0": [1]}),
        ("logit_scale", 0.5),  # other families' keys
        ("attn_logit_softcapping", 50.0),
        ("num_local_experts", 8),
        ("dtype", "int8"),
        ("torch_dtype", "float64"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    message = refusal(tmp_path, {key: value})
    assert key.removeprefix("torch_") in message


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "longrope", None])
def test_other_rope_types_are_refused_by_name(
    tmp_path: Path, spelling: str, kind: str | None
) -> None:
    changes = {"rope_scaling": ..., spelling: {**ROPE, "rope_type": kind}}
    message = refusal(tmp_path, changes)
    assert spelling in message
    assert repr(kind) in message


@pytest.mark.parametrize("kind", ["llama3", "default"])
@pytest.mark.parametrize("key", ["partial_rotary_factor", "attention_factor", "beta_fast"])
def test_unknown_numbers_of_rope_are_refused_by_name(tmp_path: Path, kind: str, key: str) -> None:
    rope = ROPE if kind == "llama3" else {}
    assert key in refusal(tmp_path, {"rope_scaling": {**rope, "rope_type": kind, key: 0.5}})


def test_two_spellings_that_disagree_are_refused(tmp_path: Path) -> None:
    other = {**ROPE, "factor": 8.0, "rope_theta": 500000.0}
    message = refusal(tmp_path, {"rope_parameters": other})
    assert "rope_parameters" in message
    assert "rope_scaling" in message
    message = refusal(tmp_path, {**NEW_SPELLING, "rope_theta": 10000.0})
    assert "rope_theta" in message
    message = refusal(tmp_path, {"dtype": "float32"})
    assert "dtype" in message
    beside = {"original_max_position_embeddings": 4096}  # the one in the object is 8192
    assert "original_max_position_embeddings" in refusal(tmp_path, beside)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        *sorted(set(ROPE) - {"rope_type"}),
    ],
)
@pytest.mark.parametrize("value", [..., None, 0, -1, "8", True, [8], float("nan"), float("inf")])
def test_every_number_is_asked_for_by_name(tmp_path: Path, key: str, value: Any) -> None:
    if key == "rope_theta" and value is ...:
        assert load_model_config(write_config(tmp_path, {key: ...})).rope_theta == 10000
    elif key in ROPE:
        rope = {k: v for k, v in {**ROPE, key: value}.items() if v is not ...}
        assert f"'{key}'" in refusal(tmp_path, {"rope_scaling": rope})
    else:
        assert f"'{key}'" in refusal(tmp_path, {key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"num_key_value_heads": 64}, "num_key_value_heads 64"),
        ({"num_attention_heads": 24, "head_dim": None}, "num_attention_heads 24"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {**ROPE, "low_freq_factor": 4.0}}, "low_freq_factor"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert words in refusal(tmp_path, changes)


@pytest.mark.parametrize(
    ("eos", "ids"),
    [(7, (7,)), ([128001, 128008], (128001, 128008)), (None, ()), ([], ()), (0, (0,))],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens(tmp_path: Path, file: str, eos: Any, ids: tuple[int, ...]) -> None:
    write_config(tmp_path, {"eos_token_id": 5})
    (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
    assert load_generation_config(tmp_path) == GenerationConfig(eos_ids=ids)
    for wrong in ("2", True, [1, None], -1, 1.5, {"a": 1}, [[2]]):
        (tmp_path / file).write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(UserError, match=f"{file}: 'eos_token_id'"):
            load_generation_config(tmp_path)
