"""Reads the answers of question-answering tasks from generated texts."""

import re
import string
import unicodedata
from decimal import Decimal

# A minus after a word or a number is not a sign. `\$` is a dollar in LaTeX. `m2` has no number.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
_NUMBER = rf"((?<![\w)])\\?\$?[-−])?\\?\$?(?<!\w)({_DIGITS})"
_ANYWHERE = re.compile(_NUMBER)
_MARK = re.compile(r"####|\\boxed\{")
_AFTER_MARK = re.compile(rf"\W*?{_NUMBER}")
_SUM = re.compile(rf"^\W*?(?:{_DIGITS})(?:\s*[^\W\d_]+)?\s*[-−+*/×÷].*=")  # `240 + 70 = 310 apples`
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_RESULT = re.compile(rf"=\W*?{_NUMBER}(?!\s*[-−+*/×÷\d.])[^=,;:]*$")
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


def read_number(text: str) -> str | None:
    """Returns the number that the text marks as its answer, or without one its last number; None
    without numbers. A result with a condition after it, as in `7 * 6 = 42 minutes for 6 doors.`,
    precedes the last number.

    Units, thousands' separators and trailing zeros are dropped: `-$1,080.50` is `-1080.5`.
    """
    if marked := marked_number(text):
        return marked
    for sentence in reversed(_SENTENCE_END.split(text)):
        if numbers := _ANYWHERE.findall(sentence):
            return _write(*(_RESULT.findall(sentence) or numbers)[-1])
    return None


def marked_number(text: str) -> str | None:
    r"""Returns the number after the last `####` or in the last `\boxed` that has one, or None.

    After a sum, such as `#### 240 + 70 = 310`, it is the result.
    """
    for part in reversed(_MARK.split(text)[1:]):
        stated = re.split(r"[\n}]", part, maxsplit=1)[0]
        result = _SUM.sub("", stated, count=1)
        if found := _AFTER_MARK.match(result):
            return _write(*found.groups())
    return None


def _write(sign: str, digits: str) -> str:
    number = Decimal(digits.replace(",", ""))
    return write_number(-number if sign else number)


def write_number(number: Decimal) -> str:
    """A number as `read_number` returns it: without trailing zeros or an exponent."""
    return f"{number.normalize() + 0:f}"
