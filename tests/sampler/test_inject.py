"""Thoughts at the ends of sentences: where one is written, and that it is written as a whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import entropix_jax
from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from tests.support.samplers import attn_stats, batch_of, fresh_state, params_of, with_own
from tests.support.steps import VOCAB, choose_jit, rows_of

# Every token is HELV, and nothing else acts.
ALWAYS: dict[str, Any] = {
    "regimes.lelv": ["entropy < -1"],
    "regimes.helv": [],
    "loop.max_period": 0,
    "dry.multiplier": 0.0,
    "inject.thought": " Wait",
    "inject.earliest": 5,
}
END = ord("~")  # tokens are bytes


def case(
    text: str = "It is late.",
    drawn: str = " ",
    *,
    generated: int = 9,
    remaining: int = 5,
    begun: int = 0,
    cooldown: int = 0,
    asks: bool = False,
    eos: int = END,
    **changes: Any,
) -> dict[str, Any]:
    """A row and the token that would be drawn."""
    own = {key.replace("__", "."): value for key, value in changes.items()}
    return {**locals(), "own": own}


# What is written where, of `entropix`.
CASES: list[tuple[dict[str, Any], bool]] = [
    (case(), True),
    (case(drawn="x"), False),
    (case(drawn="."), False),
    (case("It is late"), False),
    (case("It is late?"), True),
    (case("It is late\n", "x"), True),
    (case("It is late,\n", "x"), False),
    (case("It is e.g."), False),
    # An end token stays.
    (case(drawn="~"), False),
    (case(eos=ord(" ")), False),
    (case("It is late\n", "~"), False),
    # Not at once, not too often, and only as a whole.
    (case(generated=5), True),
    (case(generated=4), False),
    (case(generated=0, inject__earliest=0), True),
    (case(begun=1), True),
    (case(begun=2), False),
    (case(begun=7, inject__per_row=8), True),
    (case(inject__per_row=0), False),
    (case(cooldown=1), False),
    (case(remaining=4), False),
    (case(inject__thought=""), False),
    (case(inject__thought=["", " Hm"], remaining=3), True),
    # Where the host asks for the text, what is configured need not fit.
    (case(asks=True, remaining=1), True),
    (case(asks=True, inject__thought=""), True),
    (case("It is late", asks=True), False),
    (case(asks=True, drawn="x"), False),
    (case(asks=True, generated=4), False),
    # No token that is never drawn.
    (case(draw__bans=[1, ord("i")]), False),
    (case(draw__bans=[ord("j")]), True),
    (case(draw__bias=[[ord("t"), -100]]), False),
    (case(draw__bias=[[ord("t"), -99.5]]), True),
    (case(draw__bias=[[ord("t"), 100]], drawn="t"), False),
    (case(draw__bans=[ord("i")], inject__thought=[" Hi", " Wo"], begun=1), True),
    (case(draw__bans=[ord("i")], inject__thought=[" Hi", " Wo"]), False),
    (case(draw__bans=[ord("i")], asks=True), True),
    # Anywhere, as in the documents.
    (case("It is", "x", inject__after=""), True),
    (case("It is", "~", inject__after=""), True),
    (case("It is", "x", inject__after="", generated=4), False),
    (case("It is", "x", inject__after="", draw__bans=[ord("i")]), False),
    # Other marks.
    (case("It is late;", inject__after=";"), True),
    (case(inject__after=";"), False),
    (case("It is late\n", "x", inject__after=[".", "?"]), False),
]


def test_where_a_thought_is_written() -> None:
    """In all other rows the drawn token is committed, at the temperature of the arm's draw."""
    cases = [given for given, _ in CASES]
    batch = len(cases)
    settings = batch_of(*(params_of("entropix", {**ALWAYS, **each["own"]}) for each in cases))
    rows = rows_of(*(each["text"].encode() for each in cases))
    fields: dict[str, Any] = {
        name: jnp.asarray([each[name] for each in cases])
        for name in ("generated", "remaining", "asks")
    }
    rows = replace(rows, eos_ids=jnp.asarray([[-1, each["eos"]] for each in cases]), **fields)
    state = with_own(
        fresh_state(batch),
        "inject",
        **{name: jnp.asarray([each[name] for each in cases]) for name in ("begun", "cooldown")},
    )
    drawn = np.array([ord(each["drawn"]) for each in cases])
    logits = np.full((batch, VOCAB), -200.0, np.float32)
    logits[np.arange(batch), drawn] = 0
    choice, step, after = choose_jit(jnp.asarray(logits), attn_stats(batch), settings, state, rows)
    for i, (given, writes) in enumerate(CASES):
        action = ACTIONS[int(choice.proposal.action[i])]
        assert action == ("inject" if writes else "sample"), given
        waits, begun = bool(step.waits[i]), int(after.tally.own["inject"].begun[i])
        assert (waits, begun) == (writes and given["asks"], given["begun"] + writes), given
        assert float(choice.proposal.temperature[i]) == pytest.approx(0.666 * (1.3 + 0.2 * 0.25))
        queue = int(step.tally.queued[i])
        if not writes:
            assert (int(choice.token[i]), queue) == (drawn[i], 0), given
        elif not waits:
            texts = given["own"].get("inject.thought", ALWAYS["inject.thought"])
            texts = [text for text in ([texts] if isinstance(texts, str) else texts) if text]
            thought = texts[given["begun"] % len(texts)].encode()
            assert (int(choice.token[i]), queue) == (thought[0], len(thought)), given
            place = int(rows.length[i])
            assert step.rows.history[i, place : place + queue].tolist() == [*thought], given


# Whole rows

WORDS = (" the", " and", " is", ".", "?", "\n", " a", "s")
THOUGHTS = (" Wait...", " So,")


def write(model: LanguageModel, samples: int, **changes: Any) -> list[Row]:
    """Texts of few words, all of them HELV."""
    likely = [model.tokenizer.encode_within(word) for word in WORDS]
    values = {key.replace("__", "."): value for key, value in changes.items()}
    sampler = load_sampler("entropix").with_values(
        {
            **ALWAYS,
            "inject.thought": [*THOUGHTS],
            "draw.bias": [[one[0], 40.0] for one in likely if len(one) == 1],
            "base.temperature": 1.5,
            **values,
        }
    )
    options: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True, "chat": False}
    return entropix_jax.generate(model, "Once", sampler, samples=samples, **options)


def thoughts_of(row: Row) -> list[tuple[int, str, str]]:
    """Where each thought begins, counted in generated tokens; the text before it, and its own."""
    found: list[tuple[int, str, str]] = []
    text, last = "", ""
    for i, token in enumerate(row.tokens):
        if token.action == "inject":
            if last != "inject" or found[-1][2] in THOUGHTS:
                found.append((i, text, ""))
            at, before, own = found[-1]
            found[-1] = at, before, own + token.text
        text, last = text + token.text, token.action
    return found


def test_rows_of_a_model(model: LanguageModel) -> None:
    """Each thought is written as a whole, in turn, after a sentence; no two are close."""
    numbers = []
    length = {text: len(model.tokenizer.encode_within(text)) for text in THOUGHTS}
    for row in write(model, 6, inject__cooldown=12, inject__per_row=3):
        found = thoughts_of(row)
        numbers.append(len(found))
        assert [own for _, _, own in found] == [THOUGHTS[i % 2] for i in range(len(found))]
        assert all(at >= 5 for at, _, _ in found)
        ends = [at + length[own] for at, _, own in found]
        for (at, _, _), end in zip(found[1:], ends, strict=False):
            assert at >= end + 12
        for _, before, _ in found:
            assert before.rstrip()[-1] in ".?" or before[-1] == "\n", before
            assert before.rstrip(".?\n ")[-2:].isalpha(), before
    assert max(numbers) == 3
    assert sum(numbers) > 9


def test_a_ban_keeps_a_thought_out_of_a_row(model: LanguageModel) -> None:
    """Whether it is one of the sampler or a bias of -100; the text is never in any row."""
    token = model.tokenizer.encode_within(THOUGHTS[0])[-1]
    for changes in ({"draw__bans": [token]}, {"draw__bias": [[token, -100]]}):
        for row in write(model, 2, inject__after="", inject__cooldown=1, **changes):
            assert token not in [one.token_id for one in row.tokens]
            assert {one.action for one in row.tokens} == {"sample"}
    (row, *_) = write(model, 1, inject__after="", inject__cooldown=1, inject__per_row=3)
    assert [own for _, _, own in thoughts_of(row)] == [*THOUGHTS, THOUGHTS[0]]
