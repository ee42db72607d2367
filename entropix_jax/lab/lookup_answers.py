"""Inserts a lookup's result before each token of greedy answers, and records the new answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.lab.outcomes import Answer, Continuation
from entropix_jax.lab.tasks.reading import first_sentence
from entropix_jax.lab.trials import Question
from entropix_jax.sampler.wrong import MEASURES


@dataclass(frozen=True)
class Case:
    """A question of the study.

    Attributes:
        split: "tuning" for the answers that P(wrong) is fitted to, else "test".
        ambiguous: whether the question has several readings. Its answer is not looked up.
        inserted: the tokens of a lookup, empty without a result.
    """

    question: Question
    split: str
    ambiguous: bool
    inserted: Sequence[int]

    @property
    def id(self) -> str:
        """The id of the row's result."""
        return f"{self.question.task.name}/{self.question.item.id}"


@dataclass(frozen=True)
class Intents:
    """The sampled answers that intents are read from: how many, their sampler and seed."""

    number: int
    sampler: CalibratedSampler
    seed: int


@dataclass(frozen=True)
class _Sample(Continuation):
    """The tag of a sampled answer."""


@dataclass(eq=False)
class LookupAnswer(Answer):
    """A greedy answer, the answers with a lookup before each of its tokens, and sampled ones.

    Attributes:
        lookups: of each token, the score, the lowest probability of a greedy token, and the text
            without the inserted one.
        samples: first sentences of sampled answers.
        error: of the first continuation that failed.
    """

    case: Case
    intents: Intents
    lookups: dict[int, tuple[float, float, str]] = field(default_factory=dict)
    samples: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def _places(self) -> range:
        """The tokens that a lookup may come before."""
        looks_up = self.case.split == "test" and not self.case.ambiguous and self.case.inserted
        return range(len(self.row.tokens) if looks_up and self.row is not None else 0)

    @property
    def _numbers(self) -> range:
        """The sampled answers."""
        return range(self.intents.number if self.case.split == "test" else 0)

    def begin(self, row: Row) -> None:
        self.missing = len(self._places) + len(self._numbers)

    def continuations(self, greedy: CalibratedSampler) -> Iterator[Request]:
        if not self.missing:
            return
        forced = self.case.inserted
        for index in reversed(self._places):
            given = greedy, Continuation(self, index), f"lookup {index}"
            yield self.continue_from(index, forced, *given, extra=len(forced))
        for number in self._numbers:
            sampling = self.intents.sampler, _Sample(self, number), f"sample {number}"
            yield self.continue_from(0, (), *sampling, self.intents.seed)

    def add(self, tag: Continuation, row: Row) -> None:
        if row.error is not None:
            self.error = self.error or row.error
        elif isinstance(tag, _Sample):
            self.samples[tag.index] = first_sentence(row.text)
        else:
            end = tag.index + len(self.case.inserted)
            own = [token.max_prob for token in (*row.tokens[: tag.index], *row.tokens[end:])]
            text = _without(row, tag.index, end)
            self.lookups[tag.index] = self.read(text)[1], min(own, default=1.0), text

    def result(self) -> dict[str, Any]:
        """The greedy answer, the measures of its tokens as columns, and the changed answers."""
        assert self.row is not None
        found = {
            "task": self.question.task.name,
            "split": self.case.split,
            "ambiguous": self.case.ambiguous,
        }
        if error := self.row.error or self.error:
            return {**found, "error": error}
        tokens = self.row.tokens
        return {
            **found,
            "answer": self.row.text,
            "score": self.read(self.row.text)[1],
            "texts": [token.text for token in tokens],
            **{name: [getattr(token, name) for token in tokens] for name in MEASURES},
            "regime": [token.regime for token in tokens],
            "lookups": [self.lookups[index] for index in self._places],
            "samples": [self.samples[number] for number in self._numbers],
        }


def _without(row: Row, begin: int, end: int) -> str:
    """The row's text without its tokens from `begin` to `end`. White space at an end of their text
    separates the parts."""
    start, stop = (len("".join(token.text for token in row.tokens[:n])) for n in (begin, end))
    inserted = row.text[start:stop]
    between = " " if inserted != inserted.strip() else ""
    return f"{row.text[:start]}{between}{row.text[stop:]}"
