"""GSM8K: grade-school word problems from JSON Lines files (Cobbe et al. 2021, arXiv:2110.14168).

A problem is an object with the texts `question` and `answer`; the answer's last line is `#### 18`.
Prompts start with eight worked exemplars (chain of thought, Wei et al. 2022, arXiv:2201.11903) of
this project's own, from a file of the same format.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from entropix_jax.errors import UserError
from entropix_jax.host.files import opening
from entropix_jax.lab.tasks.task import Item, Prompt, Split, Task, check_split

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
    """One file's problems as the test split, and optionally another's as the tuning split."""

    name = "gsm8k"
    chat = None
    stop = ("\nQuestion:",)
    max_new_tokens = 512

    def __init__(self, test: Path, tuning: Path | None = None) -> None:
        self._test = test
        self._tuning = tuning

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        path = self._test if split == "test" else self._tuning
        if path is None:
            raise UserError(
                f"gsm8k:{self._test}: tuning needs a second file: gsm8k:{self._test},TUNING.jsonl"
            )
        return self._items(path, split, chat)

    def _items(self, path: Path, split: Split, chat: bool) -> Iterator[Item]:
        exemplars = list(_read(EXEMPLARS))
        for line, question, _, answer in _read(path):
            yield Item(f"gsm8k-{split}-{line}", _prompt(exemplars, question, chat), answer)

    def extract(self, item: Item, text: str) -> str | None:
        """See `read_number`."""
        return read_number(text)


def _prompt(exemplars: list[_Solved], question: str, chat: bool) -> Prompt:
    """The worked exemplars and the question, as turns of a chat or as plain text."""
    if not chat:
        blocks = [f"Question: {each.question}\nAnswer: {each.solution}" for each in exemplars]
        return "\n\n".join([*blocks, f"Question: {question}\nAnswer:"])
    turns = [
        {"role": role, "content": content}
        for each in exemplars
        for role, content in (("user", each.question), ("assistant", each.solution))
    ]
    return (*turns, {"role": "user", "content": question})


def read_number(text: str) -> str | None:
    """The number after the last `####`, or without one the last number; None without numbers.

    Units, thousands' separators and trailing zeros are dropped: `#### -$1,080.50` is `-1080.5`.
    """
    *_, last = (None, *(_MARKED.findall(text) or _ANYWHERE.findall(text)))
    if last is None:
        return None
    sign, digits = last
    number = Decimal(digits.replace(",", "")).normalize()
    return f"{(-number if sign else number) + 0:f}"


def _read(path: Path) -> Iterator[_Solved]:
    """Reads a file's problems line by line, skipping blank lines."""
    empty = True
    with opening(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                yield _parse(line, path, number)
    if empty:
        raise UserError(f"{path}: has no problems")


def _parse(line: bytes, path: Path, number: int) -> _Solved:
    where = f"{path}: line {number}"
    try:
        problem = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    match problem:
        case {"question": str(question), "answer": str(solution)} if question.strip():
            if not _MARKED.search(solution):
                raise UserError(f"{where}: the answer does not end in '#### NUMBER'")
            answer = read_number(solution)
            assert answer is not None
            return _Solved(number, question, solution, answer)
    raise UserError(f"{where}: a problem is an object with the texts 'question' and 'answer'")
