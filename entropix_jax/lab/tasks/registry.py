"""Finds tasks by name: the package's and users' own."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from entropix_jax.errors import UserError, nearest
from entropix_jax.lab.tasks import asking, tiny
from entropix_jax.lab.tasks.files import FileTask
from entropix_jax.lab.tasks.ifeval import IfEval
from entropix_jax.lab.tasks.published import Gsm8k, NqOpen, Svamp
from entropix_jax.lab.tasks.task import Task
from entropix_jax.lab.tasks.writing import Writing

_OF_TINY = (tiny.SUMS, tiny.WORD_PROBLEMS, tiny.FACTS, tiny.FORKS, tiny.DOCUMENTS)
_BUILT_IN: dict[str, Task] = {
    task.name: task for task in (*_OF_TINY, asking.FACTS, asking.AMBIGUOUS)
}
_OF_FILES: dict[str, type[FileTask]] = {
    kind.name: kind for kind in (Gsm8k, Svamp, NqOpen, IfEval, Writing)
}
_DATA = "ENTROPIX_DATA"  # the environment variable


def locate_task(
    name: str, data: str | None = None, resolve: Callable[[str], str] = lambda path: path
) -> str:
    """Returns the name of a task with the path of its file.

    Args:
        data: the folder of published files, for a task that names none; default: what the
            environment variable `ENTROPIX_DATA` names.
        resolve: resolves a path in the name.

    Raises:
        UserError: the task needs a file, and neither the name nor `data` has one.
    """
    kind, _, rest = name.partition(":")
    if kind not in _OF_FILES:
        return resolve(name) if name.rpartition(":")[0].endswith(".py") else name
    if rest:
        return f"{kind}:{resolve(rest)}"
    published = _OF_FILES[kind].published
    folder = data or os.environ.get(_DATA)
    if not folder:
        raise UserError(
            f"task '{name}': no file: give {kind}:FILE, or --data or {_DATA}, a folder with"
            f" {published}"
        )
    return f"{kind}:{Path(folder, published)}"


def find_task(name: str) -> Task:
    """Finds a task.

    Args:
        name: `sums`, `word-problems`, `facts`, `forks` or `documents`, of the tiny world;
            `asking-facts` or `asking-ambiguous`, of the asking world; `gsm8k:FILE`, `svamp:FILE`,
            `nq-open:FILE`, `ifeval:FILE` or `writing:FILE`, without a file see `locate_task`; or a
            user's task, `some.module:attribute` or `path/to/file.py:attribute`, whose code is run.

    Raises:
        UserError: no such task, or the user's code fails or has no task there.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    kind, _, path = locate_task(name).partition(":")
    if kind in _OF_FILES:
        return _OF_FILES[kind](Path(path))
    if ":" not in name:
        known = [*_BUILT_IN, *(f"{kind}:FILE" for kind in _OF_FILES)]
        own = "MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE"
        raise UserError(
            f"no task '{name}'{nearest(name, [*_BUILT_IN, *_OF_FILES], '')} (known:"
            f" {', '.join(known)}, {own})"
        )
    return _find_user_task(name)


def _find_user_task(name: str) -> Task:
    """The task in an attribute of a user's module or file."""
    place, _, attribute = name.rpartition(":")
    try:
        is_file = place.endswith(".py")
        module = _run_file(Path(place)) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of the user's code
        raise UserError(
            f"task '{name}': importing {place} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        task = getattr(module, attribute)
    except AttributeError:
        raise UserError(f"task '{name}': {place} has no '{attribute}'") from None
    if isinstance(task, type):
        raise UserError(f"task '{name}': '{attribute}' is a class; name an instance")
    if not isinstance(task, Task):
        raise UserError(
            f"task '{name}': '{attribute}' is not a task: inherit from"
            " entropix_jax.lab.tasks.task.Task"
        )
    return task


def _run_file(path: Path) -> ModuleType:
    name = f"entropix_jax task {path.resolve()}"  # unique
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
