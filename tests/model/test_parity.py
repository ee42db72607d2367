"""`transformers` and this package read the same folder, and agree on prompts, single steps and two
devices.
`transformers` writes the folders. No bias is 0 and no norm is 1.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.checkpoint import open_folder, read_params, save_params
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.config_file import MODEL_TYPES, load_model_config
from entropix_jax.model.mesh import param_shardings, parse_mesh, row_shardings
from entropix_jax.model.params import Params
from entropix_jax.stats import AttnStats
from tests.support import reference
from tests.support.models import load_params, logits_of, run, teacher_forced

PROMPT, CONTEXT = 192, 200  # long enough to see an error of the rotary embedding
COUNTS = np.array([PROMPT, PROMPT - 7], np.int32)  # of the two rows' prompts
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


def rope(factor: float, kind: str = "llama3") -> dict[str, Any]:
    own: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": factor}
    if kind == "llama3":
        own |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        own["original_max_position_embeddings"] = 64
    return {"rope_parameters": own}


# Each family tied and untied, with other keys that its file may have.
VARIANTS: dict[tuple[str, bool], dict[str, Any]] = {
    ("llama", True): rope(32.0),
    ("llama", False): {**rope(8.0), "head_dim": 12, "rms_norm_eps": 1e-2, "num_key_value_heads": 1},
    ("mistral", True): {"sliding_window": None, "num_key_value_heads": 4},
    ("mistral", False): {"sliding_window": CONTEXT, **rope(4.0, "linear")},
    ("qwen2", True): {},
    ("qwen2", False): {**SLIDING, "max_window_layers": 1},
    ("qwen3", True): {"head_dim": 12},
    ("qwen3", False): {"head_dim": 12, **SLIDING, "max_window_layers": 0},
    ("smollm3", True): {"no_rope_layers": [1, 0]},
    ("smollm3", False): {"no_rope_layer_interval": 2, **SLIDING},
}


@dataclass
class ModelPair:
    """A model in a folder, and the same model in `transformers`."""

    folder: Path
    config: ModelConfig
    params: Params
    model: Any  # of transformers


Maker = Callable[..., ModelPair]


def theirs(model: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits [B, T, V] and attention weights [B, L, N, T, T] of tokens [B, T]."""
    torch = importlib.import_module("torch")
    with torch.no_grad():
        out = model(torch.tensor(tokens.astype(np.int64)), output_attentions=True)
    return out.logits.float().numpy(), torch.stack(out.attentions, dim=1).float().numpy()


def build(
    torch: ModuleType, transformers: ModuleType, family: str, tied: bool, **changes: Any
) -> Any:
    torch.manual_seed(0)
    values = {**SMALL, **VARIANTS[family, tied], "tie_word_embeddings": tied, **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
    return model.eval()


@pytest.fixture(scope="module")
def made(
    torch: ModuleType, transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Maker:
    @cache
    def make(family: str, tied: bool) -> ModelPair:
        model = build(torch, transformers, family, tied)
        folder = tmp_path_factory.mktemp("family")
        model.save_pretrained(folder)
        own = load_model_config(folder)
        return ModelPair(folder, own, load_params(folder, own, "float32"), model)

    return make


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 64, (2, CONTEXT), dtype=np.int32)


def prefilled(
    params: Params, config: ModelConfig, tokens: np.ndarray, mesh: Mesh | None = None
) -> tuple[np.ndarray, AttnStats, KVCache]:
    """Prefills both prompts in one call. Returns logits [2, PROMPT, V], statistics and cache."""
    cache = init_cache(config, 2, CONTEXT, jnp.dtype(jnp.float32))
    cache = cache if mesh is None else jax.device_put(cache, row_shardings(mesh, cache))
    prompt, count = jnp.asarray(tokens[:, :PROMPT]), jnp.asarray(COUNTS)
    hidden, stats, cache = run(params, config, prompt, count, cache, window=CONTEXT)
    return np.asarray(logits_of(params, hidden)), stats, cache


def check_stats(stats: AttnStats, row: int, weights: np.ndarray) -> None:
    """Checks a row's statistics against the attention weights [L, N, n] of its last position."""
    for name, function in (
        ("entropy", reference.entropy_bits),
        ("varentropy", reference.varentropy_bits),
    ):
        want = [[function(head) for head in layer] for layer in weights]
        np.testing.assert_allclose(getattr(stats, name)[row], want, rtol=1e-5, atol=2e-5)
    apart = np.abs(weights - weights.mean(axis=1, keepdims=True)).sum(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(stats.divergence[row], apart, atol=2e-5)


def close(got: np.ndarray | jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


variants = pytest.mark.parametrize(
    ("family", "tied"), VARIANTS, ids=[f"{f}, {'tied' if t else 'untied'}" for f, t in VARIANTS]
)
# One variant of each. Except for Mistral's window, Mistral and SmolLM3 have the weights of Llama.
KIN = {"mistral": False, "qwen2": True, "qwen3": True, "smollm3": False}
assert {"llama", *KIN} == set(MODEL_TYPES)


def kin(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("family", "tied"), [(x, KIN[x]) for x in names], ids=names)


@variants
def test_prompts_equal_transformers(
    made: Maker, tokens: np.ndarray, family: str, tied: bool
) -> None:
    """Compares the logits of every position, and the attention of the last one."""
    model = made(family, tied)
    want, weights = theirs(model.model, tokens)
    assert want.std() > 0.5
    logits, stats, _ = prefilled(model.params, model.config, tokens)
    for row, count in enumerate(COUNTS):
        close(logits[row, :count], want[row, :count])
        check_stats(stats, row, weights[row, :, :, count - 1, :count])


@kin(*KIN)
def test_steps_equal_transformers(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """Runs one token per row and step, to the end of the context."""
    model = made(family, tied)
    want, weights = theirs(model.model, tokens)
    _, _, cache = prefilled(model.params, model.config, tokens)
    for step in range(CONTEXT - PROMPT):
        at = COUNTS + step
        new, count = jnp.asarray(tokens[[0, 1], at][:, None]), jnp.ones(2, jnp.int32)
        hidden, stats, cache = run(model.params, model.config, new, count, cache, window=CONTEXT)
        close(logits_of(model.params, hidden)[:, 0], want[[0, 1], at])
        for row, position in enumerate(at):
            check_stats(stats, row, weights[row, :, :, position, : position + 1])
    assert cache.length.tolist() == (COUNTS + CONTEXT - PROMPT).tolist()


@kin("qwen2", "qwen3")
def test_two_devices_equal_one(made: Maker, tokens: np.ndarray, family: str, tied: bool) -> None:
    """Heads, their biases, the MLP and the vocabulary are split into two parts each."""
    model = made(family, tied)
    mesh = parse_mesh("model=2", jax.devices()[:2])
    shardings = param_shardings(mesh, model.config)
    params = load_params(model.folder, model.config, "float32", shardings=shardings)
    layer = params.layers[0]
    if family == "qwen2":
        assert layer.query_bias.addressable_shards[1].data.shape == (16,)
        assert layer.key_bias.addressable_shards[1].data.shape == (8,)
    if family == "qwen3":
        assert layer.query_norm.addressable_shards[1].data.shape == (12,)
    spread, stats, _ = prefilled(params, model.config, tokens, mesh)
    one, plain, _ = prefilled(model.params, model.config, tokens)
    for row, count in enumerate(COUNTS):
        close(spread[row, :count], one[row, :count])
    np.testing.assert_allclose(stats.entropy, plain.entropy, atol=1e-5)


# Other forms of Llama's files.


def ours(folder: Path, tokens: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Returns this package's logits, [1, T, V]."""
    files = open_folder(folder)
    params = read_params(files.tensors, files.config, dtype)
    logits, _, _ = teacher_forced(params, files.config, tokens)
    return np.asarray(logits)


def test_shards_and_the_old_configuration(made: Maker, tokens: np.ndarray, tmp_path: Path) -> None:
    """Reads the configuration in the format before transformers 5."""
    model = made("llama", False)
    model.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    parameters = raw.pop("rope_parameters")
    raw |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))
    assert load_model_config(tmp_path) == model.config
    close(ours(tmp_path, tokens[:1]), theirs(model.model, tokens[:1])[0])


def test_bfloat16_and_saved_weights(
    torch: ModuleType, transformers: ModuleType, tmp_path: Path, tokens: np.ndarray
) -> None:
    """Weights read as bfloat16 and as float32 equal the widened model, both computed in float32.
    Other weights, saved by this package into the same folder, do too."""
    build(torch, transformers, "llama", True).to(torch.bfloat16).save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    read = partial(transformers.LlamaForCausalLM.from_pretrained, tmp_path, **options)
    want, _ = theirs(read().eval(), tokens[:1])
    for dtype in ("bfloat16", "float32"):
        close(ours(tmp_path, tokens[:1], dtype), want)
    config = load_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    params = jax.tree.map(lambda x: x[::-1] * 1.1, load_params(tmp_path, config, "bfloat16"))
    save_params(tmp_path, params, config)
    close(ours(tmp_path, tokens[:1]), theirs(read().eval(), tokens[:1])[0])


def stored_head(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    """Stores a separate head, although the configuration ties it to the embedding."""
    raw["tie_word_embeddings"] = True
    assert not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def several_types(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    """Stores matrices in bfloat16 and norms in float32, with float16 in the configuration."""
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2]:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    raw["dtype"] = "float16"


def rope_without_type(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw["rope_parameters"] = {"rope_theta": 20000.0}


def linear_rope_of_factor_one(tensors: dict[str, Any], raw: dict[str, Any]) -> None:
    raw |= rope(1.0, "linear")


@pytest.mark.filterwarnings("ignore::entropix_jax.errors.Note")
@pytest.mark.parametrize(
    "change", [stored_head, several_types, rope_without_type, linear_rope_of_factor_one]
)
def test_unusual_folders(
    made: Maker,
    transformers: ModuleType,
    torch: ModuleType,
    tokens: np.ndarray,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None],
) -> None:
    """Both packages load folders that `save_pretrained` never writes."""
    shutil.copytree(made("llama", False).folder, tmp_path, dirs_exist_ok=True)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, raw = load_file(file), json.loads(config.read_text())
    change(tensors, raw)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(raw))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **options).eval()
    close(ours(tmp_path, tokens[:1]), theirs(model, tokens[:1])[0])
