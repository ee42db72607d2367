"""Tokens after which `inject` may write a thought."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from entropix_jax.replay.sentences import begins_word, has_ended
from entropix_jax.sampler.mechanisms.inject import CLOSED, ENDS, SPACED, sentence_flags

MARKS = [".", "?", "!", "\n"]
# Texts of tokens, and whether each ends a sentence.
TEXTS = {
    " late.": True,
    ".": True,
    "?!": True,
    '."': True,
    "!) ": True,
    ".\u201d": True,
    "\n": True,
    "\n  ": True,
    ".\n\n": True,
    " late": False,
    ",": False,
    ".com": False,
    '"': False,
    " ": False,
    "": False,
}


@pytest.mark.parametrize("marks", [MARKS, ["."], "."])
def test_flags_of_tokens(marks: str | list[str]) -> None:
    """The flags equal those of the replay."""
    host = SimpleNamespace(token_texts=lambda: [*TEXTS], vocab_size=len(TEXTS) + 3)
    flags = sentence_flags(marks, host)
    assert flags.enabled
    found = flags.of_token.tolist()
    assert found[len(TEXTS) :] == [0] * 3
    for flag, (text, ends) in zip(found, TEXTS.items(), strict=False):
        assert bool(flag & ENDS) == has_ended(["x", text], marks)
        assert bool(flag & ENDS) == ends or marks != MARKS
        assert bool(flag & SPACED) == begins_word("x", text)
        assert bool(flag & CLOSED) == begins_word(text, "x")


@pytest.mark.parametrize("marks", ["", [], [""]])
def test_no_marks(marks: str | list[str]) -> None:
    flags = sentence_flags(marks, SimpleNamespace(token_texts=list, vocab_size=3))
    assert not flags.enabled
    assert not flags.of_token.any()
