"""Where a sentence ends, by the texts of the last tokens.

A sentence has ended after a word of at least two letters and an end mark or line break, if the
next token begins a new word, and not within a code block.
"""

import re
from collections.abc import Sequence

QUOTES = "\"'`«»‘’“”()[]*_"
WORD = re.compile(r"\s?[^\W\d_]+(?:['’-][^\W\d_]+)*['’-]?|['’-](?:[^\W\d_]+)?")
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr vs etc fig no vol pp ed eds al inc ltd co corp dept est approx gen "
    "col sgt capt lt rev hon gov sen rep jan feb mar apr jun jul aug sep sept oct nov dec cf "
    "viz".split()
)
LOOK_BACK = 12  # tokens
ENDS = {  # of branches, by `branch.until`
    "punctuation": re.compile(r"\s*[.,?!:;)\]}]\s*|.*\n.*", re.DOTALL),
    "line": re.compile(r".*\n.*", re.DOTALL),
}


def kinds(text: str, marks: Sequence[str]) -> set[str]:
    """Returns the kinds of a token: its part in a sentence."""
    word, found = text.strip(), {"space"} if text[:1].isspace() else set()
    ends = re.escape("".join(mark for mark in marks if mark != "\n"))
    runs, quotes = ends.replace(re.escape("."), ""), re.escape(QUOTES)
    some = f"(?:[{ends}]|[{runs}]+)" if runs else f"[{ends}]"
    if "```" in text:
        found.add("fence")
    elif not word:
        found |= {"break" if "\n" in text and "\n" in marks else "quote"} if text else set()
    elif WORD.fullmatch(text):
        found |= {"word"} | ({"long"} if sum(c.isalpha() for c in word) > 1 else set())
        found |= {"abbreviation"} if word.lower() in ABBREVIATIONS else set()
        found |= {"quote"} if word in QUOTES else set()
    elif ends and re.fullmatch(rf"[{quotes}]*{some}[{quotes}]*\s*", text):
        found |= {"mark"} | ({"break"} if text[-1].isspace() else set())
    elif all(c in QUOTES for c in word):
        found.add("quote")
    return found


def has_ended(texts: Sequence[str], marks: Sequence[str]) -> bool:
    """Whether a text, given as those of its tokens, ends a sentence if a new word comes next."""
    if sum("```" in text for text in texts) % 2:
        return False
    last = [kinds(text, marks) for text in [*texts][: -LOOK_BACK - 1 : -1]]
    last += [{"break"}] * (LOOK_BACK - len(last))  # the start of the text
    mark = next((i for i, kind in enumerate(last) if kind & {"mark", "break"}), LOOK_BACK)
    start = next((i for i in range(mark + 1, LOOK_BACK) if "word" in last[i]), LOOK_BACK)
    whole = (i for i in range(start, LOOK_BACK) if "word" not in last[i] or "space" in last[i])
    if (end := next(whole, LOOK_BACK)) == LOOK_BACK:
        return False
    begins = last[end] & {"word", "break"} or ("quote" in last[end] and "mark" not in last[end])
    pieces = [kind for kind in last[start : end + 1] if "word" in kind]
    is_short = len(pieces) == 1 and ("long" not in pieces[0] or "abbreviation" in pieces[0])
    after = all(kind & {"mark", "break", "quote"} for kind in last[:start])
    return bool(begins) and after and not is_short


def begins_word(last: str, token: str, marks: Sequence[str]) -> bool:
    """Whether a token begins a word: with white space, or after a line break."""
    return token[:1].isspace() or "break" in kinds(last, marks)
