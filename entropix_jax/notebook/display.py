"""Rows as a piece of a notebook: each token in its regime's colour and line, its metrics as a hint.

It carries its own style, takes text colour and background from the notebook, and is bounded in
size.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any, Protocol

import jinja2

from entropix_jax.commandline import printable
from entropix_jax.names import MEANINGS, REGIMES
from entropix_jax.templating import page_template
from entropix_jax.trace import TokenRecord

MOST_TOKENS = 2000  # of all rows together: half a megabyte or so
_MOST_ROWS = 50
_PROMPT = 500  # characters of its end
_FUTURE = 60  # characters of a branch in a hint

# Where notebooks say that they are dark: Jupyter, VS Code, Colab.
_DARK = ('[data-jp-theme-light="false"]', ".vscode-dark", 'html[theme="dark"]')
_COLOUR = re.compile(rf"--(?:{'|'.join(REGIMES)})(?:-fill)?: [^;]+;")
_MARKS = {
    "token injected": ("thought", "injected by the sampler"),
    "token branched": ("branch", "the best of several futures"),
    "token retracted": ("word", "taken back"),
    "token loop": ("word", "in a loop"),
}


class Shown(Protocol):
    """What is shown of a row."""

    tokens: list[TokenRecord]
    taken_back: list[TokenRecord]
    finish_reason: str | None
    error: str | None

    def history(self) -> Iterator[tuple[TokenRecord, bool]]: ...


def html(rows: Sequence[Shown], prompt: str | None = None) -> str:
    """Some rows as HTML, their first `MOST_TOKENS` tokens in all; with the prompt, if it is given,
    before each. All text is escaped."""
    shown, budget, marks = [], MOST_TOKENS, set()
    for number, row in enumerate(rows[:_MOST_ROWS], 1):
        if number > 1 and not budget:
            break
        items = list(_items(row, budget))
        marks |= {mark for item in items for mark in _MARKS if mark.split()[1] in item["classes"]}
        shown.append(
            {
                "title": _title(row, f"{number} of {len(rows)}" if len(rows) > 1 else ""),
                "error": None if row.error is None else printable(row.error),
                "tokens": items,
                "left": len(row.tokens) + len(row.taken_back) - len(items),
            }
        )
        budget -= len(items)
    return _template().render(
        style=style(),
        rows=shown,
        rows_left=len(rows) - len(shown),
        prompt=_cut_prompt(prompt),
        regimes=_shares([token for row in rows for token in row.tokens]),
        marks=[
            {"classes": classes, "name": name, "meaning": meaning}
            for classes, (name, meaning) in _MARKS.items()
            if classes in marks
        ],
    )


@functools.cache
def style() -> str:
    """The style sheet. The regimes' colours and lines are those of the pages."""
    static = files("entropix_jax.report") / "static"
    page, tokens = ((static / name).read_text("utf-8") for name in ("page.css", "tokens.css"))
    light, dark = (" ".join(_COLOUR.findall(part)) for part in page.split(":root {")[1:3])
    rules = [
        ", ".join(f".entropix-jax {selector}" for selector in head.split(", ")) + "{" + body
        for head, _, body in (rule.partition("{") for rule in tokens.splitlines()[1:])
    ]
    themes = ", ".join(f"{theme} .entropix-jax" for theme in _DARK)
    own = (files("entropix_jax.notebook") / "rows.css").read_text("utf-8")
    return "\n".join([f".entropix-jax {{ {light} }}", f"{themes} {{ {dark} }}", *rules, own])


@functools.cache
def _template() -> jinja2.Template:
    return page_template("entropix_jax.notebook", "rows.html")


def _items(row: Shown, most: int) -> Iterator[dict[str, Any]]:
    """The first tokens as they came."""
    before = None
    for token, retracted in islice(row.history(), most):
        yield _item(token, before, retracted)
        before = token


def _item(token: TokenRecord, before: TokenRecord | None, retracted: bool) -> dict[str, Any]:
    classes = ["token"]
    if token.action == "inject":
        first = before is None or before.action != "inject"
        classes += ["injected", "inject-start"] if first else ["injected"]
    if token.action == "branch":
        classes += ["branched", "branch-start"] if token.branches is not None else ["branched"]
    classes += ["loop"] * token.loop + ["retracted"] * retracted + ["empty"] * (not token.text)
    return {
        "classes": " ".join(classes),
        "regime": token.regime,
        "title": _hint(token, retracted),
        "lines": printable(token.text).split("\n"),
        "sign": "" if token.text else f"⟨{token.token_id}⟩",
    }


def _hint(token: TokenRecord, retracted: bool) -> str:
    """All that is told of a token where the pointer rests on it."""
    lines = [
        f"{repr(printable(token.text))[1:-1]} · {token.regime} · {token.action}"
        + (" · taken back" if retracted else ""),
        f"entropy {token.entropy:.2f} bits, varentropy {token.varentropy:.2f} bits²",
        f"agreement {token.agreement:.2f}, attention {token.attn_entropy_norm:.2f}",
        f"p {math.exp(token.logprob):.3f}, temperature {token.temperature:.2f}",
        f"position {token.position}",
    ]
    for future in token.branches or ():
        text = repr(printable(future["text"]))[1:-1]
        text = text if len(text) <= _FUTURE else f"{text[:_FUTURE]}…"
        score = "no score" if future["score"] is None else f"{future['score']:.2f}"
        lines.append(f"{'→' if future['chosen'] else '  '} {score} {text}")
    return "\n".join(lines)


def _title(row: Shown, number: str) -> str:
    tokens = len(row.tokens)
    parts = [
        f"{tokens} token" if tokens == 1 else f"{tokens} tokens",
        row.finish_reason or "running",
        f"{len(row.taken_back)} taken back" if row.taken_back else "",
        f"{row.tokens[-1].forwards} forward passes" if tokens else "",
    ]
    return " · ".join(part for part in (number, *parts) if part)


def _shares(tokens: Sequence[TokenRecord]) -> list[dict[str, str]]:
    counts = Counter(token.regime for token in tokens)

    def mean(regime: str, name: str, unit: str) -> str:
        values = [getattr(token, name) for token in tokens if token.regime == regime]
        return f"{sum(values) / len(values):.2f} {unit}" if values else "–"

    return [
        {
            "name": regime,
            "meaning": MEANINGS[regime],
            "tokens": str(counts[regime]),
            "share": f"{counts[regime] / len(tokens):.0%}",
            "entropy": mean(regime, "entropy", "bits"),
            "varentropy": mean(regime, "varentropy", "bits²"),
        }
        for regime in (REGIMES if tokens else ())
    ]


def _cut_prompt(prompt: str | None) -> str | None:
    if prompt is None or len(prompt) <= _PROMPT:
        return prompt and printable(prompt)
    return f"…{printable(prompt[-_PROMPT:])}"
