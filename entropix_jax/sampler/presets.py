"""Samplers as files: TOML, found by name under `configs/`.

A file may extend another one, and then has only the changed values.
"""

import hashlib
import importlib
import os
import sys
import warnings
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropix_jax.errors import Note, UserError, nearest
from entropix_jax.host.files import parse_toml, read_toml
from entropix_jax.host.resources import resource_folder
from entropix_jax.sampler.keys import check_values, check_whole
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.sampler import Sampler

# Former names, accepted until 0.2.
_ALIASES = {"quadrants": "entropix"}


def load_sampler(name_or_path: str, mechanisms: Iterable[Mechanism] = ()) -> Sampler:
    """Loads a preset of `configs/` by name, or the sampler of a TOML file. UserError for an unknown
    name (with the nearest one), or if the file is not a sampler.

    `mechanisms` are the user's own, added to the package's; see `Sampler.with_mechanism`.
    """
    sampler = Sampler(name=name_or_path, description="", file_values={})
    for mechanism in mechanisms:
        sampler = sampler.with_mechanism(mechanism)
    files = lineage(name_or_path)
    path = next(iter(files))
    values = dict(ChainMap(*files.values()))
    description = values.pop("description", "")
    if not isinstance(description, str):
        raise UserError(f"{path}: 'description' must be text, not {description!r}")
    check_values(values, str(path), sampler.mechanisms)
    hint = ': extend a preset, extends = "entropix"'
    check_whole(values, str(path), sampler.mechanisms, hint)
    return replace(sampler, name=path.stem, description=description, file_values=values)


def import_mechanisms(module: str) -> tuple[Mechanism, ...]:
    """Imports a module, which runs its code, and returns its `MECHANISMS`. UserError if the module
    is missing, fails, or has no such list."""
    try:
        found = getattr(importlib.import_module(module), "MECHANISMS", None)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):  # not one that it imports
            hint = "give its name without .py, and set PYTHONPATH to its folder"
            raise UserError(f"no module '{module}': {hint}") from None
        raise UserError(f"{module}: cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(found, list | tuple) or not all(isinstance(m, Mechanism) for m in found):
        raise UserError(f"{module}: has no MECHANISMS, a list of `sampler.mechanism.Mechanism`")
    return tuple(found)


def is_preset(name: str) -> bool:
    """Whether a preset has that name, in this or the previous release."""
    return name in _ALIASES or name in preset_names()


def preset_names() -> list[str]:
    """Returns the names of the package's presets."""
    return sorted(path.stem for path in resource_folder("configs").glob("*.toml"))


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses `sampler.key=value` of a command line into key and value; the value is TOML, or else
    plain text. UserError for another form."""
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("sampler."):
        raise UserError(f"--set {text}: expected sampler.KEY=VALUE")
    try:
        parsed = parse_toml(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    return key.removeprefix("sampler."), parsed["value"] if parsed.keys() == {"value"} else value


def code_identity(mechanisms: Sequence[Mechanism]) -> dict[str, str]:
    """Returns a hash of the source files of the user's own mechanisms, if any, so that a resumed
    run can check that they are unchanged."""
    own = mechanisms[len(MECHANISMS) :]
    parts = [getattr(part, "function", part) for m in own for part in vars(m).values()]
    modules = {getattr(part, "__module__", None) for part in parts}
    files = {getattr(sys.modules.get(str(name)), "__file__", None) for name in modules}
    code = b"".join(Path(file).read_bytes() for file in sorted(filter(None, files)))
    return {"mechanisms": hashlib.sha256(code).hexdigest()} if own else {}


def choose_sampler(
    name_or_path: str, settings: Iterable[str], mechanisms: Iterable[Mechanism] = ()
) -> Sampler:
    """Loads a preset or a file, with settings as `parse_setting` takes them."""
    return load_sampler(name_or_path, mechanisms).with_values(dict(map(parse_setting, settings)))


def lineage(name_or_path: str) -> dict[Path, dict[str, Any]]:
    """Returns a sampler's file and those it extends, nearest first, each with its own values by
    dotted key."""
    files: dict[Path, dict[str, Any]] = {}
    name: Any = name_or_path
    while name is not None:
        path = _find(name)
        if path.resolve() in (known.resolve() for known in files):
            raise UserError(f"{path}: extends itself")
        files[path] = values = _flatten(read_toml(path))
        name = values.pop("extends", None)
        if not isinstance(name, str | None):
            raise UserError(f"{path}: 'extends' must be the name of a preset, not {name!r}")
        if name is not None and name.endswith(".toml"):
            name = str(path.parent / name)
    return files


def _find(name_or_path: str) -> Path:
    """A sampler's file."""
    if name_or_path in _ALIASES:
        new = _ALIASES[name_or_path]
        warnings.warn(f"the preset '{name_or_path}' is called '{new}' now", Note, stacklevel=2)
        name_or_path = new
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = resource_folder("configs") / f"{name_or_path}.toml"
        if name_or_path not in preset_names():
            raise UserError(
                f"no sampler preset '{name_or_path}' (a file's name ends in .toml)"
                f"{nearest(name_or_path, preset_names())}"
            )
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise UserError(f"{path}: cannot be read: not a regular file")
    return path


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        here = prefix + key
        flat |= _flatten(value, f"{here}.") if isinstance(value, dict) else {here: value}
    return flat
