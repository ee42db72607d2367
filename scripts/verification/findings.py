"""What a part of the verification found, kept as a file so that the table can be made of all."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import entropix_jax
from entropix_jax.version import __version__


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    what: str  # what was tried, as a reader says it
    tried: int
    unit: str  # of what: "inputs", "kill points", "mutants"
    failures: int
    wanted: str = "0 failures"
    note: str = ""
    details: list[dict[str, Any]] = field(default_factory=list)  # of each failure


def code_digest() -> str:
    """Tells a state of the package and of these scripts from another."""
    hashed = hashlib.sha256()
    for folder in (Path(entropix_jax.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


@dataclass(frozen=True)
class Findings:
    """What a part has found, and at which commit it was last begun: what it had kept by then may be
    older."""

    lines: list[Line]
    commit: str | None = None
    seconds: float = 0.0


def write_findings(folder: Path, part: str, findings: Findings) -> None:
    """Replaces `folder/PART.json`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"version": __version__, **asdict(findings)}
    path, new = folder / f"{part}.json", folder / f".{part}.json.new"
    new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def read_findings(folder: Path, part: str) -> Findings | None:
    """`folder/PART.json`; none where the part has not been run."""
    path = folder / f"{part}.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [Line(**line) for line in found["lines"]]
    return Findings(lines, found["commit"], found["seconds"])
