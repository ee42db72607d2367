"""Reads the answers of question-answering tasks from generated texts."""

import re
import string
import unicodedata

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

_SENTENCE = re.compile(
    r"""(?:
        (?<![\w'’])(?:mrs?|ms|dr|prof|st|mt|ft|jr|sr|vs|gen|col|capt|sgt|lt|rev|sen|gov)\.
        | (?<![\w'’])(?:no|pt|vol|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\.(?=\s*\d)
        | (?<![\w'’])[^\W\d_]\.           # an initial, or a letter of U.S.
        | [.!?]+(?=[^\s.!?"'”’)\]*_])     # within a word or a number
        | [^.!?\n]
    )+[.!?]*["'”’)\]*_]*""",
    re.IGNORECASE | re.VERBOSE,
)
_LONE_ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)(?!\S)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NO_WORD = re.compile(r"(?<!\d)\.|\.(?!\d)|[^\w.]|_")


def first_sentence(text: str) -> str:
    """Returns the text up to the end of its first sentence or line.

    Abbreviations, initials and decimal points end no sentence.
    """
    found = _SENTENCE.search(text)
    return found[0].strip() if found else ""


def read_words(text: str) -> str:
    """Returns the words of a text: lower case, without accents and articles, with blanks for
    punctuation. Numbers keep their decimal point. A text of only articles keeps them."""
    decomposed = unicodedata.normalize("NFD", text).lower()
    plain = "".join(char for char in decomposed if not unicodedata.combining(char))
    with_articles, without = (
        " ".join(_NO_WORD.sub(" ", _THOUSANDS.sub("", words)).split())
        for words in (plain, _LONE_ARTICLE.sub(" ", plain))
    )
    return without or with_articles


def contains_words(words: str, wanted: str) -> bool:
    """Returns whether `wanted` occurs in `words` as whole words, wherever their blanks are: `J. R.
    R. Tolkien` contains `JRR Tolkien`. Both are as `read_words` returns them. An empty text occurs
    only in an empty one."""
    if not wanted:
        return not words
    letters = " ?".join(map(re.escape, wanted.replace(" ", "")))
    return re.search(rf"(?<![\w.]){letters}(?![\w.])", words) is not None


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and superfluous white space, as in the evaluation of
    Lee et al., which is that of SQuAD (Rajpurkar et al. 2016) on decomposed characters."""
    text = unicodedata.normalize("NFD", text).lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())
