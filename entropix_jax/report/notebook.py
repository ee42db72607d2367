"""Rows as HTML for a notebook: each token in its regime's style, with its metrics as a tooltip.

The HTML has its own style, follows the notebook's light or dark theme, and is bounded in size.
"""

import math
from collections.abc import Sequence
from typing import Any

from entropix_jax.errors import printable
from entropix_jax.names import MEANINGS, REGIMES
from entropix_jax.report.tokens import draw, html_template, marks, style

MAX_TOKENS = 2000  # of all rows together: about half a megabyte
_MAX_ROWS = 50
_PROMPT = 500  # characters of its end
_BRANCH = 60  # characters of a branch in a tooltip


def html(rows: Sequence[Any], prompt: str | None = None) -> str:
    """Rows (`engine.results.Row`, in a higher layer) as HTML, up to `MAX_TOKENS` tokens in all,
    each row after the prompt if it is given."""
    shown: list[dict[str, Any]] = []
    all_drawn: list[dict[str, Any]] = []
    for number, row in enumerate(rows[:_MAX_ROWS], 1):
        if number > 1 and len(all_drawn) == MAX_TOKENS:
            break
        log = row.log[: MAX_TOKENS - len(all_drawn)]
        records = [token.to_json(retracted=retracted) for token, retracted in log]
        drawn: list[dict[str, Any]] = []
        for record in records:
            drawn.append({**draw(record, drawn), "hint": _hint(record)})
        all_drawn += drawn
        shown.append(
            {
                "title": _title(row, f"{number} of {len(rows)}" if len(rows) > 1 else ""),
                "error": None if row.error is None else printable(row.error),
                "tokens": drawn,
                "omitted": len(row.tokens) + len(row.retracted_tokens) - len(drawn),
            }
        )
    return html_template("rows.html").render(
        style=style("rows"),
        rows=shown,
        rows_omitted=len(rows) - len(shown),
        prompt=prompt and "…" * (len(prompt) > _PROMPT) + printable(prompt[-_PROMPT:]),
        regimes=_shares([token for row in rows for token in row.tokens]),
        marks=marks(all_drawn),
    )


def _hint(record: dict[str, Any]) -> str:
    """A token's tooltip."""
    retracted = ["retracted"] if record["type"] == "retracted" else []
    regime = f"{MEANINGS[record['regime']]} ({record['regime'].upper()})"
    parts = [_quoted(record["text"]), regime, record["action"], *retracted]
    lines = [
        " · ".join(parts),
        "entropy {entropy:.2f} bits, varentropy {varentropy:.2f} bits²".format_map(record),
        "agreement {agreement:.2f}, attention {attn_entropy_norm:.2f}".format_map(record),
        f"p {math.exp(record['logprob']):.3f}, temperature {record['temperature']:.2f}",
        f"position {record['position']}",
    ]
    for branch in record.get("branches", ()):
        text = _quoted(branch["text"])
        text = text[:_BRANCH] + "…" * (len(text) > _BRANCH)
        score = "no score" if branch["score"] is None else f"{branch['score']:.2f}"
        lines.append(f"{'→' if branch['chosen'] else '  '} {score} {text}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return repr(printable(text))[1:-1]


def _title(row: Any, number: str) -> str:
    count = len(row.tokens)
    parts = [
        number,
        f"{count} token" if count == 1 else f"{count} tokens",
        row.finish_reason or "running",
        f"{len(row.retracted_tokens)} retracted" if row.retracted_tokens else "",
        f"{row.tokens[-1].to_json()['forwards']} forward passes" if count else "",
    ]
    return " · ".join(filter(None, parts))


def _shares(tokens: Sequence[Any]) -> list[dict[str, str]]:
    shares = []
    for regime in REGIMES if tokens else ():
        own = [token for token in tokens if token.regime == regime]
        share = {"name": regime, "meaning": MEANINGS[regime], "tokens": str(len(own))}
        share["share"] = f"{len(own) / len(tokens):.0%}"
        for name, unit in (("entropy", "bits"), ("varentropy", "bits²")):
            mean = sum(getattr(token, name) for token in own) / max(len(own), 1)
            share[name] = f"{mean:.2f} {unit}" if own else "–"
        shares.append(share)
    return shares
