"""Retracted tokens in events, texts, stop strings and interrupts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest

from entropix_jax.engine.api import Generation
from entropix_jax.engine.results import Event, Row
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.model_folders import token_ids
from tests.support.runs import Spec, run_specs
from tests.support.samplers import LITERAL

RETRACTING = load_sampler(LITERAL).with_values(
    {
        "regimes.lelv": ["entropy < 0.5"],
        "regimes.helv": ["entropy < -1"],
        "regimes.lehv": ["entropy < -1"],
        "regimes.hehv": ["entropy > 2"],
        "loop.max_period": 0,
        "backspace.per_row": 1000,
        "backspace.reach": 5,
        "backspace.max_prob": 0.5,
    }
)
RECORDING = Recording(top=3, layers=True)
TOKENS = 40
PROMPT = [token_ids()["<|begin_of_text|>"], 60, 61, 62, 63]
SPEC = Spec(PROMPT, "0", TOKENS)


def certain_text(model: LanguageModel, tokens: Sequence[TokenRecord]) -> str:
    """Returns the text that is certain after some tokens."""
    stream = model.tokenizer.stream(after=PROMPT)
    return "".join(stream.push(token.token_id) for token in tokens)


@dataclass
class Run:
    events: list[Event]
    row: Row
    texts: list[list[TokenRecord]] = field(default_factory=list)  # after each step
    groups: list[list[TokenRecord]] = field(default_factory=list)  # retracted together

    def __post_init__(self) -> None:
        """Sorts the tokens into the order in which they were chosen."""
        tokens = [event.token for event in self.events if event.token is not None]
        text: list[TokenRecord] = []
        self.texts.append(text)
        for token in sorted(tokens, key=lambda token: token.forwards):
            kept = token.position - len(PROMPT)
            if kept < len(text):
                self.groups.append(text[kept:])
                self.texts.append(text[:kept])
            text = [*text[:kept], token]
            self.texts.append(text)


def run_of(model: LanguageModel, spec: Spec = SPEC, **options: Any) -> Run:
    settings = {"ignore_eos": True, "recording": RECORDING, "sampler": RETRACTING, **options}
    one = run_specs(model, [spec], **settings)
    return Run(list(one), one.rows[0])


@pytest.fixture(scope="module")
def whole(model: LanguageModel) -> Run:
    return run_of(model)


def test_emitted_text_is_final(model: LanguageModel, whole: Run) -> None:
    """The emitted text is that of the committed tokens at every event, and is never taken back."""
    shown, committed = "", 0
    assert whole.texts[-1] == whole.row.tokens
    for event in whole.events:
        assert not (event.retracted and event.pieces)
        shown += "".join(piece.text for piece in event.pieces)
        committed += event.token is not None and not event.retracted
        # The last token's text may end with the U+FFFD of an incomplete character.
        if committed < TOKENS:
            assert shown == certain_text(model, whole.row.tokens[:committed])
    assert shown == whole.row.text == "".join(token.text for token in whole.row.tokens)
    ids = [token.token_id for token in whole.row.tokens]
    assert whole.row.text == model.tokenizer.stream(after=PROMPT).run(ids)
    assert whole.row.log == [
        (event.token, event.retracted) for event in whole.events if event.token
    ]


def test_an_interrupt_keeps_held_back_tokens(model: LanguageModel) -> None:
    """After any event, tokens that later steps might have retracted end the text of their row."""
    specs = [Spec(PROMPT, str(i), TOKENS) for i in range(3)]

    def three() -> Generation:
        return run_specs(model, specs, RETRACTING, ignore_eos=True)

    one = three()
    events = list(one)
    runs = [Run([e for e in events if e.row is row], row) for row in one.rows]
    held = 0
    for number in range(1, 60, 3):
        one = three()
        shown = ["", "", ""]
        for event in [*islice(one, number), *one.interrupt()]:
            shown[event.row.number] += "".join(piece.text for piece in event.pieces)
        assert one.interrupt() == []
        for index, row in enumerate(one.rows):
            assert row.finish_reason == "interrupt"
            assert shown[index] == row.text == "".join(token.text for token in row.tokens)
            seen = [e.token for e in events[:number] if e.row.number == index and not e.retracted]
            assert row.tokens in runs[index].texts
            assert row.tokens[: len(seen)] == seen
            held += len(row.tokens) - len(seen)
    assert held > 10
