"""Tokenizers of GGUF files, compared with their source tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, trainers

from entropix_jax.text.gguf_tokenizer import read_tokenizer
from tests.support.tokenizers import TEXTS, vocabulary_metadata


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
def test_pre_tokenizers(split: str, pieces: Sequence[str]) -> None:
    metadata = vocabulary_metadata() | {"tokenizer.ggml.pre": split}
    tokenizer = read_tokenizer(metadata, Path("a.gguf"))
    rules = tokenizer._tokenizer.pre_tokenizer
    found = ["It's  2024!"[a:b] for _, (a, b) in rules.pre_tokenize_str("It's  2024!")]
    assert found == pieces
    assert (tokenizer.bos_id == 0) == (split in ("llama-bpe", "tekken"))


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "key"),
    [("<|im_end|>", "eom"), ("<fin>", "eot"), ("<fin>", "x"), ("<\uff5cUser\uff5c>", "x")],
)
def test_named_tokens_are_control_tokens_whatever_their_type(
    kind: int, name: str, key: str
) -> None:
    own = vocabulary_metadata()
    tokens, prefix = own["tokenizer.ggml.tokens"], "tokenizer.ggml."
    changes = {"tokens": [tokens[0], name, *tokens[2:]], f"{key}_token_id": 1, "eos_token_id": 0}
    changes["token_type"] = [3, kind, *[1] * (len(tokens) - 2)]
    tokenizer = read_tokenizer(own | {prefix + k: v for k, v in changes.items()}, Path("a.gguf"))
    is_control = kind == 3 or key != "x" or name != "<fin>"
    assert tokenizer.special_ids == ({0, 1} if is_control else {0})
    assert (1 in tokenizer.encode(f"a{name}", add_bos=False, escape=True)) == (
        kind == 4 and not is_control
    )


def test_sentencepiece_tokenizer() -> None:
    """Compares a SentencePiece vocabulary in the format of a GGUF file, with scores and no merges,
    with its source tokenizer."""
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
