"""What a page is to be made of, told by what is in it and not by how it is called."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.files import opening
from entropix_jax.report.page import run_page

_NONE = "not a trace, a batch's output or a study's folder"
_OF_A_STUDY = ("study.json", "findings.json")
_PEEKED = 2**20  # bytes of a first line: a record's own fields stand at its beginning


def page_of(inputs: Sequence[Path], *, compare: bool = False) -> str:
    """The page of a trace, of several traces, of a batch's output, or of a study's folder.

    Args:
        compare: put the texts of one trace side by side.

    Raises:
        UserError: an input is none of these, is damaged, or does not go with the others.
    """
    kinds = [_kind(path) for path in inputs]
    for kind, path in zip(kinds, inputs, strict=True):
        if kind != "trace" and (len(inputs) > 1 or compare):
            raise UserError(f"{path}: {_NAMES[kind]}: only traces can be put side by side")
    if len(inputs) > 1 or compare:
        from entropix_jax.report.comparing import comparison_page

        return comparison_page(inputs)
    if kinds[0] == "batch":
        from entropix_jax.report.records import batch_page

        return batch_page(inputs[0])
    if kinds[0] == "study":
        from entropix_jax.report.study import study_page

        return study_page(inputs[0] if inputs[0].is_dir() else inputs[0].parent)
    return run_page(inputs[0])


_NAMES = {"trace": "a trace", "batch": "a batch's output", "study": "a study"}


def _kind(path: Path) -> str:
    """ "trace", "batch" or "study"."""
    if path.is_dir():
        return "study"
    first = _first_line(path)
    record = _object(first)
    # Half a line is for its reader to refuse.
    if first.startswith(b'{"type"') if record is None else "type" in record:
        return "trace"
    if first.startswith(b'{"id"') if record is None else {"id", "line", "digest"} <= record.keys():
        return "batch"
    if path.name in _OF_A_STUDY:
        return "study"
    raise UserError(f"{path}: line 1: {'not JSON: ' if record is None else ''}{_NONE}")


def _first_line(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file: save it in one")
    with opening(path) as file:
        first = file.readline(_PEEKED)
    if not first:
        raise UserError(f"{path}: empty: {_NONE}")
    return first


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else {}
