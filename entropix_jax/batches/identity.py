"""Whose results an output holds: the description of a run that lies beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from entropix_jax.errors import UserError

FORMAT_VERSION = 1


def json_document(content: Mapping[str, Any]) -> bytes:
    """A description as the bytes of its file."""
    return json.dumps(content, indent=2).encode() + b"\n"


def parse_sidecar(data: bytes, address: str) -> dict[str, Any]:
    """What a sidecar says.

    Raises:
        UserError: it is not the description of a run.
    """
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{address}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(name, kind), dict)
        for name, kind in (("identity", None), ("samplers", {}))
    ):
        raise UserError(f"{address}: not the description of a run")
    if not isinstance(content.get("earlier", []), list):
        raise UserError(f"{address}: earlier is not a list")
    return content


def agreed(
    address: str,
    old: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    *,
    empty: bool,
    mix: bool,
) -> Mapping[str, Any]:
    """What the sidecar is to say. `earlier` are the identities that it said before, null of none.
    `samplers`, in time, tells what each sampler that a record names was.

    Raises:
        UserError: the output is of another run and is not to be mixed.
    """
    new = {"format_version": FORMAT_VERSION, "identity": dict(identity)}
    if empty:
        return new
    if old is None:
        if not mix:
            raise UserError(
                f"{address}: holds something, but no run's results (there is no"
                f" {address}.run.json): choose another output"
            )
        return {**new, "earlier": [None]}
    difference = difference_of(old["identity"], identity)
    if difference is None:
        return old
    if not mix:
        name, theirs, ours = difference
        raise UserError(
            f"{address}: holds another run's results: {name} was {theirs} and is now {ours};"
            " choose another output"
        )
    return {**new, "earlier": [*old.get("earlier", []), old["identity"]]}


def difference_of(
    old: Mapping[str, Any], new: Mapping[str, Any], within: str = ""
) -> tuple[str, str, str] | None:
    """The first key whose values differ, and both: None where there is none."""
    for key in [*new, *(key for key in old if key not in new)]:
        here, there = new.get(key), old.get(key)
        if isinstance(here, dict) and isinstance(there, dict):
            deeper = difference_of(there, here, f"{within}{key}.")
            if deeper is not None:
                return deeper
            continue
        values = [
            json.dumps(side[key], ensure_ascii=False, sort_keys=True) if key in side else "absent"
            for side in (old, new)
        ]
        if values[0] != values[1]:
            shown = [text if len(text) <= 80 else f"{text[:77]}..." for text in values]
            return f"{within}{key}", shown[0], shown[1]
    return None
