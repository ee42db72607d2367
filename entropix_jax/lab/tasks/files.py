"""Files of tasks: their entries, with errors of one line, and two splits of one published file."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening, read_bytes
from entropix_jax.lab.tasks.task import Item, Split, Task, check_split

_TUNING_SHARE = 4  # one item in so many


class Entry(NamedTuple):
    """A value in a file: `where` is the file and the place, for error messages; `number` is its
    line, or its place in a list, from 1."""

    where: str
    number: int
    value: Any


def read_lines(path: Path) -> Iterator[Entry]:
    """The values of a JSON Lines file, one by one; blank lines are skipped. UserError if it cannot
    be read, has no value, or a line is not JSON."""
    empty = True
    with opening(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                where = f"{path}: line {number}"
                yield Entry(where, number, _parse(line, where))
    if empty:
        raise UserError(f"{path}: is empty")


def read_list(path: Path) -> Iterator[Entry]:
    """The values of a JSON file that holds one list of them. UserError if it does not."""
    values = _parse(read_bytes(path), str(path))
    if not isinstance(values, list) or not values:
        raise UserError(f"{path}: must hold a list")
    for number, value in enumerate(values, 1):
        yield Entry(f"{path}: entry {number}", number, value)


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None


def split_items(items: Iterable[Item], split: Split) -> list[Item]:
    """The items of one split, a quarter for `tuning` and the rest for `test`, in the order of a
    hash of their ids: every prefix is a fair sample."""

    def rank(item: Item) -> bytes:
        return blake2b(item.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    ordered = sorted(items, key=rank)
    quarter = len(ordered) // _TUNING_SHARE
    return ordered[:quarter] if split == "tuning" else ordered[quarter:]


class FileTask(Task):
    """A task whose items are the entries of one file. Each call of `items` reads it again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def read(self, *, chat: bool) -> Iterator[Item]:
        """Yields the file's items, in its order. UserError if it is invalid."""
        ...

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        """The items of `split_items`. UserError if the file is invalid, or two ids are equal."""
        check_split(split)
        items = list(self.read(chat=chat))
        seen: set[str] = set()
        for item in items:
            if item.id in seen:
                raise UserError(f"{self.path}: two entries have the id {item.id!r}")
            seen.add(item.id)
        yield from split_items(items, split)
