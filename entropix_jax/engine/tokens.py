"""Prompts as token ids, and checks of ids that a caller passes."""

from collections.abc import Mapping, Sequence
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.arguments import as_integer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.text.chat_template import plain_messages

Prompt = str | Sequence[Mapping[str, str]]


def encode_prompt(
    model: LanguageModel,
    prompt: Prompt,
    *,
    chat: bool,
    system: str | None = None,
    escape_special: bool = False,
) -> list[int]:
    """Returns a prompt as token ids: a text, or messages with a `role` and a `content`. With `chat`
    a text is one turn, after a `system` message if one is passed. With `escape_special` control
    tokens that the prompt spells are ordinary text. UserError if the prompt is empty, or needs a
    chat that was not requested or has no template."""
    if prompt == "":
        raise UserError("the prompt is empty")
    if not chat and (system is not None or not isinstance(prompt, str)):
        what = "a system message" if isinstance(prompt, str) else "a conversation"
        raise UserError(f"{what} needs a chat (--chat)")
    if not chat:
        return model.tokenizer.encode(str(prompt), add_bos=True, escape=escape_special)
    return model.tokenizer.apply_chat(_as_messages(prompt, system), escape=escape_special)


def prompt_messages(
    prompt: Prompt, *, chat: bool, system: str | None = None
) -> list[dict[str, str]] | None:
    """Returns the roles and texts of a prompt's messages, for a trace; None without `chat`. Call it
    after `encode_prompt`, with the same arguments."""
    found = plain_messages(_as_messages(prompt, system)) if chat else None
    return found and [{name: one[name] for name in ("role", "content")} for one in found]


def _as_messages(prompt: Prompt, system: str | None) -> Any:
    """Returns a chat's messages, with any content that a file of messages holds."""
    messages: Any = prompt
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence):
        messages = list(prompt)
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def find_no_token(model: LanguageModel, tokens: Sequence[Any]) -> Any:
    """Returns the first invalid token id; None if all are valid."""
    ids = range(model.config.vocab_size)
    return next((i for i in tokens if isinstance(i, float) or as_integer(i) not in ids), None)


def describe_token(model: LanguageModel, token: Any) -> str:
    """Returns the words for an id that is not one of the model's tokens, for an error."""
    name = model.tokenizer.token_string(token) if isinstance(token, int) and token >= 0 else None
    if name is None:
        return f"{token!r}, which is not a token id"
    return f"{name!r} (token {token}), for which the model has no row"
