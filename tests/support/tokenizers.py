"""Tokenizers made for tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "A small grey cat sat on a wall.",
    "  two  spaces, a\ttab\nand a line ",
    "naïve café, Größe, 東京, שלום",
    "family 👩‍👩‍👧 and flag 🇳🇴, thumbs 👍🏽",
]


def byte_fallback() -> tokenizers.Tokenizer:
    """Returns a tokenizer like that of Llama 2."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted(set("".join(TEXTS)) & set("abcdefghijklmnopqrstuvwxyz.,é東")), "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytewise = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*bytewise, decoders.Strip(" ", 1, 0)])
    return tokenizer


def save(
    folder: Path, tokenizer: tokenizers.Tokenizer, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def vocabulary(size: int = 300) -> tokenizers.Tokenizer:
    """Trains byte-level BPE with two control tokens."""
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
    """Returns the metadata of `vocabulary` in a GGUF file."""
    model = json.loads(vocabulary().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
