"""Published question-answering tasks, read from their files, with worked examples of this project.

The lm-evaluation-harness also has these tasks (`entropix_jax.lab.harness`), but downloads their
data, and supports neither votes nor common random numbers for two samplers.
"""

import json
import re
import string
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from entropix_jax.lab.tasks.files import JsonTask
from entropix_jax.lab.tasks.task import Item, Prompt

EXEMPLARS = Path(__file__).with_name("gsm8k_exemplars.jsonl")
# In lower case, as in the data, which has no question marks.
QUESTIONS = (
    ("which planet of the solar system has the most mass?", "Jupiter"),
    ("who wrote the novel pride and prejudice?", "Jane Austen"),
    ("what do you call a polygon with seven sides?", "a heptagon"),
    ("in which year did the berlin wall fall?", "1989"),
    ("what is the capital city of new zealand?", "Wellington"),
)

# A minus after a word or a number is not a sign. `\$` is a dollar in LaTeX.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_NUMBER = rf"((?<![\w)])\\?\$?[-−])?\\?\$?({_DIGITS})"
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[^\w\n]*?{_NUMBER}")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def ask_after(examples: Sequence[tuple[str, str]], question: str, *, chat: bool) -> Prompt:
    """The questions and answers of the examples and then the question, as turns of a chat or as
    plain text, in which a new question begins with a line `Question:`."""
    if not chat:
        blocks = [f"Question: {asked}\nAnswer: {told}" for asked, told in examples]
        return "\n\n".join([*blocks, f"Question: {question}\nAnswer:"])
    turns = [
        {"role": role, "content": content}
        for example in examples
        for role, content in zip(("user", "assistant"), example, strict=True)
    ]
    return (*turns, {"role": "user", "content": question})


@cache
def worked_examples() -> tuple[tuple[str, str], ...]:
    """The questions and solutions of eight problems (chain of thought, Wei et al. 2022,
    arXiv:2201.11903)."""
    solved = map(json.loads, EXEMPLARS.read_text(encoding="utf-8").splitlines())
    return tuple((one["question"], one["answer"]) for one in solved)


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


class _WordProblems(JsonTask):
    """The answer is the number after `####`, else the last one."""

    stop = ("\nQuestion:",)

    def extract(self, item: Item, text: str) -> str | None:
        """Returns the answer as `read_number` does."""
        return read_number(text)


class Gsm8k(_WordProblems):
    """GSM8K: grade-school word problems from JSON Lines (Cobbe et al. 2021, arXiv:2110.14168)."""

    name = "gsm8k"
    published = "gsm8k_test.jsonl"
    max_new_tokens = 512
    form = "an object with the texts 'question' and 'answer', which ends in '#### NUMBER'"

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {"question": str(question), "answer": str(solution)} if (
                question.strip() and _MARKED.search(solution) and (answer := read_number(solution))
            ):
                prompt = ask_after(worked_examples(), question, chat=chat)
                return Item(f"gsm8k-{number}", prompt, answer)
        return None


class Svamp(_WordProblems):
    """SVAMP: one-step word problems from a JSON list (Patel et al. 2021, arXiv:2103.07191), after
    four examples of GSM8K's form."""

    name = "svamp"
    published = "svamp.json"
    max_new_tokens = 128
    form = "an object with the texts 'ID', 'Body' and 'Question', and the number 'Answer'"

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {"ID": str(name), "Body": str(body), "Question": str(asked), "Answer": answer} if (
                isinstance(answer, int | float) and not isinstance(answer, bool)
            ):
                exact = Decimal(repr(answer))
                if exact.is_finite():
                    problem = f"{body.strip()} {asked.strip()}"
                    prompt = ask_after(worked_examples()[:4], problem, chat=chat)
                    return Item(name, prompt, write_number(exact))
        return None


class NqOpen(JsonTask):
    """NQ-open: short questions of users of a search engine, from JSON Lines (Kwiatkowski et al.
    2019; Lee et al. 2019, arXiv:1906.00300). A text is right if it equals one of the answers after
    `normalize_answer`."""

    name = "nq-open"
    published = "nq_open_dev.jsonl"
    stop = ("\n",)
    max_new_tokens = 16
    form = "an object with the text 'question' and the list of texts 'answer'"

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {"question": str(question), "answer": [str(), *_] as answers} if (
                question.strip() and all(isinstance(answer, str) for answer in answers)
            ):
                accepted = tuple(dict.fromkeys(map(normalize_answer, answers)))
                prompt = ask_after(QUESTIONS, f"{question.strip()}?", chat=chat)
                return Item(f"nq-open-{number}", prompt, "", accepted=accepted)
        return None

    def extract(self, item: Item, text: str) -> str | None:
        """The whole text, normalized; None if nothing is left of it."""
        return normalize_answer(text) or None

    def score(self, item: Item, answer: str | None) -> float:
        """Returns 1 for one of the answers, else 0. Two published answers are empty after
        normalization: only an empty text matches them, as in the published evaluation."""
        return float((answer or "") in item.accepted)


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and superfluous white space, as in the evaluation of
    Lee et al., which is that of SQuAD (Rajpurkar et al. 2016) on decomposed characters."""
    text = unicodedata.normalize("NFD", text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())
