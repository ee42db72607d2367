"""The asking world: its texts, its tasks with a simulated user, and the shipped model."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_prompts
from asking_scores import QUESTION, answer, name_in, reply_to, score
from tiny.corpus import encode_row, is_chosen, terminal_ids, write_row
from tiny.tokenizer import build_tokenizer, tokenizer_json
from tiny_entropy import WORLDS, measure
from tokenizers import Tokenizer

from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.errors import UserError
from entropix_jax.lab.sweep import Setting
from entropix_jax.lab.tasks import asking
from entropix_jax.lab.tasks.task import Item
from entropix_jax.lab.trials import Phase, TrialRun, read_questions
from entropix_jax.lab.world.documents import stream
from entropix_jax.lab.world.grammar import Position, replay
from entropix_jax.lab.world.lexicon import (
    ASSISTANT,
    BEGIN,
    STRANGERS,
    TURN_END,
    USER,
    split_terminals,
)
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler

WEIGHTS = Path(__file__).parents[2] / "weights" / "asking"
WORLD, TERMINALS = WORLDS["asking"]
IDS = terminal_ids(build_tokenizer(TERMINALS), TERMINALS)
FACTS = asking.facts_of_all()


@pytest.fixture(scope="module")
def row() -> list[Position]:
    return write_row(WORLD, Random(1), 40_000)


def text_of(positions: Sequence[Position]) -> str:
    return "".join(position.terminal for position in positions)


# Texts.


def test_replay_recovers_the_distributions_after_inserted_texts(row: list[Position]) -> None:
    said = split_terminals(text_of(row[:900]))
    assert not all(is_chosen(row[:900]))
    for place in range(0, 900, 9):
        upcoming, drawn = replay(stream(WORLD), said[:place]), row[place]
        assert upcoming is not None
        assert upcoming.probabilities == drawn.choice.probabilities
        assert upcoming.allows(drawn.terminal)


def test_distributions_are_valid_and_sampled(row: list[Position]) -> None:
    """The mean of -log2 p over drawn terminals is the entropy, within four standard errors. Only
    the first terminals of inserted texts are not drawn."""
    inserted = {one.terminal for one, own in zip(row, is_chosen(row), strict=True) if not own}
    assert inserted == {"[", " [", " One", "One"}
    drawn = [one for one, own in zip(row, is_chosen(row), strict=True) if own]
    assert {position.terminal for position in drawn} < set(TERMINALS)
    bits = [-math.log2(p.choice.probabilities[p.choice.terminals.index(p.terminal)]) for p in drawn]
    error = 4 * math.sqrt(sum(p.choice.varentropy for p in drawn)) / len(drawn)
    assert np.mean(bits) == pytest.approx(np.mean([p.choice.entropy for p in drawn]), abs=error)


def test_answers_agree_with_the_result_and_the_world(row: list[Position]) -> None:
    """A result about a known person states the world's facts, and the answer repeats the result."""
    pattern = r"([\w ]*?) ?\[(\w+) lives in (\w+) and is a (\w+)\]([\w ]+)\."
    told = Counter[str]()
    for before, name, town, job, after in re.findall(pattern, text_of(row)):
        said = re.fullmatch(rf" ?{name} (lives in|is a|has a|trusts) (\w+)", before + after)
        assert said is not None
        told[said[1]] += 1
        assert said[2] == {"lives in": town, "is a": job}.get(said[1], said[2])
        assert name in STRANGERS or FACTS[name] == (town, job)
    assert told["lives in"] > told["is a"] > told["trusts"] > 0


def test_a_question_names_both_people_and_the_reply_decides(row: list[Position]) -> None:
    user, assistant = map(re.escape, (USER, ASSISTANT))
    told = re.findall(
        rf"(\w+) met (\w+)\. \w+ (?:pet )?does s?he \w+\?{assistant}"
        rf" ?One question: do you mean (\w+) or (\w+)\?{user}(\w+)\.?{assistant}"
        r"(\w+) (lives in|has a|trusts) (\w+)\.",
        text_of(row),
    )
    assert len(told) > 20
    for one, other, first, second, meant, subject, predicate, fact in told:
        assert (one, other, meant) == (first, second, subject)
        person = WORLD.people[subject]
        own = {"lives in": person.town, "has a": person.pet, "trusts": person.friend}
        assert own[predicate] == fact


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        ("Anna met Nora. Where does she live?", {"Anna", "Nora"}),
        ("Anna met Bob. Where does she live?", {"Anna"}),
        ("Where does Walter live?", {"Walter"}),
    ],
)
def test_the_pronoun_decides_who_may_be_meant(question: str, answers: set[str]) -> None:
    said = f"{BEGIN}{USER.removeprefix(TURN_END)}{question}{ASSISTANT}"
    upcoming = replay(stream(WORLD), split_terminals(said))
    assert upcoming is not None
    assert set(upcoming.terminals) == answers


def test_each_terminal_is_one_token(row: list[Position]) -> None:
    tokenizer, text = Tokenizer.from_str(tokenizer_json(TERMINALS)), text_of(row)
    assert tokenizer.encode(text, add_special_tokens=False).ids == encode_row(row, IDS)
    assert (WEIGHTS / "tokenizer.json").read_text(encoding="utf-8") == tokenizer_json(TERMINALS)


# Tasks.


def test_the_table_has_the_answer_of_each_fact() -> None:
    table = [json.loads(line) for line in (WEIGHTS / "lookup.jsonl").read_text().splitlines()]
    assert table == tiny_prompts.table()
    values = {record["key"]: record["value"] for record in table}
    for item in asking.FACTS.items("test", chat=True):
        (name,) = (word for word in re.findall(r"\w+", str(item.prompt)) if word in values)
        assert item.answer in values[name].split()
        for text in (f"{name} lives in[{values[name]}] {item.answer}.", f"{name} is a Cook."):
            answer = asking.FACTS.extract(item, text)
            assert asking.FACTS.score(item, answer) == (item.answer in text)


def test_the_simulated_user_names_the_person_meant() -> None:
    means = Counter[int]()
    for item in asking.AMBIGUOUS.items("test", chat=True):
        assert not isinstance(item.prompt, str)
        one, other = re.findall(r"[A-Z]\w+", item.prompt[0]["content"])[:2]
        reply = asking.AMBIGUOUS.reply(item, f" One question: do you mean {one} or {other}?")
        assert reply in (f"{one}.", f"{other}.")
        means[reply == f"{one}."] += 1
        assert asking.AMBIGUOUS.reply(item, f" Do you mean {one}?") is None
    assert min(means.values()) > 80


class _Engine:
    """Ends each row at once, with the next of some texts, a question if it ends with a `?`."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.requests = iter(texts), list[Request]()

    def new_row(self, request: Request) -> Row:
        return Row(request)

    def check(self, request: Request) -> None:
        if len(request.prompt) > 100:
            raise UserError("the prompt is too long")

    def run(self, requests: Iterator[Request | None]) -> Iterator[Any]:
        for request in iter(lambda: next(requests, None), None):
            self.requests.append(request)
            row = request.tag.rows[0]
            row.text = next(self.texts)
            row.finish_reason = "question" if row.text.endswith("?") else "eos"
            yield SimpleNamespace(row=row, token=None, retracted=False)


def replied(model: LanguageModel, reply: Any, texts: Sequence[str]) -> tuple[_Engine, list[Any]]:
    """Runs two trials of a task with a simulated user in a stub of the engine."""

    class Task(asking._AskingAmbiguous):
        def reply(self, item: Item, question: str) -> Any:
            return reply

    questions = tuple(read_questions(model, Task(), "test", 2))
    setting = Setting("greedy", load_sampler("greedy"), {})
    run = TrialRun(model, [setting], slots=1, capacity=64)
    run.engine = engine = _Engine(texts)  # type: ignore[assignment]
    results: list[Any] = []
    store: Any = SimpleNamespace(
        is_done=lambda record: False, write=lambda record, result: results.append(result)
    )
    run.run(Phase("test", questions, (0,)).trials([setting]), store)
    return engine, results


def test_the_user_replies_to_a_question(model: LanguageModel) -> None:
    asked, told = " One question: do you mean Nina or Lara?", "Nina has a mouse."
    engine, results = replied(model, "Nina.", [asked, told, told])
    assert [one["text"] for one in results] == [told, told]
    assert [one.get("question") for one in results] == [asked, None]
    assert [request.clarify for request in engine.requests] == [True, False, True]
    first, second = (model.tokenizer.decode(list(one.prompt)) for one in engine.requests[:2])
    assert second.startswith(first.rstrip())
    assert "Nina or Lara?" in second
    assert second.count("Nina.") == 1


@pytest.mark.parametrize("reply", [None, "Nina. " * 100])
def test_without_a_reply_the_question_is_the_answer(model: LanguageModel, reply: Any) -> None:
    _, results = replied(model, reply, ["Who?", "Nina has a mouse."])
    error = {"error"} if reply else set()
    assert [{"error"} & one.keys() for one in results] == [error, set()]
    assert results[0]["score"] == 0.0


def test_an_invalid_reply_is_reported(model: LanguageModel) -> None:
    with pytest.raises(UserError, match=r"item 'asking-ambiguous-test-1': reply returned 3, not"):
        replied(model, 3, ["Who?"])


# The shipped model.


@pytest.fixture(scope="module")
def shipped() -> LanguageModel:
    return load("asking")


def test_the_shipped_model_is_small_and_accurate(shipped: LanguageModel) -> None:
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 6_000_000
    rng = Random("held out, tests")
    rows = [write_row(WORLD, rng, 257) for _ in range(32)]
    result = measure(shipped.params, shipped.config, rows, IDS)
    assert result["KL"].mean() <= max(0.05, 0.05 * result["true h"].mean())


def test_strangers_need_a_lookup(shipped: LanguageModel) -> None:
    items = list(islice(asking.FACTS.items("test", chat=True), 60))
    names = [name_in(item) for item in items]
    strange = np.array([name in STRANGERS for name in names])
    results = [f" [{asking.lookup_table()[name]}]" for name in names]
    alone, looked_up = (
        score(asking.FACTS, items, answer(shipped, items, starts))
        for starts in ([""] * len(items), results)
    )
    assert alone[strange].mean() <= 0.2
    assert alone[~strange].mean() >= 0.95
    assert looked_up.mean() >= 0.95


def test_a_reply_makes_an_ambiguous_question_clear(shipped: LanguageModel) -> None:
    items = list(islice(asking.AMBIGUOUS.items("test", chat=True), 40))
    replied = reply_to(items, answer(shipped, items, [QUESTION] * len(items)))
    assert len(replied) >= 36
    right = score(asking.AMBIGUOUS, replied, answer(shipped, replied, [""] * len(replied)))
    assert right.mean() >= 0.9
