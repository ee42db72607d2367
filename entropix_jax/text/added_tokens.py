"""Added tokens that files next to `tokenizer.json` name: tokens that are matched as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropix_jax.errors import UserError, check_unicode
from entropix_jax.host.files import read_json_object

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class AddedToken:
    """A token that a file next to `tokenizer.json` names; it is matched as a whole."""

    content: str
    id: int | None  # None: the next one
    options: Mapping[str, bool]  # of `tokenizers.AddedToken`
    origin: str  # the file


def read_added_tokens(folder: Path, raw: Mapping[str, Any]) -> list[AddedToken]:
    """Reads the added tokens that `transformers` takes from the files next to `tokenizer.json`.

    Those with an id are in `tokenizer_config.json`, decoded in `raw`, and in `added_tokens.json`;
    special ones without are in the former and in `special_tokens_map.json`.

    Raises:
        UserError: a file is no object of tokens.
    """
    with_id: dict[int, AddedToken] = {}
    path = folder / "added_tokens.json"
    if path.is_file():
        for content, token_id in read_json_object(path).items():
            token = _added_token(content, token_id, {"normalized": True}, path)
            with_id[token_id] = token
    path = folder / "tokenizer_config.json"
    decoder = raw.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping | None):
        raise UserError(f"{path}: 'added_tokens_decoder' must be an object")
    for key, token in (decoder or {}).items():
        token_id = int(key) if key.isdecimal() else key
        with_id[token_id] = _added_token(token, token_id, {}, path)
    special = {}
    map_path = folder / "special_tokens_map.json"
    named = read_json_object(map_path) if map_path.is_file() else {}
    for origin, values in ((path, raw), (map_path, named)):
        for key, value in values.items():
            if key.endswith("_token") and value is not None and not isinstance(value, bool):
                special[key] = _added_token(value, None, {"special": True}, origin)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = values.get(key) or ()
            for value in more.values() if isinstance(more, Mapping) else more:
                token = _added_token(value, None, {"special": True}, origin)
                special[f"{key}: {token.content}"] = token
    return [*(with_id[token_id] for token_id in sorted(with_id)), *special.values()]


def _added_token(
    value: Any, token_id: int | None, defaults: Mapping[str, bool], path: Path
) -> AddedToken:
    """An added token from its text or from its object."""
    content = value.get("content") if isinstance(value, Mapping) else value
    is_id = token_id is None or (isinstance(token_id, int) and not isinstance(token_id, bool))
    if not isinstance(content, str) or not content or not is_id:
        told = f"an added token must be a text with an id: {value!r}, {token_id!r}"
        raise UserError(f"{path}: {told}")
    check_unicode(content, f"{path}: an added token")
    given = value if isinstance(value, Mapping) else {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    options = {**defaults, **{flag: bool(given[flag]) for flag in flags if flag in given}}
    return AddedToken(content, token_id, options, str(path))


def add_tokens(tokenizer: tokenizers.Tokenizer, added: Sequence[AddedToken]) -> None:
    """Adds the tokens that the tokenizer lacks. UserError if one would get another id."""
    import tokenizers

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in added:
        if token.content not in known:
            known.add(token.content)
            tokenizer.add_tokens([tokenizers.AddedToken(token.content, **token.options)])
        token_id = tokenizer.token_to_id(token.content)
        if token.id not in (None, token_id):
            told = f"has the id {token.id}, but the tokenizer gives it {token_id}"
            raise UserError(f"{token.origin}: the added token {token.content!r} {told}")
