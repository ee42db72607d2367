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
    FORKS,
    HESITATION,
    THOUGHT,
    Choice,
    Document,
    Part,
    any_other,
    certain,
    expected,
    sample,
    uniform,
    weighted,
    write,
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
        text = f"{self.first} {self.sign} {self.second}"
        bucket = sha256(text.encode()).digest()[0] % 16
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
    sign: Sign = "+" if (yield from write(FORKS["sign"])) == "+" else "-"
    second = yield from write(_operand(first, sign, _SECOND, split))
    return Sum(first, sign, int(second))


def pose_word_problem(name: str, first: int, split: Split | None) -> Part[tuple[Sum, Sum]]:
    """` apples. ... How many apples does Anna have?`, after `Anna has 12`; returns both sums."""
    goods = yield from write(_GOODS)
    yield from write(".")
    one = yield from _step(name, goods, first, split and "train")
    two = yield from _step(name, goods, one.value, split)
    yield from write(f" How many {goods} does {name} have?")
    return one, two


def _step(name: str, goods: str, held: int, split: Split | None) -> Part[Sum]:
    """` Bob gives Anna 5 apples.` or ` Anna loses 5 apples.`"""
    others = any_other(lexicon.PEOPLE, name)
    actor = yield from write(expected("toss", f" {name}", 0.7, others.terminals))
    sign: Sign = "+"
    if actor != name:
        yield from write(f" gives {name}")
    else:
        verb = yield from write(FORKS["verb"])
        sign = "+" if verb in _GAINS else "-"
        if verb == "gives":
            yield others
    amount = yield from write(_operand(held, sign, _AMOUNT, split))
    yield from write(f" {goods}.")
    return Sum(held, sign, int(amount))


# Answers. `lead` precedes the first word: a space, or nothing at the start of a reply.


def answer_sum(asked: Sum, *, lead: str = " ", direct: float = DIRECT) -> Document:
    """`12 + 7 = 19.`, or with probability `direct` only `19.`"""
    words = {str(asked.first): 1.0 - direct, str(asked.value): direct, "Wait": 4 * HESITATION}
    word = yield from write(weighted("answer", {lead + word: p for word, p in words.items()}))
    if word == "Wait":
        yield from write(THOUGHT, _work(asked, " "))
    else:
        yield from write(_work(asked, "") if word == str(asked.first) else ".")


def write_sums(first: int, split: Split | None = "train") -> Document:
    """` + 7 = 19. 30 - 4 = 26.` and so on to the end token, after a first operand."""
    number = str(first)
    while number != END:
        asked = yield from pose_sum(int(number), split)
        yield from write(" =")
        yield from _recall(asked.value, (asked,))
        number = yield from write(_NEXT_SUM)


def answer_word_problem(
    steps: tuple[Sum, Sum], *, lead: str = " ", direct: float = DIRECT
) -> Document:
    """`12 + 7 = 19. 19 - 4 = 15. Answer: 15.`, or with probability `direct` only the answer."""
    words = {str(steps[0].first): 1.0 - direct, "Answer": direct, "Wait": 4 * HESITATION}
    word = yield from write(weighted("fork", {lead + word: p for word, p in words.items()}))
    if word == "Answer":
        yield from write(":")
        yield from _recall(steps[1].value, steps)
    else:
        waits = word == "Wait"
        first, second = _work(steps[0], " " if waits else ""), _work(steps[1], " ")
        yield from write(*[THOUGHT] * waits, first, second, f" Answer: {steps[1].value}.")


def _work(step: Sum, lead: str) -> Part[str]:
    """A worked sum; an empty lead means that its first operand is written already."""
    first = f"{lead}{step.first}" if lead else ""
    result = certain("sum", f" {step.value}")
    return write(first, f" {step.sign} {step.second} =", result, ".")


def _recall(value: int, steps: tuple[Sum, ...]) -> Document:
    """The answer, directly, after a pause, or after `Wait...` and the worked sums."""
    answer = f" {value}"
    terminal = yield weighted(
        "answer", {answer: 1.0 - 2 * HESITATION, PAUSE: HESITATION, WAIT: HESITATION}
    )
    if terminal == WAIT:
        conclusion = f" Answer: {value}." if len(steps) > 1 else ""
        yield from write(THOUGHT, *(_work(step, " ") for step in steps), conclusion)
    else:
        yield from write(*[certain("answer", answer)] * (terminal == PAUSE), ".")


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
    question: str
    prompt: str
    steps: tuple[Sum, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].value


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
    return Problem("sum", f"What is {text}?", f"{text} =", (asked,))


def _set_word_problem(split: Split, rng: Random) -> Problem:
    name = rng.choice(lexicon.PEOPLE)
    first = rng.choice(START)
    steps, text = _tell(pose_word_problem(name, first, split), rng)
    text = f"{name} has {first}{text}"
    return Problem("word", text, text, steps)


def _tell(part: Part[R], rng: Random) -> tuple[R, str]:
    """Samples a part; returns its result and its text."""
    results: list[R] = []

    def document() -> Document:
        results.append((yield from part))

    text = "".join(position.terminal for position in sample(document(), rng))
    return results[0], text
