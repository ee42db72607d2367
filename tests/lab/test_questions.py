"""The project's own questions: balanced files, extraction of answers, and bad lines."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.tasks.task import Item, Split

FILE = Path(__file__).parents[2] / "configs" / "ablations" / "real" / "questions.py"
SIZES = {
    "QUESTIONS": {"": 400},
    "CHOICES": dict.fromkeys("ABCD", 75),
    "YES_NO": {"yes": 150, "no": 150},
}


def load(name: str, *, chat: bool = True) -> tuple[Any, list[Any]]:
    task = find_task(f"{FILE}:{name}")
    return task, [item for split in get_args(Split) for item in task.items(split, chat=chat)]


@pytest.mark.parametrize(("name", "sizes"), SIZES.items())
def test_files_are_balanced_without_duplicates(name: str, sizes: dict[str, int]) -> None:
    task, items = load(name)
    assert Counter(item.answer for item in items) == sizes
    asked = {str(item.prompt[-1]["content"]).split("\n")[0].casefold() for item in items}
    assert len(asked) == len(items)
    for item in items:
        for answer in item.accepted or (item.answer,):
            assert task.score(item, task.extract(item, f"{answer.capitalize()}.")) == 1.0


@pytest.mark.parametrize("chat", [True, False])
def test_each_choice_is_extracted_by_its_letter_or_text(chat: bool) -> None:
    task, items = load("CHOICES", chat=chat)
    for item in items:
        asked = item.prompt[-1]["content"] if chat else item.prompt
        listed = re.findall(r"^([A-D])\) (.+)$", asked, re.MULTILINE)
        assert [letter for letter, _ in listed] == [*"ABCD"]
        for letter, choice in listed:
            forms = ("{}", "({})", "{}.", "{}) yes", "{} is right", "The answer is {}")
            texts = [form.format(letter) for form in forms]
            texts += [choice, f"It is a {choice.upper()}."]
            assert {task.extract(item, text) for text in texts} == {letter}, (asked, letter)


ITEM = Item("", "What colour is grass?\nA) red\nB) green\nC) blue\nD) black", "B")
FOUND = {
    "CHOICES": {
        **dict.fromkeys(("", "E", "BAD", "A dog", "vitamin-C", "red or green", "greenish")),
        "A green one": "B",
        "B, not A": "B",
        "I say C\nor D": "C",
    },
    "YES_NO": {"YES!": "yes", "No, yes": "no", "I know": None, "": None, "It is: no": "no"},
}


@pytest.mark.parametrize("name", FOUND)
def test_other_answers(name: str) -> None:
    task, _ = load(name)
    assert {text: task.extract(ITEM, text) for text in FOUND[name]} == FOUND[name]


CHOICE = {"question": "q", "choices": ["red", "green", "blue", "black"], "answer": 1}
BAD = [
    *({**CHOICE, "answer": answer} for answer in (4, -1, True, "B")),
    *({**CHOICE, "choices": [*first, "c"]} for first in ("ab", "aAb", ("a", "", "b"))),
    {**CHOICE, "choices": ["a", 2, "b", "c"]},
    {**CHOICE, "question": " "},
]
BAD_YES_NO = [(" ", "no"), ("q", "Yes"), ("q", True), (3, "no")]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        *(("CHOICES", CHOICE, entry) for entry in BAD),
        *(
            ("YES_NO", {"question": "q", "answer": "no"}, {"question": question, "answer": answer})
            for question, answer in BAD_YES_NO
        ),
    ],
)
def test_errors_contain_the_line(tmp_path: Path, name: str, good: Any, bad: Any) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    task, _ = load(name)
    with pytest.raises(UserError, match=re.escape(f"{path}: line 2: an entry is an object with")):
        list(type(task)(path).items("test", chat=True))
