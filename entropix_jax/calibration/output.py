"""The two forms in which thresholds are kept: a sampler file, and a model's calibration."""

import json
from collections.abc import Mapping
from pathlib import Path

from entropix_jax.files import replacing
from entropix_jax.names import THRESHOLDS


def preset_text(base: str, thresholds: Mapping[str, float], description: str) -> str:
    """A sampler file, TOML, that extends `base` by thresholds of its own.

    `base` is the name of a preset, or the path of a file seen from the new file's folder.
    """
    lines = [
        f"description = {_toml(description)}",
        f"extends = {_toml(base)}",
        "",
        "[thresholds]",
        *(f"{name} = {float(thresholds[name])!r}" for name in THRESHOLDS),
    ]
    return "\n".join(lines) + "\n"


def calibration_text(thresholds: Mapping[str, float], source: str) -> str:
    """The content of a model's `calibration.json`; `source` says how the thresholds were made."""
    ordered = {name: float(thresholds[name]) for name in THRESHOLDS}
    return json.dumps({"thresholds": ordered, "source": source}, indent=2) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the old one.

    Raises:
        UserError: it cannot be written.
    """
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _toml(text: str) -> str:
    # TOML can hold no byte of a file's name that is not UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
