"""Documents of the world, each of a kind that its first words determine."""

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.chat import write_chat
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import Document, certain, weighted
from entropix_jax.lab.world.lexicon import BEGIN, END, HEADER
from entropix_jax.lab.world.problems import (
    FIRST_OPERANDS,
    START,
    Split,
    answer_word_problem,
    pose_word_problem,
    write_sums,
)
from entropix_jax.lab.world.prose import (
    LISTS,
    tell_story,
    write_dialogue,
    write_diary,
    write_list,
    write_profile,
)

_FIRST = weighted(
    "document",
    {
        HEADER: 0.32,
        "Once": 0.11,
        "On": 0.17,
        **{title: 0.16 / len(LISTS) for title in LISTS},
        **{number: 0.08 / len(FIRST_OPERANDS) for number in FIRST_OPERANDS},
        **{name: 0.16 / len(lexicon.PEOPLE) for name in lexicon.PEOPLE},
    },
)
_AFTER_NAME = weighted(
    "fork", {":": 0.36, " has": 0.4, " lives": 0.08, " is": 0.08, " trusts": 0.08}
)
_AFTER_HAS = weighted("fork", {" a": 0.2, **{f" {n}": 0.8 / len(START) for n in START}})


def document(world: World, split: Split | None = "train") -> Document:
    """One document, from its begin to its end token. Its problems are of a split, or of all with
    None, except in chats: of the training split."""
    yield certain("fixed", BEGIN)
    first = yield _FIRST
    if first == HEADER:
        yield from write_chat(world)
    elif first == "Once":
        yield from tell_story(world)
        yield certain("fixed", END)
    elif first == "On":
        yield from write_diary(world)
    elif first in LISTS:
        yield from write_list(LISTS[first])
    elif first in FIRST_OPERANDS:
        yield from write_sums(int(first), split)
    else:
        yield from _write_about(world, first, split)


def stream(world: World, split: Split | None = "train") -> Document:
    """An endless sequence of documents."""
    while True:
        yield from document(world, split)


def _write_about(world: World, name: str, split: Split | None) -> Document:
    """A document that begins with a name: a dialogue, a profile or a word problem."""
    verb = yield _AFTER_NAME
    if verb == ":":
        yield from write_dialogue(world, name)
        return
    if verb == " has":
        owned = yield _AFTER_HAS
        if owned != " a":
            steps = yield from pose_word_problem(name, int(owned), split)
            yield from answer_word_problem(steps)
            yield certain("fixed", END)
            return
    yield from write_profile(world, name, verb.lstrip(" "))
