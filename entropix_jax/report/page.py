"""Pages: a template, the data it carries, and the scripts that show it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.files import check_apart, check_writable, replacing
from entropix_jax.names import BOXES, THRESHOLDS, read_condition
from entropix_jax.report.embedding import digest, packed, plotly_source, script, style
from entropix_jax.report.reading import TraceReader
from entropix_jax.templating import page_template
from entropix_jax.version import __version__

_ENDS = {
    "eos": "an end token",
    "length": "the token limit",
    "context": "the model's context",
    "stop": "a stop text",
    "error": "an error",
    "interrupt": "an interrupt",
}
_STYLES = {
    "run": ["tokens", "page"],
    "compare": ["tokens", "page", "compare"],
    "batch": ["page", "tables"],
    "study": ["page", "compare", "tables"],
}


def check_report(output: Path, *inputs: Path | str | None) -> None:
    """Refuses, before anything is computed, a page that could not be written.

    Args:
        inputs: what the page is made of, whose place it must not take.

    Raises:
        UserError: it is so.
    """
    check_writable(output)
    # A page takes the place of what was there, so it is the folder that must let it.
    if output.exists() and not output.is_file():
        raise UserError(f"{output}: cannot be written: not a regular file")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"{output}: cannot be written: no permission in {output.parent}")
    check_apart(output, *inputs)
    plotly_source()


def write_report(trace: Path, output: Path) -> None:
    """Writes the page of one run, whole or not at all.

    Raises:
        UserError: the trace is not one, or the page cannot be written.
    """
    write_page(run_page(trace), output)


def write_page(page: str, output: Path) -> None:
    """Writes a page, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with replacing(output) as scratch:
        # A model's folder may have a name that is not UTF-8.
        scratch.write_bytes(page.encode("utf-8", "replace"))


def run_page(trace: Path) -> str:
    """The page of one run as text. The same trace gives the same text.

    Raises:
        UserError: the trace is not one.
    """
    reader = TraceReader(trace)
    # Of the lines none is kept but in the packed form.
    payload = packed(_whole_lines(reader))
    facts = run_facts(reader, trace)
    return render("run", {"facts": facts}, {"trace": payload})


def _whole_lines(reader: TraceReader) -> Iterator[bytes]:
    for line in reader:
        yield line.raw


def run_facts(reader: TraceReader, trace: Path) -> dict[str, Any]:
    """What a page says of a run besides its tokens, from a trace that was read to its end."""
    header, footer = reader.header, reader.footer
    rows = {row["row"]: row for row in footer["rows"]} if footer else {}
    numbers = sorted({*reader.tokens, *reader.retracted, *rows})
    return {
        "name": trace.name,
        "model": header["model"],
        "sampler": header["sampler"],
        "seed": header.get("seed"),
        "backend": header.get("backend"),
        "versions": header["versions"],
        "prompt": header["prompt"],
        "prompt_tokens": len(header["prompt_tokens"]),
        "complete": footer is not None,
        "torn": reader.torn,
        "speed": _speed(reader),
        "seconds": footer["timings"].get("total") if footer else None,
        "rows": [
            {
                "row": number,
                "tokens": reader.tokens.get(number, 0),
                "retracted": reader.retracted.get(number, 0),
                "finish_reason": rows.get(number, {}).get("finish_reason"),
                "ended": ended(rows.get(number, {}).get("finish_reason")),
                "error": rows.get(number, {}).get("error"),
                "forwards": rows.get(number, {}).get("forwards"),
            }
            for number in numbers
        ],
        "parameters": header["sampler_parameters"],
        "boxes": _boxes(header["sampler_parameters"], trace),
        "thresholds": {
            name: header["sampler_parameters"].get(f"thresholds.{name}") for name in THRESHOLDS
        },
    }


def ended(reason: str | None) -> str:
    """What ended a text, in words."""
    return "interrupted" if reason is None else _ENDS.get(reason, reason)


def _speed(reader: TraceReader) -> float | None:
    """Tokens a second after the first step, which waits for the prompt and for the compiler."""
    if reader.footer is None:
        return None
    timings = reader.footer["timings"]
    tokens = sum(reader.tokens.values()) - len(reader.tokens)
    seconds = timings.get("total", 0.0) - timings.get("first_token", 0.0)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _boxes(parameters: dict[str, Any], trace: Path) -> dict[str, list[dict[str, Any]]]:
    """The conditions of each regime: quantity, sign, and the bound's name or number."""
    boxes: dict[str, list[dict[str, Any]]] = {}
    for box in BOXES:
        conditions = parameters.get(f"regimes.{box}")
        if not isinstance(conditions, list):
            raise UserError(f"{trace}: line 1: the sampler's parameters lack 'regimes.{box}'")
        boxes[box] = [_condition(text, parameters, box, trace) for text in conditions]
    return boxes


def _condition(text: Any, parameters: dict[str, Any], box: str, trace: Path) -> dict[str, Any]:
    problem = f"{trace}: line 1: regimes.{box}: {text!r}"
    try:
        quantity, sign, bound = read_condition(str(text))
    except ValueError as error:
        raise UserError(f"{problem}: {error}") from None
    if isinstance(bound, str):
        value = parameters.get(f"thresholds.{bound}")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UserError(f"{problem}: 'thresholds.{bound}' is missing")
        return {"quantity": quantity, "sign": sign, "name": bound}
    return {"quantity": quantity, "sign": sign, "value": bound}


def render(kind: str, values: dict[str, Any], payloads: dict[str, str]) -> str:
    """A page: `templates/{kind}.html`, `static/{kind}.js` with what it imports, and the style."""
    plotly, own = plotly_source(), script(kind)
    return page_template("entropix_jax.report", f"{kind}.html").render(
        **values,
        version=__version__,
        style=style(_STYLES[kind]),
        script=own,
        script_digests=f"{digest(own)} {digest(plotly)}",
        payloads={**payloads, "plotly": packed([plotly])},
    )
