"""A small reference retriever: from a row's text to the passage of a folder that fits it best."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from entropix_jax.errors import UserError, require
from entropix_jax.host.files import read_text

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
    compatibility forms (NFKC). English stop words do not count, nor passages of them alone.
    """

    def __init__(self, folder: Path, *, longest: int = LONGEST) -> None:
        """Reads and indexes a folder's texts, in passages of at most `longest` characters.

        Raises:
            UserError: no bm25s, no such folder, something in it that cannot be read, or no text.
        """
        require("retrieve", "bm25s")
        if longest < 1:
            raise ValueError(f"a passage cannot have {longest} characters")
        # This import starts JAX, so it must come after JAX has been configured.
        import bm25s

        texts = (read_text(path).removeprefix("\ufeff") for path in _find_texts(folder))
        passages = [passage for text in texts for passage in split_passages(text, longest)]
        normalized = [_normalize(passage) for passage in passages]
        found = zip(passages, normalized, _split_words(normalized), strict=True)
        if not (kept := [entry for entry in found if entry[2]]):
            raise UserError(f"{folder}: no text: no *.txt or *.md file with words in it")
        self.passages: tuple[str, ...]
        self._normalized: tuple[str, ...]
        self.passages, self._normalized, words = zip(*kept, strict=True)
        self._index = bm25s.BM25(dtype="float64")
        self._index.index(list(words), create_empty_token=False, show_progress=False)

    def __call__(self, text: str) -> str:
        """What to inject after `text`, the whole text of a row so far.

        The query is the text's last `QUERY_WORDS` words. Passages that the text already contains,
        from earlier calls, are neither returned again nor part of the query, without regard to
        white space and case.

        Returns:
            The best passage (the earlier one of equals) on lines of its own, for a text may stop
            anywhere. "" where no new passage has a word of the query.
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

    def _rank(self, text: str) -> list[int]:
        """The indices of the passages that have a word of the query, the best one first."""
        # So many words take far fewer characters.
        query = _split_words([text[-64 * QUERY_WORDS :]])[0][-QUERY_WORDS:]
        if not (ids := self._index.get_tokens_ids(query)):
            return []
        # Rounded: sums of the same terms in another order differ in their last digits.
        scores = self._index.get_scores_from_ids(ids).round(9)
        return [int(n) for n in np.argsort(-scores, kind="stable") if scores[n] > 0]


def split_passages(text: str, longest: int) -> list[str]:
    """The passages of a text in order, each of at most `longest` characters.

    A passage is a paragraph, separated by blank lines; its own line breaks remain. A Markdown
    heading belongs to the paragraph below it. A longer one is cut after the last sentence that
    fits, or else between words, or else anywhere.
    """
    passages: list[str] = []
    headings: list[str] = []
    text = text.replace("\r\n", "\n").replace("\r", "\n")
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
    """The text files of a folder, sorted by path: no links, and no pipes, which never end."""
    if not folder.is_dir():
        raise UserError(f"no such folder: '{folder}'")

    def refuse(error: OSError) -> NoReturn:
        raise error

    try:
        paths = (
            Path(at, name) for at, _, names in os.walk(folder, onerror=refuse) for name in names
        )
        texts = (path for path in paths if path.suffix.lower() in (".txt", ".md"))
        found = [path for path in texts if stat.S_ISREG(path.lstat().st_mode)]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return sorted(found, key=lambda path: path.parts)


def _normalize(text: str) -> str:
    """The form in which texts are compared."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _split_words(texts: list[str]) -> list[list[str]]:
    """The words of normalized texts, in order, without stop words."""
    import bm25s

    options = {"lower": False, "token_pattern": _WORD, "stopwords": "en"}
    words: list[list[str]] = bm25s.tokenize(texts, **options, return_ids=False, show_progress=False)
    return words
