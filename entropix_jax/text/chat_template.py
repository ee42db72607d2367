"""Chat templates: a conversation rendered by the Jinja template that comes with a checkpoint.

The environment is the one that templates are written for, that of
`transformers.PreTrainedTokenizerBase.apply_chat_template`. Jinja's immutable sandbox keeps a
template from reaching out, and products and powers are short. Time and memory are not bounded
otherwise.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from entropix_jax.errors import UserError

_LONGEST = 1_000_000  # of a product in a template
_TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts; the last two are Responses'


def render(template: str, variables: Mapping[str, Any], origin: str) -> str:
    """Renders a conversation with a template from the file `origin`. UserError if the template is
    wrong or refuses the messages."""
    try:
        return _compile(template).render(variables)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{origin}: chat template, line {error.lineno}: {error}") from None
    except _MessagesRefused as error:
        raise UserError(f"{origin}: the chat template refuses the messages: {error}") from None
    except Exception as error:  # whatever the template's own code raises
        problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{origin}: the chat template fails: {problem}") from None


def plain_messages(messages: object) -> list[dict[str, Any]]:
    """Returns a conversation with each message's content as one text.

    Messages are objects with a `role` and a `content`: a text, a list of parts such as
    `{"type": "text", "text": "Hi"}`, or nothing where the assistant called a tool. Other keys are
    the template's. UserError if a message has another shape; it is counted from 1.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a non-empty list of objects with 'role' and 'content'")
    return [_plain_message(message, number) for number, message in enumerate(messages, start=1)]


def _plain_message(message: object, number: int) -> dict[str, Any]:
    parts = message if isinstance(message, dict) else {}
    role, content = parts.get("role"), parts.get("content")
    role = "system" if role == "developer" else role  # as in OpenAI's API
    content = "" if content is None and role == "assistant" else content
    if isinstance(content, list):
        kinds = (p.get("type", "text") if isinstance(p, dict) else p for p in content)
        if other := [kind for kind in kinds if kind not in _TEXT_PARTS]:
            problem = f"has a part of type {other[0]!r}: only 'text' is supported"
            raise UserError(f"message {number} {problem}")
        content = [part.get("text") for part in content]
        if all(isinstance(text, str) for text in content):
            content = "".join(content)
    if not isinstance(role, str) or not isinstance(content, str):
        problem = "must be an object with a text 'role' and a 'content', a text or text parts"
        raise UserError(f"message {number} {problem}")
    return {**parts, "role": role, "content": content}


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox. It also refuses products and powers that take much memory, which Jinja would
    compute while it compiles a template."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        pairs = ((left, right), (right, left)) if operator == "*" else ((left, right),)
        for one, times in pairs:
            size = len(one) if isinstance(one, str | list | tuple) else 0
            if operator == "**" and isinstance(one, int):
                size = one.bit_length()
            if isinstance(times, int) and size * times > _LONGEST:
                raise OverflowError(f"the result of '{operator}' is too long")
        return super().call_binop(context, operator, left, right)


@functools.lru_cache(maxsize=4)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
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
