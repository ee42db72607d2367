"""The reference retriever: which passage of a folder a text calls for, and how it is put there."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.errors import UserError
from entropix_jax.text.retrieval import QUERY_WORDS, Retriever, split_passages

LIONS = "Lions live in prides on the savannah and hunt at night."
PRIDES = "A pride of lions has up to fifteen lionesses."
BREAD = "Bread rises because yeast makes carbon dioxide."
PARIS = "Paris is France's capital; it lies on the Seine."


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def corpus(folder: Path) -> Path:
    return write(folder, animals=f"{LIONS}\n\n{PRIDES}\n", kitchen=BREAD, places=PARIS)


CASES = {
    "Why does bread rise? I think that yeast": BREAD,
    "(yeast!)": BREAD,
    "How many lionesses are in a pride? There": PRIDES,
    "The capital of FRANCE": PARIS,
    "Wer wohnt in der STRASSE?": "Die Straße heißt nach Goethe.",
    "un cafe\u0301": "Le café ouvre tôt.",  # e and an accent, as two characters
    "Ο ΛΌΓΟΣ": "Ἐν ἀρχῇ ἦν ὁ λόγος.",
    "東京はどこですか": "東京は日本の首都である。",
    "法国在哪里": "巴黎是法国的首都。",
    "ｆｕｌｌ width": "The full story 🦁.",
    "7": "Seven is written 7.",
}


def test_the_passage_that_fits(tmp_path: Path) -> None:
    """Whatever the script, the case and the form of characters."""
    retriever = Retriever(write(tmp_path, a="\n\n".join([*dict.fromkeys(CASES.values()), LIONS])))
    for text, passage in CASES.items():
        answer = retriever(text)
        assert answer == f"\n{passage}\n"
        assert passage not in retriever(text + answer)
    # It stands on lines of its own.
    for text, before in {"yeast ": "\n", "yeast\n": "", "yeast\n\n": "", "yeast\n ": "\n"}.items():
        assert retriever(text) == f"{before}{BREAD}\n"


def okapi(passages: list[list[str]], query: list[str]) -> np.ndarray:
    """BM25 as Lucene computes it, one term at a time."""
    lengths = np.array([len(passage) for passage in passages], np.float64)
    scores = np.zeros(len(passages))
    for word in query:
        tf = np.array([Counter(passage)[word] for passage in passages], np.float64)
        df = np.count_nonzero(tf)
        idf = math.log(1 + (len(passages) - df + 0.5) / (df + 0.5))
        scores += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * lengths / lengths.mean()))
    return scores


def test_all_passages_in_their_order(tmp_path: Path) -> None:
    """Every answer joins the text, so the answers are the ranking of the whole folder."""
    rng = random.Random(1)
    vocabulary = [f"word{number}" for number in range(12)]
    passages = [[*rng.choices(vocabulary, k=rng.randint(1, 9)), f"p{n}p"] for n in range(40)]
    retriever = Retriever(write(tmp_path, a="\n\n".join(map(" ".join, passages))))
    query = rng.choices(vocabulary, k=6)
    scores = okapi(passages, query).round(9)
    ranking = [n for n in np.argsort(-scores, kind="stable") if scores[n] > 0]
    assert 10 < len(ranking) < 40
    assert len(set(scores[ranking])) < len(ranking)  # some are equal

    text = " ".join(query)
    for number in ranking:
        answer = retriever(text)
        assert answer.strip() == " ".join(passages[number])
        text += answer
    assert retriever(text) == ""


def test_equals_whose_terms_are_summed_in_another_order(tmp_path: Path) -> None:
    """Floating-point sums of the same terms may differ in their last digit: equals all the same."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    orders = [random.Random(seed).sample(range(1, 8), 7) for seed in range(20)]
    texts = [
        " ".join(word for word, count in zip(words, order, strict=True) for _ in range(count))
        for order in orders
    ]
    retriever = Retriever(write(tmp_path, a="\n\n".join(texts)), longest=500)
    assert list(retriever.passages) == texts
    for seed in range(5):
        assert retriever(" ".join(random.Random(seed).sample(words, 7))).strip() == texts[0]


def test_files_are_in_the_order_of_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b/z.txt", "b.txt", "a.md", "b/c/A.TXT", "c.TXT", "b/not.rst", "txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name.replace('/', ' ')}")
    walked = [*os.walk(tmp_path)]
    for order in (walked, walked[::-1]):
        monkeypatch.setattr(os, "walk", lambda top, order=order, **_: order)
        passages = [text.removeprefix("text of ") for text in Retriever(tmp_path).passages]
        assert passages == ["a.md", "b c A.TXT", "b z.txt", "b.txt", "c.TXT"]


# The query


def test_nothing_found(tmp_path: Path) -> None:
    retriever = Retriever(corpus(tmp_path))
    for text in (
        "",
        "   \n",
        "...",
        "Quantum chromodynamics",
        "it is on the",
        "s t",
        "bre",
        "\ud800",
    ):
        assert retriever(text) == ""


def test_only_the_end_of_the_text_counts(tmp_path: Path) -> None:
    retriever = Retriever(corpus(tmp_path))
    others = [f"other{number}" for number in range(QUERY_WORDS)]
    assert retriever(" ".join(["yeast", *others[1:]])).strip() == BREAD
    assert retriever(" ".join(["yeast", *others])) == ""
    assert retriever(" ".join(["yeast", *others[1:], "of the"])).strip() == BREAD
    assert retriever(" ".join(["yeast", "yeast", *others[2:], "lions"])).strip() == BREAD
    # However long the words are, none is cut.
    assert retriever("x" * 5000 + "yeast") == ""
    assert retriever("x" * 5000 + " yeast").strip() == BREAD


def test_a_passage_in_the_text_is_not_given_again(tmp_path: Path) -> None:
    retriever = Retriever(corpus(tmp_path))
    text = "Where do lions hunt?"
    first = retriever(text)
    assert first.strip() == LIONS
    text += first + " So"
    second = retriever(text)
    assert second.strip() == PRIDES
    assert retriever(text + second + " hm") == ""
    assert retriever(text + second + " hm, bread").strip() == BREAD
    # White space, case and forms of characters may have changed on the way.
    assert retriever(f"{LIONS.upper().replace(' ', '  ')} lions").strip() == PRIDES
    assert retriever(f"{LIONS[:-5]} lions hunt").strip() == LIONS  # only a part of it


def test_a_passage_in_the_text_is_no_part_of_the_query(tmp_path: Path) -> None:
    """Else what was injected would call for more of its own kind, whatever the row says."""
    injected = "Yeast likes sugar, warmth, sugar, warmth and sugar."
    own = "Sugar and warmth, sugar and warmth, sugar and warmth."
    asked = "A yeast is a fungus."
    retriever = Retriever(write(tmp_path, a=injected, b=own, c=asked))
    text = "Yeast likes"
    assert retriever(text).strip() == injected
    text += retriever(text)
    assert retriever(text).strip() == asked
    assert retriever(text + retriever(text)) == ""


# Passages


@pytest.mark.parametrize(
    ("text", "longest", "passages"),
    [
        (" \n\t\n", 9, []),
        ("a\nb\n\nc\n \t\n\n\nd  \n", 9, ["a\nb", "c", "d"]),
        ("# T\n\n## U\n\na b\n\nc", 20, ["# T\n## U\na b", "c"]),
        ("# T\na\n\n#b\n\n# V", 20, ["# T\na", "#b", "# V"]),
        ("Ab. Cd! Ef? Gh", 8, ["Ab. Cd!", "Ef? Gh"]),  # as much as fits
        ('"Ab." Cd', 7, ['"Ab."', "Cd"]),
        ("1.234 2.345", 8, ["1.234", "2.345"]),  # no sentence ends within a number
        ("ab cd ef", 5, ["ab cd", "ef"]),  # no sentence ends: between words
        ("abcdefg", 3, ["abc", "def", "g"]),  # nor is there another word
        ("一二。三四。五", 6, ["一二。三四。", "五"]),
        ("「一。」二", 4, ["「一。」", "二"]),
    ],
)
def test_passages(text: str, longest: int, passages: list[str]) -> None:
    assert split_passages(text, longest) == passages


@given(st.text("a.\u3002# \n", max_size=40), st.integers(1, 12))
def test_no_text_is_lost_and_none_is_too_long(text: str, longest: int) -> None:
    passages = split_passages(text, longest)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(passage == passage.strip() and 0 < len(passage) <= longest for passage in passages)


def test_line_ends_and_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\rfour\r\r---\n\nthe")
    assert Retriever(tmp_path).passages == ("one\ntwo", "three\nfour")  # of what has words


# Files


def test_links_and_pipes_are_left_alone(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", secret="yeast")
    folder = corpus(tmp_path / "folder")
    before = Retriever(folder).passages
    (folder / "file.txt").symlink_to(outside / "secret.txt")
    (folder / "broken.txt").symlink_to(outside / "nothing.txt")
    (folder / "sub").symlink_to(outside)
    (folder / "circle").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    (folder / "folder.txt").mkdir()
    assert Retriever(folder).passages == before
    (tmp_path / "link").symlink_to(folder)
    assert Retriever(tmp_path / "link").passages == before  # what the user names is followed


def test_refusals(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    with pytest.raises(UserError, match=r"no such folder: '.*texts'"):
        Retriever(folder)
    write(folder, empty="", blank=" \n\n", signs="---\n\n...", common="it is")
    (folder / "words.rst").write_text("words")
    with pytest.raises(UserError, match=r"texts: no text: no \*\.txt or \*\.md file with words"):
        Retriever(folder)
    with pytest.raises(UserError, match=r"no such folder: '.*empty\.txt'"):
        Retriever(folder / "empty.txt")
    (folder / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"texts/a\.txt: not UTF-8 at byte 3"):
        Retriever(folder)


@pytest.mark.parametrize("name", ["open", "lstat", "scandir"])
def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = write(tmp_path / "texts", a="fine")
    hidden = write(folder / "sub", b="text") if name == "scandir" else folder / "a.txt"
    owner = os if name == "scandir" else Path
    plain = getattr(owner, name)

    def refuse(path: str | Path, *mode: str):  # as the file system does, though not to root
        if Path(path) == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *mode)

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(UserError) as error:
        Retriever(folder)
    assert str(error.value) == f"{hidden}: cannot be read: Permission denied"
