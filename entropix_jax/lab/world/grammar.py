"""Probabilistic grammars as coroutines: sampling a document, and replaying a given one.

A document yields a `Choice`, the exact distribution of its next terminal, and is sent the chosen
terminal. Choices are the only randomness, and each is a terminal of the text, so a text determines
the state of its grammar: the distribution after any prefix is the choice yielded there. `sample`
answers choices at random, `replay` with a given text.
"""

import math
import tomllib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar

from entropix_jax.lab.world.lexicon import CONTENT, PAUSE, split_terminals

T = TypeVar("T")
Part = Generator["Choice", str, T]
"""A part of a document; it returns what later parts need."""
Document = Part[None]

# Probability of a pause, and of `Wait...`, where a speaker may hesitate.
HESITATION = 0.005


@dataclass(frozen=True, eq=False)
class Choice:
    """The distribution of the next terminal.

    Attributes:
        kind: what is chosen ("fact", "fork", "list", ...), for tables.
        terminals: the possible terminals, distinct.
        probabilities: of the terminals, positive, of sum 1.
    """

    kind: str
    terminals: tuple[str, ...]
    probabilities: tuple[float, ...]

    @cached_property
    def entropy(self) -> float:
        """In bits."""
        return -math.fsum(p * math.log2(p) for p in self.probabilities)

    @cached_property
    def varentropy(self) -> float:
        """The variance of the information content, in bits squared."""
        h = self.entropy
        return math.fsum(p * (math.log2(p) + h) ** 2 for p in self.probabilities)

    @cached_property
    def cumulative(self) -> tuple[float, ...]:
        """Running sums of all probabilities except the last."""
        return tuple(accumulate(self.probabilities[:-1]))

    def allows(self, terminal: str) -> bool:
        """Returns whether a text may continue with a terminal."""
        return terminal in self.terminals

    def draw(self, rng: Random) -> str:
        """Draws a terminal; a certain one takes no random number."""
        if len(self.terminals) == 1:
            return self.terminals[0]
        return self.terminals[bisect_right(self.cumulative, rng.random())]


@dataclass(frozen=True, slots=True)
class Position:
    """A terminal of a text and the distribution that it was drawn from."""

    terminal: str
    choice: Choice


class ImpossibleText(ValueError):
    """A text that the grammar cannot produce.

    Attributes:
        index: of the first terminal with probability 0.
    """

    def __init__(self, index: int, terminal: str) -> None:
        self.index = index
        super().__init__(f"terminal {index}, {terminal!r}, is impossible")


def sample(document: Document, rng: Random) -> Iterator[Position]:
    """Draws a document, terminal by terminal."""
    choice: Choice | None = next(document, None)
    while choice is not None:
        terminal = choice.draw(rng)
        yield Position(terminal, choice)
        choice = _advance(document, terminal)


def replay(document: Document, terminals: Iterable[str]) -> Choice | None:
    """Parses a text, possibly unfinished, with its grammar. Returns the choice after it, or None at
    the document's end.

    Raises:
        ImpossibleText: a terminal has probability 0 at its position.
    """
    choice: Choice | None = next(document, None)
    for index, terminal in enumerate(terminals):
        if choice is None or not choice.allows(terminal):
            raise ImpossibleText(index, terminal)
        choice = _advance(document, terminal)
    return choice


def _advance(document: Document, terminal: str) -> Choice | None:
    """The choice after a terminal, or None at the document's end."""
    try:
        return document.send(terminal)
    except StopIteration:
        return None


# Choices.


@lru_cache(maxsize=4096)
def certain(kind: str, terminal: str) -> Choice:
    """A certain continuation."""
    return Choice(kind, (terminal,), (1.0,))


THOUGHT = certain("thought", "...")  # after `Wait`


def uniform(kind: str, terminals: Sequence[str]) -> Choice:
    """Equally likely continuations."""
    return Choice(kind, tuple(terminals), (1.0 / len(terminals),) * len(terminals))


@cache
def any_other(words: tuple[str, ...], word: str) -> Choice:
    """Equally likely names, within a sentence: all but one of some words."""
    return uniform("name", [f" {other}" for other in words if other != word])


def weighted(kind: str, weights: Mapping[str, float]) -> Choice:
    """Continuations in proportion to their weights; weight 0 is impossible."""
    possible = {terminal: weight for terminal, weight in weights.items() if weight > 0}
    total = math.fsum(possible.values())
    return Choice(kind, tuple(possible), tuple(w / total for w in possible.values()))


def expected(kind: str, terminal: str, likelihood: float, others: Sequence[str]) -> Choice:
    """A continuation of a given probability, and others that share the rest evenly."""
    rest = (1.0 - likelihood) / len(others)
    return Choice(kind, (terminal, *others), (likelihood, *((rest,) * len(others))))


_FORKS = tomllib.loads(Path(__file__).with_name("forks.toml").read_text(encoding="utf-8"))
FORKS = {name: weighted("fork", words) for name, words in _FORKS.items()}


# Parts.


def write(*parts: str | Choice | Part[str]) -> Part[str]:
    """Writes parts in turn, and returns the last chosen word without its leading space.

    A text is certain: its words are function words ("fixed") or content words said before ("copy").
    """
    word = ""
    for part in parts:
        if isinstance(part, str):
            for terminal in split_terminals(part):
                yield certain("copy" if terminal.lstrip(" ") in CONTENT else "fixed", terminal)
        elif isinstance(part, Choice):
            word = (yield part).lstrip(" ")
        else:
            word = yield from part
    return word


def fact(word: str) -> Choice:
    """A fact of the world, within a sentence."""
    return certain("fact", f" {word}")


def weigh(choice: Choice, *, lead: str = " ", restate: str = "") -> Part[str]:
    """Makes a choice after a possible hesitation: a pause, or `Wait...` and a restatement.

    `choice` has spaced words; an empty `lead` drops the first terminal's space.
    """
    words = choice.terminals if lead else tuple(t.lstrip(" ") for t in choice.terminals)
    rest = 1.0 - 2.0 * HESITATION
    terminal = yield Choice(
        choice.kind,
        (*words, PAUSE, f"{lead}Wait"),
        (*(p * rest for p in choice.probabilities), HESITATION, HESITATION),
    )
    if terminal == f"{lead}Wait":
        yield from write(THOUGHT, restate)
    elif terminal != PAUSE:
        return terminal.lstrip(" ")
    return (yield choice).lstrip(" ")
