"""Tasks of published files: items, scores, the two splits, and bad files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, get_args

import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.lab.tasks.published import EXEMPLARS, Gsm8k, NqOpen, Svamp
from entropix_jax.lab.tasks.reading import normalize_answer
from entropix_jax.lab.tasks.registry import find_task, locate_task
from entropix_jax.lab.tasks.task import Item, Split
from entropix_jax.lab.tasks.writing import Writing

KITES = {"ID": "own-1", "Body": "Ann has 3 kites. She makes 4 more.", "Question": "How many?"}
PLANET = {"question": "which planet has rings", "answer": ["Saturn", "the Saturn!", "Uranus"]}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that makes a task from a file with given entries."""

    def make(kind: str, *entries: Any) -> Any:
        path = tmp_path / "entries.jsonl"
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        path.write_text("\ufeff" + (json.dumps([*entries]) if kind == "svamp" else lines))
        return find_task(f"{kind}:{path}")

    return make


@pytest.mark.parametrize("size", [1, 4, 203])
@pytest.mark.parametrize("kind", ["gsm8k", "nq-open", "writing"])
def test_a_quarter_is_for_tuning(make: Callable[..., Any], kind: str, size: int) -> None:
    """Each item is in exactly one split. The order of items depends neither on the order of the
    file nor on its length."""
    entry = {"gsm8k": {"question": "1 + 1?", "answer": "#### 2"}, "nq-open": PLANET}
    entries = [entry.get(kind, {"prompt": "Write."}) for _ in range(size)]
    task = make(kind, *entries)
    tuning, test = ([item.id for item in task.items(s, chat=True)] for s in ("tuning", "test"))
    assert len(tuning) == size // 4
    prefix = "" if kind == "writing" else f"{kind}-"
    ids = [f"{prefix}{number}" for number in range(1, size + 1)]
    assert tuning + test == sorted(ids, key=lambda i: blake2b(i.encode(), digest_size=16).digest())
    if size > 4:  # a prefix is a fair sample of the file
        places = [int(name.removeprefix(prefix)) for name in test[:40]]
        assert 80 < sum(places) / 40 < 125


def test_svamp(make: Callable[..., Any]) -> None:
    task = make("svamp", {**KITES, "Answer": 7.0}, {**KITES, "ID": "own-2", "Answer": 2.50})
    items = {item.id: item for item in task.items("test", chat=False)}
    assert {name: item.answer for name, item in items.items()} == {"own-1": "7", "own-2": "2.5"}
    solved = [json.loads(line) for line in EXEMPLARS.read_text().splitlines()][:4]
    *shown, asked = items["own-1"].prompt.split("\n\n")
    assert shown == [f"Question: {e['question']}\nAnswer: {e['answer']}" for e in solved]
    assert asked == "Question: Ann has 3 kites. She makes 4 more. How many?\nAnswer:"
    *turns, last = next(task.items("test", chat=True)).prompt
    assert [turn["content"] for turn in turns[::2]] == [e["question"] for e in solved]
    assert last == {"role": "user", "content": "Ann has 3 kites. She makes 4 more. How many?"}
    item = items["own-1"]
    for text, score in (("3 + 4 = 7\n#### 7", 1.0), ("It is 7.0 kites", 1.0), ("7 of 8", 0.0)):
        assert task.score(item, task.extract(item, text)) == score


NORMALIZED = {
    "The  Beatles": "beatles",
    "a man, a plan": "man plan",
    "theatre": "theatre",
    "Jean-Luc O'Hara": "jeanluc ohara",
    "an A.N. Other": "other",  # without its full stops, A.N. is an article
    "cafe\u0301": "cafe\u0301",
    "caf\u00e9": "cafe\u0301",
    "\tU.S.A.\n": "usa",
    "---": "",
}


@pytest.mark.parametrize(("text", "wanted"), NORMALIZED.items())
def test_answers_are_normalized_as_published(text: str, wanted: str) -> None:
    assert normalize_answer(text) == wanted


def test_nq_open(make: Callable[..., Any]) -> None:
    task = make("nq-open", PLANET, {"question": "what is a dash", "answer": ["-"]})
    items = {item.id: item for item in task.items("test", chat=False)}
    item, dash = items["nq-open-1"], items["nq-open-2"]
    assert (item.answer, item.accepted) == ("", ("Saturn", "the Saturn!", "Uranus"))
    assert item.prompt.startswith("Question: ")
    assert item.prompt.endswith("\n\nQuestion: which planet has rings?\nAnswer:")
    assert item.prompt.count("Question: ") == 6
    chat = {i.id: i.prompt for i in task.items("test", chat=True)}[item.id]
    assert [turn["role"] for turn in chat] == [*5 * ["user", "assistant"], "user"]
    assert chat[-1]["content"] == "which planet has rings?"
    assert [task.extract(item, text) for text in ("a Saturn. Or Mars.", "--", "")] == [
        "saturn",
        None,
        None,
    ]
    assert [task.score(dash, task.extract(dash, text)) for text in ("--", "x")] == [1.0, 0.0]
    assert task.stop == ("\n",)


MEASURES = {  # `exact` and `bare`
    "Saturn": (1, 1),
    " THE SATURN.": (1, 1),
    "Saturn or Uranus": (0, 1),
    "The ringed planet is Saturn.": (0, 0),
    "Mars": (0, 1),
    "Saturn. It has rings.": (0, 0),
    "": (0, 0),
}


@pytest.mark.parametrize(("text", "wanted"), MEASURES.items())
def test_measures_of_short_answers(text: str, wanted: tuple[int, int]) -> None:
    item = Item("", "", "", accepted=("Saturn", "Uranus"))
    measures = NqOpen(Path()).measures(item, text)
    assert measures == {"exact": (wanted[0], 1), "bare": (wanted[1], 1)}


RIGHT: dict[str, list[str]] = {
    "Athens": [
        *("The capital of Greece is Athens.", "ATHENS", "**Athens**", '"Athens." is it'),
        *("\n\nAthens", "... Athens", "_Athens_", "Athens's old town", "Athens-Piraeus"),
        "It is athens, of course",
    ],
    "St. Louis": ["In St. Louis. It is big.", "The Arch is in St. Louis"],
    "Missouri": ["St. Louis is in Missouri.", "By rail, e.g. from Salem, Missouri"],
    "USA": ["the U.S.A.", "The U.S.A. did it.", "usa"],
    "the U.S.": ["It was the US.", "The U. S. made it"],
    "1776": ["The U.S. was founded in 1776."],
    "J. R. R. Tolkien": ["JRR Tolkien wrote it.", "It was J.R.R. Tolkien"],
    "Tolkien": ["J. R. R. Tolkien.", "By Mr. J. R. R. Tolkien, in 1937"],
    "Martin Luther King": ["Dr. Martin Luther King gave it."],
    "3.14": ["Pi is about 3.14.", "3.14, more or less"],
    "Mambo No. 5": ["The song is Mambo No. 5. It is by Lou Bega."],
    "7 May": ["On Jan. 3 or 7 May."],
    "1,000": ["It is 1000 grams.", "1,000"],
    "8": ["6+2=8", "6 + 2 = 8", "4*2 is 8.", "(8)"],
    "Beyonc\u00e9": ["Beyonce sang it", "beyonce\u0301"],
    "ice cream": ["It is ice-cream!", "Icecream, I think."],
    "the Bridge over the River Kwai": ["A Bridge Over River Kwai"],
    "A": ["A", "a."],
    "A+": ["A+", "A+ is the most frequent"],
}
WRONG: dict[str, list[str]] = {
    "Athens": ["Sparta. Not Athens.", "Athensville", "Sparta\nAthens", "", "!"],
    "3": ["3.14", "It is 13.", "30", "It is 0.3"],
    "314": ["3.14"],
    "thunder": ["a thunderclap", "thunders"],
    "A": ["", "a letter of the alphabet"],
    "man": ["a human", "woman", "men"],
}


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        (gold, text, score)
        for table, score in ((RIGHT, 1.0), (WRONG, 0.0))
        for gold, texts in table.items()
        for text in texts
    ],
)
def test_short_answers_are_read_from_the_first_sentence(gold: str, text: str, score: float) -> None:
    item = Item("", "", "", accepted=("zebra", gold))
    task = NqOpen(Path())
    assert task.score(item, task.extract(item, text)) == score


def test_scores_equal_hand_scores() -> None:
    """Scores of 150 real answers of the tuning splits differ only where a note says why."""
    tasks = {"questions": NqOpen(Path()), "svamp": Svamp(Path()), "gsm8k": Gsm8k(Path())}
    lines = Path(__file__).with_name("hand_read.jsonl").read_text(encoding="utf-8").splitlines()
    read = [json.loads(line) for line in lines]
    assert Counter(one["task"] for one in read) == dict.fromkeys(tasks, 50)
    for one in read:
        task, gold = tasks[one["task"]], one["gold"]
        item = Item(one["item"], "", gold[0], accepted=tuple(gold))
        score = task.score(item, task.extract(item, one["text"]))
        assert (score != one["hand"]) == ("note" in one), one


def test_writing(make: Callable[..., Any]) -> None:
    turns = [{"role": "user", "content": "Write."}]
    task = make("writing", {"id": "one", "prompt": "Tell."}, {"messages": turns})
    items = {item.id: item.prompt for item in task.items("test", chat=True)}
    assert items == {"one": "Tell.", "2": tuple(turns)}
    assert (task.scored, task.votes, task.extract(Item("", "", ""), "x")) == (False, False, None)
    assert task.score(Item("", "", ""), None) != task.score(Item("", "", ""), None)  # NaN


def test_writing_skips_entries_without_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "own").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.warns(Note, match="own: line 2 is left out: neither 'prompt' nor"):
        items = list(find_task(f"writing:{tmp_path}/own").items("test", chat=False))
    assert [item.id for item in items] == ["1"]


MEASURED = {
    "": ((0, 0), (0, 0)),
    "The dog and the cat": ((0, 5), (0, 2)),
    "Teh zqxwv don't I 4x4 don’t qqzzk-dog": ((2, 6), (0, 5)),  # `teh` is a common mistake
    "a b c d a b c d A B": ((0, 0), (3, 7)),
    "you go home, you GO home! You go home.": ((0, 9), (3, 6)),
}


@pytest.mark.parametrize(("text", "wanted"), MEASURED.items())
def test_measures_of_writing(text: str, wanted: tuple[tuple[int, int], ...]) -> None:
    found = Writing(Path()).measures(Item("", "", ""), text)
    assert found == dict(zip(("unknown_words", "repeated_4grams"), wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("svamp", "[{", "bad: not JSON: "),
        ("svamp", "{}", "bad: entry 1: an entry is an object with the texts 'ID'"),
        ("svamp", "[]", "bad: is empty"),
        ("svamp", json.dumps([{**KITES, "Answer": 1}, 3]), "bad: entry 2: an entry is an"),
        *(
            ("svamp", json.dumps([{**KITES, "Answer": 1}, one]), "bad: entry 2: has no gold answer")
            for one in (KITES, *({**KITES, "Answer": a} for a in ("7", True, None, float("nan"))))
        ),
        ("svamp", json.dumps(2 * [{**KITES, "Answer": 10**400}]), "two entries have the id 'own-"),
        ("nq-open", "\n", "bad: is empty"),
        ("nq-open", "\n{", "bad: line 2: not JSON: "),
        *(
            ("nq-open", json.dumps({"question": q, "answer": ["x"]}), "bad: entry 1: an")
            for q in (" ", 1, None)
        ),
        ("nq-open", '{"question": "q"}', "bad: entry 1: has no gold answer: 'answer' is no list"),
        *(
            ("nq-open", json.dumps({"question": "q", "answer": a}), "1: has no gold answer")
            for a in ([], "x", ["x", 3], [" "], None)
        ),
        ("gsm8k", "", "bad: is empty"),
        ("gsm8k", "\n3", "bad: entry 2: an entry is an object with the texts 'question' and"),
        ("gsm8k", '{"question": "\xff", "answer": "#### 1"}', "bad: not UTF-8 at byte 14"),
        *(
            ("gsm8k", json.dumps({"question": q, "answer": "#### 3"}), "which ends in '#### N")
            for q in (3, " ")
        ),
        *(
            ("gsm8k", json.dumps({"question": "q", "answer": a}), "1: has no gold answer")
            for a in ("#### three", "It is 3.", "", 3, None)
        ),
        ("gsm8k", '{"question": "How many?"}', "answer: 'answer' is no text with"),
    ],
)
def test_errors_of_bad_files(tmp_path: Path, kind: str, content: str, message: str) -> None:
    (tmp_path / "bad").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(message)):
        list(find_task(f"{kind}:{tmp_path}/bad").items("test", chat=False))


def test_published_files_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENTROPIX_DATA", raising=False)
    for name in ("svamp", "svamp:"):
        with pytest.raises(UserError, match=r"no file: give svamp:FILE, or --data or ENTROP"):
            locate_task(name)
    monkeypatch.setenv("ENTROPIX_DATA", "/there")
    assert locate_task("gsm8k") == "gsm8k:/there/gsm8k_test.jsonl"
    assert locate_task("nq-open", "here") == "nq-open:here/nq_open_dev.jsonl"
    for name in ("sums", "ifeval:x,y", "own.py:TASK", "gsm8k:a,b"):
        assert locate_task(name, "here") == name
    with pytest.raises(UserError, match=r"/there/svamp\.json: no such file"):
        list(find_task("svamp").items("test", chat=False))


TWO_SENTENCES = {f"nq-open-{n}" for n in (1459, 2293, 2324, 3580)}  # names with a mark within
PUBLISHED = {"gsm8k": 1319, "svamp": 1000, "nq-open": 3610, "ifeval": 541}


@pytest.mark.parametrize(("name", "size"), PUBLISHED.items())
def test_the_published_files(task_data: Path, name: str, size: int) -> None:
    """Each file can be read, and its gold answers score 1."""
    task = find_task(locate_task(name, str(task_data)))
    items = [item for s in get_args(Split) for item in task.items(s, chat=True)]
    assert size - 1 <= len(items) <= size  # copies of ifeval lack an entry
    for item in items if name != "ifeval" else ():
        text = (item.accepted or (item.answer,))[0]
        assert task.score(item, task.extract(item, text)) == (item.id not in TWO_SENTENCES)
