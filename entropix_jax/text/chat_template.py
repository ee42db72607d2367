"""Chat templates: a conversation rendered by the Jinja template that comes with a checkpoint.

The environment is the one that templates are written for, that of
`transformers.PreTrainedTokenizerBase.apply_chat_template`. Jinja's immutable sandbox keeps a
template from reaching out; it bounds neither time nor memory.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from entropix_jax.errors import UserError


def render_chat(
    template: str,
    messages: object,
    *,
    origin: str,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Renders a conversation.

    Args:
        template: Jinja source.
        messages: a list of objects with at least the texts `role` and `content`; checked here,
          because it may come from a user's file.
        origin: where the template is from, for errors.
        special_tokens: `bos_token`, `eos_token` and the like, variables of the template.
        add_generation_prompt: end with the start of the assistant's answer.

    Raises:
        UserError: messages of another shape, or a template that is wrong or refuses them.
    """
    _check_messages(messages)
    try:
        return _compile(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{origin}: chat template, line {error.lineno}: {error}") from None
    except _MessagesRefused as error:
        raise UserError(f"{origin}: the chat template refuses the messages: {error}") from None
    except Exception as error:  # whatever the template's own code raises
        told = f"{type(error).__name__}: {error}"
        raise UserError(f"{origin}: the chat template fails: {told}") from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a non-empty list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f"message {number} must be an object with 'role' and 'content'")
        for key in ("role", "content"):
            if key not in message:
                raise UserError(f"message {number} has no '{key}'")
            if not isinstance(message[key], str):
                raise UserError(f"message {number}: '{key}' must be text, not {message[key]!r}")


@functools.lru_cache(maxsize=4)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _MessagesRefused(jinja2.TemplateError):
    """Raised by a template that calls `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _MessagesRefused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
