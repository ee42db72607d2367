"""The page of one run: one self-contained HTML file.

The text is HTML, drawn as in a notebook, and readable without scripts. The scripts in `static/` add
details, plots and filters from the trace that the page carries. Payloads are base64 and scripts are
this package's, so no text of a model or prompt can break out.
"""

import base64
import hashlib
import importlib.util
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.files import check_apart, check_regular, check_writable, replacing
from entropix_jax.names import BOXES, MEANINGS, THRESHOLDS, read_condition
from entropix_jax.report.reading import ENDS, TraceReader
from entropix_jax.report.tokens import STATIC, draw, html_template, marks, style
from entropix_jax.version import __version__

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)
_SHOWN = ("model", "sampler", "seed", "backend", "versions", "prompt", "messages")  # of a header


def check_report(output: Path, *inputs: Path | str | None) -> None:
    """Checks, before anything is computed, that a page can be written, over none of `inputs`."""
    check_writable(output)
    # The page replaces the file, so the folder must be writable.
    check_regular(output)
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"{output}: cannot be written: no permission in {output.parent}")
    check_apart(output, *inputs)
    plotly_source()


def write_report(trace: Path, output: Path) -> None:
    """Writes the page of one run, atomically."""
    page = run_page(trace)
    with replacing(output) as scratch:
        # The name of a model's folder may not be UTF-8.
        scratch.write_bytes(page.encode("utf-8", "replace"))


def run_page(trace: Path) -> str:
    """The page of one run. The same trace gives the same page."""
    reader = _Reader(trace)
    payload = pack(reader.lines())
    plotly, own = plotly_source(), script()
    return html_template("page.html").render(
        trace=reader.facts(),
        texts=reader.rows,
        marks=marks(token for row in reader.rows.values() for token in row),
        meanings=MEANINGS,
        version=__version__,
        style=style("page"),
        script=own,
        script_digests=f"{digest(own.encode())} {digest(plotly)}",
        payload=payload,
        plotly=pack([plotly]),
    )


@dataclass
class _Reader(TraceReader):
    """Reads a trace and collects its rows' tokens as the page draws them."""

    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def lines(self) -> Iterator[bytes]:
        """Draws the tokens, and yields the lines."""
        for raw, record in self:
            if record["type"] in ("token", "retracted"):
                drawn = self.rows.setdefault(record["row"], [])
                drawn.append(draw(record, drawn))
            yield raw

    def facts(self) -> dict[str, Any]:
        """Facts of the run for the page, known after all lines have been read."""
        header, footer = self.header, self.footer
        parameters = header["sampler_parameters"]
        ends: dict[int, dict[str, Any]] = {row: {} for row in self.rows}
        ends |= {row["row"]: row for row in footer["rows"]} if footer else {}
        rows = [
            {
                "row": row,
                "tokens": self.tokens[row],
                "retracted": self.retracted[row],
                "ended": ENDS.get(reason := end.get("finish_reason") or "interrupt", reason),
                "error": end.get("error"),
                "forwards": end.get("forwards"),
            }
            for row, end in sorted(ends.items())
        ]
        return {
            "name": self.path.name,
            **{k: header.get(k) for k in _SHOWN},
            "prompt_tokens": len(header["prompt_tokens"]),
            "complete": footer is not None,
            "torn": self.torn,
            "rows": rows,
            "parameters": parameters,
            "percentiles": header.get("percentiles") or {},
            "calibration": header.get("calibration"),
            **regime_rule(parameters, f"{self.path}: line 1"),
        }


def regime_rule(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """How a sampler of these parameters classifies tokens: its boxes in order, and its thresholds.
    UserError, which begins with `where`, if a box has no such rule."""
    return {
        "boxes": [
            {"regime": box, "conditions": _conditions(parameters, box, where)} for box in BOXES
        ],
        "thresholds": {name: parameters.get(f"thresholds.{name}") for name in THRESHOLDS},
    }


def _conditions(parameters: Mapping[str, Any], box: str, where: str) -> list[dict[str, Any]]:
    """A regime's conditions: quantity, sign, and the bound's name or value."""
    texts = parameters.get(f"regimes.{box}")
    if not isinstance(texts, list | tuple):
        raise UserError(f"{where}: the sampler's parameters lack 'regimes.{box}'")
    found = []
    for text in texts:
        try:
            quantity, sign, bound = read_condition(str(text))
        except ValueError as error:
            raise UserError(f"{where}: regimes.{box}: {text!r}: {error}") from None
        if isinstance(bound, str):
            value = parameters.get(f"thresholds.{bound}")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"{where}: regimes.{box}: 'thresholds.{bound}' is missing")
        key = "name" if isinstance(bound, str) else "value"
        found.append({"quantity": quantity, "sign": sign, key: bound})
    return found


def pack(chunks: Iterable[bytes]) -> str:
    """Bytes as base64 of a zlib stream, which a browser's DecompressionStream reads."""
    compressor = zlib.compressobj(6)  # level 9 saves another per cent, slowly
    parts = [compressor.compress(chunk) for chunk in chunks]
    return base64.b64encode(b"".join([*parts, compressor.flush()])).decode()


def plotly_source() -> bytes:
    """plotly.js, from the installed Python package."""
    # Without importing the Python half, which is slow.
    spec = importlib.util.find_spec("plotly")
    if spec is None or spec.origin is None:
        raise UserError("the package plotly is not installed: pip install 'plotly>=6'")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def script() -> str:
    """The modules of `static/` as one script, in dependency order.

    A page opened from disk cannot import, so imports and exports are removed: top-level names must
    be unique across modules.
    """
    names = sorted(path.name for path in STATIC.iterdir() if path.name.endswith(".js"))
    sources = {name: (STATIC / name).read_text("utf-8") for name in names}
    order = TopologicalSorter({name: _IMPORT.findall(text) for name, text in sources.items()})
    texts = {name: _EXPORT.sub("", _IMPORT.sub("", sources[name])) for name in order.static_order()}
    return "".join(f"\n\n// {name}\n\n{text.strip()}" for name, text in texts.items()) + "\n"


def digest(source: bytes) -> str:
    """A script's hash as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}'"
