"""Tasks by name: those of the package, and a user's own."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from entropix_jax.errors import UserError
from entropix_jax.tasks import tiny
from entropix_jax.tasks.gsm8k import Gsm8k
from entropix_jax.tasks.task import Task

_BUILT_IN: dict[str, Task] = {
    task.name: task
    for task in (tiny.SUMS, tiny.WORD_PROBLEMS, tiny.FACTS, tiny.FORKS, tiny.DOCUMENTS)
}
_GSM8K = "gsm8k:TEST.jsonl[,TUNING.jsonl]"
_MEMBERS = ("name", "chat", "stop", "max_new_tokens", "votes", "items", "extract", "score")


def find_task(name: str) -> Task:
    """The task of a name.

    Args:
        name: `sums`, `word-problems`, `facts`, `forks` or `documents`, of the tiny world;
            `gsm8k:TEST.jsonl[,TUNING.jsonl]`; or a task of one's own, `some.module:attribute` or
            `path/to/file.py:attribute`, whose code is run.

    Raises:
        UserError: there is no such task, or its code fails or has no task there.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    place, _, rest = name.partition(":")
    if place == Gsm8k.name:
        test, _, tuning = rest.partition(",")
        if not test:
            raise UserError(f"task '{name}': the problems are missing: {_GSM8K}")
        return Gsm8k(Path(test), Path(tuning) if tuning else None)
    if ":" not in name:
        close = difflib.get_close_matches(name, (*_BUILT_IN, Gsm8k.name), n=1, cutoff=0.4)
        meant = f", did you mean '{close[0]}'?" if close else ""
        known = ", ".join((*_BUILT_IN, _GSM8K))
        raise UserError(
            f"no task '{name}'{meant} (known: {known}, MODULE:ATTRIBUTE, FILE.py:ATTRIBUTE)"
        )
    return _own(name)


def _own(name: str) -> Task:
    """The task that an attribute of a user's module or file holds."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _run_file(Path(place)) if place.endswith(".py") else _import(place)
    except UserError as error:
        raise UserError(f"task '{name}': {error}") from None
    except (Exception, SystemExit) as error:  # whatever a user's code may raise
        raise UserError(
            f"task '{name}': importing {place} failed: {type(error).__name__}: {error}"
        ) from error
    try:
        task: Task = getattr(module, attribute)  # its members are looked at below
    except AttributeError:
        raise UserError(f"task '{name}': {place} has no '{attribute}'") from None
    if isinstance(task, type):
        raise UserError(f"task '{name}': '{attribute}' is a class; name an object of it")
    if missing := [member for member in _MEMBERS if not hasattr(task, member)]:
        raise UserError(
            f"task '{name}': '{attribute}' is no task: it lacks '{missing[0]}' "
            "(inherit from entropix_jax.tasks.task.Task)"
        )
    return task


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that this one imports may be what is missing.
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UserError(f"no module '{error.name}'") from None
        raise


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no file {path}")
    name = f"entropix_jax task {path.resolve()}"  # no other module's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks its own module up
    spec.loader.exec_module(module)
    return module
