"""A model folder in the Hugging Face layout: random weights and the world's tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from tiny.tokenizer import tokenizer_config, tokenizer_json

from entropix_jax.errors import UserError
from entropix_jax.model.checkpoint import save_params
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.config_file import parse_model_config
from entropix_jax.model.loading import CALIBRATION_FILE
from entropix_jax.model.params import Params
from tests.support.models import random_params
from tests.support.samplers import CALIBRATION

MAX_POSITIONS = 120  # one window, so that few programs are compiled


@functools.cache
def tokenizer_text() -> str:
    return tokenizer_json()


def token_ids() -> dict[str, int]:
    added = json.loads(tokenizer_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def vocab_size() -> int:
    return max(token_ids().values()) + 1


def raw_config() -> dict[str, Any]:
    ids = token_ids()
    return {
        "model_type": "llama",
        "vocab_size": vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": [ids["<|end_of_text|>"], ids["<|eot_id|>"]],
        "torch_dtype": "float32",
    }


def config_of_folder() -> ModelConfig:
    return parse_model_config(raw_config(), Path("config.json"))


def sharp_params() -> Params:
    """Returns weights whose logits are sharp enough for several regimes."""
    params = random_params(config_of_folder())
    return replace(params, head=4.0 * params.head)


def write_model(
    folder: Path,
    change: Callable[[Params], Params] = lambda params: params,
    *,
    calibrated: bool = True,
) -> Path:
    """Writes a complete model folder with changed weights. If it is calibrated, presets have the
    thresholds of `LITERAL`."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = raw_config()
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(MAX_POSITIONS)))
    if calibrated:
        shape = {"layers": raw["num_hidden_layers"], "width": raw["hidden_size"]}
        shape["heads"] = raw["num_attention_heads"]
        (folder / CALIBRATION_FILE).write_text(replace(CALIBRATION, model=shape).to_text())
    save_params(folder, change(sharp_params()), config_of_folder())
    return folder


def poisoned(token_id: int) -> Callable[[Params], Params]:
    """Returns a change of weights that makes logits NaN for rows that contain this token."""
    return lambda params: replace(params, embedding=params.embedding.at[token_id].set(jnp.nan))


def refusal(path: Path, load: Callable[[], object]) -> str:
    """Checks that loading fails with one line that contains `path`, and returns that line."""
    with pytest.raises(UserError) as caught:
        load()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message
