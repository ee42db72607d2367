"""Complete traces in memory."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.engine.trace import TokenRecord
from entropix_jax.report.reading import TraceReader


@dataclass(frozen=True)
class Trace:
    """The header of a trace, its tokens in order (retracted ones have the type "retracted"), and
    its footer, None if the run was killed."""

    header: dict[str, Any]
    tokens: list[dict[str, Any]]
    footer: dict[str, Any] | None
    torn: bool


def load_trace(path: Path) -> Trace:
    reader = TraceReader(path)
    records = [record for _, record in reader]
    tokens = [record for record in records if record["type"] in ("token", "retracted")]
    return Trace(reader.header, tokens, reader.footer, reader.torn)


Json = dict[str, Any]
OPTIONAL = {"top", "branches", "layers", "layers_varentropy", "attention", "ambiguous", "chosen"}
OPTIONAL |= {"p_wrong"}


def record(**changes: object) -> TokenRecord:
    fields = dict.fromkeys((field.name for field in dataclasses.fields(TokenRecord)), 0)
    return TokenRecord(**{**fields, **dict.fromkeys(OPTIONAL), **changes})  # type: ignore[arg-type]


def token(regime: str, action: str = "sample") -> TokenRecord:
    return record(regime=regime, action=action)


def read_trace(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
