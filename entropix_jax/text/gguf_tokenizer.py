"""The tokenizer of a GGUF file, as the `tokenizer.json` and `tokenizer_config.json` of a folder.

Two kinds are known: byte-level BPE, with a name for how it splits a text before merging, and
SentencePiece's BPE, whose merges follow from its scores.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.text.tokenizer import LLAMA3_SPLIT

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # types of tokens

# How a text is split before merging, as the models' authors published it.
_QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit alone
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2_SPLIT = {**_BYTES, "use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [rule, _BYTES]


# Pre-tokenizers by llama.cpp's name for them.
_SPLITS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2_SPLIT],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2_SPLIT],
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _split(LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2_SPLIT)),
    "tekken": _split(_TEKKEN_SPLIT),
}
# Those for which a word that is a token needs no merge, and a text begins with BOS by default.
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NFC = ("qwen2", "deepseek-r1-qwen")  # those that read Unicode's composed form
_SPACE = "\u2581"  # SentencePiece's


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> tuple[bytes, dict[str, Any]]:
    """The contents of `tokenizer.json` and of a decoded `tokenizer_config.json`.

    Raises:
        UserError: a kind of tokenizer or of split that is not known, or parts that are missing or
            inconsistent; the error names `path`, the file that the metadata are from.
    """
    # The rules by kind.
    prefix = "tokenizer.ggml."
    own = {key[len(prefix) :]: metadata[key] for key in metadata if key.startswith(prefix)}
    kind, split = own.get("model"), own.get("pre")
    tokens = own.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"{path}: '{prefix}tokens' is missing")
    if kind == "gpt2":
        if not isinstance(split, str) or split not in _SPLITS:
            raise UserError(
                f"{path}: '{prefix}pre': the split {split!r} is not known "
                f"(known: {', '.join(_SPLITS)})"
            )
        rules = _byte_level(own, split, path)
        add_bos = split in _LLAMA3_LIKE
    elif kind == "llama":
        rules, add_bos = _sentencepiece(own, path), True
    else:
        raise UserError(
            f"{path}: '{prefix}model': the tokenizer {kind!r} is not known (known: gpt2, llama)"
        )

    # Tokens that are matched whole.
    types = own.get("token_type") or []
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **flags, "special": type_ == _CONTROL}
        for i, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **rules,
    }

    # Named tokens, and the chat template.
    settings: dict[str, Any] = {"add_bos_token": own.get("add_bos_token", add_bos)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = own.get(f"{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise UserError(f"{path}: '{prefix}{key}_token_id': {token_id!r} is no token")
        settings[f"{name}_token"] = tokens[token_id]
    if settings["add_bos_token"] and "bos_token" not in settings:
        settings["add_bos_token"] = False
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return json.dumps(tokenizer, ensure_ascii=False).encode(), settings


def _byte_level(own: Mapping[str, Any], split: str, path: Path) -> dict[str, Any]:
    """Byte-level BPE: tokens are spelled in GPT-2's alphabet of bytes."""
    return {
        "normalizer": {"type": "NFC"} if split in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[split]},
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "ignore_merges": split in _LLAMA3_LIKE,
            "vocab": _token_ids(own["tokens"]),
            "merges": _read_merges(own, path),
        },
    }


def _sentencepiece(own: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """SentencePiece's BPE, with a token for each byte that has no other."""
    tokens, scores = own["tokens"], own.get("scores")
    types = own.get("token_type") or []
    if "merges" in own:
        merges = _read_merges(own, path)
    elif isinstance(scores, list) and len(scores) == len(tokens):
        merges = _merges_of_scores(tokens, scores, types)
    else:
        raise UserError(f"{path}: 'tokenizer.ggml.scores' must be a number for each token")
    unknown = own.get("unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise UserError(f"{path}: 'tokenizer.ggml.unknown_token_id': {unknown!r} is no token")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps: list[dict[str, Any]] = [spaces]
    ends: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if own.get("add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        ends.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": ends},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "vocab": _token_ids(tokens),
            "merges": merges,
        },
    }


def _token_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; the first of two that are spelled alike counts."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _read_merges(own: Mapping[str, Any], path: Path) -> list[list[str]]:
    written = own.get("merges")
    if not isinstance(written, list):
        raise UserError(f"{path}: 'tokenizer.ggml.merges' is missing")
    merges = [merge.split(" ") if isinstance(merge, str) else [] for merge in written]
    if wrong := [text for text, merge in zip(written, merges, strict=True) if len(merge) != 2]:
        raise UserError(f"{path}: 'tokenizer.ggml.merges': {wrong[0]!r} is not two tokens")
    return merges


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[list[str]]:
    """SentencePiece joins the pair whose token has the highest score: every way to cut a token in
    two is a merge, in the order of the scores. Control and byte tokens are never merged."""
    atoms = {_CONTROL, _BYTE}
    ids = {token: i for i, token in enumerate(tokens) if i >= len(types) or types[i] not in atoms}
    cuts = [
        (-scores[i], ids[token[:at]], ids[token[at:]], token[:at], token[at:])
        for token, i in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [[left, right] for *_, left, right in sorted(cuts)]
