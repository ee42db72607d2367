"""Added tokens that files next to `tokenizer.json` name: tokens that are matched as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropix_jax.errors import UserError, check_unicode
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.files import read_json_object

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


# Control tokens that end a turn wherever a vocabulary has them, as in llama.cpp.
TURN_ENDS = "<|eot_id|> <|im_end|> <|eom_id|> <|end|> <end_of_turn> <end_of_utterance>".split()
# Names of control tokens, also where a file does not mark them as such.
CONTROL = {*TURN_ENDS, "<|endoftext|>", "<|end_of_text|>", "<|im_start|>", "<start_of_turn>"}
CONTROL |= {"<|start_header_id|>", "<|end_header_id|>"}
CONTROL |= {"<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"}  # of DeepSeek-R1
# A token, its id (None: the next one), and the file that names it.
Added = tuple["AddedToken", int | None, Path]


def read_added_tokens(folder: Path, raw: Mapping[str, Any]) -> list[Added]:
    """Reads the added tokens that `transformers` takes from the files next to `tokenizer.json`.

    Those with an id are in `tokenizer_config.json`, decoded in `raw`, and `added_tokens.json`, the
    special ones without in the former and `special_tokens_map.json`. UserError if one is malformed.
    """
    config = folder / "tokenizer_config.json"
    added, named = folder / "added_tokens.json", folder / "special_tokens_map.json"
    decoder = raw.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise UserError(f"{config}: 'added_tokens_decoder' must be an object")
    with_id = {
        token_id: _added_token(content, token_id, {"normalized": True}, added)
        for content, token_id in read_optional(added).items()
    }
    for key, token in decoder.items():
        token_id = int(key) if key.isdecimal() else key
        with_id[token_id] = _added_token(token, token_id, {}, config)
    special: dict[str, Added] = {}
    for path, values in ((config, raw), (named, read_optional(named))):
        for key, value in values.items():
            if isinstance(value, bool | None):
                continue
            if key in ("additional_special_tokens", "extra_special_tokens"):
                listed = value if isinstance(value, list) else [value]
                for one in value.values() if isinstance(value, Mapping) else listed:
                    token = _added_token(one, None, {"special": True}, path)
                    special[f"{key}: {token[0].content}"] = token
            elif key.endswith("_token"):
                special[key] = _added_token(value, None, {"special": True}, path)
    return [*(with_id[token_id] for token_id in sorted(with_id)), *special.values()]


def read_optional(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; empty without the file."""
    return read_json_object(path) if path.is_file() else {}


def _added_token(
    value: Any, token_id: int | None, defaults: Mapping[str, bool], path: Path
) -> Added:
    """An added token from its text or from its object."""
    import tokenizers

    given = value if isinstance(value, Mapping) else {"content": value}
    content = given.get("content")
    is_id = token_id is None or as_integer(token_id) is not None
    if not isinstance(content, str) or not content or not is_id:
        problem = f"an added token must be a text with an id: {value!r}, {token_id!r}"
        raise UserError(f"{path}: {problem}")
    check_unicode(content, f"{path}: an added token")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    options = {**defaults, **{flag: bool(given[flag]) for flag in flags if flag in given}}
    return tokenizers.AddedToken(content, **options), token_id, path


def add_tokens(tokenizer: Tokenizer, added: Sequence[Added], ends: Sequence[int]) -> None:
    """Adds the tokens that the tokenizer lacks. Control tokens are those that a file marks or
    names, those in `ends`, and those in `CONTROL`. UserError if one would get another id."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token, wanted, path in added:
        if token.content not in known:
            known[token.content] = token
            tokenizer.add_tokens([token])
        token_id = tokenizer.token_to_id(token.content)
        if wanted not in (None, token_id):
            problem = f"has the id {wanted}, but the tokenizer gives it {token_id}"
            raise UserError(f"{path}: the added token {token.content!r} {problem}")
    named = CONTROL.union(token.content for token, *_ in added if token.special)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if (token.content in named or token_id in ends) and not token.special:
            token.special = True
            tokenizer.add_special_tokens([token])
