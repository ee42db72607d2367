"""Detects the end of a sentence on token ids: flags per token, made on the host, and a look back.

A sentence has ended where the row's text ends with a word of at least two letters and a mark such
as ".", perhaps in quotes or brackets, or with a word and a line break, and where the next token
begins a new word. So "a.com", "3.14", "e.g." and "Dr." end no sentence. Inside a code block no
sentence ends.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# Flags of a token.
SPACE = 1  # begins with white space
WORD = 2  # letters, perhaps after white space: a word or a part of one
LONG = 4  # a word of at least two letters
MARK = 8  # an end mark, perhaps with quotes or brackets, and white space
BREAK = 16  # white space with a line break
QUOTE = 32  # quotes, brackets, emphasis or blanks
ABBREVIATION = 64  # a word that a full stop follows within a sentence
FENCE = 128  # begins or ends a block of code
LOOK_BACK = 12  # tokens

_QUOTES = "\"'`\u00ab\u00bb\u2018\u2019\u201c\u201d()[]*_"
_WORD = re.compile(r"\s?[^\W\d_]+(?:['\u2019-][^\W\d_]+)*['\u2019-]?|['\u2019-](?:[^\W\d_]+)?")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof st jr sr vs etc fig no vol pp ed eds al inc ltd co corp dept est approx "
    "gen col sgt capt lt rev hon gov sen rep jan feb mar apr jun jul aug sep sept oct nov dec "
    "cf viz".split()
)


@struct.dataclass
class SentenceFlags:
    """The flags of a vocabulary's tokens, for one row."""

    given: jax.Array  # bool; False: no marks are given, so a thought may follow any token
    of_token: jax.Array  # uint8 [V]


def flag_tokens(texts: Iterable[str], marks: Sequence[str]) -> np.ndarray:
    """Returns the flags of each token, uint8 [V].

    Args:
        texts: the text of each token, with its white space; a control token's is empty.
        marks: the characters that end a sentence, at least one.
    """
    texts = list(texts)
    ends = re.escape("".join(mark for mark in marks if mark != "\n"))
    runs = ends.replace(re.escape("."), "")  # "?!" is one mark, "..." is an ellipsis
    quotes = re.escape(_QUOTES)
    kinds = f"[{ends}]|[{runs}]+" if runs else f"[{ends}]"
    mark = re.compile(rf"[{quotes}]*(?:{kinds})[{quotes}]*\s*") if ends else None
    flags = np.zeros(len(texts), np.uint8)
    for i, text in enumerate(texts):
        if not text:
            continue
        flag = SPACE if text[0].isspace() else 0
        word = text.strip()
        if "```" in text:
            flag |= FENCE
        elif not word:
            flag |= BREAK if "\n" in text and "\n" in marks else QUOTE
        elif _WORD.fullmatch(text):
            flag |= WORD | (LONG if sum(c.isalpha() for c in word) > 1 else 0)
            flag |= ABBREVIATION if word.lower() in _ABBREVIATIONS else 0
            flag |= QUOTE if word in _QUOTES else 0  # an apostrophe may also end a quotation
        elif mark is not None and mark.fullmatch(text):
            flag |= MARK | (BREAK if text[-1].isspace() else 0)
        elif all(c in _QUOTES for c in word):
            flag |= QUOTE
        flags[i] = flag
    return flags


def are_marks(value: Any) -> bool:
    """Whether a value is a list of characters that end a sentence, or one of them as a text."""
    marks = [value] if isinstance(value, str) else value
    return isinstance(marks, list) and all(isinstance(m, str) and len(m) <= 1 for m in marks)


def sentence_flags(value: str | list[str], host: Any) -> SentenceFlags:
    """Returns the flags of all tokens for marks that end a sentence, see `are_marks`."""
    marks = [mark for mark in ([value] if isinstance(value, str) else value) if mark]
    flags: Any = flag_tokens(host.token_texts(), marks) if marks else np.zeros(0, np.uint8)
    flags = np.pad(flags, (0, host.vocab_size - flags.size))
    return SentenceFlags(given=np.asarray(bool(marks)), of_token=flags)  # type: ignore[arg-type]


def sentence_ended(flags: SentenceFlags, history: jax.Array, length: jax.Array) -> jax.Array:
    """Returns whether one row's text ends a sentence, if a new word comes next: bool.

    Args:
        flags: see `flag_tokens`.
        history: int32 [S], the row's tokens, of which the first `length` (int32) are its text.
    """
    place = jnp.arange(history.shape[0], dtype=jnp.int32)
    fences = (jnp.take(flags.of_token, history, mode="clip") & FENCE) > 0
    within_code = jnp.sum(fences & (place < length), dtype=jnp.int32) % 2 == 1

    # From the last token back: marks, quotes and breaks, then the pieces of one word up to the one
    # that begins with white space.
    back = length - 1 - jnp.arange(LOOK_BACK, dtype=jnp.int32)
    latest = jnp.take(flags.of_token, jnp.take(history, back, mode="clip"), mode="clip")
    latest = jnp.where(back >= 0, latest, BREAK)  # before the text: a line start
    space, word, long_, abbreviation, mark, break_, quote = (
        (latest & flag) > 0 for flag in (SPACE, WORD, LONG, ABBREVIATION, MARK, BREAK, QUOTE)
    )
    ago = jnp.arange(LOOK_BACK, dtype=jnp.int32)

    def first(found: jax.Array) -> jax.Array:
        """Returns the first place where a bool [LOOK_BACK] holds, LOOK_BACK if none does."""
        return jnp.min(jnp.where(found, ago, LOOK_BACK))

    start = first(word & (ago > first(mark | break_)))
    end = first((ago >= start) & (~word | space))
    # The word's first piece has the white space, or a line start or a quote stands before it.
    begins = (ago == end) & (word | break_ | (quote & ~mark))
    found = jnp.any(begins) & jnp.all((ago >= start) | mark | break_ | quote)
    piece = (ago >= start) & (ago <= end) & word
    single = jnp.sum(piece, dtype=jnp.int32) == 1
    whole = found & (jnp.any(piece & long_) | ~single) & ~(jnp.any(piece & abbreviation) & single)
    ended: jax.Array = ~flags.given | (whole & ~within_code)
    return ended


def begins_word(
    flags: SentenceFlags, history: jax.Array, length: jax.Array, token: jax.Array
) -> jax.Array:
    """Returns whether one row's next `token` (int32) begins with white space, or follows a line
    break: bool."""
    last = jnp.take(flags.of_token, jnp.take(history, length - 1, mode="clip"), mode="clip")
    spaced = (jnp.take(flags.of_token, token, mode="clip") & SPACE) > 0
    return ~flags.given | spaced | ((last & BREAK) > 0)
