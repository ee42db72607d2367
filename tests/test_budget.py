"""Limits of the project's size, and goals. A change that needs more raises the limit here, in a
separate commit that says why. `python -m tests.test_budget` prints the table.
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
    """Returns the sizes by name, in lines."""
    whole = lines(FILES.values())
    apart = modules("lab"), modules("serve", "chat")
    scripts = [path for path in files_in("scripts", "*") if "__pycache__" not in path.parts]
    return {
        "sampler/step.py and what it imports": lines_of_closure(STEP),
        "engine/decode.py and what it imports": lines_of_closure(DECODE),
        "sampler/step.py, engine/decode.py": modules("sampler.step", "engine.decode"),
        "sampler/filters.py, sampler/draw.py": modules("sampler.filters", "sampler.draw"),
        "sampler/, engine/, model/": modules("sampler", "engine", "model"),
        "package without lab/, serve/, chat/": whole - sum(apart),
        "lab/": apart[0],
        "serve/, chat/": apart[1],
        "scripts/": lines(scripts),
        "tests/": lines(files_in("tests", "*.py")),
        "README.md": lines([ROOT / "README.md"]),
        "docs/": lines(files_in("docs", "*.md")),
    }


# The limit, and the goal.
LIMITS = {
    "sampler/step.py and what it imports": (1_915, 1_600),
    "engine/decode.py and what it imports": (4_265, 4_000),
    "sampler/step.py, engine/decode.py": (442, 420),
    "sampler/filters.py, sampler/draw.py": (225, 225),
    "sampler/, engine/, model/": (12_620, 10_400),
    "package without lab/, serve/, chat/": (20_995, 15_000),
    "lab/": (8_600, 5_300),
    "serve/, chat/": (3_150, 3_000),
    "scripts/": (3_010, 2_800),
    "tests/": (28_605, 23_400),
    "README.md": (180, 180),
    "docs/": (3_171, 2_600),
}


@pytest.mark.parametrize("what", LIMITS)
def test_sizes(what: str) -> None:
    size, (limit, goal) = sizes()[what], LIMITS[what]
    assert goal <= limit
    assert size <= limit, f"{what}: {size}, at most {limit}"


def test_all_sizes_have_limits() -> None:
    assert sizes().keys() == LIMITS.keys()


if __name__ == "__main__":
    for name, size in sizes().items():
        limit, goal = LIMITS[name]
        print(f"{size:7,} of {limit:7,}  {max(size - goal, 0):6,} above the goal  {name}")
