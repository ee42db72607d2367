"""Traces read back whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.report.reading import TraceReader


@dataclass(frozen=True)
class Trace:
    """Its header, its tokens in order (those that were taken back have the type "retracted"), and
    its footer, None where the run was killed."""

    header: dict[str, Any]
    tokens: list[dict[str, Any]]
    footer: dict[str, Any] | None
    torn: bool


def load_trace(path: Path) -> Trace:
    reader = TraceReader(path)
    records = [line.record for line in reader]
    tokens = [record for record in records if record["type"] in ("token", "retracted")]
    return Trace(reader.header, tokens, reader.footer, reader.torn)
