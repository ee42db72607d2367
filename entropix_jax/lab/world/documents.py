"""Documents of the world, each of a kind that its first words determine: stories, diaries, lists,
sums, dialogues, profiles, word problems, and chats in Llama 3's format.

Every function writes a part of a document, shown in its docstring. Parts of random length write the
end token themselves.
"""

from collections.abc import Iterator, Sequence

from entropix_jax.lab.world import asking, lexicon, problems
from entropix_jax.lab.world.facts import Person, World
from entropix_jax.lab.world.grammar import (
    FORKS,
    Document,
    Part,
    any_other,
    certain,
    fact,
    replay,
    uniform,
    weigh,
    weighted,
    write,
)
from entropix_jax.lab.world.lexicon import (
    ASSISTANT,
    BEGIN,
    END,
    HEADER,
    HEADER_END,
    PEOPLE,
    STRANGERS,
    TURN_END,
    USER,
    spaced,
)
from entropix_jax.lab.world.problems import DIRECT, FIRST_OPERANDS, START, Split

LISTS = {
    "Guests": PEOPLE,
    "Winners": PEOPLE,
    "Players": PEOPLE,
    "Singers": PEOPLE,
    "Towns": lexicon.TOWNS,
    "Shopping": lexicon.GOODS,
}
_ANYBODY = uniform("name", spaced(PEOPLE))
_FIRST_WEIGHTS = {
    HEADER: 0.32,
    "Once": 0.11,
    "On": 0.17,
    **{title: 0.16 / len(LISTS) for title in LISTS},
    **{number: 0.08 / len(FIRST_OPERANDS) for number in FIRST_OPERANDS},
    **{name: 0.16 / len(PEOPLE) for name in PEOPLE},
}
_FIRST = weighted("document", _FIRST_WEIGHTS)
_FIRST_OF_ASKING = weighted(
    "document",
    {**_FIRST_WEIGHTS, HEADER: 2.0, **{name: 0.3 / len(STRANGERS) for name in STRANGERS}},
)
_AFTER_HAS = weighted("fork", {" a": 0.2, **{f" {n}": 0.8 / len(START) for n in START}})


def document(world: World, split: Split | None = "train") -> Document:
    """One document, from its begin to its end token. Its problems are of a split, or of all with
    None, except in chats: of the training split."""
    first = yield from write(BEGIN, _FIRST_OF_ASKING if world.strangers else _FIRST)
    if first == HEADER:
        yield from write_chat(world)
    elif first == "Once":
        yield from tell_story(world)
        yield from write(END)
    elif first == "On":
        yield from write_diary(world)
    elif first in LISTS:
        yield from write_list(LISTS[first])
    elif first in FIRST_OPERANDS:
        yield from problems.write_sums(int(first), split)
    elif first in STRANGERS:
        yield from asking.write_about_stranger(world, first)
    else:
        yield from _write_about(world, first, split)


def stream(world: World, split: Split | None = "train") -> Document:
    """An endless sequence of documents."""
    while True:
        yield from document(world, split)


def _write_about(world: World, name: str, split: Split | None) -> Document:
    """A document that begins with a name: a dialogue, a profile or a word problem."""
    verb = yield from write(FORKS["after_name"])
    if verb == ":":
        yield from write_dialogue(world, name)
        return
    owned = "a" if verb != "has" else (yield from write(_AFTER_HAS))
    if owned == "a":
        yield from write_profile(world, name, verb)
    else:
        steps = yield from problems.pose_word_problem(name, int(owned), split)
        yield from problems.answer_word_problem(steps)
        yield from write(END)


# Profiles.

_VERBS = ("lives", "is", "has", "trusts")


def write_profile(world: World, name: str, verb: str) -> Document:
    """Distinct facts about a person, after `Anna lives`, ` is`, ` trusts` or ` has a`."""
    left = [other for other in _VERBS if other != verb]
    article = " a" if verb == "is" else ""
    while True:
        yield from write(article)
        yield from _complete_fact(world.people[name], verb)
        if not left:
            yield from write(END)
            return
        if len(left) == 3:
            yield from write(f" {name}")
        elif (yield from write(weighted("fork", {END: 0.3, f" {name}": 0.7}))) == END:
            return
        verb = yield from write(uniform("fork", spaced(left)))
        left.remove(verb)
        article = " a" if verb in ("is", "has") else ""


def _complete_fact(person: Person, verb: str) -> Document:
    """` Rome.` after `Anna lives in`, ` baker.` after `Anna is a`, and so on."""
    if verb == "lives":
        if (yield from write(" in", fact(person.town), FORKS["town_end"])) == ",":
            yield from write(" a town in", fact(lexicon.COUNTRY_OF[person.town]), ".")
    else:
        facts = {"is": person.job, "has": person.pet, "trusts": person.friend}
        yield from write(fact(facts[verb]), ".")


# Lists.

_SHORTEST, _LONGEST = 4, 10


def write_list(words: Sequence[str]) -> Document:
    """`: Anna, Bob, Carl and Dora.` after its title, and possibly a remark."""
    yield from write(":")
    listed = yield from enumerate_words(words)
    if (yield from write(".", FORKS["list_end"])) == "The":
        yield from write(f" first is {listed[0]} and the last is {listed[-1]}.{END}")


def enumerate_words(
    words: Sequence[str], *, lead: str = " ", length: int | None = None
) -> Part[list[str]]:
    """` Anna, Bob and Carl`: distinct, equally likely words; returns them.

    Without `length` the length is random. `lead` precedes the first word.
    """
    shortest, longest = (_SHORTEST, _LONGEST) if length is None else (length, length)
    listed: list[str] = []
    joint = ""
    while True:
        choice = uniform("list", spaced(word for word in words if word not in listed))
        listed.append((yield from weigh(choice, lead=" " if listed else lead)))
        if joint == "and":
            return listed
        if len(listed) < shortest - 1:
            yield from write(",")
        else:
            last = len(listed) >= longest - 1
            joint = yield from write(certain("fixed", " and") if last else FORKS["joint"])


# Stories.

_DAY = uniform("fork", spaced(lexicon.DAYS))


def tell_story(world: World) -> Document:
    """` upon a time Anna lived in Rome. ... The end.` after `Once`."""
    if (yield from write(FORKS["story_start"])) == "upon":
        hero = yield from write(" a time", weigh(_ANYBODY, restate=" Once upon a time"))
        yield from write(" lived in", fact(world.people[hero].town), ". One")
        day = yield from write(_DAY)
        yield from write(f" {hero}")
    else:
        day = yield from write(_DAY)
        hero = yield from weigh(_ANYBODY, restate=f" Once on {day}")
    went = " went to the"
    place = yield from write(went, weigh(world.visits[day], restate=f" {hero}{went}"))
    if (yield from write(FORKS["company"])) == "with":
        yield from write(weigh(world.sociable[hero], restate=f" {hero} went with"), ".")
    while True:
        yield from _tell_event(world, hero, place)
        if (yield from weigh(FORKS["next"], restate=f" {hero} was in the {place}.")) == "In":
            home = fact(world.people[hero].town)
            yield from write(f" the evening {hero} went home to", home, ". The end.")
            return
        place = yield from write(f" {hero}{went}", any_other(lexicon.PLACES, place))
        yield from write(".")


def _tell_event(world: World, hero: str, place: str) -> Document:
    """` There Anna met Bob. Bob was sad and wept.`, and the like."""
    event = yield from write(f" There {hero}", FORKS["event"])
    if event == "met":
        other = yield from weigh(world.friendly[hero], restate=f" {hero} met")
        mood = yield from write(f". {other} was", FORKS["mood"])
        if (yield from write(" and", FORKS[mood])) == "ate":
            yield FORKS["food"]
    elif event == "danced":
        yield from write(" with", weigh(world.sociable[hero], restate=f" {hero} danced with"))
    else:
        found = weigh(world.finds[place], restate=f" {hero} found a")
        thing = yield from write(" a", found)
        use = yield from write(f". {hero}", FORKS["use"])
        yield from write(f" the {thing}")
        if use == "gave":
            restate = f" {hero} gave the {thing} to"
            yield from write(" to", weigh(world.friendly[hero], restate=restate))
    yield from write(".")


# Diaries.

_PREPOSITIONS = {"danced": " with", "sat": " beside"}


def write_diary(world: World) -> Document:
    """` Monday Anna called Bob. On Tuesday Carl danced with Dora.` after `On`."""
    day = yield from write(_DAY)
    while True:
        name = yield from weigh(_ANYBODY, restate=f" On {day}")
        meeting = yield from write(FORKS["meeting"])
        preposition = _PREPOSITIONS.get(meeting, "")
        company = world.sociable if preposition else world.friendly
        other = weigh(company[name], restate=f" {name} {meeting}{preposition}")
        if (yield from write(preposition, other, ".", FORKS["diary_goes_on"])) == END:
            return
        day = lexicon.DAYS[(lexicon.DAYS.index(day) + 1) % len(lexicon.DAYS)]
        yield from write(f" {day}")


# Dialogues.


def write_dialogue(world: World, name: str) -> Document:
    """` Hello, Bob.` and so on, line by line, after `Anna:`."""
    other = yield from write(" Hello,", weigh(any_other(PEOPLE, name), restate=" Hello,"))
    yield from write(f".\n{other}: Hello, {name}.")
    speakers = {name: other, other: name}
    while True:
        asking = yield from write("\n", uniform("fork", tuple(speakers)))
        asked = speakers[asking]
        remark = yield from write(":", FORKS["remark"])
        if remark == "Goodbye":
            yield from write(f", {asked}.\n{asked}: Goodbye, {asking}.{END}")
            return
        person = world.people[asked]
        rest, reply, told = {
            "Where": (" do you live?", " live in", person.town),
            "What": (" is your job?", " am a", person.job),
            "Which": (" pet do you have?", " have a", person.pet),
            "Who": (" do you trust?", " trust", person.friend),
        }[remark]
        opening = weigh(certain("fixed", " I"))
        yield from write(f"{rest}\n{asked}:", opening, reply, fact(told), ".")


# Chats: possibly a system message, then questions and answers.

_ORDER_REST = {"You": " are a helpful assistant.", "Work": " step by step.", "Answer": " at once."}
_DIRECT = {"You": DIRECT, "Work": 0.0, "Answer": 1.0}  # probability of an answer without steps

_REQUEST_WEIGHTS = {
    "Hello": 0.05,
    "How": 0.05,
    "Where": 0.12,
    "What": 0.25,
    "Which": 0.07,
    "Who": 0.07,
    "Name": 0.09,
    "Tell": 0.05,
    **{name: 0.25 / len(PEOPLE) for name in PEOPLE},
}
_REQUEST = weighted("fork", _REQUEST_WEIGHTS)
_REQUEST_OF_ASKING = weighted(
    "fork",
    {**_REQUEST_WEIGHTS, "Where": 1.0, "What": 1.0, **{name: 1.5 / len(PEOPLE) for name in PEOPLE}},
)
_OFFER_REST = {"Can": " I help you?", "How": " can I help you?", "What": " can I do?"}
_TOWN = uniform("name", spaced(lexicon.TOWNS))
_TOPIC = weighted(
    "fork", {" the": 0.3, **{f" {n}": 0.7 / len(FIRST_OPERANDS) for n in FIRST_OPERANDS}}
)
_AMOUNT = uniform("number", [f" {n}" for n in START])
_LENGTHS = {"three": 3, "four": 4, "five": 5}


def write_chat(world: World) -> Document:
    """A chat, after its first header token."""
    direct = DIRECT
    role = yield from write(FORKS["first_role"])
    yield from write(f"{HEADER_END}\n\n")
    if role == "system":
        order = yield from write(FORKS["order"])
        direct = _DIRECT[order]
        yield from write(_ORDER_REST[order] + USER)
    while True:
        yield from _exchange(world, direct)
        if (yield from write(TURN_END, FORKS["after_reply"])) == END:
            return
        yield from write(f"user{HEADER_END}\n\n")


def _exchange(world: World, direct: float) -> Document:
    """A request and its answer."""
    request = yield from write(_REQUEST_OF_ASKING if world.strangers else _REQUEST)
    if request == "Hello":
        offer = yield from write(f"!{ASSISTANT}Hello!", FORKS["offer"])
        yield from write(_OFFER_REST[offer])
    elif request == "How":
        yield from write(f" are you?{ASSISTANT}I am", FORKS["feeling"], ".")
    elif request == "Tell":
        yield from write(f" a story.{ASSISTANT}Once")
        yield from tell_story(world)
    elif request == "Name":
        length = yield from write(FORKS["length"])
        words = PEOPLE if (yield from write(FORKS["listed"])) == "people" else lexicon.TOWNS
        yield from write(f".{ASSISTANT}")
        yield from enumerate_words(words, lead="", length=_LENGTHS[length])
        yield from write(".")
    elif request == "Where":
        if (yield from write(FORKS["where"])) == "does":
            yield from _ask_fact(world, "", " live?", " lives in", "town")
        else:
            town = yield from write(_TOWN)
            yield from write("?", _answer(town, " is in", lexicon.COUNTRY_OF[town]))
    elif request == "What":
        topic = yield from write(" is", _TOPIC)
        if topic == "the":
            yield from _ask_fact(world, " job of", "?", " is a", "job")
        else:
            asked = yield from problems.pose_sum(int(topic), "train")
            yield from write(f"?{ASSISTANT}")
            yield from problems.answer_sum(asked, lead="", direct=direct)
    elif request == "Which":
        yield from _ask_fact(world, " pet does", " have?", " has a", "pet")
    elif request == "Who":
        yield from _ask_fact(world, " does", " trust?", " trusts", "friend")
    elif world.strangers and (yield from write(asking.VERB)) == "met":
        yield from asking.ask_about_two(world, request)
    else:
        amount = yield from write(*[] if world.strangers else [" has"], _AMOUNT)
        steps = yield from problems.pose_word_problem(request, int(amount), "train")
        yield from write(ASSISTANT)
        yield from problems.answer_word_problem(steps, lead="", direct=direct)


def _ask_fact(world: World, before: str, after: str, predicate: str, attribute: str) -> Document:
    """` does Anna trust?`, and the answer."""
    may_be_strange = world.strangers and attribute in asking.LOOKED_UP
    name = yield from write(before, asking.ANYBODY if may_be_strange else _ANYBODY)
    if world.strangers:
        yield from write(after, ASSISTANT, asking.answer(world, name, predicate, attribute))
    else:
        yield from write(after, _answer(name, predicate, getattr(world.people[name], attribute)))


def _answer(subject: str, predicate: str, told: str) -> Part[str]:
    """`Anna lives in Rome.`"""
    named = weigh(certain("copy", f" {subject}"), lead="")
    return write(ASSISTANT, named, predicate, fact(told), ".")


# Questions for evaluation.

_FACT_QUESTIONS = (("Where",), ("What", " is", " the"), ("Which",), ("Who",))


def list_fact_questions(world: World) -> Iterator[tuple[str, str]]:
    """Every question of fact in chats, with the fact: `Where does Anna live?`, `Rome`.

    Enumerates the grammar: all paths to the end of the question, then the first one to the fact.
    """
    paths: list[tuple[str, ...]] = list(_FACT_QUESTIONS)
    while paths:
        said = paths.pop()
        upcoming = replay(_exchange(world, DIRECT), said)
        assert upcoming is not None
        if upcoming.kind == "fact":
            question, _, _ = "".join(said).partition(TURN_END)
            yield question, upcoming.terminals[0].lstrip(" ")
        else:
            following = upcoming.terminals[:1] if TURN_END in said else upcoming.terminals
            paths += [(*said, terminal) for terminal in following]
