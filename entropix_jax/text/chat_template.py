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
from typing import NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from entropix_jax.errors import UserError


def render_chat(
    template: str,
    messages: object,
    *,
    origin: str,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """Renders a conversation: a list of objects with at least the texts `role` and `content`.

    The Jinja source `template` is from the file `origin`; `special_tokens` (`bos_token` and the
    like) are its variables. With `add_generation_prompt` the text ends with the start of the
    assistant's answer. UserError if messages have another shape, or the template is wrong or
    refuses them.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a non-empty list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, start=1):
        parts = message if isinstance(message, dict) else {}
        if not all(isinstance(parts.get(key), str) for key in ("role", "content")):
            raise UserError(f"message {number} must be an object with texts 'role' and 'content'")
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


@functools.lru_cache(maxsize=4)
def _compile(template: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, ext.loopcontrols]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


class _GenerationBlock(ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _MessagesRefused(jinja2.TemplateError):
    """Raised by a template that calls `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _MessagesRefused(message)
