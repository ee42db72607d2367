"""Imports point one way: the model does not know the sampler, nor the sampler the model."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import entropix_jax
from entropix_jax.branching import Read, commit_branches
from entropix_jax.sampler.rollout import Evaluate, roll_out

ROOT = Path(entropix_jax.__file__).parent
MODEL = ("config", "params", "checkpoint", "rope", "cache", "model")
MATHS = ("precision", "linear", "attention", "stats", "metrics")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """Every module that a module's text imports, wherever in it: absolute names."""
    found: set[str] = set()
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


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


def group(*names: str) -> set[str]:
    """The modules of these names and all that lies under them."""
    full = [f"entropix_jax.{name}" for name in names]
    return {m for m in FILES if any(m == f or m.startswith(f + ".") for f in full)}


def test_the_modules_are_where_this_file_says() -> None:
    for name in (*MODEL, *MATHS, "decode", "sampler", "world"):
        assert group(name), name
    assert "entropix_jax.model" in reached("entropix_jax.decode")  # the reader of imports works
    assert "entropix_jax.sampler.step" in reached("entropix_jax.decode")


@pytest.mark.parametrize("name", sorted(group(*MODEL, *MATHS, "tokenizer", "files", "errors")))
def test_the_model_does_not_know_the_sampler(name: str) -> None:
    assert not reached(name) & group("sampler", "decode", "world")


@pytest.mark.parametrize("name", sorted(group("sampler")))
def test_the_sampler_does_not_know_the_model(name: str) -> None:
    assert not reached(name) & group(*MODEL, "attention", "linear", "decode", "world")


@pytest.mark.parametrize("name", sorted(group("world")))
def test_the_world_knows_neither(name: str) -> None:
    assert not reached(name) & group(*MODEL, *MATHS, "sampler", "decode")


def test_model_and_sampler_meet_in_one_place() -> None:
    """Only `decode` calls both a forward pass and a choice of token."""
    choosing = {f"entropix_jax.sampler.{name}" for name in ("step", "draw", "rollout")}
    both = {
        name
        for name in FILES
        if "entropix_jax.model" in imported(name) and imported(name) & choosing
    }
    assert both == {"entropix_jax.decode"}


def test_branches_are_given_the_model() -> None:
    """What rolls out and commits branches is handed the forward pass: it imports none."""
    for name in ("branching", "decode_state", "sampler.rollout"):
        assert "entropix_jax.model" not in reached(f"entropix_jax.{name}"), name
    assert "entropix_jax.branching" in imported("entropix_jax.decode")
    parameters = inspect.signature(commit_branches).parameters
    assert parameters["read"].annotation is Read
    assert inspect.signature(roll_out).parameters["evaluate"].annotation is Evaluate


def test_words_are_there_at_once() -> None:
    """What pages, traces and samplers share imports no arrays, nor anything that does."""
    names = "entropix_jax.names"
    assert reached(names) == {names, "entropix_jax.errors"}
    roots = {other.partition(".")[0] for name in reached(names) for other in imported(name)}
    assert not roots & {"jax", "numpy"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_module_imports_itself_in_a_circle(name: str) -> None:
    # A package's __init__ may list its own modules.
    for other in imported(name) & set(FILES) - {name}:
        if not (name + ".").startswith(other + "."):
            assert name not in reached(other), f"{name} and {other} import each other"


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_package_runs_without_torch(name: str) -> None:
    roots = {other.partition(".")[0] for other in imported(name)}
    assert not roots & {"torch", "transformers", "scipy", "pytest", "hypothesis"}
