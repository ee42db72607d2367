"""Imports point one way: from the commands down to the errors, never sideways."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import entropix_jax

ROOT = Path(entropix_jax.__file__).parent
TESTS = Path(__file__).parent

# Lowest first. A module imports from its own folder and from lower layers; folders of one layer do
# not know each other. So neither does the model know the sampler, nor the sampler the model.
LAYERS = (
    ("errors", "version"),
    ("names", "stats"),
    ("host",),
    ("text", "report", "sampler"),
    ("model",),
    ("engine",),
    ("batch",),
    ("cli",),
    ("lab",),
)
FLOOR = {folder: floor for floor, folders in enumerate(LAYERS) for folder in folders}
# `python -m entropix_jax.NAME` and the public names: they open onto any layer, and nothing but
# `__version__` is imported from them.
DOORS = ("ablate", "calibrate", "evaluate", "harness", "inspect", "main")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_door(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 1 or parts[1] in DOORS or parts[-1] == "__main__"


def folder(name: str) -> str:
    return name.split(".")[1]


def imported(name: str) -> set[str]:
    """The modules of the package, and the others' roots, that a module's text imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: a relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {other for other in found if other in FILES}
    return ours | {other.partition(".")[0] for other in found} - {"entropix_jax"}


def reached(name: str) -> set[str]:
    """Every module of the package that importing `name` brings in, itself included."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue += [other for other in imported(current) if other in FILES]
    return seen


MODULES = sorted(name for name in FILES if not is_door(name))


def test_every_folder_has_a_layer() -> None:
    assert {folder(name) for name in MODULES} == set(FLOOR)
    assert len(list(ROOT.glob("*.py"))) <= 12


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    for other in imported(name) & set(FILES) - {"entropix_jax"}:
        assert not is_door(other), f"{name} imports the door {other}"
        if folder(other) != folder(name):
            assert FLOOR[folder(other)] < FLOOR[folder(name)], f"{name} imports {other}"


@pytest.mark.parametrize("name", MODULES)
def test_no_imports_in_a_circle(name: str) -> None:
    # A package's __init__ may list its own modules.
    for other in imported(name) & set(MODULES) - {name}:
        if not f"{name}.".startswith(f"{other}."):
            assert name not in reached(other), f"{name} and {other} import each other"


def test_model_and_sampler_meet_in_one_module() -> None:
    """Only `engine.decode` calls both a forward pass and a choice of token."""
    both = {
        name
        for name in FILES
        if {"entropix_jax.model.llama", "entropix_jax.sampler.step"} <= imported(name)
    }
    assert both == {"entropix_jax.engine.decode"}


def test_names_are_there_at_once() -> None:
    """What pages, traces and presets share does not import arrays."""
    assert reached("entropix_jax.names") <= {"entropix_jax.names", "entropix_jax.errors"}
    assert not imported("entropix_jax.names") & {"jax", "numpy"}


def test_test_modules_share_through_support_alone() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                full = [*names, *(f"{getattr(node, 'module', '')}.{name}" for name in names)]
                assert not [n for n in full if re.match(r"tests\..*\b(test_|conftest)", n)], path


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_package_runs_without_torch(name: str) -> None:
    assert not imported(name) & {"torch", "transformers", "scipy", "pytest", "hypothesis"}
