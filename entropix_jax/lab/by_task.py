"""Numbers that may differ by task, such as how many items of each a study takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from entropix_jax.errors import UserError, nearest


@dataclass(frozen=True)
class ByTask:
    """A number for each task: its own in `own`, else the `default`."""

    default: int | None
    own: tuple[tuple[str, int], ...] = ()  # task and number; hashable

    def of(self, task: str) -> int | None:
        """The number of a task."""
        return dict(self.own).get(task, self.default)

    def at_most(self, most: int) -> ByTask:
        """The same with no number above `most`; 0 and None are without a limit."""
        own = tuple((task, min(number or most, most)) for task, number in self.own)
        return ByTask(min(self.default or most, most), own)

    def check_tasks(self, key: str, tasks: Iterable[str]) -> None:
        """Raises a UserError if a number is of none of these tasks."""
        tasks = list(tasks)
        for task, _ in self.own:
            if task not in tasks:
                raise UserError(f"{key}.{task}: no such task{nearest(task, tasks)}")

    def to_json(self) -> int | dict[str, int | None] | None:
        """One number, or one for each task and, as `default`, all others."""
        return {**dict(self.own), "default": self.default} if self.own else self.default


NONE = ByTask(0)
