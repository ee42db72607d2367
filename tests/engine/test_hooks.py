"""What a run asks of its host: texts to inject, and which of two branches it shall be."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from entropix_jax.cli import generate as main
from entropix_jax.cli import terminal
from entropix_jax.engine.api import generate
from entropix_jax.engine.results import Row
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.terminals import Screen
from tests.support.traces import read_trace

pytestmark = pytest.mark.usefixtures("own_environment")


NEVER, ALWAYS = ["entropy < -1"], ["entropy > -1"]
BOXES: dict[str, Any] = {f"regimes.{box}": NEVER for box in ("lelv", "helv", "lehv", "hehv")}
BASE = load_sampler("entropix").with_values({**BOXES, "arms.mid": "argmax", "loop.max_period": 0})
THINKING = BASE.with_values(
    {"regimes.helv": ["entropy > 2"], "inject.thought": " Wait...", "inject.cooldown": 3}
)
FORKS = {"regimes.lehv": ["entropy > 0.5"], "branch.margin": 1e6, "branch.min_p": 0.0}
BRANCHING = BASE.with_values({**FORKS, "branch.depth": 3})
PROMPT = "Once upon a time"


def run(tiny: LanguageModel, sampler: Any, **options: Any) -> Row:
    (row,) = generate(tiny, PROMPT, sampler, max_new_tokens=40, ignore_eos=True, **options)
    assert len(row.tokens) == 40
    return row


def test_a_hook_that_gives_what_it_may_not(tiny: LanguageModel) -> None:
    """As a function that forgot its `return` does."""
    with pytest.raises(UserError, match=r"^retrieve gave None: expected a text"):
        run(tiny, THINKING, retrieve=lambda text: None)
    for answer in (2, -1, "first"):
        with pytest.raises(UserError, match=rf"^ask gave {answer!r}: expected 0, 1, or None"):
            run(tiny, BRANCHING, ask=lambda row, texts, answer=answer: answer)


# The command line


SHORT = [
    *("--model", "tiny", "--prompt", PROMPT, "--no-chat", "--ignore-eos"),
    *("--max-new-tokens", "30"),
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


def test_ask_without_a_terminal_asks_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "ask_person", None)
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
