"""Published question-answering tasks, read from their files, with worked examples of this project.

The lm-evaluation-harness also has these tasks (`entropix_jax.lab.harness`), but downloads their
data, and supports neither votes nor common random numbers for two samplers.
"""

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.files import JsonTask
from entropix_jax.lab.tasks.reading import (
    contains_words,
    first_sentence,
    normalize_answer,
    read_words,
)
from entropix_jax.lab.tasks.task import Item, Prompt
from entropix_jax.text.numbers import marked_number, read_number, write_number

EXEMPLARS = Path(__file__).with_name("gsm8k_exemplars.jsonl")
# In lower case, as in the data, which has no question marks.
QUESTIONS = (
    ("which planet of the solar system has the most mass?", "Jupiter"),
    ("who wrote the novel pride and prejudice?", "Jane Austen"),
    ("what do you call a polygon with seven sides?", "a heptagon"),
    ("in which year did the berlin wall fall?", "1989"),
    ("what is the capital city of new zealand?", "Wellington"),
)

_AUXILIARIES = frozenset("is are was were be has have had do does did can could".split())


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


class _Asked(JsonTask):
    """A task whose entries need a gold answer."""

    def without_gold(self, number: int, missing: str) -> UserError:
        return UserError(f"{self.path}: entry {number}: has no gold answer: {missing}")


class _WordProblems(_Asked):
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
            case {"question": str(question)} if question.strip():
                solution = value.get("answer")
                answer = marked_number(solution) if isinstance(solution, str) else None
                if answer is None:
                    raise self.without_gold(number, "'answer' is no text with '#### NUMBER'")
                prompt = ask_after(worked_examples(), question, chat=chat)
                return Item(f"gsm8k-{number}", prompt, answer)
        return None


class Svamp(_WordProblems):
    """SVAMP: one-step word problems from a JSON list (Patel et al. 2021, arXiv:2103.07191), after
    four examples of GSM8K's form."""

    name = "svamp"
    published = "svamp.json"
    max_new_tokens = 192
    form = "an object with the texts 'ID', 'Body' and 'Question', and the number 'Answer'"

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {"ID": str(name), "Body": str(body), "Question": str(asked)}:
                answer = value.get("Answer")
                if (
                    not isinstance(answer, int | float)
                    or isinstance(answer, bool)
                    or not (exact := Decimal(repr(answer))).is_finite()
                ):
                    raise self.without_gold(number, "'Answer' is no finite number")
                problem = f"{body.strip()} {asked.strip()}"
                prompt = ask_after(worked_examples()[:4], problem, chat=chat)
                return Item(name, prompt, write_number(exact))
        return None


class NqOpen(_Asked):
    """NQ-open: short questions of users of a search engine, from JSON Lines (Kwiatkowski et al.
    2019; Lee et al. 2019, arXiv:1906.00300). A text is right if one of the answers occurs in its
    first sentence."""

    name = "nq-open"
    published = "nq_open_dev.jsonl"
    stop = ("\n",)
    max_new_tokens = 64
    form = "an object with the text 'question' and the list of texts 'answer', at least one"

    def parse(self, value: Any, number: int, *, chat: bool) -> Item | None:
        match value:
            case {"question": str(question)} if question.strip():
                match value.get("answer"):
                    case [str(), *_] as answers if all(
                        isinstance(answer, str) and answer.strip() for answer in answers
                    ):
                        prompt = ask_after(QUESTIONS, f"{question.strip()}?", chat=chat)
                        accepted = tuple(dict.fromkeys(answers))
                        return Item(f"nq-open-{number}", prompt, "", accepted=accepted)
                    case _:
                        raise self.without_gold(number, "'answer' is no list of texts")
        return None

    def extract(self, item: Item, text: str) -> str | None:
        """The words of the first sentence; None if it has none."""
        return read_words(first_sentence(text)) or None

    def score(self, item: Item, answer: str | None) -> float:
        """Returns 1 if one of the answers occurs in the sentence, else 0. An answer without a word
        is given only by a text without one."""
        return float(any(contains_words(answer or "", read_words(a)) for a in item.accepted))

    def measures(self, item: Item, text: str) -> Mapping[str, tuple[float, float]]:
        """Returns whether the text equals one of the answers (`exact`, the published score), and
        whether it is a phrase of at most four words without an auxiliary verb (`bare`)."""
        words = read_words(text).split()
        exact = normalize_answer(text) in map(normalize_answer, item.accepted)
        bare = 1 <= len(words) <= 4 and _AUXILIARIES.isdisjoint(words)
        return {"exact": (float(exact), 1.0), "bare": (float(bare), 1.0)}
