"""The package's source files, and their imports."""

from __future__ import annotations

import ast
from pathlib import Path

import entropix_jax

PACKAGE = Path(entropix_jax.__file__).parent


def module_name(path: Path) -> str:
    """Returns the dotted name of a module of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Returns all imports anywhere in a module's text: modules, and names from modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTED = {name: imports_of(path) for name, path in FILES.items()}


def closure(name: str) -> set[str]:
    """Returns a module and all modules of the package that it imports, directly or not."""
    found: set[str] = set()
    queue = [name]
    while queue:
        module = queue.pop()
        if module not in found:
            found.add(module)
            queue += IMPORTED[module] & set(FILES)
    return found - {"entropix_jax"}
