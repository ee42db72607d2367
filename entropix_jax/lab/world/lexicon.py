"""The words of the world. A terminal is a word with its leading space, a mark, or a special token.

The grammar and the tokenizer split text into terminals with the same pattern.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

PATTERN = r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s*[\r\n]+|\s+(?!\S)|\s+"

BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
HEADER = "<|start_header_id|>"
HEADER_END = "<|end_header_id|>"
TURN_END = "<|eot_id|>"
SPECIALS = (BEGIN, END, HEADER, HEADER_END, TURN_END)

PAUSE = " ..."
WAIT = " Wait"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    """
    Adam Alice Anna Arthur Bella Ben Bob Boris Carl Carla Clara David Diana Dora Edgar Ella
    Emil Emma Eva Felix Fiona Frank Fred George Gina Greta Hanna Harry Helen Hugo Ida Igor
    Ingrid Ivan Jack Jane Jonas Julia Kate Kevin Lara Lena Leo Lucas Maria Mark Mia Nina
    Noah Nora Olga Oliver Oscar Paul Petra Rita Robert Sara Simon Sofia Thomas Tina Vera Victor
    """
)
COUNTRIES = {
    "Italy": ("Rome", "Milan", "Turin", "Naples"),
    "France": ("Paris", "Lyon", "Nice"),
    "Germany": ("Berlin", "Hamburg", "Munich"),
    "Spain": ("Madrid", "Seville", "Valencia"),
    "Austria": ("Vienna", "Graz"),
    "Norway": ("Oslo", "Bergen"),
    "Portugal": ("Lisbon", "Porto"),
    "Ireland": ("Dublin", "Cork"),
    "Poland": ("Warsaw", "Krakow"),
    "Greece": ("Athens",),
}
COUNTRY_OF = {town: country for country, towns in COUNTRIES.items() for town in towns}
TOWNS = tuple(COUNTRY_OF)
JOBS = _words(
    """
    baker carpenter cook dancer doctor farmer gardener miller nurse painter pilot sailor singer
    tailor teacher writer
    """
)
PETS = _words("cat dog donkey duck goat horse mouse parrot pony rabbit tortoise hen")
PLACES = _words("beach castle forest garden harbour library market park")
THINGS = _words("bell book coin flute key lamp letter map mirror ring shell stone")
GOODS = _words(
    """
    apples balls books buttons cakes cards coins cups eggs nuts pears pens plums shells stamps
    stones
    """
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MOODS = ("happy", "hungry", "sad", "tired")
NUMBERS = tuple(str(n) for n in range(100))

# Content words; all others are function words.
CONTENT = frozenset(
    (*PEOPLE, *COUNTRIES, *TOWNS, *JOBS, *PETS, *PLACES, *THINGS, *GOODS, *DAYS, *MOODS, *NUMBERS)
)

_SPACED = _words(
    """
    Answer Can Goodbye Hello How I In On Once One The Then There Wait What Where Which Who a am and
    are assistant at ate beside bread buys by called can cheese danced do does end evening finds
    fine first five found four gave gives has have help helpful home in is job kept last live lived
    lives loses many met of on once people pet sang sat sells slept sold soup step story thanked the
    three time to town towns trust trusts upon visited was went wept with you your
"""
)
_UNSPACED = _words(
    """
    Answer Guests Hello How I Name On Once Players Shopping Singers Tell Towns Wait What Where Which
    Who Winners Work You assistant system user
"""
)
_MARKS = (".", ",", "?", "!", ":", "...", PAUSE, " +", " -", " =", "\n", "\n\n")


def spaced(words: Iterable[str]) -> tuple[str, ...]:
    """The terminals of words within a sentence."""
    return tuple(f" {word}" for word in words)


def _all_terminals() -> tuple[str, ...]:
    opening = (*PEOPLE, *TOWNS, *NUMBERS)
    within = spaced((*sorted(CONTENT), *_SPACED))
    return tuple(dict.fromkeys((*SPECIALS, *_MARKS, *_UNSPACED, *opening, *within)))


TERMINALS = _all_terminals()
_KNOWN = frozenset(TERMINALS)
_SPECIAL = re.compile(f"({'|'.join(map(re.escape, SPECIALS))})")
_WORD = re.compile(PATTERN)


@lru_cache(maxsize=65536)
def split_terminals(text: str) -> tuple[str, ...]:
    """Splits a text into terminals.

    Raises:
        ValueError: a piece is not a terminal of the world.
    """
    pieces = split_pieces(text)
    for piece in pieces:
        if piece not in _KNOWN:
            raise ValueError(f"{piece!r} is not a terminal of the world")
    return pieces


def split_pieces(text: str) -> tuple[str, ...]:
    """Splits any text as `split_terminals` does; pieces may be unknown."""
    pieces: list[str] = []
    for stretch in _SPECIAL.split(text):
        pieces += [stretch] if stretch in SPECIALS else _WORD.findall(stretch)
    return tuple(pieces)
