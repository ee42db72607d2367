"""Samplers as files: TOML, found by name under `configs/`. Imports no JAX, so a wrong name is
reported at once.

A file may extend another one, and then has only the changed values.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from entropix_jax.errors import Note, UserError, nearest
from entropix_jax.host.files import check_regular, parse_toml, read_toml
from entropix_jax.host.resources import resource_folder

# Former names, accepted until 0.2.
_ALIASES = {"quadrants": "entropix"}
# Removed keys, each with the hint of its error.
_OLD_KEYS = {
    "thresholds.calibrated": 'thresholds are percentiles now, such as thresholds.h1 = "30%"'
}


def is_preset(name: Any) -> bool:
    """Whether a preset has that name, in this or the previous release."""
    return name in [*_ALIASES, *preset_names()]


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


def check_key(key: str, where: str, known: Collection[str]) -> None:
    """Raises UserError, prefixed with `where`, for an unknown key."""
    if key in _OLD_KEYS:
        raise UserError(f"{where}: '{key}' is no longer a sampler key: {_OLD_KEYS[key]}")
    if key not in known:
        close = nearest(key, sorted(known), otherwise=" (docs/settings.md lists the keys)")
        raise UserError(f"{where}: no sampler key '{key}'{close}")


def check_names(name_or_path: str, settings: Iterable[str]) -> None:
    """Raises UserError for an unknown preset, or a key of no preset in the settings."""
    # The default's file has all keys.
    known = {key for values in lineage("entropix").values() for key in values} - {"description"}
    name = next(iter(lineage(name_or_path))).stem
    for key, _ in map(parse_setting, settings):
        check_key(key, name, known)


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
    check_regular(path)
    return path


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        here = prefix + key
        flat |= _flatten(value, f"{here}.") if isinstance(value, dict) else {here: value}
    return flat
