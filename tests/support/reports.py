"""Artificial traces, and parsers of pages."""

from __future__ import annotations

import base64
import json
import random
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from entropix_jax.names import REGIMES, TRACE_FORMAT
from entropix_jax.report import page, reading
from entropix_jax.sampler.presets import load_sampler
from tests.support.samplers import CALIBRATION
from tests.support.traces import Trace, record

Json = dict[str, Any]
NASTY = "<script>alert('1')</script>\"'&\u2028\u2029\x1b[31m</style>\n]]>{{ 7 * 7 }}\u202e🙂"
SAMPLER = load_sampler("entropix").resolve(CALIBRATION)
CONFIDENCES = ("token_confidence", "self_certainty")
STATIC = Path(page.__file__).parent / "static"


def header(**changes: Any) -> Json:
    return {
        "type": "header",
        "format_version": TRACE_FORMAT,
        "model": "weights/tiny",
        "seed": 0,
        "sampler": "entropix",
        "sampler_parameters": dict(SAMPLER.values),
        "percentiles": dict(SAMPLER.percentiles),
        "calibration": replace(CALIBRATION, at_entropy=None).to_json(),
        "versions": {"entropix_jax": "0.1.0", "jax": "0.10.2"},
        "backend": "cpu",
        "prompt": "Once",
        "prompt_tokens": [1, 2, 3],
        **changes,
    }


def token(position: int, *, retracted: bool = False, **changes: Any) -> Json:
    """Returns a token whose numbers differ from those of all other positions."""
    draw = random.Random(position * 2 + retracted)
    fields: Json = {
        **{name: round(draw.uniform(0.0, 6.0), 6) for name in (*reading.METRICS, *CONFIDENCES)},
        "position": position,
        "forwards": position,
        "text": f" word{position}",
        "token_id": draw.randrange(1000),
        "regime": "mid",
        "action": "sample",
        "top": [(7, " word", 0.5), (8, NASTY, 0.25)],
        "layers": [[0.5, 1.5], [0.25, 2.0]],
        "top_k": 27,
        "loop": False,
    }
    branches = {"branches": changes.pop("branches")} if "branches" in changes else {}
    return record(**fields | changes).to_json(retracted=retracted) | branches


def branching(position: int, **changes: Any) -> Json:
    branches = [
        {"tokens": [5, 6], "text": " to be", "score": -0.5, "chosen": True},
        {"tokens": [7], "text": NASTY, "score": None, "chosen": False},
    ]
    fields: Json = {"action": "branch", "branches": branches, "ambiguous": True}
    return token(position, regime="lehv", **(fields | changes))


def footer(records: list[Json], **changes: Any) -> Json:
    rows: dict[int, list[Json]] = {}
    for one in records:
        rows.setdefault(one["row"], []).extend([one] * (one["type"] == "token"))
    ended = [
        {
            "row": row,
            "text": "".join(one["text"] for one in tokens),
            "tokens": len(tokens),
            "finish_reason": "length",
            "retracted": 0,
            "forwards": 99,
        }
        for row, tokens in sorted(rows.items())
    ]
    timings = {"first_token": 1.0, "total": 3.0}
    return {"type": "footer", "rows": ended, "timings": timings} | changes


def run_of(count: int = 12, row: int = 0) -> list[Json]:
    """Returns tokens of one row, with all kinds of records."""
    records = [token(3 + i, row=row, regime=REGIMES[i % 5]) for i in range(count)]
    records[2] = branching(5, row=row)
    records[3] |= {"action": "branch", "regime": "lelv"}
    records[4] |= {"action": "inject"}
    records[5] |= {"action": "inject", "chosen": True}
    records[6] |= {"loop": True, "regime": "lehv"}
    records[7] |= {"text": NASTY}
    records.insert(8, token(11, retracted=True, row=row, regime="hehv"))
    return records


def lines_of(records: list[Json]) -> list[str]:
    return [json.dumps(record, ensure_ascii=False) + "\n" for record in records]


def write(path: Path, *records: Json) -> Path:
    path.write_text("".join(lines_of(list(records))), encoding="utf-8")
    return path


class Parsed(HTMLParser):
    """The elements of a page, and the text of each script by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("id") or "own"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def unpacked(text: str, name: str) -> bytes:
    return zlib.decompress(base64.b64decode(Parsed(text).scripts[name]))


SERIES = ("entropy", "varentropy", "agreement", "temperature")


def committed(trace: Trace) -> list[dict[str, Any]]:
    return [record for record in trace.tokens if record["type"] == "token"]
