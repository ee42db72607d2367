"""A small reference retriever: from a row's text so far to the passage of a folder that fits it.

It knows text only, neither the model nor the sampler. Any other function from text to text can
stand in its place.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from entropix_jax.errors import UserError, require
from entropix_jax.files import read_text

SUFFIXES = (".txt", ".md")
LONGEST = 200  # characters: about 50 tokens of English, and a thought has 64 at most
QUERY_WORDS = 32  # a sentence or two

# Kana and Han are written without spaces: each character is a word. Of other scripts, single
# letters are none, for they are mostly what an apostrophe leaves over.
_KANA_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = rf"[{_KANA_HAN}]|[^\W{_KANA_HAN}]{{2,}}|\d"
_SENTENCE_END = re.compile(r"[.!?…][\"'”’»)\]]*(?=\s)|[。！？][」』”’）]*")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_HEADING = re.compile(r"#{1,6}\s.*")


class Retriever:
    """Finds the passage of a folder's texts that has most to do with the end of a text.

    The texts are all files `*.txt` and `*.md` in the folder and below it, in the order of their
    paths, read once. Symbolic links below the folder are not followed: what they name is either
    read in its own place, or lies outside. Texts and index are kept in memory.

    Passages are ranked by BM25 (Robertson et al. 1994, "Okapi at TREC-3"; Lucene's variant, with
    k1 = 1.5 and b = 0.75). Words are compared as they are written, without stemming, but without
    regard to case and compatibility forms (NFKC). English stop words do not count.

    Attributes:
        passages: what can be injected, in the order of files and text; as in `split_passages`, less
            those that have no word to find them by.
    """

    passages: tuple[str, ...]

    def __init__(self, folder: Path, *, longest: int = LONGEST) -> None:
        """Reads and indexes a folder.

        Args:
            folder: where the texts lie.
            longest: characters of a passage, at most.

        Raises:
            UserError: bm25s is not installed, no such folder, a file in its place, a file or
                folder below it that cannot be read or is not UTF-8, or no text.
            ValueError: `longest` is not positive.
        """
        require("retrieve", "bm25s")
        # This import starts JAX, so it must come after JAX has been configured, not with ours.
        import bm25s

        passages = [p for path in _text_files(folder) for p in _passages_of(path, longest)]
        compared = [_compared(passage) for passage in passages]
        words = _words(compared)
        kept = [number for number, found in enumerate(words) if found]
        if not kept:
            raise UserError(f"{folder}: no text: no *.txt or *.md file with words in it")
        self.passages = tuple(passages[number] for number in kept)
        self._compared = [compared[number] for number in kept]
        self._index = bm25s.BM25(dtype="float64")
        self._index.index(
            [words[number] for number in kept], create_empty_token=False, show_progress=False
        )

    def __call__(self, text: str) -> str:
        """What to inject after `text`, the whole text of a row so far.

        The query is the text's last `QUERY_WORDS` words. Passages that stand in the text already,
        as earlier calls put them there, are not given again; nor are they part of the query, which
        so remains what was written around them. White space and case do not matter in this.

        Returns:
            The best passage (of equals the earlier one) on lines of its own, since the text may
            stop in the middle of a sentence: after a line break, unless the text ends with one, and
            with a line break at its end. "" where no passage that is not yet there has a word of
            the query.
        """
        whole = around = _compared(text)
        standing: set[int] = set()
        while True:
            best = next((n for n in self._ranking(around) if n not in standing), None)
            if best is None:
                return ""
            if self._compared[best] not in whole:
                line_break = "" if not text or text.endswith("\n") else "\n"
                return f"{line_break}{self.passages[best]}\n"
            standing.add(best)
            around = around.replace(self._compared[best], " ")

    def _ranking(self, text: str) -> Iterator[int]:
        """The numbers of the passages that have a word of the query, the best one first."""
        # That many words stand in far fewer characters.
        query = _words([text[-64 * QUERY_WORDS :]])[0][-QUERY_WORDS:]
        ids = self._index.get_tokens_ids(query)
        if not ids:
            return
        # Sums of the same terms in another order are equal, but for their last digits.
        scores = self._index.get_scores_from_ids(ids).round(9)
        for number in np.argsort(-scores, kind="stable"):
            if scores[number] <= 0:
                return
            yield int(number)


def split_passages(text: str, longest: int) -> list[str]:
    """The passages of a text, in its order, each of at most `longest` characters.

    A passage is a paragraph, which blank lines part from the next; its own line breaks remain. A
    Markdown heading goes with the paragraph below it. What is too long is cut after the last
    sentence that fits, or else between words, or else anywhere.

    Raises:
        ValueError: `longest` is not positive.
    """
    if longest < 1:
        raise ValueError(f"a passage cannot have {longest} characters")
    passages: list[str] = []
    headings: list[str] = []
    for paragraph in filter(None, map(str.strip, _BLANK_LINES.split(text))):
        headings.append(paragraph)
        if not all(_HEADING.fullmatch(line) for line in paragraph.split("\n")):
            passages += _cut("\n".join(headings), longest)
            headings = []
    if headings:
        passages += _cut("\n".join(headings), longest)
    return passages


def _cut(paragraph: str, longest: int) -> Iterator[str]:
    """Pieces of a stripped text, as long as they may be."""
    start = 0
    while len(paragraph) - start > longest:
        window = paragraph[start : start + longest + 1]  # one more: is a space next?
        ends = [m.end() for m in _SENTENCE_END.finditer(window) if m.end() <= longest]
        ends = ends or [m.start() for m in re.finditer(r"\s", window)] or [longest]
        yield window[: ends[-1]].rstrip()
        start += ends[-1]
        while paragraph[start].isspace():
            start += 1
    yield paragraph[start:]


def _text_files(folder: Path) -> list[Path]:
    """The text files of a folder, sorted by path, whatever order the file system has.

    Raises:
        UserError: no folder, or one below it that cannot be read.
    """
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            raise UserError(f"{folder}: a file, not a folder of texts")
        raise UserError(f"no such folder: '{folder}'")

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found = []
    for parent, _, names in os.walk(folder, onerror=refuse):
        for path in (Path(parent, name) for name in names if Path(name).suffix.lower() in SUFFIXES):
            try:
                if stat.S_ISREG(path.lstat().st_mode):  # no link, and no pipe that would never end
                    found.append(path)
            except OSError as error:
                refuse(error)
    return sorted(found, key=lambda path: path.parts)


def _passages_of(path: Path, longest: int) -> list[str]:
    text = read_text(path).removeprefix("\ufeff")  # a byte order mark
    return split_passages(text.replace("\r\n", "\n").replace("\r", "\n"), longest)


def _compared(text: str) -> str:
    """A text as it is compared with others."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _words(texts: Sequence[str]) -> list[list[str]]:
    """The words of texts that `_compared` gave, in order, without stop words."""
    import bm25s

    words: list[list[str]] = bm25s.tokenize(
        list(texts),
        lower=False,
        token_pattern=_WORD,
        stopwords="en",
        return_ids=False,
        show_progress=False,
    )
    return words
