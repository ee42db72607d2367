"""The words of the world. A terminal is a word with its leading space, a mark, or a special token.

The grammar and the tokenizer split text into terminals with the same pattern.
"""

import re
import tomllib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

PATTERN = r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s*[\r\n]+|\s+(?!\S)|\s+"

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
HEADER = "<|start_header_id|>"
HEADER_END = "<|end_header_id|>"
TURN_END = "<|eot_id|>"
SPECIALS = (BEGIN, END, HEADER, HEADER_END, TURN_END)

USER, ASSISTANT = (
    f"{TURN_END}{HEADER}{role}{HEADER_END}\n\n" for role in ("user", "assistant")
)  # the end of a turn and the start of the next one

PAUSE = " ..."
WAIT = " Wait"


_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _words(name: str) -> tuple[str, ...]:
    return tuple(_LISTS[name].split())


PEOPLE, JOBS, PETS, PLACES = map(_words, ("people", "jobs", "pets", "places"))
WOMEN, STRANGERS = map(_words, ("women", "strangers"))
THINGS, GOODS, DAYS, MOODS = map(_words, ("things", "goods", "days", "moods"))
COUNTRIES = {country: tuple(towns.split()) for country, towns in _LISTS["countries"].items()}
COUNTRY_OF = {town: country for country, towns in COUNTRIES.items() for town in towns}
TOWNS = tuple(COUNTRY_OF)
NUMBERS = tuple(str(n) for n in range(100))

# Content words; all others are function words.
_CONTENT = frozenset(
    (*PEOPLE, *COUNTRIES, *TOWNS, *JOBS, *PETS, *PLACES, *THINGS, *GOODS, *DAYS, *MOODS, *NUMBERS)
)
CONTENT = _CONTENT.union(STRANGERS)

_MARKS = (".", ",", "?", "!", ":", "...", PAUSE, " +", " -", " =", "\n", "\n\n")


def spaced(words: Iterable[str]) -> tuple[str, ...]:
    """The terminals of words within a sentence."""
    return tuple(f" {word}" for word in words)


_WITHIN = spaced((*sorted(_CONTENT), *_words("within")))
TERMINALS = tuple(
    dict.fromkeys((*SPECIALS, *_MARKS, *_words("beginning"), *PEOPLE, *TOWNS, *NUMBERS, *_WITHIN))
)
# Terminals of the asking world.
_ASKING = spaced((*STRANGERS, *_words("asking")))
ASKING_TERMINALS = (*TERMINALS, "[", " [", "]", "One", *STRANGERS, *_ASKING)
_SPECIAL = re.compile(f"({'|'.join(map(re.escape, SPECIALS))})")
_WORD = re.compile(PATTERN)


@lru_cache(maxsize=65536)
def split_terminals(text: str) -> tuple[str, ...]:
    """Splits any text into terminals; pieces of text from outside the world may be unknown."""
    pieces: list[str] = []
    for stretch in _SPECIAL.split(text):
        pieces += [stretch] if stretch in SPECIALS else _WORD.findall(stretch)
    return tuple(pieces)
