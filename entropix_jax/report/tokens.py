"""How a token is drawn, on pages and in notebooks: its classes, text and marks.

`templates/tokens.html` makes HTML of it, `static/tokens.css` has colours and underlines.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import jinja2

from entropix_jax.errors import printable

STATIC = files("entropix_jax.report") / "static"

# Classes that mark a token besides its regime: an example, and what the mark means.
MARKS = {
    "injected": ("thought", "injected by the sampler"),
    "branched": ("branch", "the best of several continuations"),
    "retracted": ("word", "retracted, and drawn again"),
    "loop": ("word", "part of a repetition, caught by the loop guard"),
    "empty": ("⟨12⟩", "a token without text, by its id"),
}


def html_template(name: str) -> jinja2.Template:
    """The template `templates/{name}` of this package: it escapes whatever is inserted."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("entropix_jax.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def style(name: str) -> str:
    """The style sheet of tokens, whose rules apply inside an element of class `entropix-jax`, and
    another one."""
    return "".join((STATIC / f"{sheet}.css").read_text("utf-8") for sheet in ("tokens", name))


def draw(record: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the template needs to draw a token: a line of a trace, after the row's line before."""
    action, text = record["action"], record["text"]
    start = before is None or before["action"] != "inject"
    classes = {
        "injected": action == "inject",
        "inject-start": action == "inject" and start,
        "branched": action == "branch",
        "branch-start": action == "branch" and bool(record.get("branches")),
        "loop": record["loop"],
        "retracted": record["type"] == "retracted",
        "empty": not text,
    }
    return {
        "classes": " ".join(["token", *(name for name, present in classes.items() if present)]),
        "regime": record["regime"],
        "lines": (printable(text) or f"⟨{record['token_id']}⟩").split("\n"),
    }


def marks(drawn: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The marks on drawn tokens: class, example, meaning."""
    found = {name for token in drawn for name in token["classes"].split()}
    return [(name, *mark) for name, mark in MARKS.items() if name in found]
