"""Searches over whole texts, against a plain implementation of each method, which runs one row at a
time, and in which a fork is a longer prompt."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.matched import CALIPER
from entropix_jax.engine.methods import METHODS, find_method
from entropix_jax.engine.request import Request
from entropix_jax.engine.search import Fork, Outcome, recording_for, run_searches
from entropix_jax.engine.state import Recording
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.lab.methods import METHODS as WITH_CONTROLS
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.model.loading import LanguageModel
from tests.support.runs import Spec, requests, run_rows

SLOTS, CAPACITY, TOKENS, FORKS = 8, 128, 20, 4
VOCAB = 1249
PROMPTS = {"dts": 50, "dts-greedy": 20, "eager": 50}
PUBLISHED = {"dts": "dts", "dts-greedy": "dts", "eager": "eager"}  # presets
OTHERS = {"dts": 2, "dts-greedy": 2, "eager": 1}


def in_nats(token: TokenRecord, temperature: float, number: int) -> tuple[float, float]:
    """Returns entropy (nats) and varentropy (nats^2) of the top tokens at a temperature."""
    assert token.top is not None
    p = np.array([p for _, _, p in token.top[:number]]) ** (1 / temperature)
    p = p[p > 0] / p.sum()
    h = -np.sum(p * np.log(p))
    return float(h), float(np.sum(p * (np.log(p) + h) ** 2))


def is_due(method: str, token: TokenRecord) -> bool:
    """Returns whether a continuation forks, in the papers' own units."""
    if method == "eager":
        return in_nats(token, 1.0, 20)[0] > 2.2
    h, u = in_nats(token, 0.6, VOCAB)
    return h <= 2.5 and u > 1.5


def questions(model: LanguageModel, count: int, sampler: str = "min-p") -> list[Request]:
    """Returns requests for beginnings of documents, where the entropy is often high."""
    items = islice(find_task("documents").items("test", chat=False), count)
    specs = [Spec(encode_prompt(model, item.prompt, chat=False), item.id, TOKENS) for item in items]
    return requests(model, specs, sampler, turn_end=True)


def problems(model: LanguageModel, count: int) -> list[Request]:
    """Returns requests for questions with numeric answers."""
    items = islice(find_task("word-problems").items("test", chat=True), count)
    specs = [Spec(encode_prompt(model, item.prompt, chat=True), item.id, TOKENS) for item in items]
    return requests(model, specs, "temperature", turn_end=True)


def answer_in(text: str) -> str | None:
    found = re.findall(r"\d+", text)
    return found[-1] if found else None


@dataclass
class Line:
    """One continuation of the reference."""

    name: str
    tokens: list[TokenRecord]
    parent: int | None = None
    begin: int = 0  # index of its own first token


class Reference:
    """A plain implementation of a method, which runs one row at a time."""

    def __init__(self, model: LanguageModel, method: str, forks: int) -> None:
        self._engine = Engine(model, slots=1, capacity=CAPACITY, recording=Recording(top=VOCAB))
        self._method, self._forks = method, forks
        self.begun: Counter[str] = Counter()  # forks of each row, by its name

    def read(
        self, request: Request, given: list[TokenRecord], forced: list[int], name: str
    ) -> Line:
        """Runs a row that begins with these tokens."""
        text = [*(token.token_id for token in given), *forced]
        own: list[TokenRecord] = []
        if len(text) < TOKENS and not {*forced} & {*request.eos_ids}:
            prompt, left = [*request.prompt, *text], TOKENS - len(text)
            asked = replace(request, prompt=prompt, max_new_tokens=left, row_id=name, tag=None)
            own = run_rows(self._engine, [asked])[0].tokens
        given = [*given, *(self._forced(i) for i in forced), *own]
        return Line(name, given, begin=len(text) - len(forced))

    def branch(self, request: Request, line: Line, at: int, token_id: int) -> Line:
        """Runs a row that diverges from a line at a token."""
        self.begun[line.name] += 1
        name = f"{line.name}.{self.begun[line.name]}"
        return self.read(request, line.tokens[:at], [token_id], name)

    @staticmethod
    def _forced(token_id: int) -> TokenRecord:
        # Only the id of a forced token, and its action, are read.
        return replace(TokenRecord(*[0] * 26), token_id=token_id, action="inject")  # type: ignore[arg-type]

    def search(self, request: Request) -> tuple[list[Line], int | None]:
        """Returns the continuations, and the index of the one that ended first."""
        lines = [self.read(request, [], [], request.row_id)]
        for at in range(TOKENS):
            here = [index for index, line in enumerate(lines) if at < len(line.tokens)]
            if self._method == "dts-greedy":
                for index in here:
                    if len(lines[index].tokens) == at + 1:
                        return lines, index
            for index in here:
                token = lines[index].tokens[at]
                is_free = token.action != "inject" and len(lines) < self._forks
                if is_free and is_due(self._method, token):
                    self._fork(request, lines, index, at)
        return lines, None

    def _fork(self, request: Request, lines: list[Line], index: int, at: int) -> None:
        line, left = lines[index], self._forks - len(lines)
        chosen = line.tokens[at].token_id
        most = [i for i, _, _ in line.tokens[at].top or ()][: 1 + OTHERS[self._method]]
        if self._method in ("dts", "dts-greedy"):  # only these tokens
            most = most[: 1 + left]
            if chosen not in most:
                lines[index] = self.branch(request, line, at, most.pop(0))
                lines[index].begin, lines[index].parent = line.begin, line.parent
        for other in [i for i in most if i != chosen][: min(OTHERS[self._method], left)]:
            lines.append(self.branch(request, line, at, other))
            lines[-1].parent = index


@pytest.mark.parametrize("name", OTHERS)
def test_a_search_equals_the_reference(tiny: LanguageModel, name: str) -> None:
    method, forks = find_method(name), FORKS
    wanted = questions(tiny, PROMPTS[name], PUBLISHED[name])
    recording = recording_for(method, forks)
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording)
    searches = [method.search(request, forks) for request in wanted]
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
        # The other rows are cut to the length of the first one that ends.
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
        # The last token of a text needs no forward pass, and shared tokens need one.
        own = (min(len(line.tokens), end) - line.begin - 1 for line in lines)
        assert outcome.forwards == sum(max(number, 0) for number in own)
    assert made > 5


@pytest.mark.parametrize(("name", "preset"), [("dts-matched", "dts"), ("eager-matched", "eager")])
def test_matched_forks(tiny: LanguageModel, name: str, preset: str) -> None:
    """Matched forks equal the method's own in number at each depth, and in the probabilities of
    forced tokens, but at other positions. An end token is never replaced."""
    wanted, same = questions(tiny, 20, preset), 0
    outcomes = {}
    for method in (find_method(preset), find_method(name, WITH_CONTROLS)):
        recording = recording_for(method, FORKS)
        engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording)
        searches = [method.search(request, FORKS) for request in wanted]
        list(run_searches(engine, searches))
        outcomes[method.name] = [search.outcome(answer_in) for search in searches]
    gaps, places = [], Counter[bool]()
    for request, own, control in zip(wanted, outcomes[preset], outcomes[name], strict=True):
        assert depths(control) == depths(own)
        for fork in control.forks:
            parent = control.rows[fork.parent].tokens[fork.position - len(request.prompt)]
            assert parent.token_id not in request.eos_ids
            assert parent.token_id != fork.token_id
            forced = control.rows[fork.row].tokens[fork.position - len(request.prompt)]
            assert forced.token_id == fork.token_id
            assert forced.logprob == pytest.approx(fork.logprob, abs=1e-3)
        for level in range(1, FORKS):
            pairs = (sorted(f.logprob for f in at_depth(o, level)) for o in (own, control))
            gaps += [abs(a - b) for a, b in zip(*pairs, strict=True)]
        same += {f.position for f in own.forks} == {f.position for f in control.forks}
        places[bool(own.forks)] += 1
    assert len(gaps) > 10
    assert np.median(gaps) <= CALIPER
    assert same < places[True] + places[False]


def at_depth(outcome: Outcome, depth: int) -> list[Fork]:
    """Returns the forks that begin a continuation of a depth."""
    known = {0: 0}
    for fork in outcome.forks:
        known[fork.row] = known[fork.parent] + 1
    return [fork for fork in outcome.forks if known[fork.row] == depth]


def depths(outcome: Outcome) -> list[int]:
    return [len(at_depth(outcome, depth)) for depth in range(1, FORKS)]


@pytest.mark.parametrize("name", ["dts", "dts-matched", "beam"])
def test_a_search_does_not_depend_on_others(tiny: LanguageModel, name: str) -> None:
    """Continuations have the same last digits next to other searches as alone: no fork reads tokens
    again that its parent had generated, even if the parent's slot has another row by then."""
    method = find_method(name, WITH_CONTROLS)
    wanted = questions(tiny, 6, "greedy" if name == "beam" else "dts")
    recording = recording_for(method, FORKS)
    results = []
    for groups in [wanted], [[request] for request in wanted]:
        engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording)
        searches = [[method.search(request, FORKS) for request in group] for group in groups]
        for group in searches:
            assert len([*run_searches(engine, group)]) == len(group)
        prompts = sum(len(request.prompt) - 1 for request in wanted)
        # A control may read its prompt again.
        assert engine._reader.read <= prompts * (2 if name == "dts-matched" else 1)
        rows = [row for group in searches for search in group for row in search.rows]
        assert all(row.kept is None and row.parent is None for row in rows)
        results.append([[(t.token_id, t.logprob, t.entropy) for t in row.tokens] for row in rows])
    assert results[0] == results[1]


def test_an_engine_that_keeps_its_slots_copies_no_caches(tiny: LanguageModel) -> None:
    """A server's list of programs has none for it."""
    method = find_method("dts")
    recording = recording_for(method, FORKS)
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording, keep=True)
    searches = [method.search(request, FORKS) for request in questions(tiny, 6, "dts")]
    assert len([*run_searches(engine, searches)]) == 6
    assert "insert" in engine.programs._called
    assert not any("keep" in str(key) for key in engine.programs._called)


@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_equals_transformers(tiny: LanguageModel, width: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
    method, wanted = find_method("beam"), questions(tiny, 12, "greedy")
    recording = recording_for(method, width)
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY, recording=recording)
    searches = [method.search(request, width) for request in wanted]
    assert len([*run_searches(engine, searches)]) == len(searches)
    for search, request in zip(searches, wanted, strict=True):
        outcome = search.outcome()
        prompt = torch.tensor([[*request.prompt]])
        found = other.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=width,
            max_new_tokens=TOKENS,
            do_sample=False,
            early_stopping=False,
            eos_token_id=[*request.eos_ids],
            pad_token_id=0,
        )
        ids = found[0, len(request.prompt) :].tolist()
        while ids and ids[-1] == 0:
            ids.pop()
        assert [token.token_id for token in outcome.row.tokens] == ids
        assert len(outcome.rows) <= width
        assert outcome.forwards <= width * (TOKENS - 1)


@pytest.mark.parametrize("name", ["self-consistency", "weighted-vote", "best-of-n", "surest-of-n"])
def test_independent_samples(tiny: LanguageModel, name: str) -> None:
    """Returns independent rows, and chooses one of them by the method's score."""
    engine, chosen = Engine(tiny, slots=SLOTS, capacity=CAPACITY), set()
    searches = [METHODS[name].search(request, 3) for request in problems(tiny, 8)]
    for search in run_searches(engine, searches):
        outcome = search.outcome(answer_in)
        rows = outcome.rows
        chosen.add(outcome.chosen)
        assert not outcome.forks
        assert len({row.request.row_id for row in rows}) == len(rows) == 3
        scores = [0.0]
        if name == "best-of-n":
            scores = [sum(t.logprob for t in row.tokens) / len(row.tokens) for row in rows]
        sums: defaultdict[str, float] = defaultdict(float)
        for row in rows if name == "weighted-vote" else ():
            if (found := answer_in(row.text)) is not None:
                sums[found] += float(row.group_confidences().min())
        if sums:
            assert outcome.answer == max(sums, key=lambda answer: sums[answer])
        if name == "surest-of-n":  # fewer tokens than a group has
            scores = [float(np.mean([t.token_confidence for t in row.tokens])) for row in rows]
        if len(scores) > 1 and all(len(row.tokens) <= 16 for row in rows):
            assert scores[outcome.chosen] == pytest.approx(max(scores))
        assert outcome.forwards == sum(len(row.tokens) - 1 for row in rows)
    assert len(chosen) > 1


def test_search_errors(tiny: LanguageModel) -> None:
    with pytest.raises(UserError, match="no method 'dst', did you mean 'dts'"):
        find_method("dst")
    engine = Engine(tiny, slots=SLOTS, capacity=CAPACITY)
    (search,) = run_searches(engine, [METHODS["self-consistency"].search(questions(tiny, 1)[0], 2)])
    with pytest.raises(UserError, match="votes, but these texts have no answers"):
        search.outcome()
