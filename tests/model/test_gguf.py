"""GGUF files: written by the package `gguf`, read here, and held against what they were made of."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from entropix_jax.errors import Note, UserError
from entropix_jax.model import gguf as reader
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import read_params
from entropix_jax.model.config import ModelConfig, RopeDivisors
from entropix_jax.model.gguf import GgufFile
from entropix_jax.model.linear import whole
from entropix_jax.model.loading import load, open_model, resolve_model
from entropix_jax.model.params import Params, param_specs
from entropix_jax.model.rope import inverse_frequencies
from entropix_jax.text.gguf_tokenizer import read_tokenizer
from tests.support.models import logits_of, random_params, run, tiny_config

TEXTS = [
    "A small grey cat sat on 12 walls.",
    "  two  spaces,\n\nit's naïve café 2024",
    "東京 🇳🇴\ttab",
]
KINDS: Any = gguf.GGMLQuantizationType
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tied_head": False},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"layers_without_rope": (3,), "num_layers": 4},
}


def vocabulary(size: int = 300) -> tokenizers.Tokenizer:
    """Byte-level BPE with two control tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    digits, spelling = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, spelling])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@functools.cache
def vocabulary_metadata() -> dict[str, Any]:
    """What a GGUF file says of `vocabulary`."""
    model = json.loads(vocabulary().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def config_of(family: str) -> ModelConfig:
    changes = {"vocab_size": len(vocabulary_metadata()["tokens"]), "rope_scaling": None}
    return tiny_config(**changes, dtype="bfloat16", **FAMILIES[family])


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp's converter lays them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    family: str = "llama",
    *,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    other: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    drop: str = "",
) -> Path:
    """A small model; `metadata`, `tokenizer`, `other` keys and `tensors` change what is written."""
    config = config_of(family)
    writer = gguf.GGUFWriter(path, family)
    own: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    said = {f"{family}.{name}": value for name, value in (own | dict(metadata or {})).items()}
    named = vocabulary_metadata() | dict(tokenizer or {})
    said |= {f"tokenizer.ggml.{name}": value for name, value in named.items()}
    said["tokenizer.chat_template"] = "{{ messages[0]['content'] }}<|im_end|>"
    said |= dict(other or {})
    for name, value in said.items():
        if value is not ...:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    specs, params = jax.tree.leaves(param_specs(config)), random_params(config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_layers)
    for spec, leaf in zip(specs, jax.tree.leaves(params), strict=True):
        values = np.asarray(leaf)
        if family in ("llama", "smollm3") and ("q_proj" in spec.name or "k_proj" in spec.name):
            values = interleaved(values, len(values) // config.head_dim)
        own_name = str(names.get_name(spec.name, try_suffixes=(".weight", ".bias")))
        if own_name != drop:
            writer.add_tensor(own_name, values)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def leaves(params: Params) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_written_is_read(family: str, tmp_path: Path) -> None:
    """Architecture and weights, to the bit: the order of the queries' and keys' rows, too."""
    file = GgufFile(write(tmp_path / "a.gguf", family))
    expected = config_of(family)
    assert file.config == replace(expected, norm_eps=float(np.float32(expected.norm_eps)))
    read = read_params(file.tensors, file.config, "float32")
    for one, other in zip(leaves(read), leaves(random_params(expected)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert file.generation.eos_ids == (1,)


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scale_linear": 0.0}, None),
    ],
)
def test_linear_rope_scaling(
    tmp_path: Path, metadata: dict[str, Any], factor: float | None
) -> None:
    """By either spelling, and without a type, as in llama.cpp."""
    config = GgufFile(write(tmp_path / "a.gguf", metadata=metadata)).config
    half = config.head_dim // 2
    expected = RopeDivisors(divisors=(factor,) * half) if factor else None
    assert config.rope_scaling == expected


def test_rotation_divisors(tmp_path: Path) -> None:
    """Llama 3's scaling, which a GGUF file holds as what each frequency is divided by."""
    divisors = np.array([1, 1, 2.5, 32], np.float32)
    file = GgufFile(write(tmp_path / "a.gguf", tensors={"rope_freqs.weight": divisors}))
    assert file.config.rope_scaling == RopeDivisors(divisors=(1.0, 1.0, 2.5, 32.0))
    plain = tiny_config(rope_scaling=None, rope_theta=file.config.rope_theta)
    wanted = inverse_frequencies(plain) / divisors
    np.testing.assert_allclose(inverse_frequencies(file.config), wanted, rtol=1e-6)
    scaled = {"rope.scaling.factor": 2.0}
    both = write(tmp_path / "c.gguf", metadata=scaled, tensors={"rope_freqs.weight": divisors})
    assert GgufFile(both).config.rope_scaling == RopeDivisors(divisors=(2.0, 2.0, 5.0, 64.0))
    wrong = write(tmp_path / "b.gguf", tensors={"rope_freqs.weight": divisors[:3]})
    with pytest.raises(UserError, match=r"'rope_freqs\.weight' has another shape"):
        _ = GgufFile(wrong).config


@pytest.mark.parametrize(
    "kind",
    """F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS""".split(),
)
@pytest.mark.parametrize("rows", [1, 3])
def test_kinds_are_dequantised(kind: str, rows: int) -> None:
    """Random bytes, in parts that are no whole numbers of rows: what the package makes of them."""
    block, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    blocks = 2 * reader._DEQUANTISED // block // rows + 3
    data = np.random.default_rng(0).integers(0, 60, (rows, blocks * size), np.uint8)
    expected = gguf.quants.dequantize(data, KINDS[kind]).reshape(-1)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        decoded = reader._decode(data.reshape(-1), KINDS[kind], dtype)
        np.testing.assert_array_equal(decoded, expected.astype(dtype))


def test_weights_are_bfloat16_unless_asked_for(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf"))
    model = load(path)
    assert model.params.embedding.dtype == jnp.bfloat16
    exact = load(path, "float32")
    np.testing.assert_array_equal(
        whole(model.params.embedding), np.asarray(exact.params.embedding).astype(jnp.bfloat16)
    )
    assert load(str(tmp_path), "int8").params.embedding.values.dtype == jnp.int8
    assert model.is_chat_model


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    tokenizer = GgufFile(write(tmp_path / "a.gguf")).tokenizer()
    for text in TEXTS:
        ids = tokenizer.encode(f"{text}<|im_end|>", add_bos=True)
        assert ids == [*vocabulary().encode(text).ids, 1]
        assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id is None
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi<|im_end|>"


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["It", "'s", " ", " 2024", "!"]),
        ("smollm", ["It", "'s", "  ", "2", "0", "2", "4", "!"]),
        ("llama-bpe", ["It", "'s", " ", " ", "202", "4", "!"]),
        ("smaug-bpe", ["It", "'s", " ", " ", "202", "4", "!"]),
        ("qwen2", ["It", "'s", " ", " ", "2", "0", "2", "4", "!"]),
        ("tekken", ["It", "'s", " ", " ", "2", "0", "2", "4", "!"]),
        ("default", ["It", "'", "s", " ", " ", "202", "4", "!"]),
    ],
)
def test_splits(split: str, pieces: Sequence[str]) -> None:
    metadata = {f"tokenizer.ggml.{k}": v for k, v in vocabulary_metadata().items()}
    tokenizer = read_tokenizer(metadata | {"tokenizer.ggml.pre": split}, Path("a.gguf"))
    rules = tokenizer._tokenizer.pre_tokenizer
    found = ["It's  2024!"[a:b] for _, (a, b) in rules.pre_tokenize_str("It's  2024!")]
    assert found == pieces
    assert (tokenizer.bos_id == 0) == (split in ("llama-bpe", "tekken"))


def test_a_file_without_a_split_takes_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tokenizer={"pre": ...})
    with pytest.warns(Note, match="'tokenizer.ggml.pre' names no split of text before merging"):
        model = load(str(path))
    assert model.tokenizer.encode("a 1", add_bos=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.dimension_sections", [1, 2]), ("attention.sliding_window_pattern", 4)],
)
def test_unknown_keys_of_the_architecture_are_named(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path / "a.gguf", metadata={key: value, "vocab_size": 300})
    with pytest.warns(Note) as caught:
        load(str(path))
    told = f"{path}: not known here, taken to change nothing: 'llama.{key}'"
    assert [str(each.message) for each in caught] == [told]


def test_sentencepiece_tokenizer() -> None:
    """A vocabulary in SentencePiece's manner as a GGUF file has it, with scores and no merges,
    against the tokenizer that it was made from."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", "<s>", "</s>", *pieces], show_progress=False
    )
    trained.train_from_iterator(TEXTS[:2], trainer)
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    merged = [len(token) > 1 for token in tokens]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        # Merged tokens were numbered in the order of their merges.
        "scores": [-float(i) if merged[i] else -1e9 for i in range(len(tokens))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    tokenizer = read_tokenizer(named, Path("a.gguf"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=True)
        assert ids == [1, *trained.encode(text, add_special_tokens=False).ids]
        assert tokenizer.decode(ids) == text


# What is no model.


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_damaged_files(tmp_path: Path) -> None:
    """Cut anywhere: one line. Whatever bytes of the header are changed to: a model or one line."""
    data = bytearray(write(tmp_path / "whole.gguf").read_bytes())
    damaged, random = tmp_path / "damaged.gguf", Random(0)
    for size in [*range(30), *(random.randrange(len(data)) for _ in range(64)), len(data) - 1]:
        damaged.write_bytes(data[:size])
        assert "not a whole GGUF file" in refusal(damaged)
    for _ in range(200):
        changed = data.copy()
        for _ in range(random.randint(1, 4)):
            changed[random.randrange(1500)] = random.randrange(256)
        damaged.write_bytes(changed)
        with contextlib.suppress(UserError):
            file = open_model(damaged)
            _ = file.config, file.generation, file.tokenizer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"expert_count": 8}}, r"'llama\.expert_count': 8 is not implemented"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "'yarn' is not implemented"),
        ({"metadata": {"rope.dimension_count": 4}}, r"'llama\.rope\.dimension_count': 4"),
        ({"metadata": {"block_count": ...}}, "'num_hidden_layers' is missing"),
        ({"tokenizer": {"pre": "unheard-of"}}, "the split 'unheard-of' is not known"),
        ({"tokenizer": {"model": "rwkv"}}, "the tokenizer 'rwkv' is not known"),
        ({"tokenizer": {"tokens": ...}}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokenizer": {"merges": ["a b c"]}}, "'a b c' is not two tokens"),
        ({"tokenizer": {"eos_token_id": 10**6}}, "eos_token_id': 1000000 is not a token id"),
        ({"other": {"split.count": 3}}, "is one of 3 parts: merge them, `llama-gguf-split"),
        ({"other": {"general.type": "adapter"}}, "is not a model but 'adapter': merge it with"),
        ({"drop": "blk.1.attn_q.weight"}, r"self_attn\.q_proj\.weight' is missing"),
        ({"tensors": {"blk.0.attn_q.scale": np.ones(4, np.float32)}}, "has no place"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", **changes)
    assert re.search(message, refusal(path))
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma", 1))
    assert "the architecture 'gemma' is not implemented (known: llama, qwen2" in refusal(path)


# The real one.


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    try:
        path = resolve_model("smollm2")
    except UserError as error:
        pytest.skip(str(error))
    file = open_model(path)
    assert isinstance(file, GgufFile)
    return file


@pytest.mark.slow
def test_smollm2_beside_transformers(smollm2: GgufFile, transformers: ModuleType) -> None:
    """Its weights to the bit, its chat template, and what it writes greedily."""
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
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    written = model.generate(torch.tensor([ids]), **options)[0].tolist()
    assert len(written) == len(ids) + 64

    # One pass over all of it: the likeliest next token at each place is the one that was written.
    config = smollm2.config
    params = read_params(smollm2.tensors, config, "float32")
    tokens = jnp.asarray([written[:-1]], jnp.int32)
    cache = init_cache(config, 1, tokens.shape[1], jnp.dtype(jnp.float32))
    count = jnp.full(1, tokens.shape[1], jnp.int32)
    hidden, *_ = run(params, config, tokens, count, cache, window=tokens.shape[1])
    logits = np.asarray(logits_of(params, hidden))[0]
    assert logits[len(ids) - 1 :].argmax(axis=-1).tolist() == written[len(ids) :]
