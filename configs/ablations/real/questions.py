"""Simple questions of this project's own, as tasks: open, multiple choice, yes or no."""

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_text
from entropix_jax.lab.tasks.files import FileTask, read_values
from entropix_jax.lab.tasks.published import QUESTIONS as EXAMPLES
from entropix_jax.lab.tasks.published import NqOpen, ask_after
from entropix_jax.lab.tasks.task import Item, Split

LETTERS = "ABCD"
# `A` before a word is an article, except in "A is right" and "A because".
_LETTER = re.compile(r"(?<![\w'’-])(?:[B-D]|A(?! (?!is |because )\w))(?![\w'’-])")
_CHOICE = re.compile(rf"^([{LETTERS}])\) (.+)$", re.MULTILINE)
_YES_NO = re.compile(r"\b(?:yes|no)\b", re.IGNORECASE)


class Questions(NqOpen):
    """In NQ-open's form, asked and judged as they are."""

    name = "questions"


class FreshQuestions(Questions):
    """The questions of the test split that no study up to the plan of the quadrants has used."""

    entries = frozenset(map(int, (Path(__file__).parent / "fresh.txt").read_text().split()))

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        for item in super().items(split, chat=chat):
            if int(item.id.rpartition("-")[2]) in self.entries:
                yield item


class FirstQuestions(Questions):
    """First questions of a newcomer: without examples in a chat. Both splits have all of them."""

    name = "first"

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        for item in self.read(chat=chat):
            yield replace(item, prompt=item.prompt[-1:]) if chat else item


class LookupFacts(Questions):
    """Questions from CSV whose answers a lookup finds in the same file: columns question, key,
    value, and answer with `|` between several. Without examples in a chat. Half are for tuning."""

    name = "lookup-facts"
    tuning_share = 2

    def read(self, *, chat: bool) -> Iterator[Item]:
        rows = csv.DictReader(read_text(self.path).splitlines())
        for number, row in enumerate(rows, 1):
            prompt = ask_after(() if chat else EXAMPLES, row["question"], chat=chat)
            accepted = tuple(row["answer"].split("|"))
            yield Item(f"{self.name}-{number}", prompt, "", accepted=accepted)


class Choices(FileTask):
    """Multiple-choice questions from JSON Lines.

    An entry is an object with the text `question`, the list `choices` of four different texts, and
    the index `answer` of the right one, from 0.
    """

    name = "choices"
    stop = ("\nQuestion:",)
    max_new_tokens = 24

    def read(self, *, chat: bool) -> Iterator[Item]:
        for number, value in read_values(self.path):
            match value:
                case {
                    "question": str(question),
                    "choices": [str(), str(), str(), str()] as choices,
                    "answer": int(index),
                } if (
                    question.strip()
                    and all(choice.strip() for choice in choices)
                    and len({choice.strip().lower() for choice in choices}) == len(LETTERS)
                    and index in range(len(LETTERS))
                    and not isinstance(index, bool)
                ):
                    listed = (f"{a}) {b.strip()}" for a, b in zip(LETTERS, choices, strict=True))
                    asked = "\n".join([question.strip(), *listed, "Answer with the letter."])
                    prompt = ask_after((), asked, chat=chat)
                    yield Item(f"choices-{number}", prompt, LETTERS[index])
                case _:
                    raise UserError(
                        f"{self.path}: line {number}: an entry is an object with the text"
                        " 'question', the list 'choices' of four different texts, and the"
                        " index 'answer' from 0 to 3"
                    )

    def extract(self, item: Item, text: str) -> str | None:
        """The first letter that stands alone. Without one, the letter of the only choice whose text
        occurs; None if there are none or several."""
        if letter := _LETTER.search(text):
            return letter[0]
        prompt = item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]
        letters = [letter for letter, choice in _CHOICE.findall(prompt) if _has(text, choice)]
        return letters[0] if len(letters) == 1 else None


class YesNo(FileTask):
    """Questions to answer with yes or no, from JSON Lines.

    An entry is an object with the texts `question` and `answer`, which is `yes` or `no`.
    """

    name = "yes-no"
    stop = ("\nQuestion:",)
    max_new_tokens = 24

    def read(self, *, chat: bool) -> Iterator[Item]:
        for number, value in read_values(self.path):
            match value:
                case {"question": str(question), "answer": "yes" | "no" as answer} if (
                    question.strip()
                ):
                    asked = f"{question.strip()}\nAnswer with yes or no."
                    yield Item(f"yes-no-{number}", ask_after((), asked, chat=chat), answer)
                case _:
                    raise UserError(
                        f"{self.path}: line {number}: an entry is an object with the text"
                        " 'question', and 'answer', which is 'yes' or 'no'"
                    )

    def extract(self, item: Item, text: str) -> str | None:
        """The first `yes` or `no`, in lower case; None if there is neither."""
        found = _YES_NO.search(text)
        return found[0].lower() if found else None


def _has(text: str, choice: str) -> bool:
    """Whether the text contains the choice as whole words, in any case."""
    pattern = rf"(?<!\w){re.escape(choice)}(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


_HERE = Path(__file__).parent
QUESTIONS = Questions(_HERE / "easy.jsonl")
FRESH = FreshQuestions(_HERE / "easy.jsonl")
FIRST = FirstQuestions(_HERE / "first.jsonl")
CHOICES = Choices(_HERE / "choices.jsonl")
YES_NO = YesNo(_HERE / "yes-no.jsonl")
LOOKUP_FACTS = LookupFacts(_HERE / "facts.csv")
