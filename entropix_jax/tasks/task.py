"""What a task is: its items, and how a completion's answer is read and scored.

Anything with the members of `Task` is one. A task of one's own inherits from it, and has left to
say only its name, its items and how to read an answer:

    class Capitals(Task):
        name = "capitals"

        def items(self, split, *, chat):
            yield Item("italy", "The capital of Italy is", "Rome")

        def extract(self, item, text):
            return next(iter(text.split()), None)
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from entropix_jax.errors import UserError

Split = Literal["tuning", "test"]
Prompt = str | tuple[Mapping[str, str], ...]
"""A text, or the messages of a chat, each with a `role` and a `content`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        id: unique within the task, over both splits, and the same from version to version.
        prompt: what the model continues or answers.
        answer: the right answer as `Task.extract` gives it; empty where there are several.
        truth: where known, each possible answer and its true probability.
    """

    id: str
    prompt: Prompt
    answer: str
    truth: Mapping[str, float] | None = None


class Task(Protocol):
    """Questions of two splits: settings are tuned on one, and measured once on the other.

    Attributes:
        name: what results are filed under.
        chat: asked as a chat or as plain text; None leaves it to the model.
        stop: texts that end an answer and are not part of it.
        max_new_tokens: most tokens of an answer.
        votes: whether a majority of answers means something: not of free texts, each of which is an
            answer of its own.
    """

    name: str
    chat: bool | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 256
    votes: bool = True

    @abstractmethod
    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        """A split's items, one by one as they are asked for: always the same, in an order in which
        any first part is a fair sample.

        Args:
            chat: as which to ask where `self.chat` is None, and else the same as that.

        Raises:
            UserError: there is no such split, or its file cannot be used. Perhaps while iterating.
        """
        ...

    @abstractmethod
    def extract(self, item: Item, text: str) -> str | None:
        """The answer in a completion of the item's prompt; None where there is none."""
        ...

    def score(self, item: Item, answer: str | None) -> float:
        """1 for a right answer, 0 for a wrong one and for none."""
        return float(answer == item.answer)


def check_split(split: str) -> None:
    """Checks the name of a split.

    Raises:
        UserError: there is none of that name.
    """
    if split not in get_args(Split):
        raise UserError(f"no split '{split}' (there are {' and '.join(get_args(Split))})")
