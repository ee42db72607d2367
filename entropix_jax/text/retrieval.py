"""A small reference retriever: from a row's text so far to the best-matching passage of a folder.

It knows text only, neither the model nor the sampler; any other function from text to text can
replace it.
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
from entropix_jax.host.files import read_text

SUFFIXES = (".txt", ".md")
LONGEST = 200  # characters: about 50 tokens of English; a thought has at most 64
QUERY_WORDS = 32  # a sentence or two

# Kana and Han are written without spaces: each character is a word. In other scripts a single
# letter is none: most are what an apostrophe leaves over.
_KANA_HAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = rf"[{_KANA_HAN}]|[^\W{_KANA_HAN}]{{2,}}|\d"
_SENTENCE_END = re.compile(r"[.!?…][\"'”’»)\]]*(?=\s)|[。！？][」』”’）]*")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_HEADING = re.compile(r"#{1,6}\s.*")


class Retriever:
    """Finds the passage in a folder's texts that best matches the end of a text.

    The texts are all files `*.txt` and `*.md` in the folder and below it, in the order of their
    paths, read once and kept in memory. Symbolic links below the folder are not followed.

    Passages are ranked by BM25 (Robertson et al. 1994, "Okapi at TREC-3"; Lucene's variant, with
    k1 = 1.5 and b = 0.75). Words are compared without stemming, and without regard to case and
    compatibility forms (NFKC). English stop words do not count.

    Attributes:
        passages: those of `split_passages` that have a word to find them by, in the order of files
            and text.
    """

    passages: tuple[str, ...]

    def __init__(self, folder: Path, *, longest: int = LONGEST) -> None:
        """Reads and indexes a folder.

        Args:
            folder: of the texts.
            longest: most characters of a passage.

        Raises:
            UserError: bm25s is not installed, no such folder, a file in its place, a file or
                folder below it that cannot be read or is not UTF-8, or no text.
            ValueError: `longest` is not positive.
        """
        require("retrieve", "bm25s")
        # This import starts JAX, so it must come after JAX has been configured.
        import bm25s

        passages = [p for path in _find_texts(folder) for p in _read_passages(path, longest)]
        normalized = [_normalize(passage) for passage in passages]
        words = _split_words(normalized)
        kept = [number for number, found in enumerate(words) if found]
        if not kept:
            raise UserError(f"{folder}: no text: no *.txt or *.md file with words in it")
        self.passages = tuple(passages[number] for number in kept)
        self._normalized = [normalized[number] for number in kept]
        self._index = bm25s.BM25(dtype="float64")
        self._index.index(
            [words[number] for number in kept], create_empty_token=False, show_progress=False
        )

    def __call__(self, text: str) -> str:
        """What to inject after `text`, the whole text of a row so far.

        The query is the text's last `QUERY_WORDS` words. Passages that the text already contains,
        from earlier calls, are neither returned again nor part of the query. White space and case
        are ignored in this.

        Returns:
            The best passage (the earlier one of equals) on lines of its own, since the text may
            stop in the middle of a sentence: after a line break, unless the text ends with one, and
            with a line break at its end. "" where no new passage has a word of the query.
        """
        whole = query = _normalize(text)
        present: set[int] = set()
        while True:
            best = next((n for n in self._rank(query) if n not in present), None)
            if best is None:
                return ""
            if self._normalized[best] not in whole:
                line_break = "" if not text or text.endswith("\n") else "\n"
                return f"{line_break}{self.passages[best]}\n"
            present.add(best)
            query = query.replace(self._normalized[best], " ")

    def _rank(self, text: str) -> Iterator[int]:
        """The indices of the passages that have a word of the query, the best one first."""
        # So many words take far fewer characters.
        query = _split_words([text[-64 * QUERY_WORDS :]])[0][-QUERY_WORDS:]
        ids = self._index.get_tokens_ids(query)
        if not ids:
            return
        # Rounded: sums of the same terms in another order differ in their last digits.
        scores = self._index.get_scores_from_ids(ids).round(9)
        for number in np.argsort(-scores, kind="stable"):
            if scores[number] <= 0:
                return
            yield int(number)


def split_passages(text: str, longest: int) -> list[str]:
    """The passages of a text in order, each of at most `longest` characters.

    A passage is a paragraph, separated by blank lines; its own line breaks remain. A Markdown
    heading belongs to the paragraph below it. A longer one is cut after the last sentence that
    fits, or else between words, or else anywhere.

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
    """Cuts a stripped text into pieces that are as long as allowed."""
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


def _find_texts(folder: Path) -> list[Path]:
    """The text files of a folder, sorted by path.

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


def _read_passages(path: Path, longest: int) -> list[str]:
    text = read_text(path).removeprefix("\ufeff")  # a byte order mark
    return split_passages(text.replace("\r\n", "\n").replace("\r", "\n"), longest)


def _normalize(text: str) -> str:
    """The form in which texts are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _split_words(texts: Sequence[str]) -> list[list[str]]:
    """The words of normalized texts, in order, without stop words."""
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
