"""A conversation with a kept cache: each answer is what `generate` gives for its messages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import entropix_jax
from entropix_jax.chat.dialogue import Dialogue, Turn, turns_of
from entropix_jax.engine.results import Row
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.text.tokenizer import Tokenizer
from tests.support.runs import calibrated, set_pace
from tests.support.samplers import LITERAL
from tests.support.traces import read_trace

CONTEXT = 512
BUDGET = 24


def dialogue_of(model: LanguageModel, sampler: str = "min-p", **options: Any) -> Dialogue:
    options = {"context": CONTEXT, "max_new_tokens": BUDGET, **options}
    return Dialogue(model, calibrated(model, sampler), **options)


def answered(dialogue: Dialogue, turn: Turn, *, events: int | None = None) -> Turn:
    """The turn, with its answer, or what it has of that after so many events."""
    if events == 0:
        dialogue.engine.stop()
    for number, _ in enumerate(dialogue.run(turn), start=1):
        if number == events:
            dialogue.stop()
    return turn


def row_of(turn: Turn) -> Row:
    assert turn.row is not None
    return turn.row


def ids(row: Row) -> list[int]:
    return [token.token_id for token in row.tokens]


class Oracle:
    """The same messages, rendered anew and read from the first token on."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._before: list[int] = []
        self._read = 0

    def check(self, turn: Turn) -> int:
        """Checks a turn that was just answered. Returns how many tokens were not read for it."""
        dialogue, row = self._dialogue, row_of(turn)
        messages = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
        for one in dialogue.turns[: turn.at]:
            messages.append({"role": "user", "content": one.question})
            messages.append({"role": "assistant", "content": one.answer})
        messages.append({"role": "user", "content": turn.question})
        (fresh,) = entropix_jax.generate(
            dialogue.model,
            messages,
            dialogue.sampler,
            seed=turn.seed,
            max_new_tokens=dialogue.max_new_tokens,
        )
        assert list(row.request.prompt) == list(fresh.request.prompt)
        assert ids(row) == ids(fresh)
        assert (turn.answer, row.finish_reason) == (fresh.text, fresh.finish_reason)
        # What is read are the tokens that differ from those before, but for each text's last.
        prompt = list(row.request.prompt)
        pairs = zip(prompt[:-1], self._before[:-1], strict=False)
        shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        assert dialogue.engine.read - self._read == len(prompt) - 1 - shared
        self._before, self._read = prompt + ids(row), dialogue.engine.read
        return shared


@pytest.mark.parametrize("sampler", ["min-p", LITERAL])
def test_answers_are_those_of_a_conversation_read_anew(tiny: LanguageModel, sampler: str) -> None:
    dialogue = dialogue_of(tiny, sampler, seed=3)
    oracle = Oracle(dialogue)
    assert oracle.check(answered(dialogue, dialogue.question("Hello"))) == 0
    first = row_of(dialogue.last())
    # Of the second turn only what follows the first is read.
    second = answered(dialogue, dialogue.question("Mia has 12 apples and buys 7."))
    assert oracle.check(second) == len(first.request.prompt) + len(first.tokens) - 1
    answered(dialogue, dialogue.question("How many apples does Mia have?"))
    oracle.check(dialogue.last())
    # Again: nothing is read. Each time the next seed.
    for seed in (4, 5):
        again = answered(dialogue, dialogue.retry())
        assert (again.at, again.seed, len(dialogue.turns)) == (2, seed, 3)
        assert oracle.check(again) == len(row_of(again).request.prompt) - 1
    # Back, twice, and on from there, with the first seed.
    assert dialogue.back() is again
    assert dialogue.back() is second
    other = answered(dialogue, dialogue.question("Where is Rita?"))
    assert (other.at, other.seed) == (1, 3)
    assert oracle.check(other) >= len(first.request.prompt)
    # Another sampler, another budget, another beginning.
    dialogue.sampler = calibrated(tiny, "top-p")
    dialogue.max_new_tokens = 5
    oracle.check(answered(dialogue, dialogue.question("And Adam?")))
    dialogue.system = "Answer in one word."
    oracle.check(answered(dialogue, dialogue.retry()))
    assert [turn.question for turn in dialogue.turns] == ["Hello", "Where is Rita?", "And Adam?"]


def test_an_answer_that_is_stopped_stays(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pace(monkeypatch, 8)
    dialogue = dialogue_of(tiny, LITERAL)
    whole = answered(dialogue, dialogue.question("Once upon a time")).answer
    dialogue.back()
    stopped = answered(dialogue, dialogue.question("Once upon a time"), events=3)
    assert row_of(stopped).finish_reason == "interrupt"
    assert 0 < len(stopped.answer) < len(whole)
    assert whole.startswith(stopped.answer)
    assert dialogue.messages()[-1] == {"role": "assistant", "content": stopped.answer}
    # Once it has ended nothing is left to stop, and the next answer is whole.
    dialogue.stop()
    dialogue._running = row_of(stopped)  # as a signal finds it just before it is forgotten
    dialogue.stop()
    following = answered(dialogue, dialogue.question("Who is Rita?"))
    assert row_of(following).finish_reason in ("eos", "length")
    (fresh,) = entropix_jax.generate(
        tiny, dialogue.messages(following), dialogue.sampler, max_new_tokens=BUDGET
    )
    assert ids(row_of(following)) == ids(fresh)


def test_without_a_word_nothing_changes(tiny: LanguageModel) -> None:
    dialogue = dialogue_of(tiny)
    first = answered(dialogue, dialogue.question("Hello"))
    for turn in (dialogue.question("And?"), dialogue.retry()):
        assert row_of(answered(dialogue, turn, events=0)).finish_reason == "interrupt"
        assert dialogue.turns == [first]
    assert row_of(answered(dialogue, dialogue.question("And?"))).finish_reason != "interrupt"


def test_nor_where_it_fails(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    dialogue = dialogue_of(tiny)
    first = answered(dialogue, dialogue.question("Hello"))
    turn = dialogue.question("And?")
    row_of(turn).error = "NaN"

    def fail(rows: list[Row]) -> Any:
        rows[0].text, rows[0].finish_reason = "half", "error"
        return iter(())

    monkeypatch.setattr(dialogue.engine, "run", fail)
    answered(dialogue, turn)
    assert dialogue.turns == [first]


def test_the_context_is_full(tiny: LanguageModel) -> None:
    dialogue = dialogue_of(tiny, max_new_tokens=CONTEXT)
    dialogue.question(long := "Then Adam went to the market. " * 71)
    turn = answered(dialogue, dialogue.question(long))
    prompt = row_of(turn).request.prompt
    assert row_of(turn).finish_reason == "context"
    assert len(prompt) + len(row_of(turn).tokens) == CONTEXT
    with pytest.raises(UserError, match=r"context is full: the conversation has \d+ tokens, 512 "):
        dialogue.question("And?")
    assert dialogue.back() is turn
    assert answered(dialogue, dialogue.question("Hello")).answer


def test_there_is_nothing_to_do_again(tiny: LanguageModel) -> None:
    dialogue = dialogue_of(tiny)
    for what in (dialogue.retry, dialogue.back, lambda: dialogue.rows("tiny")):
        with pytest.raises(UserError, match="no turn yet"):
            what()
    dialogue.turns = [Turn(0, "Hello", 7, "Hi!")]
    with pytest.raises(UserError, match="not generated here"):
        dialogue.rows("tiny")
    assert dialogue.retry().seed == 8


def test_a_model_without_a_template(tiny: LanguageModel) -> None:
    settings = replace(tiny.tokenizer._settings, chat_template=None)
    path = tiny.folder / "tokenizer.json"
    plain = replace(tiny, tokenizer=Tokenizer(path, path.read_bytes(), settings))
    with pytest.raises(UserError, match="no chat template: it cannot chat"):
        dialogue_of(plain)


def test_the_trace_of_an_answer(tiny: LanguageModel, tmp_path: Path) -> None:
    dialogue = dialogue_of(tiny)
    answered(dialogue, dialogue.question("Hello"))
    turn = answered(dialogue, dialogue.retry())
    dialogue.rows("a name").save_trace(tmp_path / "trace.jsonl")
    header, *tokens, footer = read_trace(tmp_path / "trace.jsonl")
    assert (header["model"], header["seed"]) == ("a name", 1)
    assert header["prompt_tokens"] == list(row_of(turn).request.prompt)
    assert [token["token_id"] for token in tokens] == ids(row_of(turn))
    assert footer["rows"][0]["text"] == turn.answer
    assert 0 < footer["timings"]["first_token"] <= footer["timings"]["total"]


USER, ASSISTANT, SYSTEM = ({"role": r, "content": r} for r in ("user", "assistant", "system"))


def test_messages_become_turns() -> None:
    turns = [Turn(0, "user", 5, "assistant"), Turn(1, "user", 5, "assistant")]
    place = Path("chat.json")
    both = [USER, ASSISTANT] * 2
    assert turns_of([SYSTEM, *both, USER], place, 5) == ("system", turns, "user")
    assert turns_of(both, place, 5) == (None, turns, None)
    assert turns_of([SYSTEM], place, 5) == ("system", [], None)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "a non-empty list of objects"),
        ({"role": "user", "content": ""}, "a non-empty list of objects"),
        ([ASSISTANT], "message 1: expected a text of role user or system"),
        ([USER, SYSTEM], "message 2: expected a text of role assistant"),
        ([USER, ASSISTANT, SYSTEM], "message 3: expected a text of role user"),
        ([{"role": "user", "content": 3}], "message 1"),
        ([{"role": ["user"], "content": "a"}], "message 1"),
        (["user"], "message 1"),
    ],
)
def test_other_messages_are_refused(messages: Any, told: str) -> None:
    with pytest.raises(UserError, match=f"^chat.json: .*{told}"):
        turns_of(messages, Path("chat.json"), 0)
