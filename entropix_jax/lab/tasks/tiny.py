"""Tasks in the tiny world, with answers known by construction.

None needs a stop text: a chat's answer ends with the turn, a fork's is its first word, and a
document runs to its end or budget. The other budgets fit the longest right answer and an injected
thought.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from random import Random

from entropix_jax.lab.strength import LEAST
from entropix_jax.lab.tasks.task import Item, Prompt, Split, Task, check_split
from entropix_jax.lab.world import documents, facts, grammar
from entropix_jax.lab.world.futures import Futures
from entropix_jax.lab.world.lexicon import (
    BEGIN,
    END,
    PAUSE,
    PEOPLE,
    PLACES,
    THINGS,
    WAIT,
    split_terminals,
)
from entropix_jax.lab.world.problems import FIRST_OPERANDS, Kind, problems, read_answer

PAUSED = r" \.\.\."
WAITED = r" ?Wait\.\.\."

_HESITATION = re.compile(f"({PAUSED}|{WAITED})")
_MARK = f"{WAIT}..."
_Pieces = tuple[str, ...]
_WORLD = facts.create(facts.WORLD_SEED)  # the one that the tiny model was trained on


def digest(text: str) -> bytes:
    """Returns the hash that orders and divides items."""
    return sha256(text.encode()).digest()


def choose_split(text: str) -> Split:
    """Returns a pseudo-random split, each with probability 1/2."""
    return "test" if digest(text)[0] % 2 else "tuning"


def as_chat(question: str) -> Prompt:
    """Returns a chat with one message."""
    return ({"role": "user", "content": question},)


class _Problems(Task):
    """Sums or word problems. The deciding sum occurs in no training text and in one split only."""

    chat = True

    def __init__(
        self, name: str, kind: Kind, sizes: Mapping[Split, int], max_new_tokens: int
    ) -> None:
        self.name = name
        self.max_new_tokens = max_new_tokens
        self._kind = kind
        self._sizes = sizes

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        posed = problems(self._kind, split, self._sizes[split], seed=0)
        for number, problem in enumerate(posed, 1):
            yield Item(
                f"{self.name}-{split}-{number}", as_chat(problem.question), str(problem.answer)
            )

    def extract(self, item: Item, text: str) -> str | None:
        answer = read_answer(self._kind, text)
        return None if answer is None else str(answer)


# `Anna lives in Rome.`, hesitations allowed: the subject and the fact.
_STATEMENT = re.compile(r"(\w+) (?:[a-z]+ |\.\.\. )+(\w+)(?:,|\.(?!\.))")


def read_fact(item: Item, text: str) -> str | None:
    """Returns the fact in the first statement, if its subject is in the question."""
    assert not isinstance(item.prompt, str)
    statement = _STATEMENT.search(text)
    subjects = re.findall(r"\w+", item.prompt[-1]["content"])
    return statement[2] if statement and statement[1] in subjects else None


class _Facts(Task):
    """Every question of fact in the world's chats.

    The training text has all facts, so the splits divide the questions, by a stable hash.
    """

    name = "facts"
    chat = True
    max_new_tokens = 24

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        asked = sorted(documents.list_fact_questions(_WORLD), key=lambda pair: digest(pair[0]))
        kept = (pair for pair in asked if choose_split(pair[0]) == split)
        for number, (question, fact) in enumerate(kept, 1):
            yield Item(f"facts-{split}-{number}", as_chat(question), fact)

    def extract(self, item: Item, text: str) -> str | None:
        return read_fact(item, text)


class _Beginnings(Task):
    """Distinct beginnings of separate documents. A stable hash of its text chooses the split."""

    chat = False
    size: int  # of each split

    @abstractmethod
    def draw(self, number: int, rng: Random) -> tuple[str, dict[str, float] | None]:
        """Draws a beginning for the item after `number` others, and the true probabilities of its
        answers, if known. An empty one is left out."""

    def items(self, split: Split, *, chat: bool) -> Iterator[Item]:
        check_split(split)
        rng = Random(f"{self.name} 0")
        found: set[str] = set()
        while len(found) < self.size:
            prompt, truth = self.draw(len(found), rng)
            if prompt and prompt not in found and choose_split(prompt) == split:
                found.add(prompt)
                yield Item(f"{self.name}-{split}-{len(found)}", prompt, "", truth)


class _Forks(_Beginnings):
    """Stories, diaries and profiles, cut where several continuations are possible."""

    name = "forks"
    max_new_tokens = 12
    size = 400

    _FUTURES = range(2, 7)

    def draw(self, number: int, rng: Random) -> tuple[str, dict[str, float] | None]:
        return rng.choice(list(self._forks(rng)))

    def _forks(self, rng: Random) -> Iterator[tuple[str, dict[str, float]]]:
        """The forks of a new document, at least one: the text before and the possible futures."""
        text = ""
        for position in grammar.sample(_write_forked(_WORLD), rng):
            futures = _futures(position.choice)
            if len(futures) in self._FUTURES:
                yield text, futures
            text += position.terminal

    def extract(self, item: Item, text: str) -> str | None:
        """The future at the beginning of a completion, hesitations skipped."""
        assert item.truth is not None
        hesitation = rf"(?:{PAUSED}|{WAITED}(?: \w+)*?\.?)*?"
        future = re.match(rf"{hesitation} ?({'|'.join(item.truth)})\b", text)
        return future[1] if future else None

    def score(self, item: Item, answer: str | None) -> float:
        """1 for a possible future."""
        assert item.truth is not None
        return float(answer in item.truth)


_FIRST_WORD = grammar.weighted(
    "document", {"Once": 0.5, "On": 0.25, **{name: 0.25 / len(PEOPLE) for name in PEOPLE}}
)
_FIRST_VERB = grammar.uniform("document", (" lives", " is", " has", " trusts"))


def _write_forked(world: facts.World) -> grammar.Document:
    """A story, a diary or a profile, in proportions that vary the forks."""
    first = yield from grammar.write(_FIRST_WORD)
    if first == "Once":
        yield from documents.tell_story(world)
    elif first == "On":
        yield from documents.write_diary(world)
    else:
        verb = yield from grammar.write(_FIRST_VERB)
        yield from grammar.write(" a" if verb == "has" else "")
        yield from documents.write_profile(world, first, verb)


def _futures(choice: grammar.Choice) -> dict[str, float]:
    """Probabilities of the words at a fork, hesitations excluded; empty if it is not a fork of
    words."""
    chances = zip(choice.terminals, choice.probabilities, strict=True)
    futures = {word.lstrip(" "): p for word, p in chances if word not in (PAUSE, WAIT)}
    if choice.kind != "fork" or not all(word.isalpha() for word in futures):
        return {}
    total = math.fsum(futures.values())
    return {word: p / total for word, p in futures.items()}


def _write_story(world: facts.World) -> grammar.Document:
    """A story from its first word."""
    yield from grammar.write("Once")
    yield from documents.tell_story(world)


def _first_event(text: str) -> str | None:
    """The outcome of a story: of its first event the reaction of the person met, the thing found,
    or `with` for a dance. None before that."""
    _, _, event = text.partition(" There ")
    found = _EVENT.search(event)
    return found and (found[1] or found[2] or found[3])


_EVENT = re.compile(rf" and (\w+)| a (?:\.\.\. )?({'|'.join(THINGS)})\b| danced (with)")


def _story_so_far(said: _Pieces) -> _Pieces:
    """The terminals that determine the outcome distribution of a story: not its names, and of what
    precedes the event only the place."""
    if " There" in said:
        there = said.index(" There")
        places = (word for word in reversed(said[:there]) if word.lstrip(" ") in PLACES)
        said = (next(places, ""), *said[there:])
    return tuple("" if word.lstrip(" ") in PEOPLE else word for word in said)


class _Stories(_Beginnings):
    """Stories up to their first event, cut where several continuations are likely.

    The prompt leaves the outcome open: the day decides the distribution of places, the place that
    of things, the mood that of reactions. `true_strength` has the fork strengths of the grammar.
    """

    name = "stories"
    stop = (" Then", " In")  # each begins the sentence after the event
    max_new_tokens = 40
    size = 300

    def __init__(self) -> None:
        self._futures = Futures(lambda: _write_story(_WORLD), _first_event, _story_so_far)

    def draw(self, number: int, rng: Random) -> tuple[str, None]:
        """The beginning of a new story, after its hero; empty if it hesitates."""
        cuts, text = [], ""
        for position in grammar.sample(_write_story(_WORLD), rng):
            if _first_event(text) is not None:
                break
            likely = sum(p >= LEAST for p in position.choice.probabilities)
            if likely > 1 and any(word in text for word in PEOPLE):
                cuts.append(text)
            text += position.terminal
        prompt = rng.choice(cuts)
        return "" if _HESITATION.search(prompt) else prompt, None

    def extract(self, item: Item, text: str) -> str | None:
        return _first_event(f"{item.prompt}{text}")

    def score(self, item: Item, answer: str | None) -> float:
        """1 for a story that reaches its first event."""
        return float(answer is not None)

    def true_strength(self, item: Item, text: str) -> float | None:
        """The true fork strength of the word after a text that continues the prompt. None for a
        text that the world cannot produce or that has its outcome."""
        said = split_terminals(f"{item.prompt}{text}")
        try:
            return None if self.extract(item, text) else self._futures.strength(said)
        except grammar.ImpossibleText:
            return None


class _Documents(_Beginnings):
    """Open writing: beginnings of documents, the same number of each kind except chats and word
    problems.

    Every text that the world's grammar can produce is right, cut anywhere. No beginning could be a
    whole document, so an empty continuation is wrong.
    """

    name = "documents"
    max_new_tokens = 48
    votes = False
    size = 300

    _KINDS = ("list", "diary", "story", "dialogue", "profile", "sums")  # in turn
    _LONGEST = 12  # terminals of a beginning

    def draw(self, number: int, rng: Random) -> tuple[str, None]:
        """The beginning of the next document of a kind; empty if it hesitates or could end."""
        kind = self._KINDS[number % len(self._KINDS)]
        count = rng.randint(1, self._LONGEST)
        while True:
            positions = list(
                islice(grammar.sample(documents.document(_WORLD), rng), 1, self._LONGEST + 2)
            )
            said = [position.terminal for position in positions]
            if _classify_document(said) == kind:
                break
        hesitates = not {PAUSE, WAIT}.isdisjoint(said[:count])
        if hesitates or len(said) <= count or END in positions[count].choice.terminals:
            return "", None
        return "".join(said[:count]), None

    def extract(self, item: Item, text: str) -> str | None:
        """Removes the hesitations from a continuation.

        With `Wait...` goes its restatement: the words that the world itself restates there or, if
        the world would not hesitate, any repetition of the words just before; either may be cut by
        the text's end. Of several readings, the one that stays possible the longest is chosen, then
        the one that keeps the most. `Wait...` stays only where the world needs it: before worked
        sums.
        """
        before = split_terminals(f"{BEGIN}{item.prompt}")
        pieces: list[str] = []
        for index, stretch in enumerate(_HESITATION.split(text)):
            if index % 2 == 0:
                pieces += split_terminals(stretch)
            elif stretch != PAUSE and pieces[-1:] != [_MARK]:
                pieces.append(_MARK)
        *_, said = _read(before, tuple(pieces))
        return "".join(said[len(before) :]) or None

    def score(self, item: Item, answer: str | None) -> float:
        """The share of the words before the first impossible one; 0 for no text.

        A last word that is cut, as by the budget, counts as possible.
        """
        before, pieces = split_terminals(f"{BEGIN}{item.prompt}"), split_terminals(answer or "")
        possible, upcoming = _follow((*before, *pieces))
        possible -= len(before)
        if pieces and _cut(upcoming, "".join(pieces[possible:])):
            return 1.0
        return possible / len(pieces) if pieces else 0.0


def _classify_document(said: Sequence[str]) -> str:
    """The kind of a document, from its first three terminals."""
    first, second, third, *_ = said
    if first in PEOPLE:
        if second == ":":
            return "dialogue"
        return "problem" if second == " has" and third != " a" else "profile"
    if first in documents.LISTS:
        return "list"
    return (
        "sums" if first in FIRST_OPERANDS else {"On": "diary", "Once": "story"}.get(first, "chat")
    )


# Judges whether a text could have been written in the world, hesitations aside. A sampler may
# inject `Wait...` anywhere, which says nothing about the model, so it is removed before a text is
# judged. So are hesitations of the model itself, as the two look the same.


def _read(said: _Pieces, pieces: _Pieces) -> tuple[int, int, int, _Pieces]:
    """The best reading of `pieces` after `said`: its rank and its terminals.

    Readings are ranked, lower first, by the pieces after the first impossible one, the hesitations
    kept, and the negative length.
    """
    mark = pieces.index(_MARK) if _MARK in pieces else len(pieces)
    start = len(said)
    said += pieces[:mark]
    possible, upcoming = _follow(said)
    rest = pieces[mark + 1 :]
    if possible < len(said) or mark == len(pieces):
        whole = (*said, *(piece for piece in rest if piece != _MARK))
        return len(pieces) - (possible - start), whole.count(WAIT), -len(whole), whole
    ways = [_read(said, rest)]
    if WAIT in upcoming.terminals:
        hesitating = (*said, WAIT, "...")
        lengths = list(_restated(upcoming, hesitating, rest))
        if len(_words(upcoming)) == 1:
            ways.append(_read(hesitating, rest))
    else:
        lengths = list(_repeated(said, rest))
    ways += [_read(said, rest[length:]) for length in lengths if length > 0]
    return min(ways)


def _restated(fork: grammar.Choice, hesitating: _Pieces, rest: _Pieces) -> Iterator[int]:
    """Lengths of the world's own restatement: the numbers of pieces after which it is back at the
    fork, or the end of the text."""
    words = _words(fork)
    again = False
    for length, piece in enumerate(("", *rest)):
        if piece not in ("", _MARK):
            hesitating += (piece,)
        possible, upcoming = _follow(hesitating)
        if possible < len(hesitating):
            if not again and _cut(upcoming, "".join(rest[length - 1 :])):
                yield len(rest)
            return
        if _words(upcoming) == words:
            again = True
            yield length
            if len(words) > 1:
                return
    if not again:
        yield len(rest)


def _repeated(said: _Pieces, rest: _Pieces) -> Iterator[int]:
    """Lengths of repetitions of the words just said, possibly cut by the end of the text."""
    words = [(index, piece) for index, piece in enumerate(rest, 1) if piece != _MARK]
    text = "".join(word for _, word in words).lstrip(" ")
    for count in range(1, len(said)):
        again = "".join(said[-count:]).lstrip(" ")
        if count <= len(words) and "".join(w for _, w in words[:count]).lstrip(" ") == again:
            yield words[count - 1][0]
        elif text and again.startswith(text):
            yield len(rest)


def _cut(upcoming: grammar.Choice, text: str) -> bool:
    """Whether a text is the beginning of a possible terminal or of a hesitation."""
    return any(terminal.startswith(text) for terminal in (*upcoming.terminals, PAUSE, _MARK))


def _words(choice: grammar.Choice) -> list[str]:
    """The possible terminals other than hesitations."""
    return [terminal for terminal in choice.terminals if terminal not in (PAUSE, WAIT)]


@lru_cache(maxsize=1024)
def _follow(terminals: _Pieces) -> tuple[int, grammar.Choice]:
    """The number of terminals before the first impossible one in a stream of documents, and what
    may follow them. Sums of all splits are possible."""
    try:
        upcoming = grammar.replay(documents.stream(_WORLD, split=None), terminals)
    except grammar.ImpossibleText as impossible:
        return _follow(terminals[: impossible.index])
    assert upcoming is not None  # streams are endless
    return len(terminals), upcoming


SUMS = _Problems("sums", "sum", {"tuning": 184, "test": 191}, 24)  # all that exist
WORD_PROBLEMS = _Problems("word-problems", "word", {"tuning": 500, "test": 500}, 48)
FACTS = _Facts()
FORKS = _Forks()
STORIES = _Stories()
DOCUMENTS = _Documents()
