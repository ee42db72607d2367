"""Chats in Llama 3's format: possibly a system message, then questions and answers."""

from collections.abc import Iterator

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import (
    Document,
    certain,
    choose,
    replay,
    say,
    state,
    uniform,
    weigh,
    weighted,
)
from entropix_jax.lab.world.lexicon import END, HEADER, HEADER_END, TURN_END, spaced
from entropix_jax.lab.world.problems import (
    DIRECT,
    FIRST_OPERANDS,
    START,
    answer_sum,
    answer_word_problem,
    pose_sum,
    pose_word_problem,
)
from entropix_jax.lab.world.prose import ANYBODY, enumerate_words, tell_story

_FIRST_ROLE = weighted("fork", {"user": 0.8, "system": 0.2})
_ORDER = weighted("fork", {"You": 0.5, "Work": 0.25, "Answer": 0.25})
_ORDER_REST = {"You": " are a helpful assistant.", "Work": " step by step.", "Answer": " at once."}
_DIRECT = {"You": DIRECT, "Work": 0.0, "Answer": 1.0}  # probability of an answer without steps
_AFTER_REPLY = weighted("fork", {HEADER: 0.4, END: 0.6})

_REQUEST = weighted(
    "fork",
    {
        "Hello": 0.05,
        "How": 0.05,
        "Where": 0.12,
        "What": 0.25,
        "Which": 0.07,
        "Who": 0.07,
        "Name": 0.09,
        "Tell": 0.05,
        **{name: 0.25 / len(lexicon.PEOPLE) for name in lexicon.PEOPLE},
    },
)
_OFFER = weighted("fork", {" Can": 0.2, " How": 0.5, " What": 0.3})
_OFFER_REST = {"Can": " I help you?", "How": " can I help you?", "What": " can I do?"}
_FEELING = weighted("fork", {" fine": 0.6, " happy": 0.3, " tired": 0.1})
_WHERE = weighted("fork", {" does": 0.7, " is": 0.3})
_TOWN = uniform("name", spaced(lexicon.TOWNS))
_TOPIC = weighted(
    "fork", {" the": 0.3, **{f" {n}": 0.7 / len(FIRST_OPERANDS) for n in FIRST_OPERANDS}}
)
_AMOUNT = uniform("number", [f" {n}" for n in START])
_LENGTHS = {"three": 3, "four": 4, "five": 5}
_LENGTH = weighted("fork", {" three": 0.4, " four": 0.3, " five": 0.3})
_LISTS = {"people": lexicon.PEOPLE, "towns": lexicon.TOWNS}
_LISTED = weighted("fork", {" people": 0.7, " towns": 0.3})


def write_chat(world: World) -> Document:
    """A chat, after its first header token."""
    direct = DIRECT
    role = yield from choose(_FIRST_ROLE)
    yield from say(f"{HEADER_END}\n\n")
    if role == "system":
        order = yield from choose(_ORDER)
        direct = _DIRECT[order]
        yield from say(_ORDER_REST[order])
        yield from _turn_to("user")
    while True:
        yield from _exchange(world, direct)
        yield from say(TURN_END)
        if (yield _AFTER_REPLY) == END:
            return
        yield from say(f"user{HEADER_END}\n\n")


def _turn_to(role: str) -> Document:
    """The end of one turn and the header of the next."""
    yield from say(f"{TURN_END}{HEADER}{role}{HEADER_END}\n\n")


def _exchange(world: World, direct: float) -> Document:
    """A request and its answer."""
    request = yield from choose(_REQUEST)
    if request == "Hello":
        yield from say("!")
        yield from _turn_to("assistant")
        yield from say("Hello!")
        offer = yield from choose(_OFFER)
        yield from say(_OFFER_REST[offer])
    elif request == "How":
        yield from say(" are you?")
        yield from _turn_to("assistant")
        yield from say("I am")
        yield from choose(_FEELING)
        yield from say(".")
    elif request == "Tell":
        yield from say(" a story.")
        yield from _turn_to("assistant")
        yield from say("Once")
        yield from tell_story(world)
    elif request == "Name":
        yield from _ask_for_list()
    elif request == "Where":
        yield from _ask_where(world)
    elif request == "What":
        yield from _ask_what(world, direct)
    elif request == "Which":
        yield from say(" pet does")
        name = yield from choose(ANYBODY)
        yield from say(" have?")
        yield from _answer(name, " has a", world.people[name].pet)
    elif request == "Who":
        yield from say(" does")
        name = yield from choose(ANYBODY)
        yield from say(" trust?")
        yield from _answer(name, " trusts", world.people[name].friend)
    else:
        yield from say(" has")
        amount = int((yield from choose(_AMOUNT)))
        steps = yield from pose_word_problem(request, amount, "train")
        yield from _turn_to("assistant")
        yield from answer_word_problem(steps, lead="", direct=direct)


def _answer(subject: str, predicate: str, fact: str) -> Document:
    """`Anna lives in Rome.`"""
    yield from _turn_to("assistant")
    yield from weigh(certain("copy", f" {subject}"), lead="")
    yield from say(predicate)
    yield from state("fact", f" {fact}")
    yield from say(".")


def _ask_for_list() -> Document:
    length = yield from choose(_LENGTH)
    words = yield from choose(_LISTED)
    yield from say(".")
    yield from _turn_to("assistant")
    yield from enumerate_words(_LISTS[words], lead="", length=_LENGTHS[length])
    yield from say(".")


def _ask_where(world: World) -> Document:
    if (yield from choose(_WHERE)) == "is":
        town = yield from choose(_TOWN)
        yield from say("?")
        yield from _answer(town, " is in", lexicon.COUNTRY_OF[town])
    else:
        name = yield from choose(ANYBODY)
        yield from say(" live?")
        yield from _answer(name, " lives in", world.people[name].town)


def _ask_what(world: World, direct: float) -> Document:
    yield from say(" is")
    topic = yield from choose(_TOPIC)
    if topic == "the":
        yield from say(" job of")
        name = yield from choose(ANYBODY)
        yield from say("?")
        yield from _answer(name, " is a", world.people[name].job)
    else:
        asked = yield from pose_sum(int(topic), "train")
        yield from say("?")
        yield from _turn_to("assistant")
        yield from answer_sum(asked, lead="", direct=direct)


# Questions for evaluation.

_FACT_QUESTIONS = (("Where",), ("What", " is", " the"), ("Which",), ("Who",))


def list_fact_questions(world: World) -> Iterator[tuple[str, str]]:
    """Every question of fact in chats, with the fact: `Where does Anna live?`, `Rome`.

    Enumerates the grammar: all paths to the end of the question, then the first one to the fact.
    """
    paths: list[tuple[str, ...]] = list(_FACT_QUESTIONS)
    while paths:
        said = paths.pop()
        upcoming = replay(_exchange(world, DIRECT), said).upcoming
        assert upcoming is not None
        if upcoming.kind == "fact":
            question, _, _ = "".join(said).partition(TURN_END)
            yield question, upcoming.terminals[0].lstrip(" ")
        else:
            following = upcoming.terminals[:1] if TURN_END in said else upcoming.terminals
            paths += [(*said, terminal) for terminal in following]
