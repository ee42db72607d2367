"""Reading a trace back, line by line, and telling what is wrong with it and where.

A run that was killed leaves a trace without a footer, and perhaps half of its last line: such a
trace is read as far as it goes. Whatever else is not as `entropix_jax.trace` writes it is refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.names import TRACE_FORMAT
from entropix_jax.report.shapes import Each, JsonLines, Line, Maybe, check_regimes

_METRICS = """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
    attn_varentropy agreement agreement_published interaction_strength confidence temperature top_p
    min_p""".split()
_HEADER = {
    "format_version": int,
    "model": str,
    "sampler": str,
    "sampler_parameters": dict,
    "versions": dict,
    "prompt": str,
    "prompt_tokens": list,
}
_TOKEN = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(_METRICS, float),
    "loop": bool,
    "top?": [(int, str, float)],
    "branches?": [{"tokens": list, "text": str, "chosen": bool, "score?": Maybe(float)}],
    "layers?": [[float]],
}
_ROW = {
    "row": int,
    "text": str,
    "tokens": int,
    "forwards": int,
    **dict.fromkeys(("finish_reason?", "error?"), Maybe(str)),
}
_FOOTER = {"rows": [_ROW], "timings": Each(float)}


@dataclass
class TraceReader(JsonLines):
    """Iterates over the lines of a trace, of which it keeps none.

    Once it is through, `header` and `footer` are the trace's own, and `tokens` and `retracted` the
    numbers of tokens of each row that were committed and taken back. `footer` is None where the run
    was killed.
    """

    header: dict[str, Any] = field(default_factory=dict)
    footer: dict[str, Any] | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    retracted: dict[int, int] = field(default_factory=dict)
    _due: dict[int, int] = field(default_factory=dict)  # the position of each row's next token

    def __iter__(self) -> Iterator[Line]:
        """The whole lines, in order, each looked at.

        Raises:
            UserError: the file is missing, unreadable, empty, not a trace, or damaged: one line
                that names the file and the line in it.
        """
        for line in super().__iter__():
            self._take(line.record)
            yield line
        if not self._number:
            raise UserError(f"{self.path}: empty: not a trace")
        if not self.header:
            self._refuse("cut off within the header: nothing of the run is left")

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.get("type")
        if not self.header:
            if kind != "header":
                self._refuse("not a trace: it does not begin with a header")
            self._take_header(record)
        elif self.footer is not None:
            self._refuse("something follows the footer")
        elif kind in ("token", "retracted"):
            self._take_token(record)
        elif kind == "footer":
            self._take_footer(record)
        else:
            self._refuse(f"no line of a trace has the type {json.dumps(kind)}")

    def _take_header(self, record: dict[str, Any]) -> None:
        version = record.get("format_version")
        if isinstance(version, int) and version != TRACE_FORMAT:
            self._refuse(f"a trace of format {version}, this version reads {TRACE_FORMAT}")
        self._check(record, _HEADER)
        self.header = record

    def _take_token(self, record: dict[str, Any]) -> None:
        if "context" in record and "row" not in record:
            self._refuse("a token of inspect, which generates nothing: a page is made of a run")
        self._check(record, _TOKEN)
        check_regimes([record["regime"]], self._where)
        row, position = record["row"], record["position"]
        due = self._due.setdefault(row, position)
        if position != due:
            self._refuse(
                f"position {position} of row {row}, where {due} was due: lines are missing"
            )
        counts = self.retracted if record["type"] == "retracted" else self.tokens
        counts[row] = counts.get(row, 0) + 1
        if record["type"] == "token":
            self._due[row] = position + 1

    def _take_footer(self, record: dict[str, Any]) -> None:
        self._check(record, _FOOTER)
        for row in record["rows"]:
            found = self.tokens.get(row["row"], 0)
            if row["tokens"] != found:
                self._refuse(
                    f"the footer counts {row['tokens']} tokens of row {row['row']}, "
                    f"the file holds {found}"
                )
        self.footer = record
