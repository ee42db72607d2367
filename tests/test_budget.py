"""Limits of the project's size. A change that needs more raises the limit here, in a separate
commit that says why. `python -m tests.test_budget` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.sources import FILES, PACKAGE, closure

ROOT = PACKAGE.parent
STEP, DECODE = "entropix_jax.sampler.step", "entropix_jax.engine.decode"


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def modules(*names: str) -> int:
    """Returns the lines of modules, or of folders of the package."""
    starts = tuple(f"entropix_jax.{name}" for name in names)
    inside = (n for n in FILES if n in starts or n.startswith(tuple(f"{s}." for s in starts)))
    return lines(FILES[name] for name in inside)


def files_in(folder: str, pattern: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob(pattern) if path.is_file()]


def lines_of_closure(name: str) -> int:
    return lines(FILES[module] for module in closure(name))


def sizes() -> dict[str, int]:
    """Returns the sizes by name, in lines unless the name says files."""
    whole = lines(FILES.values())
    apart = modules("lab"), modules("serve", "chat")
    scripts = [path for path in files_in("scripts", "*") if "__pycache__" not in path.parts]
    return {
        "sampler/step.py and what it imports, files": len(closure(STEP)),
        "sampler/step.py and what it imports": lines_of_closure(STEP),
        "engine/decode.py and what it imports, files": len(closure(DECODE)),
        "engine/decode.py and what it imports": lines_of_closure(DECODE),
        "sampler/step.py, engine/decode.py": modules("sampler.step", "engine.decode"),
        "the draw: filters, draw": modules(*(f"sampler.{name}" for name in ("filters", "draw"))),
        "sampler/, engine/, model/": modules("sampler", "engine", "model"),
        "package without lab/, serve/, chat/": whole - sum(apart),
        "lab/": apart[0],
        "serve/, chat/": apart[1],
        "modules at the root of the package, files": len([*PACKAGE.glob("*.py")]),
        "scripts/": lines(scripts),
        "tests/": lines(files_in("tests", "*.py")),
        "README.md": lines([ROOT / "README.md"]),
        "docs/": lines(files_in("docs", "*.md")),
    }


LIMITS = {
    "sampler/step.py and what it imports, files": 12,
    "sampler/step.py and what it imports": 1_805,
    "engine/decode.py and what it imports, files": 28,
    "engine/decode.py and what it imports": 4_160,
    "sampler/step.py, engine/decode.py": 450,
    "the draw: filters, draw": 320,
    "sampler/, engine/, model/": 11_750,
    "package without lab/, serve/, chat/": 18_870,
    "lab/": 7_015,
    "serve/, chat/": 3_040,
    "modules at the root of the package, files": 8,
    "scripts/": 2_800,
    "tests/": 26_950,
    "README.md": 180,
    "docs/": 2_655,
}


@pytest.mark.parametrize("what", LIMITS)
def test_sizes(what: str) -> None:
    size, limit = sizes()[what], LIMITS[what]
    assert size <= limit, f"{what}: {size}, at most {limit}"


def test_all_sizes_have_limits() -> None:
    assert sizes().keys() == LIMITS.keys()


if __name__ == "__main__":
    for name, size in sizes().items():
        print(f"{size:7,} of {LIMITS.get(name, 0):7,}  {name}")
