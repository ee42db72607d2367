"""Probabilistic grammars as coroutines: sampling a document, and replaying a given one.

A document yields a `Choice`, the exact distribution of its next terminal, and is sent the chosen
terminal. Choices are the only randomness, and each is a terminal of the text, so a text determines
the state of its grammar: the distribution after any prefix is the choice yielded there. `sample`
answers choices at random, `replay` with a given text.
"""

import math
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
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


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed text: its positions, and the next choice (None at the document's end)."""

    positions: tuple[Position, ...]
    upcoming: Choice | None


class ImpossibleText(ValueError):
    """A text that the grammar cannot produce.

    Attributes:
        index: of the first terminal with probability 0.
    """

    def __init__(self, index: int, terminal: str, choice: Choice | None) -> None:
        self.index = index
        if choice is None:
            expected = "nothing: the document has ended"
        else:
            expected = " or ".join(repr(t) for t in choice.terminals[:4])
            expected += " or ..." if len(choice.terminals) > 4 else ""
        super().__init__(f"terminal {index} is {terminal!r}, but the world expects {expected}")


def sample(document: Document, rng: Random) -> Iterator[Position]:
    """Draws a document, terminal by terminal."""
    choice: Choice | None = next(document, None)
    while choice is not None:
        terminal = choice.draw(rng)
        yield Position(terminal, choice)
        choice = _advance(document, terminal)


def replay(document: Document, terminals: Iterable[str]) -> Replay:
    """Parses a text, possibly unfinished, with its grammar.

    Raises:
        ImpossibleText: a terminal has probability 0 at its position.
    """
    positions: list[Position] = []
    choice: Choice | None = next(document, None)
    for index, terminal in enumerate(terminals):
        if choice is None or terminal not in choice.terminals:
            raise ImpossibleText(index, terminal, choice)
        positions.append(Position(terminal, choice))
        choice = _advance(document, terminal)
    return Replay(tuple(positions), choice)


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


def uniform(kind: str, terminals: Sequence[str]) -> Choice:
    """Equally likely continuations."""
    return Choice(kind, tuple(terminals), (1.0 / len(terminals),) * len(terminals))


def weighted(kind: str, weights: Mapping[str, float]) -> Choice:
    """Continuations in proportion to their weights; weight 0 is impossible."""
    possible = {terminal: weight for terminal, weight in weights.items() if weight > 0}
    total = math.fsum(possible.values())
    return Choice(kind, tuple(possible), tuple(w / total for w in possible.values()))


def expected(kind: str, terminal: str, likelihood: float, others: Sequence[str]) -> Choice:
    """A continuation of a given probability, and others that share the rest evenly."""
    rest = (1.0 - likelihood) / len(others)
    return Choice(kind, (terminal, *others), (likelihood, *((rest,) * len(others))))


# Parts.


def say(text: str) -> Document:
    """Certain words: function words ("fixed"), or content words said before ("copy")."""
    for terminal in split_terminals(text):
        yield certain("copy" if terminal.lstrip(" ") in CONTENT else "fixed", terminal)


def state(kind: str, text: str) -> Document:
    """Certain words, all of one kind."""
    for terminal in split_terminals(text):
        yield certain(kind, terminal)


def choose(choice: Choice) -> Part[str]:
    """Makes a choice; returns the word without its leading space."""
    return (yield choice).lstrip(" ")


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
        yield certain("thought", "...")
        yield from say(restate)
    elif terminal != PAUSE:
        return terminal.lstrip(" ")
    return (yield choice).lstrip(" ")
