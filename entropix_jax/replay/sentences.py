"""Where a sentence and a branch end, by the texts of tokens."""

import re
from collections.abc import Sequence

QUOTES = "\"'\u2019\u201d)]*"
ENDS = {  # of branches, by `branch.until` and `clarify.until`
    "punctuation": re.compile(r"\s*[.,?!:;)\]}]\s*|.*\n.*", re.DOTALL),
    "sentence": re.compile(r".*[.?!][\s\"')\]\u2019\u201d]*|.*\n.*", re.DOTALL),
    "line": re.compile(r".*\n.*", re.DOTALL),
}


def has_ended(texts: Sequence[str], marks: Sequence[str]) -> bool:
    """Whether the last of the tokens ends with a mark, perhaps before quotes and white space."""
    for character in reversed(texts[-1]):
        if character in marks:
            return True
        if not character.isspace() and character not in QUOTES:
            break
    return False


def begins_word(last: str, token: str) -> bool:
    """Whether a token begins a word, after the last one."""
    return token[:1].isspace() or last[-1:].isspace()
