"""The process that renders chat templates. See `entropix_jax.chat_template`, which starts it.

A line of standard input is a request, and gets a line of standard output; both are JSON. It ends
with its input, and by a signal where a template takes longer than the request allows. (Where the
system has no such limits, as Windows, or does not keep that of memory, as macOS, the sandbox and
the length of the text are what bounds a template.)
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

if sys.platform != "win32":
    import resource

_LONGEST_ERROR = 500  # characters


def serve() -> None:
    """Answers requests until there are no more."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit(request["seconds"], request["bytes"])
        answer = _answer(request)
        _limit(0, request["bytes"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _limit(seconds: float, most: int) -> None:
    """Sets how long this process may go on, 0 for ever, and how large it may become, in bytes."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # a system that does not keep it
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
        # Of processor time, which no load on the machine uses up.
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    """The `text`, or what is wrong: an `error`."""
    try:
        return {"text": _text(_compiled(request["template"]), request)}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"chat template, line {error.lineno}: {_told(error)}"}
    except _Refused as error:
        return {"error": f"the chat template refuses the messages: {_told(error)}"}
    except MemoryError:
        most = request["bytes"] >> 20
        return {"error": f"the chat template fails: it takes more than {most} MiB of memory"}
    except Exception as error:  # whatever the stranger's program does
        return {"error": f"the chat template fails: {type(error).__name__}: {_told(error)}"}


def _text(template: jinja2.Template, request: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    left = request["characters"]
    for piece in template.generate(request["variables"]):
        left -= len(piece)
        if left < 0:
            raise _TooLong(f"it makes more than {request['characters']:,} characters")
        pieces.append(piece)
    return "".join(pieces)


class _TooLong(Exception):
    """A text that no model could read."""


class _Refused(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


def _told(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 3]}..."


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
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


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is what it encloses."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)
