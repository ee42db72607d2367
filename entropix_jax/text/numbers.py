"""Reads numbers and final answers from generated texts."""

import re
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


def last_answer(text: str) -> str | None:
    """Returns the number of a text as `read_number` does, else its last line, in lower case and
    without a full stop. None for an empty text."""
    if (number := read_number(text)) is not None:
        return number
    lines = [line.strip().rstrip(".").lower() for line in text.splitlines()]
    return next(filter(None, reversed(lines)), None)
