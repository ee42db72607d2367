"""GSM8K: grade-school word problems from JSON Lines files (Cobbe et al. 2021, arXiv:2110.14168).

A problem is an object with the texts `question` and `answer`; the answer's last line is `#### 18`.
Prompts start with eight worked exemplars (chain of thought, Wei et al. 2022, arXiv:2201.11903) of
this project's own, from a file of the same format.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import NamedTuple

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.examples import ask_after
from entropix_jax.lab.tasks.files import Entry, read_lines, split_items
from entropix_jax.lab.tasks.task import Item, Split, Task, check_split

EXEMPLARS = Path(__file__).with_name("gsm8k_exemplars.jsonl")

# A minus after a word or a number is not a sign. `\$` is a dollar in LaTeX.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = rf"((?<![\w)])\\?\$?[-−])?\\?\$?({_DIGITS})"
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[^\w\n]*?{_NUMBER}")


class _Solved(NamedTuple):
    line: int
    question: str
    solution: str
    answer: str


class Gsm8k(Task):
    """One file's problems, in two splits; or as the test split, and another's as the tuning one."""

    name = "gsm8k"
    chat = None
    stop = ("\nQuestion:",)
    max_new_tokens = 512

    def __init__(self, test: Path, tuning: Path | None = None) -> None:
        self._test = test
        self._tuning = tuning

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        if self._tuning is None:
            yield from split_items(self._read(self._test, self.name, chat), split)
        else:
            path = self._test if split == "test" else self._tuning
            yield from self._read(path, f"{self.name}-{split}", chat)

    def _read(self, path: Path, kind: str, chat: bool) -> Iterator[Item]:
        for line, question, _, answer in map(_parse, read_lines(path)):
            prompt = ask_after(worked_examples(), question, chat=chat)
            yield Item(f"{kind}-{line}", prompt, answer)

    def extract(self, item: Item, text: str) -> str | None:
        """See `read_number`."""
        return read_number(text)


@cache
def worked_examples() -> tuple[tuple[str, str], ...]:
    """The questions and solutions of the project's own exemplars."""
    solved = map(_parse, read_lines(EXEMPLARS))
    return tuple((each.question, each.solution) for each in solved)


def read_number(text: str) -> str | None:
    """The number after the last `####`, or without one the last number; None without numbers.

    Units, thousands' separators and trailing zeros are dropped: `#### -$1,080.50` is `-1080.5`.
    """
    *_, last = (None, *(_MARKED.findall(text) or _ANYWHERE.findall(text)))
    if last is None:
        return None
    sign, digits = last
    number = Decimal(digits.replace(",", ""))
    return write_number(-number if sign else number)


def write_number(number: Decimal) -> str:
    """A number as `read_number` returns it: without trailing zeros or an exponent."""
    return f"{number.normalize() + 0:f}"


def _parse(entry: Entry) -> _Solved:
    match entry.value:
        case {"question": str(question), "answer": str(solution)} if question.strip():
            if not _MARKED.search(solution):
                raise UserError(f"{entry.where}: the answer does not end in '#### NUMBER'")
            answer = read_number(solution)
            assert answer is not None
            return _Solved(entry.number, question, solution, answer)
    raise UserError(f"{entry.where}: a problem is an object with the texts 'question' and 'answer'")
