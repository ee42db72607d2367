"""The interface of tasks: items, and how to extract and score the answer in a completion.

A task is any object with the members of `Task`. A subclass needs only a name, items and `extract`:

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
from typing import Literal, Protocol, get_args, runtime_checkable

from entropix_jax.errors import UserError

Split = Literal["tuning", "test"]
Prompt = str | tuple[Mapping[str, str], ...]
"""A text, or the messages of a chat, each with a `role` and a `content`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        id: unique within the task, over both splits, and stable over versions.
        prompt: what the model continues or answers.
        answer: the right answer as `Task.extract` returns it; empty if there are several.
        truth: the true probability of each possible answer, if known.
        accepted: the right answers, if there are several.
    """

    id: str
    prompt: Prompt
    answer: str
    truth: Mapping[str, float] | None = None
    accepted: tuple[str, ...] = ()


@runtime_checkable
class Task(Protocol):
    """Questions in two splits: settings are tuned on one and measured on the other.

    Attributes:
        name: the name in results.
        chat: whether prompts are a chat or plain text; None: depends on the model.
        stop: texts that end an answer without being part of it.
        max_new_tokens: limit of an answer.
        votes: whether a majority of answers is meaningful (not for free text).
        scored: whether texts have a score; samplers are tuned on tasks with one.
        has_user: whether a simulated user replies to a question of the model, see `reply`.
    """

    name: str
    chat: bool | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 256
    votes: bool = True
    scored: bool = True
    has_user: bool = False

    @abstractmethod
    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        """Yields a split's items, always the same ones, in an order in which every prefix is a fair
        sample.

        Args:
            chat: `self.chat`, or the model's choice if that is None.

        Raises:
            UserError: no such split, or an invalid file; possibly while iterating.
        """
        ...

    @abstractmethod
    def extract(self, item: Item, text: str) -> str | None:
        """Returns the answer in a completion of the item's prompt, or None."""
        ...

    def reply(self, item: Item, question: str) -> str | None:
        """Returns the simulated user's reply to a text that ends with a question of the model. None
        ends the chat: the text is then the answer."""
        return None

    def identity(self) -> Mapping[str, str]:
        """Returns dependencies of scores and measures, such as versions of other packages."""
        return {}

    def score(self, item: Item, answer: str | None) -> float:
        """1 for the right answer, else 0."""
        return float(answer == item.answer)

    def measures(self, item: Item, text: str) -> Mapping[str, tuple[float, float]]:
        """Returns further measures of a completion by name, each a numerator and a denominator. The
        mean over texts is the ratio of their sums."""
        return {}


def check_split(split: str) -> None:
    """Raises a UserError for an unknown split."""
    if split not in get_args(Split):
        raise UserError(f"no split '{split}' (there are {' and '.join(get_args(Split))})")
