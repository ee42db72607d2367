"""Thresholds as a sampler file."""

import json
from collections.abc import Mapping
from pathlib import Path

from entropix_jax.host.files import replacing
from entropix_jax.names import THRESHOLDS


def preset_text(base: str, thresholds: Mapping[str, float], description: str) -> str:
    """A sampler file (TOML) that extends `base` with thresholds.

    `base` is the name of a preset, or a path relative to the new file's folder.
    """
    lines = [
        f"description = {_toml(description)}",
        f"extends = {_toml(base)}",
        "",
        "[thresholds]",
        *(f"{name} = {float(thresholds[name])!r}" for name in THRESHOLDS),
    ]
    return "\n".join(lines) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically.

    Raises:
        UserError: it cannot be written.
    """
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _toml(text: str) -> str:
    # File names may have bytes that are not UTF-8, which TOML cannot represent.
    text = text.encode("utf-8", "backslashreplace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
