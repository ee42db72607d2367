"""Files of tasks: their entries, with errors of one line, and two splits of one published file."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_text
from entropix_jax.lab.tasks.task import Item, Split, Task, check_split


def read_values(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the values of a file of JSON Lines or of one JSON list, each with its number: the line
    or the position in the list, from 1. UserError if the file cannot be read or has no value."""
    content = read_text(path)
    if content.lstrip().startswith("["):
        values = list(enumerate(_parse(content, str(path)), 1))
    else:
        lines = enumerate(content.split("\n"), 1)
        values = [(n, _parse(line, f"{path}: line {n}")) for n, line in lines if line.strip()]
    if not values:
        raise UserError(f"{path}: is empty")
    yield from values


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None


def split_items(items: Iterable[Item], split: Split, share: int = 4) -> list[Item]:
    """The items of one split, one in `share` for `tuning` and the rest for `test`, in the order of
    a hash of their ids: every prefix is a fair sample."""

    def rank(item: Item) -> bytes:
        return blake2b(item.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    ordered = sorted(items, key=rank)
    end = len(ordered) // share
    return ordered[:end] if split == "tuning" else ordered[end:]


class FileTask(Task):
    """A task whose items are the entries of one file. Each call of `items` reads it again.

    Attributes:
        published: the file's name as it is published.
        tuning_share: one item in this many is for tuning.
    """

    published: str
    tuning_share = 4

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
        yield from split_items(items, split, self.tuning_share)


class JsonTask(FileTask):
    """A task whose entries are values of JSON.

    Attributes:
        form: the form of an entry, for error messages.
    """

    form: str

    @abstractmethod
    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        """Returns the item of an entry; None for an entry of another form."""
        ...

    def read(self, *, chat: bool) -> Iterator[Item]:
        for number, value in read_values(self.path):
            item = self.parse(value, number, chat=chat)
            if item is None:
                raise UserError(f"{self.path}: entry {number}: an entry is {self.form}")
            yield item
