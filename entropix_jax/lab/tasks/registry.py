"""Finds tasks by name: those of the package, and users' own."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks import tiny
from entropix_jax.lab.tasks.gsm8k import Gsm8k
from entropix_jax.lab.tasks.task import Task

_BUILT_IN: dict[str, Task] = {
    task.name: task
    for task in (tiny.SUMS, tiny.WORD_PROBLEMS, tiny.FACTS, tiny.FORKS, tiny.DOCUMENTS)
}
_GSM8K = "gsm8k:TEST.jsonl[,TUNING.jsonl]"
_MEMBERS = ("name", "chat", "stop", "max_new_tokens", "votes", "items", "extract", "score")


def find_task(name: str) -> Task:
    """Finds a task.

    Args:
        name: `sums`, `word-problems`, `facts`, `forks` or `documents`, of the tiny world;
            `gsm8k:TEST.jsonl[,TUNING.jsonl]`; or a user's task, `some.module:attribute` or
            `path/to/file.py:attribute`, whose code is run.

    Raises:
        UserError: no such task, or the user's code fails or has no task there.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    place, _, rest = name.partition(":")
    if place == Gsm8k.name:
        test, _, tuning = rest.partition(",")
        if not test:
            raise UserError(f"task '{name}': no file of problems: {_GSM8K}")
        return Gsm8k(Path(test), Path(tuning) if tuning else None)
    if ":" not in name:
        close = difflib.get_close_matches(name, (*_BUILT_IN, Gsm8k.name), n=1, cutoff=0.4)
        suggestion = f", did you mean '{close[0]}'?" if close else ""
        known = ", ".join((*_BUILT_IN, _GSM8K))
        raise UserError(
            f"no task '{name}'{suggestion} (known: {known}, MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE)"
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
