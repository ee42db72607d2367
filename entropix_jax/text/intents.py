"""Intents: how much several continuations of a text differ in their outcomes, not in their words.

Continuations with the same outcome have one intent. The entropy over intents is low if the model
means one thing, high if it guesses, and in between if the question has a few readings.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log2

from entropix_jax.text.numbers import read_number

_NO_WORD = re.compile(r"[^\w\s]|_")
_QUESTION = re.compile(r"\?[^\w\s]*\s*$")  # closed by quotes or brackets
_ARTICLES = ("a", "an", "the")


def read_outcome(text: str) -> str:
    """Returns the number of a text as `read_number` does, else its words in lower case, without
    punctuation and articles."""
    if (number := read_number(text)) is not None:
        return number
    words = _NO_WORD.sub("", text.lower()).split()
    return " ".join(word for word in words if word not in _ARTICLES)


def intent_entropy(texts: Iterable[str]) -> float:
    """Returns the entropy over the outcomes of texts, in bits. 0 without texts."""
    counts = Counter(map(read_outcome, texts))
    total = counts.total()
    return sum(count / total * log2(total / count) for count in counts.values())


def may_ask(messages: Sequence[Mapping[str, str]]) -> bool:
    """Returns whether the next answer may be a clarifying question. Returns False if the last
    complete answer ends with a question mark: the user has just replied to it."""
    past = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    answers = [message["content"] for message in past if message["role"] == "assistant"]
    return not (answers and _QUESTION.search(answers[-1]))
