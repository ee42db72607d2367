"""Finds tasks by name: those of the package, and users' own."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks import tiny
from entropix_jax.lab.tasks.gsm8k import Gsm8k
from entropix_jax.lab.tasks.ifeval import IfEval
from entropix_jax.lab.tasks.nq_open import NqOpen
from entropix_jax.lab.tasks.svamp import Svamp
from entropix_jax.lab.tasks.task import Task
from entropix_jax.lab.tasks.writing import Writing

_BUILT_IN: dict[str, Task] = {
    task.name: task
    for task in (tiny.SUMS, tiny.WORD_PROBLEMS, tiny.FACTS, tiny.FORKS, tiny.DOCUMENTS)
}


class _OfFiles(NamedTuple):
    """A kind of task whose items are in files."""

    make: Callable[..., Task]  # of their paths
    usage: str
    published: str  # the name of the file, as it is published
    most: int = 1  # files


_OF_FILES = {
    Gsm8k.name: _OfFiles(Gsm8k, "gsm8k:TEST.jsonl[,TUNING.jsonl]", "gsm8k_test.jsonl", most=2),
    Svamp.name: _OfFiles(Svamp, "svamp:FILE.json", "svamp.json"),
    NqOpen.name: _OfFiles(NqOpen, "nq-open:FILE.jsonl", "nq_open_dev.jsonl"),
    IfEval.name: _OfFiles(IfEval, "ifeval:FILE.jsonl", "ifeval.jsonl"),
    Writing.name: _OfFiles(Writing, "writing:FILE.csv", "prompts.csv"),
}
_DATA = "ENTROPIX_DATA"  # the environment variable
_MEMBERS = (
    *("name", "chat", "stop", "max_new_tokens", "votes", "scored"),
    *("items", "extract", "score", "measures", "identity"),
)


def locate_task(
    name: str, data: str | None = None, resolve: Callable[[str], str] = lambda path: path
) -> str:
    """The name of a task with the paths of its files.

    Args:
        data: the folder of published files, for a task that names none; default: what the
            environment variable `ENTROPIX_DATA` names.
        resolve: what a path means that the name has.

    Raises:
        UserError: the task needs a file, and there is neither.
    """
    kind, _, rest = name.partition(":")
    if kind not in _OF_FILES:
        return resolve(name) if name.rpartition(":")[0].endswith(".py") else name
    known = _OF_FILES[kind]
    if rest:
        return f"{kind}:{','.join(map(resolve, rest.split(',', known.most - 1)))}"
    folder = data or os.environ.get(_DATA)
    if not folder:
        raise UserError(
            f"task '{name}': no file: give {known.usage}, or --data or {_DATA}, a folder with"
            f" {known.published}"
        )
    return f"{kind}:{Path(folder, known.published)}"


def find_task(name: str) -> Task:
    """Finds a task.

    Args:
        name: `sums`, `word-problems`, `facts`, `forks` or `documents`, of the tiny world;
            `gsm8k:TEST.jsonl[,TUNING.jsonl]`, `svamp:FILE.json`, `nq-open:FILE.jsonl`,
            `ifeval:FILE.jsonl` or `writing:FILE.csv`, without a file see `locate_task`; or a
            user's task, `some.module:attribute` or `path/to/file.py:attribute`, whose code is run.

    Raises:
        UserError: no such task, or the user's code fails or has no task there.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    kind, _, rest = locate_task(name).partition(":")
    if kind in _OF_FILES:
        known = _OF_FILES[kind]
        return known.make(*map(Path, rest.split(",", known.most - 1)))
    if ":" not in name:
        close = difflib.get_close_matches(name, (*_BUILT_IN, *_OF_FILES), n=1, cutoff=0.4)
        suggestion = f", did you mean '{close[0]}'?" if close else ""
        names = ", ".join((*_BUILT_IN, *(each.usage for each in _OF_FILES.values())))
        raise UserError(
            f"no task '{name}'{suggestion} (known: {names}, MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE)"
        )
    return _find_user_task(name)


def _find_user_task(name: str) -> Task:
    """The task in an attribute of a user's module or file."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    except UserError as error:
        raise UserError(f"task '{name}': {error}") from None
    except (Exception, SystemExit) as error:  # of the user's code
        raise UserError(
            f"task '{name}': importing {place} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        task: Task = getattr(module, attribute)  # members are checked below
    except AttributeError:
        raise UserError(f"task '{name}': {place} has no '{attribute}'") from None
    if isinstance(task, type):
        raise UserError(f"task '{name}': '{attribute}' is a class; name an instance")
    if missing := [member for member in _MEMBERS if not hasattr(task, member)]:
        raise UserError(
            f"task '{name}': '{attribute}' is not a task: it has no '{missing[0]}' "
            "(inherit from entropix_jax.lab.tasks.task.Task)"
        )
    return task


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The missing module may also be one that this module imports.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"no module '{error.name}'") from None
        raise


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no file {path}")
    name = f"entropix_jax task {path.resolve()}"  # unique
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
