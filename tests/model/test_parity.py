"""The same folder read by `transformers` and by this package: the same numbers.

Folders are written by `transformers` itself, in the layout that published checkpoints have.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from entropix_jax.model.checkpoint import load_params, save_params
from entropix_jax.model.config import load_generation_config, load_model_config
from tests.support import reference
from tests.support.models import all_metrics, generate, teacher_forced

TOKENS = 200  # long enough to see an error of the rotary embedding
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def rope(factor: float | None) -> dict[str, Any]:
    if factor is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "GQA, factor 32": rope(32.0),
    "GQA, factor 8": rope(8.0),
    "MHA, unscaled": {**rope(None), "num_key_value_heads": 4},
    "MQA, untied": {**rope(32.0), "num_key_value_heads": 1, "tie_word_embeddings": False},
    "wide heads, epsilon 1e-2": {**rope(8.0), "head_dim": 12, "rms_norm_eps": 1e-2},
}


def build(torch: ModuleType, transformers: ModuleType, changes: dict[str, Any]) -> Any:
    """A random model in which the norms are not all one."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes}))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def theirs(torch: ModuleType, model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and attention weights [L, N, T, T] of one row."""
    with torch.no_grad():
        out = model(torch.tensor(tokens[None].astype(np.int64)), output_attentions=True)
    return out.logits[0].float().numpy(), torch.cat(out.attentions).float().numpy()


def ours(folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, Any]:
    config = load_model_config(folder)
    params = load_params(folder, config, "float32")
    logits, stats, _ = teacher_forced(params, config, tokens[None])
    return logits[0], stats


def old_spelling(folder: Path) -> None:
    """Rewrites a configuration of transformers 5 as those before it wrote it."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    parameters = raw.pop("rope_parameters")
    raw["rope_theta"] = parameters.pop("rope_theta")
    raw["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 64, TOKENS, dtype=np.int32)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_attention(
    torch: ModuleType,
    transformers: ModuleType,
    tmp_path: Path,
    tokens: np.ndarray,
    changes: dict[str, Any],
) -> None:
    model = build(torch, transformers, changes)
    model.save_pretrained(tmp_path)
    want, weights = theirs(torch, model, tokens)
    assert want.std() > 0.5
    logits, stats = ours(tmp_path, tokens)
    np.testing.assert_allclose(logits, want, atol=1e-5 * max(1, np.abs(want).max()))
    entropy = [[reference.entropy_bits(head[-1]) for head in layer] for layer in weights]
    np.testing.assert_allclose(stats.entropy[0], entropy, atol=1e-5)
    varentropy = [[reference.varentropy_bits(head[-1]) for head in layer] for layer in weights]
    np.testing.assert_allclose(stats.varentropy[0], varentropy, atol=2e-5)
    away = np.abs(weights[:, :, -1] - weights[:, :, -1].mean(axis=1, keepdims=True))
    metrics = all_metrics(load_model_config(tmp_path), logits[-1:], stats)
    assert float(metrics.agreement[0]) == pytest.approx(1 - away.sum(-1).mean() / 2, abs=1e-5)
    assert float(metrics.agreement_published[0]) == pytest.approx(away.mean(), abs=1e-6)

    new = load_model_config(tmp_path)
    old_spelling(tmp_path)
    assert load_model_config(tmp_path) == new
    assert transformers.LlamaConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 10000
    assert load_generation_config(tmp_path).eos_ids == (2,)


def test_greedy_tokens(
    torch: ModuleType, transformers: ModuleType, tmp_path: Path, tokens: np.ndarray
) -> None:
    """64 tokens in a row, and two rows of unlike length in one batch."""
    changes = {**rope(32.0), "eos_token_id": None, "tie_word_embeddings": False}
    model = build(torch, transformers, changes)
    model.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    params = load_params(tmp_path, config, "float32")
    prompts = [tokens[:40].tolist(), tokens[50:57].tolist()]
    state, _ = generate(params, config, prompts, [64, 64], capacity=104, max_steps=64)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=64,
                do_sample=False,
                pad_token_id=0,
            )[0].tolist()
        assert len(want) == len(prompt) + 64
        assert len(set(want[len(prompt) :])) > 4  # no row that merely repeats one token
        assert state.history[row, : len(want)].tolist() == want


def test_shards(
    torch: ModuleType, transformers: ModuleType, tmp_path: Path, tokens: np.ndarray
) -> None:
    model = build(torch, transformers, {**rope(32.0), "tie_word_embeddings": False})
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    want, _ = theirs(torch, model, tokens)
    logits, _ = ours(tmp_path, tokens)
    np.testing.assert_allclose(logits, want, atol=1e-5 * max(1, np.abs(want).max()))


def test_bfloat16_checkpoint(
    torch: ModuleType, transformers: ModuleType, tmp_path: Path, tokens: np.ndarray
) -> None:
    """Read as bfloat16 and as float32, both computing in float32: both are the widened model."""
    build(torch, transformers, rope(32.0)).to(torch.bfloat16).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    want, _ = theirs(torch, model, tokens)
    for dtype in ("bfloat16", "float32"):
        params = load_params(tmp_path, config, dtype)
        assert params.embedding.dtype == dtype
        logits, _, _ = teacher_forced(params, config, tokens[None])
        np.testing.assert_allclose(logits[0], want, atol=1e-5 * max(1, np.abs(want).max()))


def test_transformers_reads_what_is_saved(
    torch: ModuleType, transformers: ModuleType, tmp_path: Path, tokens: np.ndarray
) -> None:
    """Other weights, saved by this package into the same folder."""
    build(torch, transformers, rope(8.0)).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    params = jax.tree.map(lambda x: x[::-1] * 1.1, load_params(tmp_path, config, "float32"))
    save_params(tmp_path, params, config)
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).eval()
    want, _ = theirs(torch, model, tokens)
    logits, _, _ = teacher_forced(params, config, tokens[None])
    np.testing.assert_allclose(logits[0], want, atol=1e-5 * max(1, np.abs(want).max()))
