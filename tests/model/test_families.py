"""Llama's close kin, read by `transformers` and by this package: the same numbers from a prompt,
step by step, in branches, on two devices and from 8 bits.

Folders are written by `transformers` itself; no bias is 0 and no norm is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.cache import KVCache, init_cache, init_suffixes
from entropix_jax.model.checkpoint import load_params
from entropix_jax.model.config import MODEL_TYPES, ModelConfig, load_model_config
from entropix_jax.model.llama import forward, forward_branches
from entropix_jax.model.mesh import parse_mesh, place, rules_for
from entropix_jax.model.params import Params
from entropix_jax.stats import AttnStats
from tests.support import reference
from tests.support.models import logits_of, run

PROMPT, CONTEXT = 24, 32
COUNTS = np.array([PROMPT, PROMPT - 7], np.int32)  # of the two rows' prompts
WIDTH, DEPTH = 2, 2
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": CONTEXT}

# Each family tied and untied, and what else its file may say. A family's two are one program, and
# so are Llama and Mistral.
VARIANTS: dict[tuple[str, bool], dict[str, Any]] = {
    ("llama", True): {},
    ("llama", False): {},
    ("mistral", True): {"sliding_window": None},
    ("mistral", False): {"sliding_window": CONTEXT},
    ("qwen2", True): {},
    ("qwen2", False): {**SLIDING, "max_window_layers": 1},
    ("qwen3", True): {"head_dim": 12},
    ("qwen3", False): {"head_dim": 12, **SLIDING, "max_window_layers": 0},
    ("smollm3", True): {"no_rope_layers": [1, 0]},
    ("smollm3", False): {"no_rope_layer_interval": 2, **SLIDING},
}

run_branches = jax.jit(forward_branches, static_argnames=("config", "window"))


@dataclass
class Made:
    """A model in a folder, and what `transformers` says of texts."""

    folder: Path
    config: ModelConfig
    params: Params
    # Logits [B, T, V] and attention weights [B, L, N, T, T] of tokens [B, T].
    theirs: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


Maker = Callable[..., Made]


@pytest.fixture(scope="module")
def made(
    torch: ModuleType, transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Maker:
    @cache
    def make(family: str, tied: bool) -> Made:
        torch.manual_seed(0)
        values = {**SMALL, **VARIANTS[family, tied], "tie_word_embeddings": tied}
        config = transformers.AutoConfig.for_model(family, **values)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.5)
        model.eval()
        folder = tmp_path_factory.mktemp("family")
        model.save_pretrained(folder)

        def theirs(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            with torch.no_grad():
                out = model(torch.tensor(tokens.astype(np.int64)), output_attentions=True)
            return out.logits.numpy(), torch.stack(out.attentions, dim=1).numpy()

        own = load_model_config(folder)
        return Made(folder, own, load_params(folder, own, "float32"), theirs)

    return make


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 64, (2, CONTEXT), dtype=np.int32)


def prefilled(
    params: Params, config: ModelConfig, tokens: np.ndarray, cache: KVCache | None = None
) -> tuple[np.ndarray, AttnStats, KVCache]:
    """Both prompts in one call: logits [2, PROMPT, V], and the rest of `forward`'s."""
    if cache is None:
        cache = init_cache(config, 2, CONTEXT, jnp.dtype(jnp.float32))
    prompt, count = jnp.asarray(tokens[:, :PROMPT]), jnp.asarray(COUNTS)
    hidden, stats, cache = run(params, config, prompt, count, cache, window=CONTEXT)
    return np.asarray(logits_of(params, hidden)), stats, cache


def entropies(weights: np.ndarray) -> np.ndarray:
    """Bits [L, N] of weights [L, N, n]."""
    return np.array([[reference.entropy_bits(head) for head in layer] for layer in weights])


def close(got: np.ndarray | jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


variants = pytest.mark.parametrize(
    ("family", "tied"), VARIANTS, ids=[f"{f}, {'tied' if t else 'untied'}" for f, t in VARIANTS]
)
# Of these one each. Mistral, apart from its window, and SmolLM3's weights are Llama's, see
# `test_what_the_folder_says`, of which other modules ask as much.
KIN = {"mistral": False, "qwen2": True, "qwen3": True, "smollm3": False}
assert {"llama", *KIN} == set(MODEL_TYPES)


def kin(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "tied"), [(x, KIN[x]) for x in names], ids=names)


@variants
def test_a_prompt(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """Logits of every position, and the attention of the last one."""
    model = made(family, tied)
    want, weights = model.theirs(tokens)
    assert want.std() > 0.5
    logits, stats, _ = prefilled(model.params, model.config, tokens)
    for row, count in enumerate(COUNTS):
        close(logits[row, :count], want[row, :count])
        seen = weights[row, :, :, count - 1, :count]
        np.testing.assert_allclose(stats.entropy[row], entropies(seen), atol=1e-5)


@kin(*KIN)
def test_steps(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """To the end of the context, a token of each row at a time."""
    model = made(family, tied)
    want, weights = model.theirs(tokens)
    _, _, cache = prefilled(model.params, model.config, tokens)
    for step in range(CONTEXT - PROMPT):
        at = COUNTS + step
        new, count = jnp.asarray(tokens[[0, 1], at][:, None]), jnp.ones(2, jnp.int32)
        hidden, stats, cache = run(model.params, model.config, new, count, cache, window=CONTEXT)
        close(logits_of(model.params, hidden)[:, 0], want[[0, 1], at])
        for row, position in enumerate(at):
            seen = weights[row, :, :, position, : position + 1]
            np.testing.assert_allclose(stats.entropy[row], entropies(seen), atol=1e-5)
    assert cache.length.tolist() == (COUNTS + CONTEXT - PROMPT).tolist()


@variants
def test_what_the_folder_says(made: Maker, family: str, tied: bool) -> None:
    """Beside what Llama's says: its numbers are the same."""
    window = VARIANTS[family, tied].get("sliding_window") is not None
    differs: dict[str, dict[str, Any]] = {
        "qwen2": {"qkv_bias": True},
        "qwen3": {"qk_norm": True, "head_dim": 12},
        "smollm3": {"layers_without_rope": (1,), "rope_theta": 2e6},
    }
    assert made(family, tied).config == replace(
        made("llama", tied).config,
        max_positions=CONTEXT if window else 1024,
        **differs.get(family, {}),
    )


@kin("qwen2", "qwen3", "smollm3")
def test_branches(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """Two of each row, a token at a time: as the same texts in one pass."""
    model = made(family, tied)
    _, _, cache = prefilled(model.params, model.config, tokens)
    suffixes = init_suffixes(cache, WIDTH, DEPTH)
    branches = np.random.default_rng(1).integers(3, 64, (2, WIDTH, DEPTH), dtype=np.int32)
    for depth in range(DEPTH):
        hidden, stats, suffixes = run_branches(
            model.params,
            model.config,
            jnp.asarray(branches[:, :, depth]),
            jnp.int32(depth),
            cache,
            suffixes,
            window=CONTEXT,
        )
        logits = np.asarray(logits_of(model.params, hidden))
        for row, count in enumerate(COUNTS):
            for branch in range(WIDTH):
                text = [*tokens[row, :count], *branches[row, branch, : depth + 1]]
                want, weights = model.theirs(np.asarray([text]))
                close(logits[row, branch], want[0, -1])
                entropy = stats.entropy[WIDTH * row + branch]
                np.testing.assert_allclose(entropy, entropies(weights[0, :, :, -1]), atol=1e-5)


@kin("qwen2", "qwen3")
def test_two_devices(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """Heads, their biases, the MLP and the vocabulary in two parts each."""
    model = made(family, tied)
    rules = rules_for(parse_mesh("model=2", jax.devices()[:2]), model.config)
    shardings = rules.params(model.config)
    params = load_params(model.folder, model.config, "float32", shardings=shardings)
    layer = params.layers[0]
    if family == "qwen2":
        assert layer.query_bias.addressable_shards[1].data.shape == (16,)
        assert layer.key_bias.addressable_shards[1].data.shape == (8,)
    if family == "qwen3":
        assert layer.query_norm.addressable_shards[1].data.shape == (12,)
    empty = init_cache(model.config, 2, CONTEXT, jnp.dtype(jnp.float32))
    spread, stats, _ = prefilled(params, model.config, tokens, place(empty, rules.rows(empty)))
    one, plain, _ = prefilled(model.params, model.config, tokens)
    for row, count in enumerate(COUNTS):
        close(spread[row, :count], one[row, :count])
    np.testing.assert_allclose(stats.entropy, plain.entropy, atol=1e-5)


@kin("qwen2", "qwen3")
def test_types_of_an_accelerator(made: Maker, family: str, tied: bool) -> None:
    """Activations of bfloat16 stay that, with weights of bfloat16 and of 8 bits."""
    model = made(family, tied)
    cache = init_cache(model.config, 1, CONTEXT, jnp.dtype(jnp.bfloat16))
    for weights in ("bfloat16", "int8"):
        params = load_params(model.folder, model.config, weights)
        hidden, stats, kept = jax.eval_shape(
            lambda params: forward(
                params,
                model.config,
                jnp.zeros((1, 4), jnp.int32),
                jnp.full(1, 4, jnp.int32),
                cache,
                window=CONTEXT,
            ),
            params,
        )
        assert hidden.dtype == kept.keys[0].dtype == kept.values[-1].dtype == jnp.bfloat16
        assert stats.entropy.dtype == jnp.float32
