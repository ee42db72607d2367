"""Open writing: prompts of a user's own, whose texts have measures but no score.

The file is as for `batch`: JSON Lines or CSV with a `prompt` or `messages`, and optionally an `id`.
"""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from entropix_jax.batch.records import BadRecord, Record, read_records
from entropix_jax.errors import Note, require
from entropix_jax.lab.tasks.files import FileTask
from entropix_jax.lab.tasks.task import Item

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_GRAM = 4


class Writing(FileTask):
    """The prompts of a file, in two splits."""

    name = "writing"
    published = "prompts.csv"
    votes = False
    scored = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        require("lab", "wordfreq")

    def read(self, *, chat: bool) -> Iterator[Item]:
        for record in read_records(str(self.path)):
            where = f"{self.path}: line {record.line}"
            if isinstance(record, BadRecord):  # the published file has one
                warnings.warn(f"{where} is left out: {record.error}", Note, stacklevel=2)
            else:
                yield to_item(record)

    def identity(self) -> Mapping[str, str]:
        """The version of the word lists."""
        return {"wordfreq": version("wordfreq")}

    def extract(self, item: Item, text: str) -> str | None:
        """Returns None: free text has no answer."""
        return None

    def score(self, item: Item, answer: str | None) -> float:
        """Returns NaN: free text has no score."""
        return math.nan

    def measures(self, item: Item, text: str) -> Mapping[str, tuple[float, float]]:
        """Returns the share of words of two letters or more that are not English, and the share of
        word 4-grams that occurred earlier in the text."""
        words = [word.casefold() for word in _WORD.findall(text)]
        long = [word for word in words if len(word) > 1 and not any(map(str.isdigit, word))]
        grams = [tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)]
        return {
            "unknown_words": (float(sum(map(_is_unknown, long))), float(len(long))),
            "repeated_4grams": (float(len(grams) - len(set(grams))), float(len(grams))),
        }


def _is_unknown(word: str) -> bool:
    """Whether a word is rarer than one in a hundred million English words, as are most foreign
    words."""
    # Imported here, as it takes a while, and belongs to an extra.
    from wordfreq import zipf_frequency

    return zipf_frequency(word, "en", wordlist="large") == 0.0


def to_item(record: Record) -> Item:
    """A prompt without an answer."""
    return Item(record.id, record.prompt or tuple(record.messages or ()), "")
