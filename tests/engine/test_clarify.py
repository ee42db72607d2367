"""Rows that ask the user a question, and rows that could but do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.text.intents import intent_entropy
from tests.support.runs import ids_of, is_same, run_rows

SLOTS, CAPACITY = 4, 512  # as in `test_engine`
WIDTH = 4
EVERYWHERE: dict[str, Any] = {
    **{f"arms.{regime}": "clarify" for regime in REGIMES},
    "base.temperature": 0.0,
    "base.min_p": 0.0,
    "clarify.width": WIDTH,
    "clarify.tokens": 5,
    "clarify.temperature": 3.0,
    "clarify.least": 0.0,
    "clarify.most": 9.0,
    "clarify.length": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "asks": {},
    "guesses": {"clarify.most": 0.0, "clarify.per_row": 2},
    "is sure": {"clarify.least": 8.0},
    "has no prompt": {"clarify.prompt": ""},
    "may not write the prompt": {"draw.bans": [58]},
}


def request_of(model: LanguageModel, case: str, *, clarify: bool = True) -> Request:
    sampler = load_sampler("min-p").with_values(EVERYWHERE | CASES[case])
    return Request(
        model.tokenizer.encode("Mia met Nora. Later", add_bos=True),
        calibrate_sampler(sampler, model),
        max_new_tokens=20,
        row_id=case,
        clarify=clarify,
    )


def run(model: LanguageModel, wanted: Sequence[Request]) -> list[Row]:
    return run_rows(Engine(model, slots=SLOTS, capacity=CAPACITY), wanted)


@pytest.fixture(scope="module")
def rows(tiny: LanguageModel) -> dict[str, Row]:
    wanted = {case: request_of(tiny, case) for case in CASES}
    wanted["has no user"] = request_of(tiny, "asks", clarify=False)
    return dict(zip(wanted, run(tiny, [*wanted.values()]), strict=True))


def test_a_row_ends_with_a_question(tiny: LanguageModel, rows: dict[str, Row]) -> None:
    """The row commits the prompt and a question of limited length, and none of the branches."""
    row, prompt = rows["asks"], tiny.tokenizer.encode_within(" One question:")
    assert ids_of(row)[: len(prompt)] == prompt
    assert {token.action for token in row.tokens[: len(prompt)]} == {"clarify"}
    question = [token.text for token in row.tokens[len(prompt) :]]
    ends = ["?" in text or "\n" in text for text in question]
    assert ends.index(True) == len(question) - 1 if any(ends) else len(question) == 6
    assert row.finish_reason == "question"


def test_the_entropy_over_intents_is_recorded(rows: dict[str, Row]) -> None:
    first, *others = rows["asks"].tokens
    assert first.branches is not None
    assert len(first.branches) == WIDTH
    assert all(len(branch.tokens) <= 5 and not branch.chosen for branch in first.branches)
    assert first.intents == intent_entropy(branch.text for branch in first.branches)
    assert rows["asks"].to_json()["intents"] == [first.intents]
    assert all(token.intents is None and token.branches is None for token in others)
    # The branches' tokens were evaluated.
    assert first.forwards >= sum(len(branch.tokens) for branch in first.branches)


@pytest.mark.parametrize(("case", "forks"), [("guesses", 2), ("is sure", 1)])
def test_a_row_samples_outside_the_bounds(case: str, forks: int, rows: dict[str, Row]) -> None:
    """Its text is that of a row that does not fork."""
    row, plain = rows[case], rows["has no user"]
    assert (row.text, ids_of(row)) == (plain.text, ids_of(plain))
    intents = [token.intents is not None for token in row.tokens]
    assert intents == [True] * forks + [False] * (len(intents) - forks)
    assert {token.action for token in row.tokens} == {"sample"}


@pytest.mark.parametrize("case", ["has no user", "has no prompt", "may not write the prompt"])
def test_a_row_that_cannot_ask_does_not_fork(case: str, rows: dict[str, Row]) -> None:
    row = rows[case]
    assert row.finish_reason != "question"
    assert row.tokens[-1].forwards == len(row.tokens) - 1
    assert "intents" not in row.to_json()


def test_results_do_not_depend_on_other_rows(tiny: LanguageModel, rows: dict[str, Row]) -> None:
    for case in ("asks", "guesses"):
        (alone,) = run(tiny, [request_of(tiny, case)])
        assert is_same(alone, rows[case])
        assert [t.intents for t in alone.tokens] == [t.intents for t in rows[case].tokens]
