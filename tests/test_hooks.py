"""What a run asks of its host: texts to inject, and which of two branches it shall be."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from entropix_jax import main, terminal
from entropix_jax.api import generate
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel, load
from entropix_jax.results import Row
from entropix_jax.retrieval import Retriever
from entropix_jax.sampler.presets import load_sampler
from tests.test_main import read_trace
from tests.test_terminal import Screen, own_environment  # noqa: F401 (a fixture)

NEVER, ALWAYS = ["entropy < -1"], ["entropy > -1"]
BOXES: dict[str, Any] = {f"regimes.{box}": NEVER for box in ("lelv", "helv", "lehv", "hehv")}
BASE = load_sampler("entropix").with_values({**BOXES, "arms.mid": "argmax", "loop.max_period": 0})
THINKING = BASE.with_values(
    {"regimes.helv": ["entropy > 2"], "inject.thought": " Wait...", "inject.cooldown": 3}
)
BRANCHING = BASE.with_values(
    {
        "regimes.lehv": ["entropy > 0.5"],
        "branch.margin": 1e6,
        "branch.min_p": 0.0,
        "branch.depth": 3,
    }
)
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """The embedded one."""
    return load("tiny")


def run(model: LanguageModel, sampler: Any, **options: Any) -> Row:
    (row,) = generate(model, PROMPT, sampler, max_new_tokens=40, ignore_eos=True, **options)
    assert len(row.tokens) == 40
    return row


def test_a_text_takes_the_thoughts_place(model: LanguageModel) -> None:
    asked: list[str] = []

    def retrieve(text: str) -> str:
        asked.append(text)
        return f" Number {len(asked)}."

    row = run(model, THINKING, retrieve=retrieve)
    assert len(asked) >= 2
    for number, text in enumerate(asked, 1):
        # The text so far, prompt and all; and what was given stands right after it.
        assert (PROMPT + row.text).startswith(text)
        assert (PROMPT + row.text)[len(text) :].startswith(f" Number {number}.")
    injected = [token for token in row.tokens if token.action == "inject"]
    ids = model.tokenizer.encode(" Number 1.", add_bos=False)
    assert [token.token_id for token in injected[: len(ids)]] == ids
    assert all(token.regime == "helv" for token in injected[:1])


def test_other_documents_are_another_text(model: LanguageModel, tmp_path: Path) -> None:
    texts = []
    for answer in ("A time in Rome.", "A time in Oslo."):
        (tmp_path / "facts.txt").write_text(answer)
        texts.append(run(model, THINKING, retrieve=Retriever(tmp_path)).text)
    assert texts[0] != texts[1]
    assert "\nA time in Rome.\n" in texts[0]
    assert "\nA time in Oslo.\n" in texts[1]


def test_nothing_retrieved_is_the_samplers_own_thought(model: LanguageModel) -> None:
    """The same text as without the hook, to the last number but the count of evaluations: a
    position that waited is evaluated again."""
    plain = run(model, THINKING)
    asked = run(model, THINKING, retrieve=lambda text: "")
    assert asked.text == plain.text
    assert [t.action for t in asked.tokens] == [t.action for t in plain.tokens]
    assert asked.tokens[-1].forwards > plain.tokens[-1].forwards


def test_nothing_at_all_is_a_plain_draw(model: LanguageModel) -> None:
    silent = THINKING.with_values({"inject.thought": ""})
    row = run(model, silent, retrieve=lambda text: "")
    assert {token.action for token in row.tokens} == {"argmax", "sample"}


def test_a_text_that_does_not_fit_is_not_begun(model: LanguageModel) -> None:
    row = run(model, THINKING, retrieve=lambda text: " word" * 100)
    assert row.text == run(model, THINKING).text


def test_the_cap_counts_what_was_retrieved(model: LanguageModel) -> None:
    asked: list[str] = []

    def retrieve(text: str) -> str:
        asked.append(text)
        return " So."

    run(model, THINKING.with_values({"inject.per_row": 1}), retrieve=retrieve)
    assert len(asked) == 1


def test_a_hook_that_gives_what_it_may_not(model: LanguageModel) -> None:
    """As a function that forgot its `return` does."""
    with pytest.raises(UserError, match=r"^retrieve gave None: expected a text"):
        run(model, THINKING, retrieve=lambda text: None)
    for answer in (2, -1, "first"):
        with pytest.raises(UserError, match=rf"^ask gave {answer!r}: expected 0, 1, or None"):
            run(model, BRANCHING, ask=lambda row, texts, answer=answer: answer)


@pytest.mark.parametrize("whole", [True, False])
def test_a_person_chooses(model: LanguageModel, whole: bool) -> None:
    shown: list[Sequence[str]] = []

    def second(row: int, texts: Sequence[str]) -> int:
        assert row == 0
        shown.append(list(texts))
        return 1

    sampler = BRANCHING.with_values({"branch.commit_all": whole})
    row = run(model, sampler, ask=second)
    starts = [token for token in row.tokens if token.branches is not None]
    assert len(starts) == len(shown) >= 3
    for token, texts in zip(starts, shown, strict=True):
        assert token.branches is not None
        assert token.ambiguous
        assert token.action == "branch"
        ranked = sorted(token.branches, key=lambda b: -b["score"])
        assert [b["text"] for b in ranked[:2]] == texts
        assert [b["chosen"] for b in ranked] == [False, True] + [False] * (len(ranked) - 2)
        at = row.tokens.index(token)
        tokens = ranked[1]["tokens"][: None if whole else 1][: 40 - at]
        assert [t.token_id for t in row.tokens[at : at + len(tokens)]] == tokens
        assert {t.action for t in row.tokens[at : at + len(tokens)]} == {"branch"}


def test_a_person_who_leaves_it_to_the_model(model: LanguageModel) -> None:
    plain = run(model, BRANCHING)
    asked = run(model, BRANCHING, ask=lambda row, texts: None)
    assert asked.text == plain.text
    for one, other in zip(asked.tokens, plain.tokens, strict=True):
        assert (one.token_id, one.action, one.regime) == (
            other.token_id,
            other.action,
            other.regime,
        )
        assert one.entropy == pytest.approx(other.entropy, abs=1e-4)


def test_the_other_rows_of_a_batch_go_on(model: LanguageModel) -> None:
    """Each row asks for itself, and is what it is alone."""
    rows = generate(
        model,
        PROMPT,
        THINKING.with_values({"arms.mid": "sample"}),
        samples=3,
        max_new_tokens=40,
        ignore_eos=True,
        retrieve=lambda text: f" {len(text)}.",
    )
    assert len({row.text for row in rows}) == 3
    (alone,) = generate(
        model,
        PROMPT,
        THINKING.with_values({"arms.mid": "sample"}),
        max_new_tokens=40,
        ignore_eos=True,
        retrieve=lambda text: f" {len(text)}.",
    )
    assert rows[0].text == alone.text


# The command line


SHORT = [
    "--model",
    "tiny",
    "--prompt",
    PROMPT,
    "--no-chat",
    "--ignore-eos",
    "--max-new-tokens",
    "30",
]


def settings(changes: dict[str, str]) -> list[str]:
    return [x for key, value in changes.items() for x in ("--set", f"sampler.{key}={value}")]


THINK = settings({"regimes.helv": '["entropy > 2"]', "inject.cooldown": "3"})
FORK = settings({"regimes.lehv": '["entropy > 0.5"]', "branch.margin": "1e6", "branch.min_p": "0"})


def test_retrieve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "adam.txt").write_text("Once upon a time Adam lived in Rome.")
    trace = tmp_path / "trace.jsonl"
    folder = str(tmp_path / "facts")
    assert main.main([*SHORT, *THINK, "--retrieve", folder, "--trace", str(trace)]) == 0
    assert "\nOnce upon a time Adam lived in Rome.\n" in capsys.readouterr().out
    assert sum(line.get("action") == "inject" for line in read_trace(trace)) > 5
    assert main.main([*SHORT, "--retrieve", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_ask_without_a_terminal_asks_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(terminal, "ask_person", fail)
    assert main.main([*SHORT, *FORK, "--ask"]) == 0
    asked, notes = capsys.readouterr()
    assert "note: --ask: no terminal, nobody is asked\n" in notes
    assert main.main([*SHORT, *FORK]) == 0
    assert capsys.readouterr().out == asked


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("1\n", 0), ("2\n", 1), ("\n", None), ("", None), ("x\n3\n 2 \n", 1)],
)
def test_what_a_person_may_type(
    typed: str, answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    screen = Screen(monkeypatch)
    assert terminal.ask_person(0, [" one\n", " two\x1b[2J"]) == answer
    shown = screen.read()
    assert "' one\\n'" in shown
    assert "\x1b[2J" not in shown
