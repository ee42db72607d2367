"""Tokenizers made for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "A small grey cat sat on a wall.",
    "  two  spaces, a\ttab\nand a line ",
    "naïve café, Größe, 東京, שלום",
    "family 👩‍👩‍👧 and flag 🇳🇴, thumbs 👍🏽",
]


def byte_fallback() -> tokenizers.Tokenizer:
    """In the manner of Llama 2."""
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
