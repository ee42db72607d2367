"""The facts of a world. Every fact has a single continuation wherever it is mentioned."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.grammar import Choice, expected, weighted

# Possible weights of a fork's futures.
_FORKS = ((0.5, 0.5), (0.8, 0.2), (0.6, 0.3, 0.1), (0.4, 0.3, 0.2, 0.1))


@dataclass(frozen=True, eq=False)
class Person:
    """One inhabitant."""

    town: str
    job: str
    pet: str
    friend: str


@dataclass(frozen=True, eq=False)
class World:
    """The inhabitants by name, and distributions of what happens where."""

    people: Mapping[str, Person]
    finds: Mapping[str, Choice]  # by place: the thing found there
    visits: Mapping[str, Choice]  # by day: the place visited
    strangers: tuple[str, ...] = ()  # people without facts; only an asking world has them

    @cached_property
    def friendly(self) -> Mapping[str, Choice]:
        """By name: whom one meets, nearly always the friend."""
        return {name: self._company(name, "swerve", 0.92) for name in self.people}

    @cached_property
    def sociable(self) -> Mapping[str, Choice]:
        """By name: whom one dances with, half the time the friend."""
        return {name: self._company(name, "toss", 0.5) for name in self.people}

    def _company(self, name: str, kind: str, likelihood: float) -> Choice:
        friend = self.people[name].friend
        others = [f" {other}" for other in self.people if other not in (name, friend)]
        return expected(kind, f" {friend}", likelihood, others)


WORLD_SEED = 0  # of the world that the tiny model was trained on


def create(seed: int, strangers: tuple[str, ...] = ()) -> World:
    """Creates the world of a seed. With strangers it is an asking world, see `asking`."""
    rng = Random(seed)
    names = list(lexicon.PEOPLE)
    rng.shuffle(names)
    people = {
        name: Person(
            town=rng.choice(lexicon.TOWNS),
            job=rng.choice(lexicon.JOBS),
            pet=rng.choice(lexicon.PETS),
            friend=friend,
        )
        for name, friend in zip(names, (*names[1:], names[0]), strict=True)
    }

    def fork(words: tuple[str, ...]) -> Choice:
        weights = rng.choice(_FORKS)
        futures = rng.sample(words, len(weights))
        return weighted("fork", {f" {w}": p for w, p in zip(futures, weights, strict=True)})

    return World(
        people={name: people[name] for name in lexicon.PEOPLE},
        finds={place: fork(lexicon.THINGS) for place in lexicon.PLACES},
        visits={day: fork(lexicon.PLACES) for day in lexicon.DAYS},
        strangers=strangers,
    )
