"""Samplers as files: TOML, found by name under `configs/`.

A file may extend another one, and then holds only what it changes. Explicit thresholds override the
model's calibration.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError, nearest
from entropix_jax.host.files import parse_toml, read_toml
from entropix_jax.host.resources import resource_folder
from entropix_jax.names import THRESHOLDS
from entropix_jax.sampler.sampler import Sampler, check_key, check_values, check_whole, required


def load_sampler(name_or_path: str) -> Sampler:
    """The preset of a name under `configs/`, or the sampler of a TOML file.

    Raises:
        UserError: no such preset or file (the nearest name is given), or a file that is not a
        sampler.
    """
    path, raw = _read(name_or_path, ())
    description = raw.pop("description", "")
    if not isinstance(description, str):
        raise UserError(f"{path}: 'description' must be text, not {description!r}")
    flat = _flatten(raw)
    for key in flat:
        check_key(key, str(path))
    if missing := sorted(required() - set(flat)):
        raise UserError(
            f"{path}: '{missing[0]}' is missing; 'extends' takes it from another preset"
        )
    check_values(flat, str(path))
    check_whole(flat, str(path))
    return Sampler(name=path.stem, description=description, file_values=flat)


def lineage(name_or_path: str) -> list[Path]:
    """The files of a sampler that `load_sampler` takes and of those it extends, nearest first."""
    paths: list[Path] = []
    base: str | None = name_or_path
    while base is not None:
        path, _, base = _read_file(base)
        paths.append(path)
    return paths


def preset_names() -> list[str]:
    """The presets that come with the package."""
    return sorted(path.stem for path in resource_folder("configs").glob("*.toml"))


def parse_setting(text: str) -> tuple[str, Any]:
    """A command line's `sampler.key=value` as key and value; the value is TOML, or else plain text.

    Raises:
        UserError: it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.startswith("sampler."):
        raise UserError(f"--set {text}: expected sampler.KEY=VALUE")
    try:
        parsed = parse_toml(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    return key.removeprefix("sampler."), parsed["value"] if parsed.keys() == {"value"} else value


def choose_sampler(name_or_path: str, settings: Iterable[str]) -> Sampler:
    """A preset or a file, with a command line's settings, each as `parse_setting` takes it.

    Raises:
        UserError: as `load_sampler`, `parse_setting` and `Sampler.with_values`.
    """
    changes = dict(parse_setting(text) for text in settings)
    return load_sampler(name_or_path).with_values(changes)


def _read(name_or_path: str, seen: tuple[Path, ...]) -> tuple[Path, dict[str, Any]]:
    path, raw, base = _read_file(name_or_path)
    identity = path.resolve()
    if identity in seen:
        raise UserError(f"{path}: extends itself")
    if base is None:
        return path, raw
    thresholds = raw.get("thresholds")
    if isinstance(thresholds, dict) and set(thresholds) & set(THRESHOLDS):
        # Explicit thresholds override the model's calibration.
        thresholds.setdefault("calibrated", False)
    return path, _merge(_read(base, (*seen, identity))[1], raw)


def _read_file(name_or_path: str) -> tuple[Path, dict[str, Any], str | None]:
    """A sampler's file, what it holds itself, and what it extends."""
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
    raw = read_toml(path)
    base = raw.pop("extends", None)
    if base is None:
        return path, raw, None
    if not isinstance(base, str):
        raise UserError(f"{path}: 'extends' must be the name of a preset, not {base!r}")
    if base.endswith(".toml"):
        base = str(path.parent / base)
    return path, raw, base


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
