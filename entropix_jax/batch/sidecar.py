"""The sidecar of an output, `out.jsonl.run.json`: which run the results are of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropix_jax.batch.storage import is_local, resolve, storage_errors
from entropix_jax.errors import UserError
from entropix_jax.host.files import replacing


def read_sidecar(address: str) -> dict[str, Any] | None:
    """The sidecar of an output; None where there is none. UserError if it cannot be read, or is not
    the description of a run."""
    sidecar = f"{address}.run.json"
    fs, path = resolve(sidecar)
    with storage_errors(sidecar):
        if not fs.exists(path):
            return None
        data = fs.cat_file(path)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{sidecar}: not valid JSON: {error}") from error
    match content:
        case {"identity": dict()} if isinstance(content.get("samplers", {}), dict):
            return dict(content)
    raise UserError(f"{sidecar}: not the description of a run")


def write_sidecar(address: str, content: Mapping[str, Any]) -> None:
    """Replaces the sidecar of an output, atomically. UserError if it cannot be written."""
    sidecar = f"{address}.run.json"
    data = json.dumps(content, indent=2).encode() + b"\n"
    fs, path = resolve(sidecar)
    if is_local(fs):
        with replacing(Path(path)) as scratch:
            scratch.write_bytes(data)
    else:
        with storage_errors(sidecar, "written"):
            fs.pipe_file(path, data)


def check_same_run(
    address: str, sidecar: Mapping[str, Any] | None, identity: Mapping[str, Any], *, mix: bool
) -> bool:
    """Whether an output that is not empty is of the run with this identity. UserError if it is not,
    and `mix` is False."""
    if sidecar is None:
        problem = f"something, but no run's results (there is no {address}.run.json)"
    elif difference := find_difference(sidecar["identity"], identity):
        problem = f"another run's results: {difference}"
    else:
        return True
    if not mix:
        raise UserError(f"{address}: holds {problem}; choose another output")
    return False


def find_difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """The first key whose values differ, dotted, with both values; empty where none does."""
    for key in [*new, *old]:
        if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
            if inner := find_difference(old[key], new[key], f"{prefix}{key}."):
                return inner
            continue
        was, now = (
            json.dumps(side[key], ensure_ascii=False, sort_keys=True) if key in side else "absent"
            for side in (old, new)
        )
        if was != now:
            was, now = (text if len(text) <= 80 else f"{text[:77]}..." for text in (was, now))
            return f"{prefix}{key} was {was} and is now {now}"
    return ""
