"""Profiles, lists, stories, diaries and dialogues.

Every function writes a part of a document, shown in its docstring. Parts of random length write the
end token themselves.
"""

from collections.abc import Sequence
from functools import cache

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.facts import Person, World
from entropix_jax.lab.world.grammar import (
    Choice,
    Document,
    Part,
    certain,
    choose,
    say,
    state,
    uniform,
    weigh,
    weighted,
)
from entropix_jax.lab.world.lexicon import END, spaced

ANYBODY = uniform("name", spaced(lexicon.PEOPLE))


@cache
def anybody_but(name: str) -> Choice:
    """Everybody else, equally likely."""
    return uniform("name", spaced(other for other in lexicon.PEOPLE if other != name))


# Profiles.

_VERBS = ("lives", "is", "has", "trusts")
_TOWN_END = weighted("fork", {".": 0.7, ",": 0.3})


def write_profile(world: World, name: str, verb: str) -> Document:
    """Distinct facts about a person, after `Anna lives`, ` is`, ` trusts` or ` has a`."""
    person = world.people[name]
    left = [other for other in _VERBS if other != verb]
    if verb == "is":
        yield from say(" a")
    yield from _complete_fact(person, verb)
    while left:
        if len(left) < 3:
            if (yield weighted("fork", {END: 0.3, f" {name}": 0.7})) == END:
                return
        else:
            yield from say(f" {name}")
        verb = yield from choose(uniform("fork", spaced(left)))
        left.remove(verb)
        if verb in ("is", "has"):
            yield from say(" a")
        yield from _complete_fact(person, verb)
    yield certain("fixed", END)


def _complete_fact(person: Person, verb: str) -> Document:
    """` Rome.` after `Anna lives in`, ` baker.` after `Anna is a`, and so on."""
    if verb == "lives":
        yield from say(" in")
        yield from state("fact", f" {person.town}")
        if (yield _TOWN_END) == ".":
            return
        yield from say(" a town in")
        yield from state("fact", f" {lexicon.COUNTRY_OF[person.town]}")
    else:
        facts = {"is": person.job, "has": person.pet, "trusts": person.friend}
        yield from state("fact", f" {facts[verb]}")
    yield from say(".")


# Lists.

LISTS = {
    "Guests": lexicon.PEOPLE,
    "Winners": lexicon.PEOPLE,
    "Players": lexicon.PEOPLE,
    "Singers": lexicon.PEOPLE,
    "Towns": lexicon.TOWNS,
    "Shopping": lexicon.GOODS,
}
_SHORTEST, _LONGEST = 4, 10
_JOINT = weighted("fork", {",": 0.8, " and": 0.2})
_LIST_END = weighted("fork", {END: 0.6, " The": 0.4})


def write_list(words: Sequence[str]) -> Document:
    """`: Anna, Bob, Carl and Dora.` after its title, and possibly a remark."""
    yield from say(":")
    listed = yield from enumerate_words(words)
    yield from say(".")
    if (yield _LIST_END) == " The":
        yield from say(f" first is {listed[0]} and the last is {listed[-1]}.")
        yield certain("fixed", END)


def enumerate_words(
    words: Sequence[str], *, lead: str = " ", length: int | None = None
) -> Part[list[str]]:
    """` Anna, Bob and Carl`: distinct, equally likely words; returns them.

    Without `length` the length is random. `lead` precedes the first word.
    """
    listed: list[str] = []
    last = False
    while True:
        choice = uniform("list", spaced(word for word in words if word not in listed))
        listed.append((yield from weigh(choice, lead=lead)))
        if last:
            return listed
        last = (yield _joint(len(listed), length)) == " and"
        lead = " "


def _joint(listed: int, length: int | None) -> Choice:
    """`,` or, before the last word, ` and`."""
    shortest, longest = (_SHORTEST, _LONGEST) if length is None else (length, length)
    if listed < shortest - 1:
        return certain("fixed", ",")
    return _JOINT if listed < longest - 1 else certain("fixed", " and")


# Stories.

_STORY_START = weighted("fork", {" upon": 0.6, " on": 0.4})
_DAY = uniform("fork", spaced(lexicon.DAYS))
_COMPANY = weighted("fork", {".": 0.5, " with": 0.5})
_EVENT = weighted("fork", {" met": 0.45, " found": 0.35, " danced": 0.2})
_MOOD = weighted("fork", {" happy": 0.4, " hungry": 0.3, " sad": 0.2, " tired": 0.1})
_DEEDS = {
    "happy": weighted("fork", {" sang": 0.6, " danced": 0.4}),
    "hungry": weighted("fork", {" ate": 1.0}),
    "sad": weighted("fork", {" wept": 0.8, " slept": 0.2}),
    "tired": weighted("fork", {" slept": 0.9, " wept": 0.1}),
}
_FOOD = weighted("fork", {" bread": 0.5, " soup": 0.3, " cheese": 0.2})
_USE = weighted("fork", {" kept": 0.3, " sold": 0.2, " gave": 0.5})
_NEXT = weighted("fork", {" Then": 0.5, " In": 0.5})


def tell_story(world: World) -> Document:
    """` upon a time Anna lived in Rome. ... The end.` after `Once`."""
    if (yield _STORY_START) == " upon":
        yield from say(" a time")
        hero = yield from weigh(ANYBODY, restate=" Once upon a time")
        yield from say(" lived in")
        yield from state("fact", f" {world.people[hero].town}")
        yield from say(". One")
        day = yield from choose(_DAY)
        yield from say(f" {hero}")
    else:
        day = yield from choose(_DAY)
        hero = yield from weigh(ANYBODY, restate=f" Once on {day}")
    yield from say(" went to the")
    place = yield from weigh(world.visits[day], restate=f" {hero} went to the")
    if (yield _COMPANY) == " with":
        yield from weigh(world.sociable[hero], restate=f" {hero} went with")
        yield from say(".")
    while True:
        yield from _tell_event(world, hero, place)
        if (yield from weigh(_NEXT, restate=f" {hero} was in the {place}.")) == "In":
            yield from say(f" the evening {hero} went home to")
            yield from state("fact", f" {world.people[hero].town}")
            yield from say(". The end.")
            return
        yield from say(f" {hero} went to the")
        place = yield from choose(_elsewhere(place))
        yield from say(".")


@cache
def _elsewhere(place: str) -> Choice:
    return uniform("name", spaced(other for other in lexicon.PLACES if other != place))


def _tell_event(world: World, hero: str, place: str) -> Document:
    """` There Anna met Bob. Bob was sad and wept.`, and the like."""
    yield from say(f" There {hero}")
    event = yield from choose(_EVENT)
    if event == "met":
        other = yield from weigh(world.friendly[hero], restate=f" {hero} met")
        yield from say(f". {other} was")
        mood = yield from choose(_MOOD)
        yield from say(" and")
        if (yield from choose(_DEEDS[mood])) == "ate":
            yield from choose(_FOOD)
    elif event == "danced":
        yield from say(" with")
        yield from weigh(world.sociable[hero], restate=f" {hero} danced with")
    else:
        yield from say(" a")
        thing = yield from weigh(world.finds[place], restate=f" {hero} found a")
        yield from say(f". {hero}")
        use = yield from choose(_USE)
        yield from say(f" the {thing}")
        if use == "gave":
            yield from say(" to")
            yield from weigh(world.friendly[hero], restate=f" {hero} gave the {thing} to")
    yield from say(".")


# Diaries.

_MEETING = weighted(
    "fork", {" called": 0.3, " visited": 0.25, " thanked": 0.2, " danced": 0.15, " sat": 0.1}
)
_PREPOSITIONS = {"danced": " with", "sat": " beside"}
_DIARY_GOES_ON = weighted("fork", {" On": 0.8, END: 0.2})


def write_diary(world: World) -> Document:
    """` Monday Anna called Bob. On Tuesday Carl danced with Dora.` after `On`."""
    day = yield from choose(_DAY)
    while True:
        name = yield from weigh(ANYBODY, restate=f" On {day}")
        meeting = yield from choose(_MEETING)
        if preposition := _PREPOSITIONS.get(meeting, ""):
            yield from say(preposition)
        company = world.sociable if preposition else world.friendly
        yield from weigh(company[name], restate=f" {name} {meeting}{preposition}")
        yield from say(".")
        if (yield _DIARY_GOES_ON) == END:
            return
        day = lexicon.DAYS[(lexicon.DAYS.index(day) + 1) % len(lexicon.DAYS)]
        yield from say(f" {day}")


# Dialogues.

_REMARK = weighted(
    "fork", {" Where": 0.2, " What": 0.15, " Which": 0.15, " Who": 0.15, " Goodbye": 0.35}
)
_REPLY = certain("fixed", " I")


def write_dialogue(world: World, name: str) -> Document:
    """` Hello, Bob.` and so on, line by line, after `Anna:`."""
    yield from say(" Hello,")
    other = yield from weigh(anybody_but(name), restate=" Hello,")
    yield from say(f".\n{other}: Hello, {name}.")
    speakers = {name: other, other: name}
    while True:
        yield from say("\n")
        asking = yield uniform("fork", tuple(speakers))
        asked = speakers[asking]
        yield from say(":")
        remark = yield from choose(_REMARK)
        if remark == "Goodbye":
            yield from say(f", {asked}.\n{asked}: Goodbye, {asking}.")
            yield certain("fixed", END)
            return
        yield from _ask_and_reply(world.people[asked], remark)


def _ask_and_reply(person: Person, question: str) -> Document:
    """` do you live?\\nBob: I live in Rome.`, and the like."""
    rest, reply, fact = {
        "Where": (" do you live?", " live in", person.town),
        "What": (" is your job?", " am a", person.job),
        "Which": (" pet do you have?", " have a", person.pet),
        "Who": (" do you trust?", " trust", person.friend),
    }[question]
    yield from say(f"{rest}\n{person.name}:")
    yield from weigh(_REPLY)
    yield from say(reply)
    yield from state("fact", f" {fact}")
    yield from say(".")
