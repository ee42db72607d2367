"""Reads a trace line by line.

A killed run leaves a trace without a footer, and perhaps a truncated last line. Such a trace is
read up to there.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening
from entropix_jax.host.shapes import fits
from entropix_jax.names import REGIMES, TRACE_FORMAT

# In bytes; far more than a token of a model with thousands of heads takes.
LONGEST_LINE = 64 * 2**20

METRICS = """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
    attn_varentropy agreement agreement_published interaction_strength confidence temperature top_p
    min_p""".split()
_TABLES = "entropy", "varentropy", "attn_entropy_norm", "agreement"

# Why a row ended, in words. Reasons that are not listed are shown as they are.
ENDS = {
    "eos": "end of text",
    "length": "token limit",
    "confidence": "low confidence",
    "question": "question to the user",
    "context": "context limit",
    "stop": "stop string",
    "interrupt": "stopped",
    "cancelled": "stopped",
}
_TOKEN = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(METRICS, float),
    "loop": bool,
    **dict.fromkeys(("token_confidence?", "self_certainty?", "max_prob?", "p_wrong?"), float),
    "top?": [(int, str, float)],
    "branches?": [{"tokens": list, "text": str, "chosen": bool, "score?": float}],
    "layers?": [[float]],
    "intents?": float,
    "layers_varentropy?": [[float]],
    "attention?": [{"layer": int, "head": int, "to": [(int, str, float)]}],
    "chosen?": bool,
}
_ROW = {
    **dict.fromkeys(("row", "tokens", "forwards"), int),
    **dict.fromkeys(("text", "finish_reason?", "error?"), str),
}
# The shape of each type of line, see `host.shapes`.
SHAPES: dict[str, dict[str, Any]] = {
    "header": {
        "format_version": int,
        **dict.fromkeys(("model", "sampler", "prompt"), str),
        **dict.fromkeys(("sampler_parameters", "versions", "percentiles?"), dict),
        "prompt_tokens": list,
        "messages?": [{"role": str, "content": str}],
        "calibration?": {"model": dict, "quantiles": dict.fromkeys(_TABLES, (float,) * 101)},
    },
    "token": _TOKEN,
    "retracted": _TOKEN,
    "footer": {"rows": [_ROW], "timings": dict},
}


@dataclass
class TraceReader:
    """Iterates over the lines of a trace without keeping them.

    After the iteration `header` and `footer` are the trace's own (`footer` is None if the run was
    killed), `tokens` and `retracted` count each row's committed and retracted tokens, and `torn`
    says whether the last line was truncated.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    footer: dict[str, Any] | None = None
    tokens: Counter[int] = field(default_factory=Counter)
    retracted: Counter[int] = field(default_factory=Counter)
    torn: bool = False
    _line: int = 0

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yields the bytes and the parsed object of each complete line. UserError, which names the
        file and the line, if this is no trace."""
        with opening(self.path) as file:
            while raw := file.readline(LONGEST_LINE).removeprefix(b"\xef\xbb\xbf"):
                self._line += 1
                if len(raw) == LONGEST_LINE:
                    self._refuse("the line is too long")
                try:
                    record = json.loads(raw.decode(), parse_constant=self._refuse_constant)
                except (ValueError, RecursionError) as error:
                    self.torn = raw.startswith(b"{") and not raw.endswith(b"\n")
                    if self.torn:
                        break
                    is_utf8 = not isinstance(error, UnicodeDecodeError)
                    self._refuse("not JSON: not a trace" if is_utf8 else "not UTF-8")
                self._read(record)
                yield raw, record
        if not self._line:
            raise UserError(f"{self.path}: empty: not a trace")
        if not self.header:
            self._refuse("truncated within the header")

    def _read(self, record: Any) -> None:
        """Keeps the header and the footer, and counts tokens. UserError for another line."""
        kind = record.get("type") if isinstance(record, dict) else None
        if not self.header and kind != "header":
            if isinstance(record, dict) and {"id", "line", "digest"} <= record.keys():
                hint = "run batch with --trace DIR and give one of its traces"
                self._refuse(f"a batch's output has no page: {hint}")
            self._refuse("not a trace: the first line must be a header")
        if self.footer is not None:
            self._refuse("data after the footer")
        shapes = SHAPES.get(kind) if isinstance(kind, str) else None
        if shapes is None or (kind == "header") == bool(self.header):
            self._refuse(f"unknown line type {json.dumps(kind)}")
        if "context" in record and "row" not in record:
            self._refuse("a trace of inspect, which generates nothing, has no page")
        version = record.get("format_version", TRACE_FORMAT)
        if isinstance(version, int) and version != TRACE_FORMAT:
            self._refuse(f"trace format {version}; this version reads {TRACE_FORMAT}")
        for key, shape in shapes.items():
            if not fits(record, {key: shape}):
                name = key.removesuffix("?")
                self._refuse(f"'{name}' is {'malformed' if name in record else 'missing'}")
        if kind == "header":
            self.header = record
        elif kind == "footer":
            self.footer = record
        elif record["regime"] not in REGIMES:
            self._refuse(f"unknown regime {json.dumps(record['regime'])}")
        else:
            (self.tokens if kind == "token" else self.retracted)[record["row"]] += 1

    def _refuse_constant(self, name: str) -> NoReturn:
        self._refuse(f"{name} is not a number")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: line {self._line}: {problem}")
