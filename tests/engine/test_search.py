"""Searches over whole texts, against a plain reading of each method: rows are read one at a time,
and a fork is a prompt that is longer by what the two share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import numpy as np
import pytest

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import encode_prompt
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.search import METHODS, Search, find_method, recording_for, run_searches
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, requests

SLOTS, CAPACITY, TOKENS, FORKS = 6, 128, 20, 4
PROMPTS = {"dts": 50, "eager": 50}  # of the other methods 10
DUE: dict[str, Callable[[TokenRecord, int], bool]] = {
    "dts": lambda token, at: token.regime == "lehv",
    "dts-greedy": lambda token, at: token.regime == "lehv",
    "eager": lambda token, at: token.entropy > 1.2,
    "random-forks": lambda token, at: token.regime == "lehv",
    "start-forks": lambda token, at: at == 0,
}
OTHERS = {"dts": 2, "dts-greedy": 2, "eager": 1, "random-forks": 2, "start-forks": FORKS - 1}


def questions(model: LanguageModel, count: int) -> list[Request]:
    items = islice(find_task("word-problems").items("test", chat=True), count)
    specs = [Spec(encode_prompt(model, item.prompt, chat=True), item.id, TOKENS) for item in items]
    # Such that some tokens of so small a model are in each regime.
    thresholds = {"thresholds.h1": 0.5, "thresholds.h2": 1.2, "thresholds.u1": 0.5}
    sampler = load_sampler("min-p").with_values({**thresholds, "thresholds.u2": 0.5})
    return requests(model, specs, sampler, turn_end=True)


def answer_in(text: str) -> str | None:
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


@dataclass
class Line:
    """One continuation of the reference."""

    tokens: list[TokenRecord]
    parent: int | None = None
    begin: int = 0  # index of its own first token


class Reference:
    """A method in step, one row at a time."""

    def __init__(self, model: LanguageModel, method: str, forks: int) -> None:
        self._engine = Engine(model, slots=1, capacity=CAPACITY, recording=Recording(top=FORKS))
        self._method, self._forks = method, forks

    def read(
        self, request: Request, given: list[TokenRecord], forced: list[int], name: str
    ) -> Line:
        """The row alone whose text begins with these tokens."""
        text = [*(token.token_id for token in given), *forced]
        own: list[TokenRecord] = []
        if len(text) < TOKENS and not {*forced} & {*request.eos_ids}:
            prompt, left = [*request.prompt, *text], TOKENS - len(text)
            row = Row(replace(request, prompt=prompt, max_new_tokens=left, row_id=name, tag=None))
            list(self._engine.run([row]))
            own = row.tokens
        return Line([*given, *(self._forced(given, i) for i in forced), *own], begin=len(given))

    @staticmethod
    def _forced(given: list[TokenRecord], token_id: int) -> TokenRecord:
        # Nothing reads what a forced token records, but its id and that it was forced.
        return replace(TokenRecord(*[0] * 26), token_id=token_id, action="inject")  # type: ignore[arg-type]

    def search(self, request: Request) -> tuple[list[Line], int | None]:
        """The continuations, and which one ended first."""
        name, due = request.row_id, DUE[self._method]
        lines = [self.read(request, [], [], name)]

        def by_rule(at: int, here: list[int]) -> list[int]:
            return [index for index in here if due(lines[index].tokens[at], at)]

        first = self._walk(request, lines, name, by_rule)
        if self._method == "random-forks" and len(lines) > 1:
            random = Random(f"{request.seed}:{name}")
            crossings = {(line.parent, line.begin) for line in lines[1:]}
            length = len(lines[0].tokens)
            picks = [random.randrange(length) for _ in crossings]
            name = f"{name}.{self._begun(lines, 0)}"
            lines = [self.read(request, [], [], name)]

            def at_random(at: int, here: list[int]) -> list[int]:
                chosen = [index for index in here if lines[index].tokens[at].action != "inject"]
                number = min(picks.count(at), len(chosen))
                picks.extend([at + 1] * (picks.count(at) - number))
                return sorted(random.sample(chosen, number))

            self._walk(request, lines, name, at_random)
        return lines, first

    @staticmethod
    def _begun(lines: list[Line], index: int) -> int:
        return sum(line.parent == index for line in lines) + 1

    def _walk(
        self,
        request: Request,
        lines: list[Line],
        name: str,
        due: Callable[[int, list[int]], list[int]],
    ) -> int | None:
        names = [name]
        for at in range(TOKENS):
            here = [index for index, line in enumerate(lines) if at < len(line.tokens)]
            if self._method == "dts-greedy":
                for index in here:
                    if len(lines[index].tokens) == at + 1:
                        return index
            for index in due(at, here):
                token = lines[index].tokens[at]
                if token.action == "inject":
                    continue
                others = [i for i, _, _ in token.top or () if i != token.token_id]
                for other in others[: OTHERS[self._method]][: self._forks - len(lines)]:
                    own = f"{names[index]}.{self._begun(lines, index)}"
                    lines.append(self.read(request, lines[index].tokens[:at], [other], own))
                    lines[-1].parent = index
                    names.append(own)
        return None


@pytest.mark.parametrize("name", DUE)
def test_a_search_is_the_reference(tiny: LanguageModel, name: str) -> None:
    method, forks = find_method(name), FORKS
    wanted = questions(tiny, PROMPTS.get(name, 10))
    recording = recording_for(method, forks)
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording)
    searches = [Search(request, method, forks) for request in wanted]
    ended = list(run_searches(engine, searches))
    assert {*map(id, ended)} == {*map(id, searches)}
    reference, made = Reference(tiny, name, forks), 0
    for search, request in zip(searches, wanted, strict=True):
        lines, first = reference.search(request)
        outcome = search.outcome(answer_in)
        made += len(outcome.forks)
        parents = [line.parent for line in lines[1:]]
        assert [fork.parent for fork in outcome.forks] == parents
        begins = [fork.position - len(request.prompt) for fork in outcome.forks]
        assert begins == [line.begin for line in lines[1:]]
        texts = [[token.token_id for token in line.tokens] for line in lines]
        end = TOKENS if first is None else len(lines[first].tokens)
        # The others end with the first, however far ahead of it they are.
        assert [[t.token_id for t in row.tokens] for row in outcome.rows] == [
            text[:end] for text in texts
        ]
        for row, text in zip(outcome.rows, texts, strict=True):
            assert row.text == "".join(token.text for token in row.tokens)
            assert (row.finish_reason == "cancelled") == (len(text) > end)
            assert [token for token, gone in row.log if not gone] == row.tokens
        votes = Counter(filter(None, (answer_in(row.text) for row in outcome.rows)))
        assert outcome.votes == votes
        if first is None:
            assert outcome.answer == (votes.most_common(1)[0][0] if votes else None)
        else:
            assert outcome.chosen == first
        # The last token of a text is not read, and what a fork shares is read once.
        own = (min(len(line.tokens), end) - line.begin - 1 for line in lines)
        assert outcome.forwards == sum(max(number, 0) for number in own)
    assert made > 5


@pytest.mark.parametrize("name", ["self-consistency", "best-of-n", "surest-of-n"])
def test_independent_samples(tiny: LanguageModel, name: str) -> None:
    """They are the rows alone, one of which is chosen."""
    engine, chosen = Engine(tiny, slots=SLOTS, capacity=CAPACITY), set()
    searches = [Search(request, METHODS[name], 3) for request in questions(tiny, 8)]
    for search in run_searches(engine, searches):
        outcome = search.outcome(answer_in)
        rows = outcome.rows
        chosen.add(outcome.chosen)
        assert not outcome.forks
        assert len({row.request.row_id for row in rows}) == len(rows) == 3
        scores = [0.0]
        if name == "best-of-n":
            scores = [sum(t.logprob for t in row.tokens) / len(row.tokens) for row in rows]
        if name == "surest-of-n":  # fewer tokens than a group has
            scores = [float(np.mean([t.token_confidence for t in row.tokens])) for row in rows]
        if len(scores) > 1 and all(len(row.tokens) <= 16 for row in rows):
            assert scores[outcome.chosen] == pytest.approx(max(scores))
        assert outcome.forwards == sum(len(row.tokens) - 1 for row in rows)
    assert len(chosen) > 1


def test_what_cannot_be_searched(tiny: LanguageModel) -> None:
    with pytest.raises(UserError, match="no method 'dst', did you mean 'dts'"):
        find_method("dst")
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY)
    (search,) = run_searches(
        engine, [Search(questions(tiny, 1)[0], METHODS["self-consistency"], 2)]
    )
    with pytest.raises(UserError, match="votes, but these texts have no answers"):
        search.outcome()
