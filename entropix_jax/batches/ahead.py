"""What comes from somewhere slow, read ahead, so that nobody has to wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

_AHEAD = 32  # records

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Runs an iterable in a thread of its own, some items ahead. A context manager: the iterable
    is left where it is on exit, or as soon as it gives the item that it was asked for.

    An input that never gives one holds up nothing, not even the end of the process.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        """Nothing is asked for before the context is entered."""
        self._items = items
        self._read: queue.Queue[Item | BaseException | None] = queue.Queue(_AHEAD)
        self._left = False

    def get(self, patience: float) -> Item | None:
        """The next item; None after the last one.

        Args:
            patience: how many seconds to wait for it.

        Raises:
            queue.Empty: it is not there yet.
            Exception: whatever the iterable raised.
        """
        item = self._read.get(timeout=patience)
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> Ahead[Item]:
        threading.Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left = True
        with suppress(queue.Empty):  # for a thread that waits for room
            while True:
                self._read.get_nowait()

    def _work(self) -> None:
        try:
            for item in self._items:
                self._read.put(item)
                if self._left:
                    return
        except BaseException as error:  # told where it is waited for
            self._read.put(error)
        else:
            self._read.put(None)
