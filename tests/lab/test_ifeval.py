"""IFEval: verdicts of the official checkers, reproducible and without any download."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.task import Item, Task

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install -e .[harness]")
pytest.importorskip("langdetect", reason="langdetect is not installed: pip install -e .[harness]")

import nltk

from entropix_jax.lab.tasks.ifeval import IfEval, Instruction, check, load_checkers

NO_COMMA, BULLETS = "punctuation:no_comma", "detectable_format:number_bullet_lists"
WORDS, SENTENCES = "length_constraints:number_words", "length_constraints:number_sentences"
LETTERS, CAPITALS = "keywords:letter_frequency", "change_case:capital_word_frequency"
FRENCH, REPEAT = "language:response_language", "combination:repeat_prompt"
FEW = {"relation": "less than", "num_words": 5}
ASKED = "Name two fruits."


def entry(**changes: Any) -> dict[str, Any]:
    usual = {"key": 7, "prompt": ASKED, "instruction_id_list": [NO_COMMA, WORDS]}
    return usual | {"kwargs": [{}, FEW]} | changes


def task_of(tmp_path: Path, *entries: Any) -> tuple[Task, list[Item]]:
    (tmp_path / "entries.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in entries))
    task = IfEval(tmp_path / "entries.jsonl")
    return task, list(task.items("test", chat=True))


def test_an_answer_lists_the_followed_instructions(tmp_path: Path) -> None:
    # Arguments that do not apply are left out, or null.
    given = [{"num_words": None, "relation": None}, {"num_bullets": None, **FEW}]
    task, items = task_of(tmp_path, entry(), entry(key=8, kwargs=given))
    assert {(item.id, item.prompt, item.answer) for item in items} == {
        (name, ASKED, json.dumps([[NO_COMMA, {}], [WORDS, FEW]])) for name in ("7", "8")
    }
    assert (task.votes, task.scored, task.max_new_tokens) == (False, True, 512)
    item = items[0]
    for text, followed, loose in (
        ("Figs and plums", (True, True), (True, True)),
        ("Figs, plums", (False, True), (False, True)),
        ("Figs and plums and pears too", (True, False), (True, False)),
        ("Sure, here they are:\nFigs and plums", (False, False), (True, True)),
        ("Figs and plums\nNote, that is all", (False, False), (True, True)),
        ("", (False, False), (False, False)),
    ):
        answer = task.extract(item, text)
        kept = [one for one, does in zip(json.loads(item.answer), followed, strict=True) if does]
        assert answer == json.dumps(kept)
        assert task.score(item, answer) == all(followed)
        assert task.measures(item, text) == {
            "prompt_loose": (float(all(loose)), 1.0),
            "instructions_strict": (float(sum(followed)), 2.0),
            "instructions_loose": (float(sum(loose)), 2.0),
        }


@pytest.mark.parametrize(
    ("instruction", "right", "wrong"),
    [
        ((BULLETS, {"num_bullets": 2}), "* figs\n* plums", "* figs"),
        ((REPEAT, {"prompt_to_repeat": ASKED}), f"{ASKED} Figs.", "Figs."),
        ((LETTERS, {"letter": "g", "let_frequency": 2, "let_relation": "at least"}), "gG", "gab"),
        ((FRENCH, {"language": "fr"}), "Les figues sont bonnes.", "The figs are quite good."),
        # These need nltk's Punkt data.
        (
            (SENTENCES, {"relation": "less than", "num_sentences": 3}),
            "A fig. Ripe!",
            "A fig. Ripe! Is it?",
        ),
        (
            (CAPITALS, {"capital_relation": "at least", "capital_frequency": 2}),
            "I am. OK.",
            "I am.",
        ),
    ],
)
def test_verdicts(instruction: tuple[str, dict[str, Any]], right: str, wrong: str) -> None:
    assert [check([instruction], ASKED, text)[0] for text in (right, wrong)] == [True, False]


def test_identity_of_the_checkers(tmp_path: Path) -> None:
    """A study continues only with the checkers with which it began."""
    task, _ = task_of(tmp_path, entry())
    identity = task.identity()
    assert {*identity} == {"lm_eval", "nltk", "langdetect", "punkt"}
    assert identity["nltk"] == nltk.__version__


def test_verdicts_are_reproducible() -> None:
    """The original has random choices: a letter if the given one is not a letter, and guesses of
    the language of short texts. The global random state does not change."""
    drawn = (LETTERS, {"letter": "#", "let_frequency": 1, "let_relation": "at least"})
    texts = [*"abcdefghijklmnopqrstuvwxyz", "taxi", "hotel bar", "mama"]
    instructions: list[Instruction] = [drawn, (FRENCH, {"language": "en"})]
    found = []
    for seed in range(3):
        random.seed(seed)
        wanted = random.Random(seed).random()
        found.append([check(instructions, ASKED, text) for text in texts])
        assert random.random() == wanted
    assert found[0] == found[1] == found[2]
    assert sum(letter for letter, _ in found[0][:26]) == 1


def test_a_text_without_a_language_passes(caplog: pytest.LogCaptureFixture) -> None:
    assert check([(FRENCH, {"language": "fr"})], ASKED, "123") == [True]
    assert not caplog.records


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "x"},
        {"prompt": " "},
        {"kwargs": [{}]},
        {"kwargs": [{}, 3]},
        {"instruction_id_list": [NO_COMMA, 3]},
        {"instruction_id_list": [], "kwargs": []},
    ],
)
def test_errors_of_bad_entries(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"entries\.jsonl: entry 2: an entry is an object with the"):
        task_of(tmp_path, entry(), entry(**changes))


def test_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ifeval")]:
        monkeypatch.delitem(sys.modules, name)
    downloads: list[Any] = []
    monkeypatch.setattr(nltk, "download", lambda *given, **named: downloads.append(given))
    load_checkers.cache_clear()
    try:
        few = (SENTENCES, {"relation": "less than", "num_sentences": 3})
        assert check([few], ASKED, "It is a fig. It is ripe.") == [True]
        capital = (CAPITALS, {"capital_relation": "at least", "capital_frequency": 1})
        assert check([capital], ASKED, "It is OK.") == [True]
    finally:
        load_checkers.cache_clear()
    assert not downloads
    assert capsys.readouterr().out == ""
