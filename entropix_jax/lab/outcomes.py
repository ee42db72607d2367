"""Replaces the tokens of greedy answers, and records the outcomes of the changed answers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import Record, content_hash
from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.lab.strength import LEAST, fork_strength, permuted_strength
from entropix_jax.lab.trials import Question, extract_answer, score_answer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler

ATTENTION = ("attn_entropy_norm", "attn_varentropy", "agreement", "interaction_strength")
MEASURES = ("entropy", "varentropy", *ATTENTION)
# For `measure`: every token that may be an alternative, and each head.
RECORDING = Recording(top=round(1 / LEAST), layers=True, state=True, raw_layers=True)
_HEAD_DECIMALS = 4


@dataclass(frozen=True)
class Sampling:
    """The continuations after each alternative of a token: how many, how they are drawn, and the
    seed of their random numbers."""

    number: int
    sampler: CalibratedSampler
    seed: int


def measure(
    model: LanguageModel,
    engine: Engine,
    questions: Sequence[Question],
    store: Store,
    make: Callable[[Question, Record], Answer],
) -> Iterator[int]:
    """Answers the questions without a stored result, continues the answers from other tokens, and
    stores the tokens. Yields the number of stored results after each answer. A question that cannot
    be answered gets a result without tokens.

    Rows are created when a slot is free for them, so their number is not limited by memory.

    Args:
        make: makes the answer of a question that has no stored result.
    """
    greedy = calibrate_sampler(load_sampler("greedy"), model)
    answering = 0
    ready: deque[Iterator[Request]] = deque()  # continuations that have not begun

    def requests() -> Iterator[Request | None]:
        nonlocal answering
        asked = _requests(engine, questions, store, greedy, make)
        while True:
            if ready:
                if (request := next(ready[0], None)) is None:
                    ready.popleft()
                else:
                    yield request
            elif (request := next(asked, None)) is not None:
                answering += 1
                yield request
            elif answering:
                yield None
            else:
                return

    for event in engine.run(requests()):
        row, tag = event.row, event.row.request.tag
        if row.finish_reason is None:
            continue
        if isinstance(tag, Answer):
            answering -= 1
            tag.row = row
            if row.error is None:
                tag.begin(row)
            ready.append(tag.continuations(greedy))
        else:
            tag.answer.missing -= 1
            tag.answer.add(tag, row)
        answer = tag if isinstance(tag, Answer) else tag.answer
        if not answer.missing:
            store.write(answer.record, answer.result())
            yield store.done


def _requests(
    engine: Engine,
    questions: Sequence[Question],
    store: Store,
    greedy: CalibratedSampler,
    make: Callable[[Question, Record], Answer],
) -> Iterator[Request]:
    """The requests of the greedy answers that are missing in the store."""
    for number, question in enumerate(questions, 1):
        name = f"{question.task.name}/{question.item.id}"
        record = Record(number, name, content_hash(name.encode() + question.digest))
        if store.is_done(record):
            continue
        request = Request(
            question.prompt,
            greedy,
            max_new_tokens=question.max_new_tokens,
            row_id=name.encode("utf-8", "backslashreplace").decode(),
            eos_ids=question.ends,
            stop=question.task.stop,
            tag=make(question, record),
        )
        try:
            engine.check(request)
        except UserError as error:  # the prompt is too long
            store.write(record, {"task": question.task.name, "error": str(error)})
            continue
        yield request


@dataclass(eq=False)
class Answer:
    """A greedy answer and the outcomes of its continuations. It is the tag of the answer's request.

    Attributes:
        row: the finished answer, None before that.
        missing: number of continuations that have not ended.
    """

    question: Question
    record: Record
    row: Row | None = field(default=None, kw_only=True)
    missing: int = field(default=0, kw_only=True)

    @abstractmethod
    def begin(self, row: Row) -> None:
        """Takes the finished answer, unless it failed. Sets `missing`."""
        ...

    @abstractmethod
    def continuations(self, greedy: CalibratedSampler) -> Iterator[Request]:
        """Yields the rows of all continuations, whose tags are `Continuation`s."""
        ...

    @abstractmethod
    def add(self, tag: Any, row: Row) -> None:
        """Takes a finished continuation."""
        ...

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Returns the stored result, after the last continuation."""
        ...

    def read(self, text: str) -> tuple[str | None, float]:
        """Returns the answer in a text, and its score."""
        found = extract_answer(self.question, text)
        return found, score_answer(self.question, found)

    def continue_from(
        self,
        index: int,
        forced: Sequence[int],
        sampler: CalibratedSampler,
        tag: Continuation,
        name: str,
        seed: int = 0,
        extra: int = 0,
    ) -> Request:
        """Returns the row that keeps the first `index` tokens of the answer, continues with the
        `forced` tokens, and has `extra` tokens more than the answer's budget. Its random numbers
        are a function of the seed, the item and the name."""
        assert self.row is not None
        asked = self.row.request
        return Request(
            asked.prompt,
            sampler,
            max_new_tokens=asked.max_new_tokens + extra,
            row_id=f"{asked.row_id}/{name}",
            seed=seed,
            eos_ids=asked.eos_ids,
            stop=asked.stop,
            tag=tag,
            prefix=[(token, False) for token in self.row.tokens[:index]],
            forced=forced,
        )


@dataclass(frozen=True)
class Continuation:
    """The tag of a row that continues an answer from an index."""

    answer: Answer
    index: int


@dataclass(frozen=True)
class _Alternative(Continuation):
    """The tag of a row that has another token at the index."""

    token_id: int
    sampled: bool


@dataclass(eq=False)
class ForkedAnswer(Answer):
    """A greedy answer whose tokens are replaced.

    Attributes:
        alternatives: of each token, ids with probabilities; empty without continuations to sample.
        flips: of each token, the answer and the score if the other token is forced.
        sampled: of each token and alternative, counts of the outcomes.
        failed: indices of tokens with a continuation that failed.
    """

    sampling: Sampling
    alternatives: list[dict[int, float]] = field(default_factory=list)
    flips: dict[int, tuple[str | None, float]] = field(default_factory=dict)
    sampled: dict[tuple[int, int], Counter[str | None]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    def begin(self, row: Row) -> None:
        number = self.sampling.number
        never = set(row.request.sampler.settings.unwritable.tolist())
        for token in row.tokens:
            chances = {i: p for i, _, p in token.top or () if p >= LEAST and i not in never}
            self.alternatives.append(chances if number and len(chances) > 1 else {})
        self.missing = len(row.tokens) + number * sum(map(len, self.alternatives))

    def continuations(self, greedy: CalibratedSampler) -> Iterator[Request]:
        """Yields the rows of all continuations, from the last token to the first: then each row's
        text, without its forced token, is in the cache of an earlier row."""
        assert self.row is not None
        for index in reversed(range(len(self.row.tokens) if self.missing else 0)):
            other = _other(self.row.tokens[index])
            tag = _Alternative(self, index, other, sampled=False)
            yield self.continue_from(index, [other], greedy, tag, f"{index}/{other}/other")
            for token_id in self.alternatives[index]:
                tag = _Alternative(self, index, token_id, sampled=True)
                for number in range(self.sampling.number):
                    name = f"{index}/{token_id}/{number}"
                    given = self.sampling.sampler, tag, name, self.sampling.seed
                    yield self.continue_from(index, [token_id], *given)

    def add(self, tag: _Alternative, row: Row) -> None:
        if row.error is not None:
            self.failed.add(tag.index)
        elif tag.sampled:
            place = tag.index, tag.token_id
            self.sampled.setdefault(place, Counter())[self.read(row.text)[0]] += 1
        else:
            self.flips[tag.index] = self.read(row.text)

    def result(self) -> dict[str, Any]:
        """The measures and labels of each token, as columns. `alternatives` has, of each token, the
        alternatives as [token id, probability, [[outcome, count], ...]], none if there is only one.
        """
        assert self.row is not None
        task = self.question.task
        if self.row.error is not None:
            return {"task": task.name, "error": self.row.error}
        answer, score = self.read(self.row.text)
        kept = [index for index in range(len(self.row.tokens)) if index not in self.failed]
        tokens = [self.row.tokens[index] for index in kept]
        tops = [token.top or [] for token in tokens]
        columns: dict[str, list[Any]] = {
            "index": kept,
            "token_id": [token.token_id for token in tokens],
            "text": [token.text for token in tokens],
            "pivot": [self.flips[index][0] != answer for index in kept],
            "mistake": [score < 1 <= self.flips[index][1] for index in kept],
            "p1": [top[0][2] for top in tops],
            "p2": [top[1][2] for top in tops],
            **{name: [getattr(token, name) for token in tokens] for name in MEASURES},
            "heads": [_heads(token) for token in tokens],
        }
        if self.sampling.number:
            columns |= self._outcomes(kept)
        return {"task": task.name, "answer": answer, "score": score, **columns}

    def _outcomes(self, kept: Sequence[int]) -> dict[str, list[Any]]:
        """The sampled outcomes of each token, and its fork strengths."""
        assert self.row is not None
        columns: dict[str, list[Any]] = {"alternatives": [], "strength": [], "permuted": []}
        true_strength = getattr(self.question.task, "true_strength", None)
        for index in kept:
            chances = self.alternatives[index]
            counts = [_sorted(self.sampled[index, token_id]) for token_id in chances]
            outcomes = list(dict.fromkeys(found for counter in counts for found in counter))
            table = np.array([[counter.get(found, 0) for found in outcomes] for counter in counts])
            columns["alternatives"].append(
                [
                    [token_id, p, [*counter.items()]]
                    for (token_id, p), counter in zip(chances.items(), counts, strict=True)
                ]
            )
            p = [*chances.values()]
            shares = table / table.sum(axis=-1, keepdims=True) if chances else table
            columns["strength"].append(fork_strength(p, shares) if chances else 0.0)
            columns["permuted"].append(permuted_strength(p, table) if chances else 0.0)
        if true_strength is not None:
            texts = [token.text for token in self.row.tokens]
            before = ("".join(texts[:index]) for index in kept)
            columns["true"] = [true_strength(self.question.item, text) for text in before]
        return columns


def _sorted(counts: Counter[str | None]) -> dict[str | None, int]:
    """The counts by falling number, then by outcome: not in the order in which rows ended."""
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0] is None, pair[0] or "")))


def _other(token: TokenRecord) -> int:
    """The most likely token other than the chosen one."""
    return next(i for i, *_ in token.top or () if i != token.token_id)


def _heads(token: TokenRecord) -> list[float]:
    """The attention entropy of each layer and head over the log2 of the number of keys, in one
    list."""
    keys = max(token.position, 2)
    normalised = np.asarray(token.layers, float).ravel() / np.log2(keys)
    return [round(value, _HEAD_DECIMALS) for value in normalised.tolist()]
