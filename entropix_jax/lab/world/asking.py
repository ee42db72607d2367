"""The chats and texts that an asking world adds: lookups, and questions to the user.

A stranger is a person whose facts only a lookup returns. The host inserts two texts into an answer:
a lookup's result in brackets, and the first words of a question to the user. The model does not
choose to write them, so the true distribution at their position is the one without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import (
    Choice,
    Document,
    Part,
    any_other,
    certain,
    fact,
    uniform,
    weighted,
    write,
)
from entropix_jax.lab.world.lexicon import (
    ASSISTANT,
    END,
    PEOPLE,
    STRANGERS,
    TURN_END,
    USER,
    WOMEN,
    spaced,
    split_terminals,
)

LOOKED_UP = ("town", "job")  # facts of a result
BEFORE, AFTER = ("[", " ["), "]"  # of a result

_LOOKUPS, _QUESTIONS = 0.2, 0.5  # shares of the positions for it at which the host inserts a text

VERB = weighted("fork", {" has": 0.2, " met": 0.8})
ANYBODY = weighted(
    "name", {f" {n}": 0.5 / len(group) for group in (PEOPLE, STRANGERS) for n in group}
)
_TELLS = uniform("fork", (" lives", " is"))
_GUESSES = {"town": spaced(lexicon.TOWNS), "job": spaced(lexicon.JOBS)}
# Of questions about one of two people: the words around the pronoun, the predicate of the answer.
ABOUT_TWO = {
    "Where": (" does", " live?", " lives in", "town"),
    "Which": (" pet does", " have?", " has a", "pet"),
    "Who": (" does", " trust?", " trusts", "friend"),
}
_ABOUT_TWO = uniform("fork", spaced(ABOUT_TWO))
_REPLY_END = uniform("fork", (".", TURN_END))


@dataclass(frozen=True, eq=False)
class Interruptible(Choice):
    """A choice in whose place the host may insert a text.

    Attributes:
        inserted: the possible first terminals of that text, none of which the choice itself has.
        share: the share of texts in which the host inserts it.
    """

    inserted: tuple[str, ...]
    share: float

    def allows(self, terminal: str) -> bool:
        return terminal in self.inserted or super().allows(terminal)

    def draw(self, rng: Random) -> str:
        return rng.choice(self.inserted) if rng.random() < self.share else super().draw(rng)


def _interruptible(choice: Choice, share: float, *inserted: str) -> Interruptible:
    return Interruptible(choice.kind, choice.terminals, choice.probabilities, inserted, share)


# Lookups.


def answer(world: World, name: str, predicate: str, attribute: str) -> Part[str]:
    """`Anna lives in Rome.` The answer about a stranger is a guess without a lookup."""
    words = [certain("fixed", word) for word in split_terminals(predicate)]
    return _tell(world, name, [certain("copy", name), *words], attribute)


def write_about_stranger(world: World, name: str) -> Document:
    """` lives in Rome.` or ` is a baker.`, after the name."""
    lives = (yield from write(_TELLS)) == "lives"
    word = certain("fixed", " in" if lives else " a")
    yield from write(_tell(world, name, [word], "town" if lives else "job"), END)


def _tell(world: World, name: str, words: Sequence[Choice], attribute: str) -> Part[str]:
    """Words and a fact, `lives in Rome.`, possibly with the result of a lookup before one of them:
    `lives[Anna lives in Rome and is a baker] in Rome.`"""
    choices = [*words, _known_or(world, name, "unknown", attribute)]
    for index, choice in enumerate(choices):
        if (yield _interruptible(choice, _LOOKUPS, *BEFORE)) in BEFORE:
            found = yield from _write_result(world, name)
            told = certain("copy", f" {found[attribute]}") if attribute in found else choices[-1]
            rest = [*choices[index:-1], told]
            if rest[0].terminals == (name,):
                rest[0] = certain("copy", f" {name}")
            yield from write(*rest)
            break
    return (yield from write("."))


def format_result(name: str, town: str, job: str) -> str:
    """Returns the result of a lookup about a person."""
    return f"{name} lives in {town} and is a {job}"


def _write_result(world: World, name: str) -> Part[dict[str, str]]:
    """The result of a lookup and the closing bracket; returns the facts."""
    town = yield from write(f"{name} lives in", _known_or(world, name, "result", "town"))
    job = yield from write(" and is a", _known_or(world, name, "result", "job"), AFTER)
    return {"town": town, "job": job}


def _known_or(world: World, name: str, kind: str, attribute: str) -> Choice:
    """A fact about a person; about a stranger every one is equally likely."""
    if name in world.people:
        return fact(getattr(world.people[name], attribute))
    return uniform(kind, _GUESSES[attribute])


# Questions to the user.


def ask_about_two(world: World, one: str) -> Document:
    """` met Bella. Where does she live?` after `Anna`, and the answer about one of both if the
    pronoun fits both. In its place the host may insert a question to the user."""
    other = yield from write(any_other(PEOPLE, one), ".")
    before, after, predicate, attribute = ABOUT_TWO[(yield from write(_ABOUT_TWO))]
    pronouns = {name: "she" if name in WOMEN else "he" for name in (one, other)}
    distinct = spaced(dict.fromkeys(pronouns.values()))
    pronoun = yield from write(before, uniform("fork", distinct))
    meant = [name for name in pronouns if pronouns[name] == pronoun]
    yield from write(after, ASSISTANT)
    choice = uniform("person", meant)
    # Chat templates remove the space before a message.
    ask = _interruptible(choice, _QUESTIONS, " One", "One")
    named = yield ask if len(meant) > 1 else choice
    if named in ask.inserted:
        named = yield from write(f" question: do you mean {one} or {other}?{USER}", choice)
        yield from write(*[TURN_END] * ((yield _REPLY_END) == "."))
        yield from write(ASSISTANT.removeprefix(TURN_END), named)
    yield from write(predicate, fact(getattr(world.people[named], attribute)), ".")
