"""GGUF files, written by the package `gguf`, read here, and compared with their source."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.model import gguf as reader
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import ModelFiles, read_params
from entropix_jax.model.config import RopeDivisors
from entropix_jax.model.gguf import open_gguf
from entropix_jax.model.loading import load, open_model, resolve_model
from entropix_jax.model.params import Params
from entropix_jax.model.rope import inverse_frequencies
from tests.support.gguf_files import FAMILIES, config_of, write
from tests.support.model_folders import refusal
from tests.support.models import logits_of, random_params, run, tiny_config
from tests.support.tokenizers import TEXTS, vocabulary

KINDS: Any = gguf.GGMLQuantizationType


def leaves(params: Params) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_files_are_read_exactly(family: str, tmp_path: Path) -> None:
    """Architecture and weights are equal bit for bit, with the order of query and key rows."""
    file = open_gguf(write(tmp_path / "a.gguf", family))
    expected = config_of(family)
    assert file.config == replace(expected, norm_eps=float(np.float32(expected.norm_eps)))
    read = read_params(file.tensors, file.config, "float32")
    for one, other in zip(leaves(read), leaves(random_params(expected)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert file.eos_ids == (1,)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    """Accepts both keys, and a missing type, like llama.cpp."""
    fours = RopeDivisors(divisors=(4.0,) * 4)
    for metadata, expected in (
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}, fours),
        ({".rope.scaling.factor": 4.0}, fours),
        ({".rope.scale_linear": 4.0}, fours),
        ({".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}, None),
        ({".rope.scaling.type": "linear", ".rope.scaling.factor": 1.0}, None),
        ({".rope.scaling.type": "linear"}, None),
        ({".rope.scale_linear": 0.0}, None),
    ):
        path = write(tmp_path / "a.gguf", changes=metadata)
        assert open_gguf(path).config.rope_scaling == expected, metadata


def test_rotation_divisors(tmp_path: Path) -> None:
    """A GGUF file stores Llama 3's scaling as a divisor for each frequency."""
    divisors = np.array([1, 1, 2.5, 32], np.float32)
    for metadata, factor in (({}, 1), ({".rope.scaling.factor": 2.0}, 2)):
        tensors = {"rope_freqs.weight": divisors}
        config = open_gguf(write(tmp_path / "a.gguf", changes=metadata, tensors=tensors)).config
        plain = tiny_config(rope_scaling=None, rope_theta=config.rope_theta)
        wanted = inverse_frequencies(plain) / (factor * divisors)
        np.testing.assert_allclose(inverse_frequencies(config), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "kind",
    """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS""".split(),
)
@pytest.mark.parametrize("rows", [1, 3])
def test_kinds_are_dequantised(kind: str, rows: int) -> None:
    """Random bytes, in parts of incomplete rows, are dequantised like in the package."""
    block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = 2 * reader._DEQUANTISED // block // rows + 3
    data = np.random.default_rng(0).integers(0, 60, (rows, blocks * size), np.uint8)
    expected = gguf.quants.dequantize(data, KINDS[kind]).reshape(-1)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        decoded = reader._decode(data.reshape(-1), KINDS[kind], expected.shape, dtype)
        np.testing.assert_array_equal(decoded, expected.astype(dtype))


def test_weights_are_bfloat16_by_default(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf"))
    model = load(path)
    assert model.params.embedding.dtype == jnp.bfloat16
    exact = load(path, "float32")
    np.testing.assert_array_equal(
        np.asarray(model.params.embedding), np.asarray(exact.params.embedding).astype(jnp.bfloat16)
    )
    assert load(str(tmp_path), "int8").params.embedding.values.dtype == jnp.int8
    assert model.is_chat_model


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    tokenizer = open_gguf(write(tmp_path / "a.gguf")).tokenizer()
    for text in TEXTS:
        ids = tokenizer.encode(f"{text}<|im_end|>", add_bos=True)
        assert ids == [*vocabulary().encode(text).ids, 1]
        assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id is None
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi<|im_end|>"


def test_unknown_keys_and_a_missing_pre_tokenizer_are_noted(tmp_path: Path) -> None:
    unknown = {".rope.dimension_sections": [1, 2], ".attention.sliding_window_pattern": 4}
    changes = {**unknown, ".vocab_size": 300, "tokenizer.ggml.pre": ...}
    path = write(tmp_path / "a.gguf", changes=changes)
    with pytest.warns(Note) as caught:
        model = load(str(path))
    names = "'llama.attention.sliding_window_pattern', 'llama.rope.dimension_sections'"
    keys, split = (str(each.message) for each in caught)
    assert keys == f"{path}: unknown keys, taken to change nothing: {names}"
    assert "'tokenizer.ggml.pre' is missing: llama.cpp's default pre-tokenizer is used" in split
    assert model.tokenizer.encode("a 1", add_bos=False)


# Invalid files


def refused(path: Path) -> str:
    return refusal(path, lambda: load(str(path)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF\0\0\0\3" + bytes(64), "it is big-endian: convert the model again"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer to the file: run"),
        (b"tjgg" + bytes(64), "it starts with b'tjgg', not with b'GGUF'"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    for other in (path, tmp_path / "m-00002-of-00002.gguf"):
        other.write_bytes(data)
    assert message in refused(path)
    assert resolve_model(str(tmp_path)) == path  # whose metadata say that it is a part


def test_damaged_files(tmp_path: Path) -> None:
    """Mutations are in `test_fuzzing`."""
    whole = write(tmp_path / "whole.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(whole.replace(b"llama", b"gemma", 1))
    assert "the architecture 'gemma' is not implemented (known: llama, qwen2" in refused(damaged)
    damaged.write_bytes(whole[:-1])
    assert "ends 1 bytes after the file" in refused(damaged)
    damaged.write_bytes(whole.replace(b"ggml.bos_token_id", b"ggml.eos_token_id"))
    assert "two tensors or two keys have the same name" in refused(damaged)
    at = whole.index(b"output_norm.weight") + 34  # after the name, the axis and the type
    damaged.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    assert "tensor 'output_norm.weight' begins at 0, expected" in refused(damaged)


def test_a_long_list_takes_less_than_four_times_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", changes={"x": [300] * 200_000})
    tracemalloc.start()
    open_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({".expert_count": 8}, r"'llama\.expert_count': 8 is not implemented"),
        ({".rope.scaling.type": "yarn"}, "'yarn' is not implemented"),
        ({".rope.dimension_count": 4}, r"'llama\.rope\.dimension_count': 4"),
        ({".block_count": ...}, "'num_hidden_layers' is missing"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer 'unheard-of' \\(known: "),
        ({"tokenizer.ggml.model": "rwkv"}, "unknown tokenizer 'rwkv'"),
        ({"tokenizer.ggml.tokens": ...}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokenizer.ggml.token_type": 3}, r"'tokenizer\.ggml\.token_type' must be a list"),
        ({"tokenizer.ggml.scores": ["a"]}, r"'tokenizer\.ggml\.scores' must be a list"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id': 1000000 is not a token id"),
        ({"split.count": 3, "general.architecture": ...}, "is one of 3 parts: merge them, `llama-"),
        ({"general.type": "adapter"}, "is not a model but 'adapter': merge it with"),
    ],
)
def test_errors_of_metadata(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert re.search(message, refused(write(tmp_path / "a.gguf", changes=changes)))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.1.attn_q.weight", None, r"self_attn\.q_proj\.weight' is missing"),
        ("blk.0.attn_q.scale", np.ones(4, np.float32), "has no place"),
        ("rope_freqs.weight", np.ones(3, np.float32), r"has shape \[3\], expected \[4\]"),
    ],
)
def test_errors_of_tensors(name: str, tensor: Any, message: str, tmp_path: Path) -> None:
    assert re.search(message, refused(write(tmp_path / "a.gguf", tensors={name: tensor})))


# SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    try:
        path = resolve_model("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    return open_model(path)


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: ModelFiles, transformers: ModuleType) -> None:
    """Compares weights bit for bit, the chat template, and a greedy text."""
    place = {"pretrained_model_name_or_path": str(smollm2.path.parent)}
    place["gguf_file"] = smollm2.path.name
    theirs = transformers.AutoTokenizer.from_pretrained(**place)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2.tokenizer().render_chat(messages)
    given = {"tokenize": False, "add_generation_prompt": True}
    assert theirs.apply_chat_template(messages, **given) == text
    ids = smollm2.tokenizer().encode(text, add_bos=True)
    assert theirs.encode(text, add_special_tokens=False) == ids

    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    weights = model.state_dict()
    for name, tensor in smollm2.tensors.items():
        np.testing.assert_array_equal(weights[name].numpy(), tensor.read(np.float32))
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
    written = model.generate(torch.tensor([ids]), **options)[0].tolist()
    assert len(written) == len(ids) + 32

    # In one pass over the text, the most likely next token is the written one at each position.
    config = smollm2.config
    params = read_params(smollm2.tensors, config, "float32")
    tokens = jnp.asarray([written[:-1]], jnp.int32)
    cache = init_cache(config, 1, tokens.shape[1], jnp.dtype(jnp.float32))
    count = jnp.full(1, tokens.shape[1], jnp.int32)
    hidden, *_ = run(params, config, tokens, count, cache, window=tokens.shape[1])
    logits = np.asarray(logits_of(params, hidden))[0]
    assert logits[len(ids) - 1 :].argmax(axis=-1).tolist() == written[len(ids) :]
