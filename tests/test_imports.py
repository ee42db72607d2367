"""Imports go only from higher to lower layers, from commands to errors."""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.sources import FILES, IMPORTED, imports_of

TESTS = Path(__file__).parent

# Lowest first. A module imports from its own folder and from lower layers. Folders of one layer do
# not import each other. The sampler thus does not import the model.
LAYERS = (
    ("errors", "packed", "platforms", "version"),
    ("names", "stats", "accelerators"),
    ("host",),
    ("text", "report", "sampler"),
    ("model",),
    ("engine",),
    ("batch", "replay"),
    ("cli",),
    ("lab", "serve", "chat"),
)
# Modules that import SciPy, which JAX requires, too.
ISOTONIC = ("entropix_jax.lab.uncertainty", "entropix_jax.lab.wrong")
FLOOR = {folder: floor for floor, folders in enumerate(LAYERS) for folder in folders}


def is_entry_point(name: str) -> bool:
    """Returns whether a module is an entry point: it imports any layer, and no layer imports it."""
    return name in ("entropix_jax", "entropix_jax.main") or name.endswith(".__main__")


def folder(name: str) -> str:
    return name.split(".")[1]


MODULES = sorted(name for name in FILES if not is_entry_point(name))


def test_every_folder_has_a_layer() -> None:
    assert {folder(name) for name in MODULES} == set(FLOOR)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_to_lower_layers(name: str) -> None:
    for other in IMPORTED[name] & set(FILES) - {"entropix_jax"}:
        assert not is_entry_point(other), f"{name} imports the entry point {other}"
        if folder(other) != folder(name):
            assert FLOOR[folder(other)] < FLOOR[folder(name)], f"{name} imports {other}"


def test_no_circular_imports() -> None:
    # A package's __init__ may list its own modules.
    packages = {name: {name, name.rpartition(".")[0]} for name in MODULES}
    graph = {name: IMPORTED[name] & {*MODULES} - packages[name] for name in MODULES}
    TopologicalSorter(graph).prepare()


def test_model_and_sampler_meet_in_one_module() -> None:
    """Only `engine.decode` calls both a forward pass and a choice of token."""
    ends = {"entropix_jax.model.llama", "entropix_jax.sampler.step"}
    assert [name for name in FILES if ends <= IMPORTED[name]] == ["entropix_jax.engine.decode"]


def test_third_party_packages() -> None:
    """The package does not import packages of tests and training. Modules shared by pages, traces
    and presets import no arrays."""
    roots = {name: {other.partition(".")[0] for other in found} for name, found in IMPORTED.items()}
    for name in FILES:
        assert not roots[name] & {"torch", "transformers", "pytest", "hypothesis"}, name
        if name not in ISOTONIC:
            assert "scipy" not in roots[name], name
        if name.split(".")[1:2] != ["serve"]:
            assert not roots[name] & {"pydantic", "pydantic_core", "starlette", "uvicorn"}, name
    for name in ("entropix_jax.names", "entropix_jax.errors"):
        assert not roots[name] & {"jax", "numpy"}


@pytest.mark.parametrize(
    ("modules", "foreign"),
    [
        ("main, entropix_jax.__main__", "jax numpy tokenizers"),
        ("sampler.files, entropix_jax.model.find, entropix_jax.cli.terminal", "jax numpy"),
        ("report.page", "jax numpy plotly"),
        ("batch.output, entropix_jax.batch.records", "jax s3fs aiohttp"),
        ("lab.harness, entropix_jax.batch.run", "lm_eval"),
        ("chat.command", "jax numpy tokenizers"),
        ("serve.command", "jax pydantic starlette uvicorn"),
    ],
)
def test_importing_is_cheap(modules: str, foreign: str) -> None:
    code = f"import sys, entropix_jax.{modules}\nprint({set(foreign.split())} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_wrong_names_are_reported_without_jax() -> None:
    wrong = "--sampler entropi", "--model tini", "--set sampler.base.temprature=1", "--promt a"
    code = "import sys\nfrom entropix_jax.__main__ import main\n"
    code += "\n".join(f"main('generate --prompt a {one}'.split())" for one in wrong)
    code += "\nprint('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert done.stderr.count("did you mean") == len(wrong)


def test_test_modules_share_code_only_through_support() -> None:
    for path in TESTS.rglob("*.py"):
        names = [n for n in imports_of(path) if re.match(r"tests\..*\b(test_|conftest)", n)]
        assert not names, path
