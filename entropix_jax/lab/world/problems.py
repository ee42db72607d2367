"""Sums and two-step word problems, for documents and for evaluation.

A stable hash of its operands and sign puts every sum into one of three splits. A problem belongs to
the split of its last sum; earlier sums are training sums. So the deciding sum of a held-out problem
never occurs in training text, neither as a problem nor as a step.
"""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from random import Random
from typing import Literal, TypeVar

from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.grammar import (
    HESITATION,
    Choice,
    Document,
    Part,
    certain,
    choose,
    expected,
    sample,
    say,
    uniform,
    weighted,
)
from entropix_jax.lab.world.lexicon import END, PAUSE, WAIT, spaced

R = TypeVar("R")
Split = Literal["train", "tuning", "test"]
Sign = Literal["+", "-"]

DIRECT = 0.25  # probability of an answer without steps, if neither was asked for
_FIRST = range(10, 51)  # operands of a single sum
_SECOND = range(1, 51)
START = range(20, 51)  # the first amount of a word problem
_AMOUNT = range(2, 13)  # the change in one step

FIRST_OPERANDS = tuple(str(n) for n in _FIRST)
_NEXT_SUM = weighted("number", {END: 0.2, **{f" {n}": 0.8 / len(_FIRST) for n in _FIRST}})
_GOODS = uniform("name", spaced(lexicon.GOODS))
_SIGN = weighted("fork", {" +": 0.5, " -": 0.5})
_VERB = weighted(
    "fork", {" buys": 0.3, " finds": 0.2, " loses": 0.15, " sells": 0.15, " gives": 0.2}
)
_GAINS = ("buys", "finds")


@dataclass(frozen=True, slots=True)
class Sum:
    """`first sign second`."""

    first: int
    sign: Sign
    second: int

    @property
    def value(self) -> int:
        return self.first + self.second if self.sign == "+" else self.first - self.second

    @property
    def split(self) -> Split:
        """1/16 tuning, 1/16 test, 14/16 train."""
        return _split(self.first, self.sign, self.second)


@cache
def _split(first: int, sign: Sign, second: int) -> Split:
    bucket = sha256(f"{first} {sign} {second}".encode()).digest()[0] % 16
    return "test" if bucket == 0 else "tuning" if bucket == 1 else "train"


class NoSuchProblem(ValueError):
    """No operand puts the sum into the split. Never raised for training text."""


@cache
def _operand(first: int, sign: Sign, allowed: range, split: Split | None) -> Choice:
    """The second operand: uniform over those with a sum of the split, from 0 to 99."""
    sums = (Sum(first, sign, second) for second in allowed)
    operands = [f" {s.second}" for s in sums if split in (None, s.split) and 0 <= s.value <= 99]
    if not operands:
        raise NoSuchProblem(f"no operand puts {first} {sign} ... into the split {split!r}")
    return uniform("number", operands)


def pose_sum(first: int, split: Split | None) -> Part[Sum]:
    """` + 7`, after the first operand."""
    sign: Sign = "+" if (yield from choose(_SIGN)) == "+" else "-"
    second = int((yield from choose(_operand(first, sign, _SECOND, split))))
    return Sum(first, sign, second)


def pose_word_problem(name: str, first: int, split: Split | None) -> Part[tuple[Sum, Sum]]:
    """` apples. ... How many apples does Anna have?`, after `Anna has 12`; returns both sums."""
    goods = yield from choose(_GOODS)
    yield from say(".")
    one = yield from _step(name, goods, first, split and "train")
    two = yield from _step(name, goods, one.value, split)
    yield from say(f" How many {goods} does {name} have?")
    return one, two


@cache
def _others(name: str) -> tuple[str, ...]:
    return spaced(other for other in lexicon.PEOPLE if other != name)


@cache
def _actor(name: str) -> Choice:
    return expected("toss", f" {name}", 0.7, _others(name))


@cache
def _receiver(name: str) -> Choice:
    return uniform("name", _others(name))


def _step(name: str, goods: str, held: int, split: Split | None) -> Part[Sum]:
    """` Bob gives Anna 5 apples.` or ` Anna loses 5 apples.`"""
    actor = yield from choose(_actor(name))
    sign: Sign = "+"
    if actor != name:
        yield from say(f" gives {name}")
    else:
        verb = yield from choose(_VERB)
        sign = "+" if verb in _GAINS else "-"
        if verb == "gives":
            yield from choose(_receiver(name))
    amount = int((yield from choose(_operand(held, sign, _AMOUNT, split))))
    yield from say(f" {goods}.")
    return Sum(held, sign, amount)


# Answers. `lead` precedes the first word: a space, or nothing at the start of a reply.


def answer_sum(asked: Sum, *, lead: str = " ", direct: float = DIRECT) -> Document:
    """`12 + 7 = 19.`, or with probability `direct` only `19.`"""
    opening = weighted(
        "answer",
        {
            f"{lead}{asked.first}": 1.0 - direct,
            f"{lead}{asked.value}": direct,
            f"{lead}Wait": 4 * HESITATION,
        },
    )
    word = yield from choose(opening)
    if word == "Wait":
        yield certain("thought", "...")
        yield from _work(asked, " ")
    elif word == str(asked.first):
        yield from _work(asked, "")
    else:
        yield from say(".")


def write_sums(first: int, split: Split | None = "train") -> Document:
    """` + 7 = 19. 30 - 4 = 26.` and so on to the end token, after a first operand."""
    while True:
        asked = yield from pose_sum(first, split)
        yield from say(" =")
        yield from _recall(asked.value, (asked,))
        number = yield _NEXT_SUM
        if number == END:
            return
        first = int(number)


def answer_word_problem(
    steps: tuple[Sum, Sum], *, lead: str = " ", direct: float = DIRECT
) -> Document:
    """`12 + 7 = 19. 19 - 4 = 15. Answer: 15.`, or with probability `direct` the answer alone."""
    opening = weighted(
        "fork",
        {
            f"{lead}{steps[0].first}": 1.0 - direct,
            f"{lead}Answer": direct,
            f"{lead}Wait": 4 * HESITATION,
        },
    )
    word = yield from choose(opening)
    if word == "Answer":
        yield from say(":")
        yield from _recall(steps[1].value, steps)
        return
    if word == "Wait":
        yield certain("thought", "...")
        yield from _work(steps[0], " ")
    else:
        yield from _work(steps[0], "")
    yield from _work(steps[1], " ")
    yield from _conclude(steps[1].value)


def _work(step: Sum, lead: str) -> Document:
    """A worked sum; an empty lead means that its first operand is written already."""
    if lead:
        yield from say(f"{lead}{step.first}")
    yield from say(f" {step.sign} {step.second} =")
    yield certain("sum", f" {step.value}")
    yield from say(".")


def _conclude(value: int) -> Document:
    yield from say(f" Answer: {value}.")


def _recall(value: int, steps: tuple[Sum, ...]) -> Document:
    """The answer, directly, after a pause, or after `Wait...` and the worked sums."""
    answer = f" {value}"
    terminal = yield weighted(
        "answer", {answer: 1.0 - 2 * HESITATION, PAUSE: HESITATION, WAIT: HESITATION}
    )
    if terminal == answer:
        yield from say(".")
    elif terminal == PAUSE:
        yield certain("answer", answer)
        yield from say(".")
    else:
        yield certain("thought", "...")
        for step in steps:
            yield from _work(step, " ")
        if len(steps) > 1:
            yield from _conclude(value)


# Problems for evaluation.

Kind = Literal["sum", "word"]
_ANSWERS = {"sum": re.compile(r"(\d+)\."), "word": re.compile(r"Answer: (?:\.\.\. )?(\d+)\.")}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its answer.

    Attributes:
        question: for a chat.
        prompt: plain text that the answer continues.
    """

    kind: Kind
    split: Split
    question: str
    prompt: str
    steps: tuple[Sum, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].value

    def read_answer(self, reply: str) -> int | None:
        """See `read_answer`."""
        return read_answer(self.kind, reply)


def read_answer(kind: Kind, reply: str) -> int | None:
    """The answer in a reply to a problem; None if there is none."""
    found = _ANSWERS[kind].search(reply)
    return int(found[1]) if found else None


def problems(kind: Kind, split: Split, count: int, seed: int) -> list[Problem]:
    """`count` distinct problems of a split, the same for a seed."""
    rng = Random(f"{kind} {split} {seed}")
    found: dict[str, Problem] = {}
    for _ in range(100 * count):
        if len(found) == count:
            return list(found.values())
        try:
            problem = _set_sum(split, rng) if kind == "sum" else _set_word_problem(split, rng)
        except NoSuchProblem:
            continue
        found.setdefault(problem.question, problem)
    raise ValueError(f"the split {split!r} has fewer than {count} problems of the kind {kind!r}")


def _set_sum(split: Split, rng: Random) -> Problem:
    first = rng.choice(FIRST_OPERANDS)
    asked, text = _tell(pose_sum(int(first), split), rng)
    text = first + text
    return Problem("sum", split, f"What is {text}?", f"{text} =", (asked,))


def _set_word_problem(split: Split, rng: Random) -> Problem:
    name = rng.choice(lexicon.PEOPLE)
    first = rng.choice(START)
    steps, text = _tell(pose_word_problem(name, first, split), rng)
    text = f"{name} has {first}{text}"
    return Problem("word", split, text, text, steps)


def _tell(part: Part[R], rng: Random) -> tuple[R, str]:
    """Samples a part; returns its result and its text."""
    results: list[R] = []

    def document() -> Document:
        results.append((yield from part))

    text = "".join(position.terminal for position in sample(document(), rng))
    return results[0], text
