"""How a token is drawn, on pages and in notebooks: its classes, text and marks.

`templates/tokens.html` makes HTML of it, `static/tokens.css` has colours and underlines.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2

from entropix_jax.errors import printable

STATIC = files("entropix_jax.report") / "static"

# Classes that mark a token besides its regime: an example, and the meaning of the mark.
MARKS = {
    "injected": ("thought", "injected by the sampler"),
    "branched": ("fork", "the best of several continuations"),
    "lookup": ("result", "looked up"),
    "clarify": ("question", "asked by the sampler"),
    "retracted": ("word", "step back: retracted, and sampled again"),
    "loop": ("word", "part of a repetition, found by the loop guard"),
    "chosen": ("word", "chosen by the reader"),
    "empty": ("⟨12⟩", "name or id of a token without text"),
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


def draw(record: Mapping[str, Any], drawn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the template's view of a token, a line of a trace, after the `drawn` ones of its row.
    A branch without a rival is no fork, nor are the tokens that follow in it."""
    text, branches = record["text"], record.get("branches")
    chosen, thought = bool(record.get("chosen")), _is_thought(record)
    marks_before = drawn[-1]["classes"].split() if drawn else []
    forked = len(branches) > 1 if branches else "branched" in marks_before
    asked = {name: record["action"] == name for name in ("lookup", "clarify")}
    classes = {
        "injected": thought,
        "inject-start": thought and "injected" not in marks_before,
        "branched": record["action"] == "branch" and forked,
        "branch-start": record["action"] == "branch" and len(branches or ()) > 1,
        **asked,
        **{f"{name}-start": asked[name] and name not in marks_before for name in asked},
        "loop": record["loop"],
        "retracted": record["type"] == "retracted",
        "chosen": chosen,
        "empty": not text,
    }
    return {
        "classes": " ".join(["token", *(name for name, present in classes.items() if present)]),
        "regime": record["regime"],
        "spaced": text.startswith(" ") and not text.isspace(),
        "lines": (printable(text) or name_of(record)).split("\n"),
    }


def _is_thought(record: Mapping[str, Any]) -> bool:
    """Whether the sampler injected a token."""
    return bool(record["action"] == "inject" and not record.get("chosen"))


def name_of(record: Mapping[str, Any]) -> str:
    """Returns the name of a token without text, such as `<|im_end|>`, or its id in brackets. Only
    the recorded most likely tokens have names, and a part of a character has none."""
    number = record["token_id"]
    names = (name for other, name, *_ in record.get("top") or () if other == number)
    name = printable(next(names, ""))
    return name if name and "\ufffd" not in name else f"⟨{number}⟩"


def marks(drawn: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Returns the marks on drawn tokens: class, example, meaning."""
    found = {name for token in drawn for name in token["classes"].split()}
    return [(name, *mark) for name, mark in MARKS.items() if name in found]
