"""The folders of the package's data files: presets and the embedded model."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def resource_folder(name: str) -> Path:
    """The folder `configs` or `weights`: in an installed package, or next to it in a checkout."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
