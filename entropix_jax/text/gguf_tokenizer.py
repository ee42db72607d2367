"""The tokenizer of a GGUF file, read as the `tokenizer.json` of a folder.

Two kinds are known: byte-level BPE with a named pre-tokenizer, and SentencePiece's BPE, whose
merges follow from its scores.
"""

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.shapes import fits
from entropix_jax.text.added_tokens import CONTROL
from entropix_jax.text.tokenizer import (
    BYTES,
    LLAMA3_SPLIT,
    Tokenizer,
    byte_level_rules,
    merges_of_ranks,
    read_settings,
    split_by,
    tokenizer_json,
)

_LISTS: Mapping[str, list[type]] = {"token_type": [int], "scores": [float]}
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # types of tokens

# How a text is split before merging, as the models' authors published it.
_QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit alone
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's for a file that names none, each within the pieces of the one before.
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_GPT2_SPLIT = {**BYTES, "use_regex": True}

# Pre-tokenizers by llama.cpp's name for them.
_SPLITS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2_SPLIT],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2_SPLIT],
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), split_by(LLAMA3_SPLIT)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), split_by(_QWEN2_SPLIT)),
    "tekken": split_by(_TEKKEN_SPLIT),
    "default": split_by(*_DEFAULT_SPLITS),
}
# Those for which a word that is a token needs no merge, and a text begins with BOS by default.
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NFC = ("qwen2", "deepseek-r1-qwen")  # those that read Unicode's composed form
_SPACE = "\u2581"  # SentencePiece's


def read_tokenizer(
    metadata: Mapping[str, Any], path: Path, notes: list[str] | None = None
) -> Tokenizer:
    """Returns the tokenizer in a GGUF file's metadata, and adds to `notes` what a user should know.
    UserError, which names `path`, if the tokenizer or pre-tokenizer is unknown, or parts of it are
    missing or inconsistent."""
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): metadata[key] for key in metadata if key.startswith(prefix)}
    tokens = own.get("tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise UserError(f"{path}: '{prefix}tokens' is missing")

    for name, shape in _LISTS.items():
        own |= {name: own[name].tolist()} if isinstance(own.get(name), array) else {}
        if name in own and not fits(own[name], shape):
            raise UserError(f"{path}: '{prefix}{name}' must be a list of numbers")

    # Named tokens, and the chat template.
    settings: dict[str, Any] = {"chat_template": metadata.get("tokenizer.chat_template")}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = own.get(f"{key}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or token_id not in range(len(tokens)):
            raise UserError(f"{path}: '{prefix}{key}_token_id': {token_id!r} is not a token id")
        settings[f"{name}_token"] = tokens[token_id]

    # The rules by kind.
    kind, split = own.get("model"), str(own.get("pre", "default"))
    # The first of two tokens that are spelled alike counts.
    vocab = {token: i for i, token in reversed(list(enumerate(tokens)))}
    if kind == "gpt2":
        if split == "default" and notes is not None:
            problem = "is missing: llama.cpp's default pre-tokenizer is used, which may differ from"
            notes.append(f"{path}: '{prefix}pre' {problem} the model's (convert the model again)")
        if split not in _SPLITS:
            problem = f"unknown pre-tokenizer {split!r} (known: {', '.join(_SPLITS)})"
            raise UserError(f"{path}: '{prefix}pre': {problem}")
        add_bos = split in _LLAMA3_LIKE
        options = {"whole_words": add_bos, "nfc": split in _NFC}
        rules = byte_level_rules(vocab, _read_merges(own, path), _SPLITS[split], **options)
    elif kind == "llama":
        rules, add_bos = _sentencepiece(own, vocab, path), True
    else:
        raise UserError(f"{path}: '{prefix}model': unknown tokenizer {kind!r} (known: gpt2, llama)")

    # Tokens that are matched whole.
    types = own.get("token_type") or [_NORMAL] * len(tokens)
    ends = [own.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
    added = (
        (i, token, type_ == _CONTROL or i in ends)
        for i, (token, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ in (_CONTROL, _USER_DEFINED) or i in ends or token in CONTROL
    )
    settings["add_bos_token"] = own.get("add_bos_token", add_bos) and "bos_token" in settings
    return Tokenizer(path, tokenizer_json(rules, added), read_settings(settings, path))


def _sentencepiece(own: Mapping[str, Any], vocab: Mapping[str, int], path: Path) -> dict[str, Any]:
    """SentencePiece's BPE, with a token for each byte that has no other."""
    tokens, scores = own["tokens"], own.get("scores")
    types = own.get("token_type") or []
    if "merges" in own:
        merges = _read_merges(own, path)
    elif isinstance(scores, list) and len(scores) == len(tokens):
        # The pair whose token has the highest score is joined; control and byte tokens never are.
        atoms = {i for i, type_ in enumerate(types) if type_ in (_CONTROL, _BYTE)}
        ranks = {token: (-scores[i], i) for i, token in enumerate(tokens) if i not in atoms}
        merges = merges_of_ranks(ranks)
    else:
        raise UserError(f"{path}: 'tokenizer.ggml.scores' must be a number for each token")
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
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
            "unk_token": tokens[own.get("unknown_token_id", 0)],
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _read_merges(own: Mapping[str, Any], path: Path) -> list[Any]:
    written = own.get("merges")
    if not isinstance(written, list):
        raise UserError(f"{path}: 'tokenizer.ggml.merges' is missing")
    if wrong := [each for each in written if not isinstance(each, str) or each.count(" ") != 1]:
        raise UserError(f"{path}: 'tokenizer.ggml.merges': {wrong[0]!r} is not two tokens")
    return [tuple(merge.split(" ")) for merge in written]
