"""Loads samplers from presets, files and settings of a command line, and the user's mechanisms."""

import hashlib
import importlib
import sys
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.host.arguments import checked
from entropix_jax.sampler.files import lineage, parse_setting
from entropix_jax.sampler.keys import check_values, check_whole
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.sampler import Sampler


@checked
def load_sampler(name_or_path: str | Path, mechanisms: Iterable[Mechanism] = ()) -> Sampler:
    """Loads a preset of `configs/` by name, or the sampler of a TOML file. UserError for an unknown
    name (with the nearest one), or if the file is not a sampler.

    `mechanisms` are the user's own, added to the package's; see `Sampler.with_mechanism`.
    """
    sampler = Sampler(name=str(name_or_path), description="", file_values={})
    for mechanism in mechanisms:
        sampler = sampler.with_mechanism(mechanism)
    files = lineage(str(name_or_path))
    path, values = next(iter(files)), dict(ChainMap(*files.values()))
    description = values.pop("description", "")
    if not isinstance(description, str):
        raise UserError(f"{path}: 'description' must be text, not {description!r}")
    values = check_values(values, str(path), sampler.mechanisms)
    check_whole(values, str(path), sampler.mechanisms, ': extend a preset, extends = "entropix"')
    return replace(sampler, name=path.stem, description=description, file_values=values)


def import_mechanisms(module: str | None) -> tuple[Mechanism, ...]:
    """Imports a module, which runs its code, and returns its `MECHANISMS`, none without a module.
    UserError if it is missing, fails, or has no such list."""
    if module is None:
        return ()
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
